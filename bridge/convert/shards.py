"""FSDP shards: one torch.save file a rank, in which tensors are DTensors, ShardedTensors or whole.

Who holds what is read from each tensor's own placements and from the place that its rank has in the tensor's own
device mesh, never guessed from values, file numbers or the first key. The split is that of `torch.chunk`:
https://docs.pytorch.org/docs/stable/distributed.tensor.html#placements
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from bridge.convert.names import check_names, clean_names, find_weights
from bridge.convert.pickles import MAX_RANK, Object, Sharded, TensorRef
from bridge.convert.places import inside, read_json
from bridge.convert.plain import step_of, tensors_of, unwritten_tensors
from bridge.convert.source import IncompleteError, Piece, Source, StridedTensor, Tensor, joined
from bridge.convert.torchfile import TorchFile, read_torch
from bridge.errors import UserError

NAME = re.compile(r"model_world_size_(\d{1,6})_rank_(\d{1,6})\.pt")
"""verl's name of a rank's weights."""

ACCELERATE = re.compile(r"pytorch_model_fsdp(?:_\d+)?_rank_?(\d{1,6})\.bin")
"""accelerate's name; the number of ranks is not in it."""


def open_shards(folder: Path) -> Source:
    """The shards in a folder as one Source of whole tensors.

    IncompleteError, which names them, if ranks are missing; UserError if the ranks do not belong together.
    """
    names = [entry.name for entry in folder.iterdir()]
    files = _of_one_save(folder, names)
    with Source("fsdp", folder, ranks=len(files)).opening() as source:
        ranks = [read_torch(source.add(inside(folder, name))) for name in files]
        source.step = step_of(ranks[0].root)
        _fill(source, ranks)
    return source


def _of_one_save(folder: Path, names: list[str]) -> list[str]:
    """The file of each rank, in order."""
    worlds: dict[int, dict[int, str]] = {}
    for name in names:
        if match := NAME.fullmatch(name):
            worlds.setdefault(int(match[1]), {})[int(match[2])] = name
    if not worlds:
        found = {int(match[1]): name for name in names if (match := ACCELERATE.fullmatch(name))}
        worlds = {max(found) + 1: found}
    whole = [world for world, held in worlds.items() if set(held) >= set(range(world)) and world]
    told = _told_world(folder)
    world = told if told in worlds else whole[0] if len(whole) == 1 else None
    if world is None and len(whole) > 1:
        raise UserError(
            f"{folder}: holds whole checkpoints of {', '.join(map(str, sorted(whole)))} ranks and no fsdp_config.json "
            "says which one counts; move the others away"
        )
    if world is None:
        world = max(worlds, key=lambda world: len(worlds[world]))
    held = worlds[world]
    missing = [rank for rank in range(world) if rank not in held]
    if missing or not world:
        sample = next(iter(held.values()))
        listed = ", ".join(re.sub(r"rank(_?)\d+", rf"rank\g<1>{rank}", sample) for rank in missing[:5])
        raise IncompleteError(f"{folder}: {len(missing)} of its {world} files are missing: {listed}")
    return [held[rank] for rank in range(world)]


def _told_world(folder: Path) -> int | None:
    """What verl's `fsdp_config.json` says; older versions write none."""
    try:
        value = read_json(folder / "fsdp_config.json").get("world_size")
    except UserError:
        return None
    return value if type(value) is int else None


def _fill(source: Source, ranks: list[TorchFile]) -> None:
    where = str(source.path)
    states: list[dict[str, TensorRef | Sharded]] = []
    for rank in ranks:
        path = str(rank.file.path)
        wrapper, state = find_weights(rank.root, path)
        found, dropped = tensors_of(state, path)
        check_names(found, path)
        if states and set(found) != set(states[0]):
            odd = min(set(found) ^ set(states[0]))
            raise UserError(f"{path}: {odd[:120]!a} is not in every rank's file; the files are of different saves")
        if not states:
            source.warnings += unwritten_tensors(rank.root, wrapper)
        states.append(found)
        source.wrapper, source.dropped = wrapper, dropped
    clean = clean_names(states[0], where)
    check_names(clean.values(), where)
    for name, short in clean.items():
        source.tensors[short] = _whole(
            where, short, [(rank, state[name]) for rank, state in zip(ranks, states, strict=True)]
        )


def _whole(where: str, name: str, parts: list[tuple[TorchFile, TensorRef | Sharded]]) -> Tensor:
    """One tensor out of what each rank holds of it."""
    first = parts[0][1]
    kinds = {value.kind if isinstance(value, Sharded) else "tensor" for _, value in parts}
    if len(kinds) > 1 or any((value.dtype, value.shape) != (first.dtype, first.shape) for _, value in parts):
        raise UserError(f"{where}: {name[:120]!a} has another type or shape in some rank's file; save it again")
    if isinstance(first, TensorRef):  # a buffer, or a parameter outside the wrapped modules: every rank has all of it
        return parts[0][0].tensor(name, first)
    held = (
        piece
        for rank, value in parts
        if isinstance(value, Sharded)
        for piece in (_dtensor if value.kind == "DTensor" else _shards)(rank, name, value)
    )
    return joined(where, name, first.dtype, first.shape, held)


def _shards(rank: TorchFile, name: str, value: Sharded) -> Iterator[Piece]:
    """The parts of a ShardedTensor that a rank holds: each says where it belongs."""
    local = value.state[0] if type(value.state) is tuple and value.state else None
    if type(local) is not list:
        raise _strange(rank, name)
    for shard in local:
        fields = _fields(shard)
        origin = _numbers(rank, name, _fields(fields.get("metadata")).get("shard_offsets"))
        yield _piece(rank, name, value, origin, fields.get("tensor"))


def _dtensor(rank: TorchFile, name: str, value: Sharded) -> Iterator[Piece]:
    """The part of a DTensor that a rank holds, placed by its coordinate in the mesh."""
    state = _fields(value.state)
    spec = _fields(state.get("_spec"))
    mesh = _fields(spec.get("mesh"))
    coordinate = mesh.get("_coordinate_on_dim")
    if coordinate is None:  # this rank has no part in the tensor's mesh
        return
    at = _numbers(rank, name, coordinate)
    axes = _mesh_axes(rank, name, mesh)
    sizes = tuple(math.prod(shape) for shape, _ in axes)
    ranks = mesh.get("_flatten_rank_map", mesh.get("_flatten_mesh_list"))
    if type(ranks) is tuple and not _in_order(_numbers(rank, name, ranks), axes):
        raise UserError(
            f"{rank.file.path}: {name[:120]!a} lies on a device mesh whose ranks do not ascend; there torch cuts by "
            "one order and places by another, so gather the full state dict instead"
        )
    placements: Any = spec.get("placements")
    if type(placements) not in (tuple, list) or not len(placements) == len(sizes) == len(at):
        raise _strange(rank, name)
    origin, extent, even = list((0,) * len(value.shape)), list(value.shape), list(value.shape)
    for axis, index in _splits(rank, name, placements, sizes):
        if not 0 <= axis < len(value.shape) or not 0 <= at[index] < sizes[index]:
            raise _strange(rank, name)
        chunk = -(-extent[axis] // sizes[index])
        begin = min(at[index] * chunk, extent[axis])
        origin[axis] += begin
        even[axis], extent[axis] = chunk, min(chunk, extent[axis] - begin)
    local = state.get("_local_tensor")
    if isinstance(local, TensorRef) and local.shape == tuple(even):  # padded to the even size
        local = TensorRef(local.storage, local.dtype, local.offset, tuple(extent), local.stride, local.lazy)
    if not isinstance(local, TensorRef) or local.shape != tuple(extent):
        raise _strange(rank, name)
    yield _piece(rank, name, value, tuple(origin), local)


def _splits(rank: TorchFile, name: str, placements: Any, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """(tensor axis, mesh axis) of each split in the order in which the splits are made.

    A strided shard of FSDP over tensor parallelism is split after the mesh axes to its right that split the same
    tensor axis; their sizes make up its split factor.
    """
    plain: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for index, placement in enumerate(placements):
        kind = placement.kind.name.rpartition(".")[2] if isinstance(placement, Object) else ""
        fields = _fields(placement)
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise UserError(f"{rank.file.path}: {name[:120]!a} is placed by {kind or 'nothing known'}; gather it first")
        axis = fields.get("dim")
        if type(axis) is not int:
            raise _strange(rank, name)
        (strided if kind == "_StridedShard" else plain).append((axis, index))
        if kind == "_StridedShard" and not _ordinary(placements, sizes, index, axis, fields.get("split_factor")):
            raise UserError(
                f"{rank.file.path}: {name[:120]!a} is split in an order that is not understood; gather it first"
            )
    return [*plain, *strided]


def _ordinary(placements: Any, sizes: tuple[int, ...], index: int, axis: int, factor: Any) -> bool:
    right = [
        size
        for placement, size in list(zip(placements, sizes, strict=True))[index + 1 :]
        if isinstance(placement, Object)
        and placement.kind.name.endswith(".Shard")
        and _fields(placement).get("dim") == axis
    ]
    return bool(factor == math.prod(right))


_Axis = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides, in the list of ranks, of one axis of a mesh: one number each, more where axes were flattened."""


def _mesh_axes(rank: TorchFile, name: str, mesh: Mapping[str, Any]) -> tuple[_Axis, ...]:
    """The axes of the rank tensor, or since torch 2.9 of the layout object."""
    if isinstance(ranks := mesh.get("mesh"), TensorRef):
        return tuple(((size,), (step,)) for size, step in zip(ranks.shape, ranks.stride, strict=True))
    layout = _fields(mesh.get("_layout"))
    axes: Any = layout.get("axes")
    fields = [_fields(axis) for axis in axes] if type(axes) in (tuple, list) else None
    shapes: Any = [axis.get("shape") for axis in fields] if fields is not None else layout.get("shape")
    steps: Any = [axis.get("stride") for axis in fields] if fields is not None else layout.get("stride")
    if type(shapes) not in (tuple, list) or type(steps) not in (tuple, list) or len(shapes) != len(steps):
        raise _strange(rank, name)
    found = []
    for pair in zip(shapes, steps, strict=True):
        size, step = (_numbers(rank, name, part if type(part) is tuple else (part,)) for part in pair)
        if len(size) != len(step):
            raise _strange(rank, name)
        found.append((size, step))
    return tuple(found)


@lru_cache
def _in_order(ranks: tuple[int, ...], axes: tuple[_Axis, ...]) -> bool:
    """Whether ranks ascend along every axis of a mesh, as its process groups count them; False for what is no mesh."""
    if all(low < high for low, high in pairwise(ranks)):
        return True
    sizes = [size for shape, _ in axes for size in shape]
    strides = [step if size > 1 else 0 for shape, steps in axes for size, step in zip(shape, steps, strict=True)]
    reach = sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    if len(sizes) > MAX_RANK or 0 in sizes or math.prod(sizes) > len(ranks) or reach >= len(ranks) or max(ranks) >> 63:
        return False
    line = np.array(ranks, np.int64)
    mesh = as_strided(line, sizes, [step * line.itemsize for step in strides])
    whole = mesh.reshape([math.prod(shape) for shape, _ in axes])
    return all(bool((np.diff(whole, axis=axis) > 0).all()) for axis in range(whole.ndim))


def _piece(rank: TorchFile, name: str, value: Sharded, origin: tuple[int, ...], local: Any) -> Piece:
    if not isinstance(local, TensorRef) or len(local.shape) != len(origin) or len(origin) != len(value.shape):
        raise _strange(rank, name)
    tensor: StridedTensor = rank.tensor(name, local)
    return Piece(origin, tensor)


def _numbers(rank: TorchFile, name: str, value: Any) -> tuple[int, ...]:
    if type(value) not in (tuple, list) or any(type(number) is not int or number < 0 for number in value):
        raise _strange(rank, name)
    return tuple(value)


def _fields(value: Any) -> dict[Any, Any]:
    """The attributes that a pickle sets on an object: a dict, or slots beside an absent dict."""
    state = value.state if isinstance(value, Object) else value
    if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
        state = state[1]
    if state is None and isinstance(value, Object) and type(value.arguments) is tuple and value.arguments:
        names = ("dim", "split_factor")  # placements that are built by a call
        return dict(zip(names, value.arguments, strict=False))
    return state if type(state) is dict else {}


def _strange(rank: TorchFile, name: str) -> UserError:
    return UserError(
        f"{rank.file.path}: {name[:120]!a} is not sharded as torch 2.x does it; gather the full state dict instead"
    )
