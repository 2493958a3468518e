"""What lies at a path: recognised by what it holds, never by a flag."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridge.convert.dcp import METADATA, open_dcp
from bridge.convert.deepspeed import LATEST, MODEL, OPTIMIZER, SPLIT, open_deepspeed
from bridge.convert.lora import ADAPTER_CONFIG
from bridge.convert.places import inside, read_small
from bridge.convert.plain import open_file, open_index, parts_of, refuse_part
from bridge.convert.shards import ACCELERATE, NAME, open_shards
from bridge.convert.source import IncompleteError, Source, SourceFile, nbytes
from bridge.convert.steps import number, steps
from bridge.convert.tensorfile import open_tensor_file, open_tensor_folder
from bridge.errors import UserError

INDEX = "pytorch_model.bin.index.json"

_EXPLAINED = (
    (
        r"ckpt_contents\.json|mp_rank_\d+(_\d+)*|iter_\d+|common\.pt",
        "a Megatron checkpoint: its names and splits depend on the model, so export it with mbridge or Megatron-Bridge "
        "and convert that",
    ),
    (
        r"latest_universal|zero",
        "a DeepSpeed universal checkpoint: convert the ZeRO checkpoint that it was made from",
    ),
)
"""(pattern of a name in the folder, what it is and what to do): recognised so that the message can say it."""

_NO_WEIGHTS = re.compile(
    r"(optim|optimizer|scheduler|scaler|sampler|rng|rng_state|random_states|extra_state|training_args|data)(\W|_).*"
)
"""Files beside the weights. They hold arbitrary objects and are never opened."""

_INNER = ("actor", "pytorch_model_fsdp_0", "model")
"""Folders in which trainers put the weights of a step: verl's policy, accelerate's DCP folder."""

_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
"""What PEFT saves."""

_LEVELS = 5
_GROWTH, _ROOM = 16, 1 << 30  # expanded views may hold this many times the files' bytes, plus this many bytes


def open_source(path: Path, wanted: str = "auto") -> Source:
    """The checkpoint at `path`, a file or a folder that holds one, opened for reading.

    Of a folder with several steps the newest whole one is taken. `wanted` is the dtype asked for: ZeRO checkpoints hold
    two. IncompleteError if files are missing or cut off; UserError if there is no checkpoint, more than one, or a
    damaged, unsafe or unsupported one.
    """
    with _collector_paused():
        source = _open_folder(path, wanted, _LEVELS) if path.is_dir() else _open_file(path)
    with source.opening():
        if not source.tensors:
            raise UserError(f"{path}: holds no tensors; copy it again or take an earlier checkpoint")
        total = sum(nbytes(tensor) for tensor in source.tensors.values())
        held = sum(file.size for file in source.files)
        # A view with stride 0 is larger than its bytes; without a bound a small file could fill a disk.
        if total > held * _GROWTH + _ROOM:
            raise UserError(f"{path}: claims {total:,} bytes of tensors in {held:,} bytes of files; refused as hostile")
    return source


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without the garbage collector: an index is hundreds of thousands of objects that stay, and it would look at them
    again and again, for a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _open_file(path: Path) -> Source:
    source = _open_weights(path)
    if path.name in _ADAPTERS:
        source.format = "peft"
    return source


def _open_weights(path: Path) -> Source:
    if path.name.endswith(".safetensors.index.json"):
        return open_tensor_folder(path.parent)
    if path.name.endswith(".index.json"):
        return open_index(path)
    if (count := parts_of(path.name)) > 1:
        raise UserError(f"{path}: is one of the {count} files of a model; give their folder")
    if SPLIT.fullmatch(path.name):
        raise UserError(
            f"{path}: is one part of a model that DeepSpeed split over pipeline stages, tensor parallel ranks or "
            "experts; merge it with the trainer's own export first"
        )
    file = SourceFile(path)
    try:
        head = file.read(0, min(file.size, 9))
    finally:
        file.close()
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= 100_000_000:
        return open_tensor_file(path)
    return open_file(path)


def _open_folder(folder: Path, wanted: str, levels: int) -> Source:
    names = sorted(entry.name for entry in folder.iterdir())
    for pattern, what in _EXPLAINED:
        found = next((name for name in names if re.fullmatch(pattern, name)), None)
        # Where it was made inside the folder of the training, the ZeRO checkpoint lies beside it.
        if found is not None and not (found == "latest_universal" and LATEST in names):
            raise UserError(f"{folder}: holds {what} ({found})")
    if METADATA in names:
        return open_dcp(folder)
    if any(name.endswith(".distcp") for name in names):
        raise IncompleteError(f"{folder}: lacks {METADATA}, which a torch distributed checkpoint gets last")
    if any(NAME.fullmatch(name) or ACCELERATE.fullmatch(name) for name in names):
        return open_shards(folder)
    if any(MODEL.fullmatch(name) or OPTIMIZER.fullmatch(name) for name in names):
        return open_deepspeed(folder, wanted)
    source = _adapter(folder, names) or (None if LATEST in names and wanted == "float32" else _weights(folder, names))
    return source or _below(folder, names, wanted, levels)


def _adapter(folder: Path, names: list[str]) -> Source | None:
    if ADAPTER_CONFIG not in names:
        return None
    found = [name for name in _ADAPTERS if name in names]
    if not found:
        raise IncompleteError(f"{folder}: has an {ADAPTER_CONFIG} but no adapter_model.safetensors or .bin")
    return _open_file(inside(folder, found[0]))


def _weights(folder: Path, names: list[str]) -> Source | None:
    """Whole weights in the folder itself: safetensors first, as loaders do."""
    if any(
        re.fullmatch(r".*\.safetensors(\.index\.json)?", name) and not name.startswith("adapter_") for name in names
    ):
        return open_tensor_folder(folder)
    candidates = [
        name
        for name in names
        if name.endswith((".pt", ".pth", ".bin", ".ckpt"))
        and not _NO_WEIGHTS.match(name)
        and number(name) is None
        and (folder / name).is_file()
    ]
    if INDEX in names:
        candidates = [name for name in candidates if not re.fullmatch(r"pytorch_model-\d+-of-\d+\.bin", name)]
        if not candidates:
            return open_index(inside(folder, INDEX))
        candidates.append(INDEX)
    refuse_part(folder, candidates)
    if len(candidates) > 1:
        raise UserError(f"{folder}: holds several checkpoints ({', '.join(candidates[:6])}); name one of them")
    return _open_file(inside(folder, candidates[0])) if candidates else None


def _below(folder: Path, names: list[str], wanted: str, levels: int) -> Source:
    """The newest whole step in the folder, or the part of a step that holds the weights."""
    found = [_tag(folder)] if LATEST in names else []
    found += [path for path in steps(folder, names) if path not in found]
    found = found or [folder / name for name in _INNER if (folder / name).is_dir()][:1]
    if not found or not levels:
        # Below the path that was asked for it is a step that its writer has only begun, and an older one will do.
        raise (UserError if levels == _LEVELS else IncompleteError)(
            f"{folder}: holds no checkpoint file (.pt, .pth, .bin, .ckpt or .safetensors) and no steps; give its path"
        )
    broken: list[str] = []
    for path in found:
        path = inside(folder, path.name)
        try:
            if not path.exists():
                raise IncompleteError(f"{path}: is named by {folder / LATEST} and is not there")
            source = _open_folder(path, wanted, levels - 1) if path.is_dir() else _open_file(path)
        except IncompleteError as error:
            broken.append(str(error))
            continue
        if source.step is None:
            source.step = number(path.name)
        source.warnings = [f"{text}; the newest whole step was taken" for text in broken] + source.warnings
        return source
    raise IncompleteError(broken[0])


def _tag(folder: Path) -> Path:
    """The folder that DeepSpeed's `latest` names."""
    try:
        text = read_small(inside(folder, LATEST), 4096).decode("utf-8").strip()
    except ValueError as error:
        raise UserError(
            f"{folder / LATEST}: cannot be read as text; write the name of the step's folder into it"
        ) from error
    if not text:
        raise IncompleteError(f"{folder / LATEST}: is empty; write the name of the step's folder into it")
    return inside(folder, text)
