"""Sources made by `torch.save`: one file (ZIP or the older stream) or Hugging Face's `pytorch_model*.bin` set."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.convert.archive import MAGIC, Record, read_archive
from bridge.convert.dtypes import ITEMSIZE, SAFETENSORS
from bridge.convert.names import check_names, clean_names, find_weights
from bridge.convert.pickles import MAX_BYTES, Object, Pickle, StorageRef, TensorRef, read_pickle
from bridge.convert.source import Source, SourceFile, StridedTensor
from bridge.errors import UserError

LEGACY_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
"""The pickle of torch's magic number, with which files begin that were saved without ZIP."""

_LEGACY_PROTOCOL = 1001
_GROWTH, _ROOM = 16, 1 << 30  # expanded views may hold this many times the file's bytes, plus this many bytes

Locate = Callable[[StorageRef], Record]


@dataclass
class _Part:
    """The weights of one file, under the names they have there."""

    file: SourceFile
    locate: Locate
    references: dict[str, TensorRef]
    dropped: list[str]
    wrapper: tuple[str, ...]
    step: int | None


def open_file(path: Path) -> Source:
    """One torch.save file as a Source. The caller closes it; on an error it is closed here."""
    source = Source("torch", path, {}, [])
    with _closed_on_error(source):
        _fill(source, [_read_part(source, path)])
    return source


def open_index(path: Path, inside: Callable[[Path, str], Path]) -> Source:
    """The files that a `pytorch_model.bin.index.json` names, as one Source.

    `inside` turns the index's folder and a file name from the index into a path that is safe to open.
    """
    weight_map = _weight_map(path)
    paths = {name: inside(path.parent, name) for name in dict.fromkeys(weight_map.values())}
    missing = [name for name, file in paths.items() if not file.exists()]
    if missing:
        raise UserError(f"{path}: {len(missing)} of its {len(paths)} files are missing: {', '.join(missing[:5])}")
    source = Source("hf-bin", path, {}, [])
    with _closed_on_error(source):
        parts = {name: _read_part(source, file) for name, file in paths.items()}
        for tensor, name in weight_map.items():
            if tensor not in parts[name].references:
                raise UserError(f"{paths[name]}: lacks the tensor {tensor[:120]!a} that the index promises")
        _fill(source, list(parts.values()))
    return source


@contextmanager
def _closed_on_error(source: Source) -> Iterator[None]:
    try:
        yield
    except BaseException:
        source.close()
        raise


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: is no index with a weight_map; copy it again") from error
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise UserError(f"{path}: its weight_map does not map tensor names to file names; copy it again")
    return weight_map


def _read_part(source: Source, path: Path) -> _Part:
    file = SourceFile(path)
    source.files.append(file)
    root, locate = _read_zip(file) if file.read(0, min(4, file.size)) == MAGIC else _read_legacy(file)
    wrapper, state = find_weights(root, str(path))
    references, dropped = {}, []
    for name, value in state.items():
        if isinstance(name, str) and isinstance(value, TensorRef):
            references[name] = value
        elif isinstance(value, Object) and value.kind.name.startswith("torch._utils._rebuild_"):
            kind = value.kind.name.removeprefix("torch._utils._rebuild_")
            raise UserError(f"{path}: {str(name)[:120]!a} is a {kind}, which safetensors cannot hold; save it dense")
        else:
            dropped.append(str(name)[:120] if isinstance(name, (str, int)) else type(name).__name__)
    return _Part(file, locate, references, dropped, wrapper, _step(root))


def _fill(source: Source, parts: list[_Part]) -> None:
    """Give the source the tensors of all parts, under their clean names."""
    where = str(source.path)
    names = [name for part in parts for name in part.references]
    doubled = next((name for name, count in Counter(names).items() if count > 1), None)
    if doubled is not None:
        raise UserError(f"{where}: the tensor {doubled[:120]!a} is in two of its files; remove one of them")
    clean = clean_names(names, where)
    check_names(clean.values(), where)
    for part in parts:
        _refuse_inflation(part.file, part.references)
        for name, reference in part.references.items():
            source.tensors[clean[name]] = _resolve(part.file, clean[name], reference, part.locate)
        source.dropped += part.dropped
        source.wrapper, source.step = part.wrapper, part.step


def _step(root: dict[Any, Any]) -> int | None:
    found = (root.get(key) for key in ("step", "global_step", "iteration", "iter_num"))
    return next((value for value in found if type(value) is int), None)


def _read_zip(file: SourceFile) -> tuple[Any, Locate]:
    records = read_archive(file)
    index = records["data.pkl"]
    if index.size > MAX_BYTES:
        raise UserError(
            f"{file.path}: its pickle has {index.size:,} bytes; no state dict needs more than {MAX_BYTES:,}"
        )
    pickle = read_pickle(file.read(index.offset, index.size), file.path)
    return pickle.value, lambda storage: _found(file, storage, records.get(f"data/{storage.key}"))


def _read_legacy(file: SourceFile) -> tuple[Any, Locate]:
    """The stream of torch before 1.6: magic, protocol, system, the object, the keys, then each storage in turn."""
    head = file.read(0, min(file.size, MAX_BYTES))
    pickles: list[Pickle] = []
    for _ in range(5):
        pickles.append(read_pickle(head, file.path, pickles[-1].end if pickles else 0))
    _, protocol, system, root, keys = (pickle.value for pickle in pickles)
    if protocol != _LEGACY_PROTOCOL or not isinstance(system, dict) or system.get("little_endian") is not True:
        raise UserError(
            f"{file.path}: is no little-endian torch.save file of protocol {_LEGACY_PROTOCOL}; save it again"
        )
    storages = pickles[3].storages
    if not isinstance(keys, list) or any(key not in storages for key in keys) or len(set(keys)) != len(keys):
        raise UserError(f"{file.path}: its list of storages is damaged; copy it again")
    located, at = {}, pickles[4].end
    for key in keys:
        # A storage is its number of elements in 8 bytes, then the elements.
        size = int.from_bytes(file.read(at, 8), "little") * ITEMSIZE[storages[key].dtype]
        located[key] = Record(at + 8, size)
        at += 8 + size
        if at > file.size:
            raise UserError(f"{file.path}: was cut off at {file.size:,} bytes; copy it again or take an earlier one")
    return root, lambda storage: _found(file, storage, located.get(storage.key))


def _found(file: SourceFile, storage: StorageRef, record: Record | None) -> Record:
    if record is None:
        raise UserError(f"{file.path}: lacks the storage {storage.key[:40]!a} that a tensor uses; save it again")
    return record


def _resolve(file: SourceFile, name: str, reference: TensorRef, locate: Locate) -> StridedTensor:
    """The tensor at its place in the file; UserError if a single element of it lies outside its storage."""
    quoted = ascii(name[:120])
    if reference.dtype not in SAFETENSORS or reference.lazy:
        kind = "a lazily conjugated or negated tensor" if reference.lazy else f"of dtype {reference.dtype}"
        raise UserError(f"{file.path}: {quoted} is {kind}, which safetensors cannot hold; save it in another form")
    storage, itemsize = reference.storage, ITEMSIZE[reference.dtype]
    record = locate(storage)
    declared = storage.numel * ITEMSIZE[storage.dtype]
    numel = math.prod(reference.shape)
    reach = sum((size - 1) * step for size, step in zip(reference.shape, reference.stride, strict=True))
    used = (reference.offset + reach + 1) * itemsize if numel else 0
    if record.size < declared or used > declared:
        raise UserError(
            f"{file.path}: {quoted} needs {max(used, declared):,} bytes of a storage that has "
            f"{min(record.size, declared):,}; the file is damaged or hostile"
        )
    return StridedTensor(
        file, record.offset + reference.offset * itemsize, reference.dtype, reference.shape, reference.stride
    )


def _refuse_inflation(file: SourceFile, references: Mapping[str, TensorRef]) -> None:
    # A view with stride 0 is larger than its bytes; without a bound a small file could fill a disk.
    total = sum(math.prod(reference.shape) * ITEMSIZE[reference.dtype] for reference in references.values())
    if total > file.size * _GROWTH + _ROOM:
        raise UserError(
            f"{file.path}: claims {total:,} bytes of tensors in a file of {file.size:,}; refused as hostile"
        )
