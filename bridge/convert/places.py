"""Names that come from a checkpoint, and the paths they may stand for."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bridge.convert.source import SourceFile
from bridge.errors import UserError

MAX_COMPANION = 512 << 20  # bytes
MAX_JSON = 32 << 20  # bytes; an index of 100,000 tensors has 10 MB
_LONGEST = 255  # bytes of a file's name, on every file system of Linux
_BLOCK = 4 << 20


def inside(folder: Path, name: str) -> Path:
    """The path of file `name` in `folder`, if that is where it really lies.

    The name may come from an index, so it must be a bare file name; a link must not lead out of the folder, except
    from a snapshot of the Hugging Face cache to the blobs beside it. UserError otherwise.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise UserError(f"{folder}: the file name {name[:120]!a} leads out of the folder; refused as unsafe")
    if len(name.encode("utf-8", "replace")) > _LONGEST:
        raise UserError(f"{folder}: the file name {name[:120]!a} … is too long for a file; write the index again")
    path = folder / name
    if path.is_symlink():
        home = Path(os.path.realpath(folder))
        homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
        if Path(os.path.realpath(path)).parent not in homes:  # unlike resolve(), bears with a link to itself
            raise UserError(f"{path}: is a link that leads out of the folder; copy the file instead")
    return path


def lexical(folder: Path) -> Path:
    """The folder with an absolute path without `..`, so that the parents of the path are those of the folder."""
    return Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would leave the folder of a link


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UserError if it is none."""
    try:
        value = json.loads(read_small(path, MAX_JSON).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no valid JSON ({str(error)[:80]}); repair or replace it") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: is no JSON object; repair or replace it")
    return value


def read_small(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most `limit` bytes; UserError for another one, and nothing is waited for."""
    return b"".join(read_blocks(path, limit))


def read_blocks(path: Path, limit: int = MAX_COMPANION) -> Iterator[bytes]:
    """The bytes of a companion file, in blocks."""
    file = SourceFile(path)
    try:
        if file.size > limit:
            raise UserError(f"{path}: has {file.size:,} bytes, too many for such a file; replace it")
        for start in range(0, file.size, _BLOCK):
            yield file.read(start, min(_BLOCK, file.size - start))
    finally:
        file.close()
