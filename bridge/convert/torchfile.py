"""One file of `torch.save`: what its pickle holds, and where the bytes of each tensor lie."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.convert.archive import MAGIC, Record, read_archive
from bridge.convert.dtypes import ITEMSIZE, SAFETENSORS
from bridge.convert.pickles import MAX_BYTES, Pickle, StorageRef, TensorRef, read_pickle
from bridge.convert.source import IncompleteError, SourceFile, StridedTensor
from bridge.errors import UserError

_LEGACY_MAGIC = re.compile(rb"\x80[\x02-\x05](\x95.{8})?\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\.", re.DOTALL)
"""The pickle, of any protocol, of torch's magic number, with which files begin that were saved without ZIP."""

_LEGACY_PROTOCOL = 1001

Locate = Callable[[StorageRef], Record]


@dataclass
class TorchFile:
    """A file whose index was read. Its weights stay where they are until a tensor is read."""

    file: SourceFile
    root: Any
    """The saved object: containers and values as they are, tensors as TensorRef or Sharded, all else as Object."""
    _locate: Locate

    def tensor(self, name: str, reference: TensorRef) -> StridedTensor:
        """The tensor at its place in the file.

        UserError if an element of it lies outside its storage, or if safetensors cannot hold its type.
        """
        file, quoted = self.file, ascii(name[:120])
        if reference.dtype not in SAFETENSORS or reference.lazy:
            kind = "a lazily conjugated or negated tensor" if reference.lazy else f"of dtype {reference.dtype}"
            raise UserError(f"{file.path}: {quoted} is {kind}, which safetensors cannot hold; save it in another form")
        storage, itemsize = reference.storage, ITEMSIZE[reference.dtype]
        record = self._locate(storage)
        declared = storage.numel * ITEMSIZE[storage.dtype]
        numel = math.prod(reference.shape)
        reach = sum((size - 1) * step for size, step in zip(reference.shape, reference.stride, strict=True))
        used = (reference.offset + reach + 1) * itemsize if numel else 0
        if record.size < declared or used > declared:
            raise UserError(
                f"{file.path}: {quoted} needs {max(used, declared):,} bytes of a storage that has "
                f"{min(record.size, declared):,}; the file is damaged or hostile"
            )
        start = record.offset + reference.offset * itemsize
        return StridedTensor(file, start, reference.dtype, reference.shape, reference.stride)


def read_torch(file: SourceFile) -> TorchFile:
    """Read the index of a torch.save file, ZIP or older stream; no code runs and no weight is read.

    UserError if the file is empty, cut off, damaged, unsafe or of another kind.
    """
    head = file.read(0, min(file.size, 512))
    if head[:4] == MAGIC:
        return _read_zip(file)
    if _LEGACY_MAGIC.match(head):
        return _read_legacy(file)
    if not head:
        raise IncompleteError(f"{file.path}: is empty; copy it again or take an earlier checkpoint")
    raise UserError(f"{file.path}: is {_guess(head)}, not a torch.save checkpoint; give a checkpoint file or folder")


def _read_zip(file: SourceFile) -> TorchFile:
    records = read_archive(file)
    index = records["data.pkl"]
    if index.size > MAX_BYTES:
        raise UserError(
            f"{file.path}: its pickle has {index.size:,} bytes; no state dict needs more than {MAX_BYTES:,}"
        )
    raw = file.read(index.offset, index.size)
    if index.crc and zlib.crc32(raw) != index.crc:  # one wrong bit here could exchange two tensors
        raise UserError(f"{file.path}: its pickle is not what was saved (CRC-32); copy it again or take an earlier one")
    pickle = read_pickle(raw, file.path)
    return TorchFile(file, pickle.value, lambda storage: _found(file, storage, records.get(f"data/{storage.key}")))


def _read_legacy(file: SourceFile) -> TorchFile:
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
    if (
        not isinstance(keys, list)
        or any(type(key) is not str or key not in storages for key in keys)
        or len(set(keys)) != len(keys)
    ):
        raise UserError(f"{file.path}: its list of storages is damaged; copy it again")
    located, at = {}, pickles[4].end
    for key in keys:
        # A storage is its number of elements in 8 bytes, then the elements.
        size = int.from_bytes(file.read(at, 8), "little") * ITEMSIZE[storages[key].dtype]
        located[key] = Record(at + 8, size)
        at += 8 + size
        if at > file.size:
            raise IncompleteError(
                f"{file.path}: was cut off at {file.size:,} bytes; copy it again or take an earlier one"
            )
    return TorchFile(file, root, lambda storage: _found(file, storage, located.get(storage.key)))


def _found(file: SourceFile, storage: StorageRef, record: Record | None) -> Record:
    if record is None:
        raise UserError(f"{file.path}: lacks the storage {storage.key[:40]!a} that a tensor uses; save it again")
    return record


def _guess(head: bytes) -> str:
    if head[257:262] == b"ustar":
        return "a tar file of torch before 0.4 or something else in tar, a format that is not supported"
    if head.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer whose content was not downloaded (run git lfs pull)"
    if head[:1] == b"\x80":
        return "a bare pickle"
    if head[8:9] == b"{":
        return "in safetensors form"
    return "an unknown kind of file"


def integer(values: Mapping[Any, Any], *keys: str) -> int | None:
    """The first of `keys` that holds a whole number."""
    return next((values[key] for key in keys if type(values.get(key)) is int), None)
