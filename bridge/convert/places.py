"""Names that come from a checkpoint, and the paths they may stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bridge.convert.source import SourceFile
from bridge.errors import UserError

MAX_COMPANION = 512 << 20  # bytes
_BLOCK = 4 << 20


def inside(folder: Path, name: str) -> Path:
    """The path of file `name` in `folder`, if that is where it really lies.

    The name may come from an index, so it must be a bare file name; a link must not lead out of the folder, except
    from a snapshot of the Hugging Face cache to the blobs beside it. UserError otherwise.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise UserError(f"{folder}: the file name {name[:120]!a} leads out of the folder; refused as unsafe")
    path = folder / name
    if path.is_symlink():
        home = folder.resolve()
        homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
        if path.resolve().parent not in homes:
            raise UserError(f"{path}: is a link that leads out of the folder; copy the file instead")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UserError if it is none."""
    try:
        value = json.loads(b"".join(read_blocks(path)).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no valid JSON ({str(error)[:80]}); repair or replace it") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: is no JSON object; repair or replace it")
    return value


def read_blocks(path: Path) -> Iterator[bytes]:
    """The bytes of a companion file, in blocks."""
    file = SourceFile(path)
    try:
        if file.size > MAX_COMPANION:
            raise UserError(f"{path}: has {file.size:,} bytes, too many for such a file; replace it")
        for start in range(0, file.size, _BLOCK):
            yield file.read(start, min(_BLOCK, file.size - start))
    finally:
        file.close()
