"""DeepSpeed ZeRO checkpoints of stages 0 to 3.

Stages 0 to 2 keep the model whole in `module` of the model states. Stage 3 leaves placeholders there: the weights exist
as fp32 masters only, cut flat over the ranks' optimizer states. The masters of stages 1 and 2 are used where more
precision is asked for than `module` has. The layout is what the loaders of DeepSpeed 0.16 and 0.19 expect; Adam's
moments and the optimizer's own state stay where they are.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from bridge.convert.dtypes import CASTABLE, ITEMSIZE
from bridge.convert.names import check_names, clean_names, refuse_split
from bridge.convert.pickles import MAX_RANK, TensorRef
from bridge.convert.places import inside
from bridge.convert.plain import step_of, tensors_of
from bridge.convert.source import IncompleteError, Piece, Source, StridedTensor, Tensor, joined
from bridge.convert.torchfile import TorchFile, integer, read_torch
from bridge.errors import UserError

LATEST = "latest"
MODEL = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d+)_optim_states\.pt")
SPLIT = re.compile(
    r"layer_\d+.*model_states\.pt|expp_rank_\d+.*|(?:zero_pp_rank_\d+_)?mp_rank_0*[1-9]\d*_model_states\.pt"
)
"""Parts of pipeline stages, experts and tensor parallel ranks."""

_MOST_RANKS = 1_000_000

_MASTERS = ("single_partition_of_fp32_groups", "fp32_flat_groups")


def open_deepspeed(folder: Path, wanted: str) -> Source:
    """The checkpoint in a tag's folder as a Source; `wanted` is the dtype asked for, `auto` for what is stored.

    IncompleteError, which names them, if ranks are missing; UserError for pipeline, tensor and expert parallel ones.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    split = next((name for name in names if SPLIT.fullmatch(name)), None)
    if split is not None:
        raise UserError(
            f"{folder}: is split over pipeline stages, tensor parallel ranks or experts ({split}); merge it with the "
            "trainer's own export first"
        )
    models = _by_rank(names, MODEL)
    optimizers = _by_rank(names, OPTIMIZER)
    if 0 not in models:
        raise IncompleteError(f"{folder}: lacks the model states of rank 0 (mp_rank_00_model_states.pt)")
    with Source("deepspeed", folder).opening() as source:
        first = read_torch(source.add(inside(folder, models[0])))
        root = first.root
        if not isinstance(root, dict) or not isinstance(root.get("module"), dict):
            raise UserError(f"{first.file.path}: is no model state of DeepSpeed: it has no module")
        refuse_split(root, str(first.file.path))
        source.step = step_of(root)
        module, source.dropped = tensors_of(root["module"], str(first.file.path))
        if any(not isinstance(value, TensorRef) for value in module.values()):
            raise UserError(f"{first.file.path}: its module holds DTensors; save with plain ZeRO, without AutoTP")
        held: dict[str, Tensor] = {
            name: first.tensor(name, value) for name, value in module.items() if isinstance(value, TensorRef)
        }
        shapes = _shapes(root, first)
        placeholders = any(
            held[name].shape != shape for group in shapes for name, shape in group.items() if name in held
        )
        world = source.ranks = integer(root, "dp_world_size") or len(optimizers) or 1
        if not 0 < world <= _MOST_RANKS:
            raise UserError(f"{first.file.path}: its dp_world_size is {world}; the file is damaged or hostile")
        if placeholders or (_finer(held, wanted) and (optimizers or shapes)):
            source.format = "deepspeed-zero3" if placeholders else "deepspeed-zero-masters"
            _refuse_missing(folder, world, models if placeholders else {}, optimizers)
            masters = [read_torch(source.add(inside(folder, optimizers[rank]))) for rank in range(world)]
            others = [read_torch(source.add(inside(folder, models[rank]))) for rank in range(1, world) if placeholders]
            held |= _from_masters(str(folder), shapes, masters)
            if placeholders:
                held |= _frozen(str(folder), [first, *others])
        else:
            source.format = "deepspeed-module"
            missing = [rank for rank in range(world) if optimizers and rank not in optimizers]
            if missing:
                source.warnings.append(
                    f"the optimizer states of ranks {missing[:20]} are missing; the 16-bit model is whole without them"
                )
        _share(root, held, first)
        clean = clean_names(held, str(folder))
        check_names(clean.values(), str(folder))
        source.tensors = {clean[name]: tensor for name, tensor in held.items()}
        source.wrapper = ("module",)
    return source


def _finer(held: dict[str, Any], wanted: str) -> bool:
    """Whether the masters give another result than `module`: only if a wider or different float is asked for."""
    stored = {tensor.dtype for tensor in held.values() if tensor.dtype in ("float16", "bfloat16")}
    return wanted != "auto" and bool(stored - {wanted})


def _by_rank(names: Iterable[str], pattern: re.Pattern[str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            rank = int(match[1] or 0)
            if rank in found:
                raise UserError(f"rank {rank} has two files, {found[rank]} and {name}; move the stale one away")
            found[rank] = name
    return found


def _refuse_missing(folder: Path, world: int, models: dict[int, str], optimizers: dict[int, str]) -> None:
    missing = [
        f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(world) if models and rank not in models
    ]
    prefix = "bf16_" if any(name.startswith("bf16_") for name in optimizers.values()) else ""
    missing += [
        f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world) if rank not in optimizers
    ]
    if missing:
        raise IncompleteError(f"{folder}: {len(missing)} of its files are missing: {', '.join(missing[:5])}")


def _shapes(root: dict[Any, Any], file: TorchFile) -> list[dict[str, tuple[int, ...]]]:
    """`param_shapes`: for each group, or each sub-group of stage 3, names and shapes in the order of the flat data."""
    groups = root.get("param_shapes") or []
    groups = groups if type(groups) is list else [groups]
    named: list[dict[str, tuple[int, ...]]] = []
    seen: set[str] = set()
    for group in groups:
        # A parameter lies in one place. Looked at before the rest is, a group that is listed a million times ends here.
        if type(group) is dict and (twice := next((name for name in group if name in seen), None)) is not None:
            raise UserError(f"{file.file.path}: {str(twice)[:120]!a} is in two of its groups; save it again")
        named.append(_named_shapes(group, "param_shapes", file))
        seen |= named[-1].keys()
    return named


def _named_shapes(group: Any, field: str, file: TorchFile) -> dict[str, tuple[int, ...]]:
    good = type(group) is dict and all(
        type(name) is str
        and type(shape) is tuple
        and len(shape) <= MAX_RANK
        and all(type(n) is int and n >= 0 for n in shape)
        for name, shape in group.items()
    )
    if not good:
        raise UserError(f"{file.file.path}: its {field} are not as DeepSpeed writes them; save it again")
    return dict(group)


def _from_masters(where: str, shapes: list[dict[str, tuple[int, ...]]], ranks: list[TorchFile]) -> dict[str, Tensor]:
    flat = [_flat_groups(rank, len(ranks)) for rank in ranks]
    kind = flat[0][0]
    if any(other != kind for other, _ in flat):
        raise UserError(f"{where}: the optimizer states are of different ZeRO stages; they are of different saves")
    groups = [parts for _, parts in flat]
    if kind == "fp32_flat_groups":
        return _stage3(where, shapes, groups)
    if any(len(parts) != len(shapes) for parts in groups):
        raise UserError(f"{where}: has {len(shapes)} parameter groups but other numbers of flat groups; save it again")
    found: dict[str, Tensor] = {}
    for number, group in enumerate(shapes):
        found |= _stage2(where, group, [parts[number] for parts in groups])
    return found


def _flat_groups(rank: TorchFile, world: int) -> tuple[str, list[StridedTensor]]:
    state = rank.root.get("optimizer_state_dict") if isinstance(rank.root, dict) else None
    key = next((key for key in _MASTERS if isinstance(state, dict) and isinstance(state.get(key), list)), None)
    if key is None or not isinstance(state, dict):
        raise UserError(f"{rank.file.path}: holds no fp32 masters of ZeRO; another optimizer or an elastic save")
    counts = state.get("partition_count")
    counts = counts if type(counts) is list else [counts]
    if any(count not in (world, None) for count in counts):
        told = next((count for count in counts if type(count) is int and count != world), "an unknown number of")
        raise UserError(f"{rank.file.path}: says it is one of {told} ranks, but {world} are here")
    parts = []
    for reference in state[key]:
        if not isinstance(reference, TensorRef) or len(reference.shape) != 1 or reference.stride != (1,):
            raise UserError(f"{rank.file.path}: its fp32 masters are no flat tensors; save it again")
        parts.append(rank.tensor(key, reference))
    return key, parts


def _stage2(where: str, group: dict[str, tuple[int, ...]], ranks: list[StridedTensor]) -> dict[str, Tensor]:
    """Stages 1 and 2: the group is laid out flat and cut once, so the ranks' parts are one after the other."""
    line = _Line(ranks)
    found: dict[str, Tensor] = {}
    at = 0
    for name, shape in group.items():
        size = math.prod(shape)
        found[name] = joined(where, name, "float32", shape, line.pieces(at, size, 0), flat=True)
        at += size
    _refuse_left_over(where, line.size - at, 2 * len(ranks))
    return found


def _stage3(
    where: str, shapes: list[dict[str, tuple[int, ...]]], ranks: list[list[StridedTensor]]
) -> dict[str, Tensor]:
    """Stage 3: every parameter is cut into equal parts, of which each rank has one after the other."""
    lines = [_Line(parts) for parts in ranks]
    found: dict[str, Tensor] = {}
    at = 0
    for name, shape in (item for group in shapes for item in group.items()):
        size = math.prod(shape)
        part = -(-size // len(ranks))
        pieces = (
            piece
            for rank, line in enumerate(lines)
            for piece in line.pieces(at, min(part, size - rank * part), rank * part)
        )
        found[name] = joined(where, name, "float32", shape, pieces, flat=True)
        at += part
    for line in lines:
        _refuse_left_over(where, line.size - at, 2 * len(ranks))
    return found


def _refuse_left_over(where: str, rest: int, alignment: int) -> None:
    if not 0 <= rest < alignment:
        raise UserError(f"{where}: {rest:,} elements of the fp32 masters belong to no parameter; save it again")


class _Line:
    """Flat tensors, thought of as one after the other."""

    def __init__(self, parts: list[StridedTensor]) -> None:
        self.parts = parts
        self.ends = list(accumulate(part.shape[0] for part in parts))
        self.size = self.ends[-1] if parts else 0

    def pieces(self, start: int, count: int, origin: int) -> Iterator[Piece]:
        """Elements `start` to `start + count` as pieces of a flat tensor from its element `origin` on."""
        stop = start + max(count, 0)
        index = bisect_right(self.ends, start)
        while start < stop and index < len(self.parts):
            part, begin = self.parts[index], self.ends[index] - self.parts[index].shape[0]
            size = min(stop, self.ends[index]) - start
            if size:
                at = part.start + (start - begin) * ITEMSIZE[part.dtype]
                yield Piece((origin,), StridedTensor(part.file, at, part.dtype, (size,), (1,)))
            start, origin, index = start + size, origin + size, index + 1


def _frozen(where: str, ranks: list[TorchFile]) -> dict[str, Tensor]:
    """Frozen parameters of stage 3: a part in each rank's model states, in the parameter's own dtype."""
    shapes = _named_shapes(ranks[0].root.get("frozen_param_shapes") or {}, "frozen_param_shapes", ranks[0])
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        pieces, at, dtype = [], 0, ""
        for rank in ranks:
            fragments = rank.root.get("frozen_param_fragments") if isinstance(rank.root, dict) else None
            reference = fragments.get(name) if isinstance(fragments, dict) else None
            if not isinstance(reference, TensorRef) or reference.dtype not in CASTABLE:
                raise UserError(f"{rank.file.path}: lacks its part of the frozen {name[:120]!a}; save it again")
            part = rank.tensor(name, reference)
            size = min(math.prod(part.shape), math.prod(shape) - at)
            if len(part.shape) != 1 or part.stride != (1,):
                raise UserError(f"{rank.file.path}: its part of {name[:120]!a} is not flat; save it again")
            dtype = part.dtype
            if size:
                pieces.append(Piece((at,), StridedTensor(part.file, part.start, dtype, (size,), (1,))))
            at += size
        found[name] = joined(where, name, dtype, shape, pieces, flat=True)
    return found


def _share(root: dict[Any, Any], held: dict[str, Any], file: TorchFile) -> None:
    """Give names that share a parameter the tensor of the one that holds it."""
    shared = root.get("shared_params")
    for alias, holder in (shared if type(shared) is dict else {}).items():
        if type(alias) is not str or type(holder) is not str or holder not in held:
            raise UserError(
                f"{file.file.path}: {str(alias)[:120]!a} shares a parameter that is not there; save it again"
            )
        held[alias] = held[holder]
    empty = [name for name, tensor in held.items() if tensor.shape == (0,)]
    if empty:
        raise UserError(
            f"{file.file.path}: {empty[0][:120]!a} is a placeholder and its weights are nowhere; save it again"
        )
