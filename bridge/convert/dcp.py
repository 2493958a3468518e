"""torch.distributed.checkpoint folders: `.metadata` says which file holds which box of which tensor.

Every item in a `.distcp` file is a torch.save archive of one tensor. `.metadata` is written last, so a folder without
it is unfinished. It is a plain pickle and is read like every other one here: nothing in it runs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bridge.convert.names import check_names, clean_names, find_weights
from bridge.convert.pickles import MAX_BYTES, MAX_OPCODES, MAX_RANK, Global, Object, Sharded, TensorRef, read_pickle
from bridge.convert.places import inside
from bridge.convert.plain import unwritten_tensors
from bridge.convert.source import IncompleteError, Piece, Source, SourceFile, Tensor, joined
from bridge.convert.torchfile import read_torch
from bridge.errors import UserError

METADATA = ".metadata"

_WRAPPERS = ("app", "state")
"""Keys above the weights that only these checkpoints have: an application state may hold model and optimizer."""

_OPTIMIZER = re.compile(r"(optimizer|optimizers|optim)\.")
"""How names begin that are no weights where a state was saved with its names joined already."""

_MOST_PARTS = MAX_OPCODES // 4
"""Each has its own offsets and sizes, which take a pickle more than four opcodes."""

Place = tuple[str, int, int]
"""File name, offset and length in bytes."""


def open_dcp(folder: Path) -> Source:
    """The folder as a Source. IncompleteError if a file that it needs is missing, UserError if it is damaged."""
    path = inside(folder, METADATA)
    with Source("dcp", folder).opening() as source:
        metadata = _read_metadata(source.add(path))
        stored = _stored(path, metadata)
        names = sorted({name for name, _, _ in stored.values()})
        missing = [name for name in names if not inside(folder, name).exists()]
        if missing:
            raise IncompleteError(
                f"{folder}: {len(missing)} of its {len(names)} files are missing: {', '.join(map(ascii, missing[:5]))}"
            )
        source.ranks = (
            len({name.split("_")[2] for name in names if name.startswith("__") and name.count("_") == 3}) or 1
        )
        root = _nested(path, metadata)
        source.wrapper, state = find_weights(root, str(path), also=_WRAPPERS)
        weights = {
            str(name): value
            for name, value in state.items()
            if isinstance(value, Sharded) and not _OPTIMIZER.match(str(name))
        }
        source.dropped = [str(name)[:120] for name in state if str(name) not in weights]
        source.warnings += unwritten_tensors(root, source.wrapper)
        clean = clean_names(weights, str(path))
        check_names(clean.values(), str(path))
        files: dict[str, SourceFile] = {}
        for name, value in weights.items():
            source.tensors[clean[name]] = _tensor(source, files, clean[name], value, stored)
    return source


def _read_metadata(file: SourceFile) -> dict[str, Any]:
    if file.size > MAX_BYTES:
        raise UserError(f"{file.path}: has {file.size:,} bytes; more than {MAX_BYTES:,} are not read")
    if not file.size:
        raise IncompleteError(f"{file.path}: is empty; take an earlier checkpoint")
    value = read_pickle(file.read(0, file.size), file.path).value
    fields = value.state if isinstance(value, Object) and value.kind.name.endswith(".Metadata") else None
    if type(fields) is not dict or any(
        type(fields.get(key)) is not dict for key in ("state_dict_metadata", "storage_data")
    ):
        raise UserError(f"{file.path}: is no metadata of a torch distributed checkpoint; copy it again")
    return fields


def _stored(path: Path, metadata: dict[str, Any]) -> dict[tuple[str, tuple[int, ...]], Place]:
    """(tensor, offset of the chunk) -> where it lies. Items that are no tensors are left out."""
    stored: dict[tuple[str, tuple[int, ...]], Place] = {}
    for key, value in metadata["storage_data"].items():
        index, info = _state(key), _state(value)
        name, offset, file = index.get("fqn"), index.get("offset"), info.get("relative_path")
        start, length = _number(info.get("offset")), _number(info.get("length"))
        if type(name) is not str or type(file) is not str or start is None or length is None:
            raise UserError(f"{path}: does not say where its items lie as torch does it; copy it again")
        if info.get("transform_descriptors"):
            raise UserError(f"{path}: its items were transformed when they were saved (compressed); save them plain")
        if offset is not None:
            stored[name, _sizes(path, offset)] = (file, start, length)
    return stored


def _nested(path: Path, metadata: dict[str, Any]) -> dict[Any, Any]:
    """The saved dict as it was before its keys were joined by dots, with a Sharded in place of each tensor."""
    planner = metadata.get("planner_data")
    paths = planner if type(planner) is dict else {}
    root: dict[Any, Any] = {}
    parts = 0
    for name, value in metadata["state_dict_metadata"].items():
        keys = paths.get(name)
        if type(keys) is not tuple or not 0 < len(keys) <= MAX_RANK or any(type(key) not in (str, int) for key in keys):
            keys = (name,)
        place = root
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if type(place) is not dict:
                raise UserError(f"{path}: {str(name)[:120]!a} lies inside another item; copy it again")
        if keys[-1] in place:
            raise UserError(f"{path}: {str(name)[:120]!a} lies in the place of another item; copy it again")
        described = place[keys[-1]] = _description(path, name, value)
        parts += len(described.state[1]) if described else 0
        if parts > _MOST_PARTS:  # one list of parts may stand under a million names
            raise UserError(f"{path}: tells of more than {_MOST_PARTS:,} parts of tensors; copy it again")
    return root


def _description(path: Path, name: Any, value: Any) -> Sharded | None:
    if not isinstance(value, Object) or not value.kind.name.endswith(".TensorStorageMetadata") or type(name) is not str:
        return None
    fields = _state(value)
    properties = fields["properties"].state if isinstance(fields.get("properties"), Object) else None
    dtype = properties[0] if type(properties) is tuple and properties else _state(fields.get("properties")).get("dtype")
    chunks = fields.get("chunks")
    if type(chunks) is not list or not isinstance(dtype, Global):
        raise UserError(f"{path}: {name[:120]!a} is not described as torch does it; copy it again")
    boxes = [(_sizes(path, _state(c).get("offsets")), _sizes(path, _state(c).get("sizes"))) for c in chunks]
    return Sharded("chunks", dtype.name.removeprefix("torch."), _sizes(path, fields.get("size")), (name, boxes))


def _tensor(
    source: Source,
    files: dict[str, SourceFile],
    name: str,
    value: Sharded,
    stored: dict[tuple[str, tuple[int, ...]], Place],
) -> Tensor:
    full, boxes = value.state
    pieces = []
    for origin, sizes in boxes:
        if 0 in sizes:  # a rank without rows: its offset may lie at the end
            continue
        if (full, origin) not in stored:
            raise UserError(f"{source.path}: says nowhere where a part of {name[:120]!a} lies; save it again")
        file_name, offset, length = stored[full, origin]
        if file_name not in files:
            files[file_name] = source.add(inside(source.path, file_name))
        file = files[file_name]
        if offset + length > file.size:
            raise IncompleteError(f"{file.path}: ends before {name[:120]!a} does; it was cut off, so take a whole copy")
        content = read_torch(file.window(offset, length))
        if not isinstance(content.root, TensorRef) or content.root.shape != sizes:
            raise UserError(f"{file.path}: holds something else in place of {name[:120]!a}; copy it again")
        pieces.append(Piece(origin, content.tensor(name, content.root)))
    return joined(str(source.path), name, value.dtype, value.shape, pieces)


def _number(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _sizes(path: Path, value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > MAX_RANK or any(type(size) is not int or size < 0 for size in value):
        raise UserError(f"{path}: holds a size that is no tuple of numbers; copy it again")
    return value


def _state(value: Any) -> dict[Any, Any]:
    state = value.state if isinstance(value, Object) else None
    return state if type(state) is dict else {}
