"""The ZIP archives that `torch.save` writes: where each record lies, with nothing taken on trust.

Only what torch writes is accepted: stored (never compressed) records under one top folder, each inside the file and
apart from all others. The layout is the ZIP file format (APPNOTE 6.3.10, sections 4.3.6 to 4.3.16).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from bridge.convert.source import IncompleteError, SourceFile
from bridge.errors import UserError

MAGIC = b"PK\x03\x04"
MAX_DIRECTORY = 64 << 20  # bytes; about 700,000 records
_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_DESCRIBED = 8  # flag: sizes and checksum follow the data
_DESCRIPTORS = (16, 24)  # bytes, with sizes of 32 or 64 bits
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True)
class Record:
    """A stretch of the archive's file, in bytes."""

    offset: int
    size: int
    crc: int = field(default=0, compare=False)
    """CRC-32 of its bytes as the archive tells it; 0 if it was not computed."""


@dataclass(frozen=True)
class _Entry:
    name: str
    flags: int
    method: int
    packed: int
    size: int
    header: int
    crc: int


def read_archive(file: SourceFile) -> dict[str, Record]:
    """Records by name, without the top folder: `data.pkl`, `data/0`, `byteorder`, …

    UserError if the archive is truncated, damaged, compressed, or not of torch's making.
    """
    start, size, count = _find_directory(file)
    entries = _read_directory(file, start, size, count)
    records: dict[str, Record] = {}
    for entry in entries:
        if entry.name in records:
            raise UserError(f"{file.path}: holds two records named {entry.name!r}; save the checkpoint again")
        records[entry.name] = _locate(file, entry, start)
    _refuse_gaps(file, entries, records, start)
    return _without_top_folder(file, records)


def _find_directory(file: SourceFile) -> tuple[int, int, int]:
    """Offset, bytes and number of entries of the central directory."""
    end = file.size - _END.size
    # torch writes no comment, so the end record can only be at the very end: nothing is searched for.
    magic, disk, _, _, count, size, start, _ = _END.unpack(file.read(end, _END.size) if end >= 0 else bytes(_END.size))
    if magic != b"PK\x05\x06":
        raise IncompleteError(
            f"{file.path}: does not end as an archive does, so it was cut off; take a whole copy of it"
        )
    if _FULL16 in (disk, count) or _FULL32 in (size, start):
        start, size, count, end = _find_directory64(file, end)
    elif disk:
        raise UserError(f"{file.path}: is one part of a ZIP archive in several; join the parts first")
    if start + size > end or size > MAX_DIRECTORY or count * _ENTRY.size > size:
        raise _damaged(file, "its directory does not fit into the file")
    return start, size, count


def _find_directory64(file: SourceFile, end: int) -> tuple[int, int, int, int]:
    if end < _END64_LOCATOR.size:
        raise _damaged(file, "its end record is incomplete")
    magic, _, at, disks = _END64_LOCATOR.unpack(file.read(end - _END64_LOCATOR.size, _END64_LOCATOR.size))
    if magic != b"PK\x06\x07" or disks > 1 or at + _END64.size > end:
        raise _damaged(file, "its end record is incomplete")
    fields = _END64.unpack(file.read(at, _END64.size))
    if fields[0] != b"PK\x06\x06":
        raise _damaged(file, "its end record is incomplete")
    return fields[9], fields[8], fields[7], at


def _read_directory(file: SourceFile, start: int, size: int, count: int) -> list[_Entry]:
    raw = file.read(start, size)
    entries, at = [], 0
    for _ in range(count):
        if at + _ENTRY.size > size:
            raise _damaged(file, "its directory is too short")
        magic, _, _, flags, method, _, _, crc, packed, full, name, extra, comment, _, _, _, header = _ENTRY.unpack_from(
            raw, at
        )
        stop = at + _ENTRY.size + name
        if magic != b"PK\x01\x02" or stop + extra + comment > size:
            raise _damaged(file, "its directory is damaged")
        sizes = _wide_sizes(file, raw[stop : stop + extra], full, packed, header)
        try:
            text = raw[at + _ENTRY.size : stop].decode("utf-8")
        except UnicodeDecodeError:
            raise _damaged(file, "a record's name is not UTF-8") from None
        entries.append(_Entry(text, flags, method, sizes[1], sizes[0], sizes[2], crc))
        at = stop + extra + comment
    return entries


def _wide_sizes(file: SourceFile, extra: bytes, *sizes: int) -> list[int]:
    """The sizes, where a full 32-bit field stands for a 64-bit one in the extra data (tag 1)."""
    if _FULL32 not in sizes:
        return list(sizes)
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, at)
        wide = extra[at + 4 : at + 4 + length]
        if tag == 1 and len(wide) >= 8 * sizes.count(_FULL32):
            values = iter(struct.unpack_from(f"<{len(wide) // 8}Q", wide))
            return [next(values) if size == _FULL32 else size for size in sizes]
        at += 4 + length
    raise _damaged(file, "a record's size is missing")


def _locate(file: SourceFile, entry: _Entry, directory: int) -> Record:
    if entry.flags & 1:
        raise UserError(f"{file.path}: record {entry.name!r} is encrypted; torch never writes that")
    if entry.method != 0 or entry.packed != entry.size:
        raise UserError(f"{file.path}: record {entry.name!r} is compressed; torch never writes that, so it is refused")
    if entry.header + _LOCAL.size > directory:
        raise _damaged(file, f"record {entry.name!r} lies outside the file")
    magic, *_, method, _, _, _, _, _, name, extra = _LOCAL.unpack(file.read(entry.header, _LOCAL.size))
    offset = entry.header + _LOCAL.size + name + extra
    if magic != MAGIC or method != 0 or offset + entry.size > directory:
        raise _damaged(file, f"record {entry.name!r} lies outside the file or has no header")
    if file.read(entry.header + _LOCAL.size, name) != entry.name.encode("utf-8"):
        raise _damaged(file, f"record {entry.name!r} has another name in its own header")
    return Record(offset, entry.size, entry.crc)


def _refuse_gaps(file: SourceFile, entries: list[_Entry], records: dict[str, Record], directory: int) -> None:
    """Each record must reach up to the next, or to a data descriptor before that: else a length was changed."""
    ordered = sorted(entries, key=lambda entry: entry.header)
    begins = [*(entry.header for entry in ordered), directory]
    for entry, follower in zip(ordered, begins[1:], strict=True):
        end = records[entry.name].offset + records[entry.name].size
        if end > follower:
            raise _damaged(file, "two records share bytes")
        if follower - end not in (_DESCRIPTORS if entry.flags & _DESCRIBED else (0,)):
            raise _damaged(file, f"record {entry.name!r} does not reach up to the next one")
        if entry.flags & _DESCRIBED and file.read(end, 4) != b"PK\x07\x08":
            raise _damaged(file, f"record {entry.name!r} does not end where it says")


def _without_top_folder(file: SourceFile, records: dict[str, Record]) -> dict[str, Record]:
    tops = [name[: -len("/data.pkl")] for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(tops) != 1:
        raise UserError(f"{file.path}: is a ZIP archive but not one of torch.save: it has no single data.pkl")
    prefix = tops[0] + "/"
    inner = {name.removeprefix(prefix): record for name, record in records.items() if name.startswith(prefix)}
    if "constants.pkl" in inner:
        raise UserError(f"{file.path}: is a TorchScript program; save its state_dict() with torch.save instead")
    order = inner.get("byteorder")
    if order is not None and (order.size > 16 or file.read(order.offset, order.size) != b"little"):
        raise UserError(f"{file.path}: was saved in big-endian byte order; save it again on a little-endian machine")
    return inner


def _damaged(file: SourceFile, what: str) -> UserError:
    return UserError(f"{file.path}: is a damaged archive: {what}; copy it again or take an earlier one")
