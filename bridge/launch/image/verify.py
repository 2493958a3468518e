"""Is an image file still the one that was recorded? Imports next to nothing: jobs ask this before each use.

`verify_sif` reads the whole file each time. `verify_once` reads it once on each node and then again whenever the file's
inode, size or times differ: a write by anybody changes them. A byte that the disk itself turned over does not; that is
found on the next node, after the next boot, and by `bridge-rl image verify`, which always reads everything.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from bridge.artifacts import file_digest
from bridge.errors import UserError


def verify_sif(path: Path, recorded: str, report: Callable[[int], object] | None = None) -> None:
    """Read a file and compare its SHA-256 with the recorded one (`sha256:…`). `report` is given the bytes as they come.

    Raises UserError when the file is not there or differs.
    """
    try:
        found = "sha256:" + file_digest(path, report)
    except OSError as error:
        raise UserError(f"{path}: the image cannot be read: {error.strerror}; build or pull it again") from None
    if found != recorded:
        raise UserError(
            f"{path}: the image has changed: expected {recorded}, found {found}; remove it, then build or pull it again"
        )


def verify_once(path: Path, recorded: str) -> None:
    """`verify_sif`, but not again on this node for the same file. Raises UserError as that does."""
    marks = _marks()
    try:
        facts = path.stat()
    except OSError as error:
        raise UserError(f"{path}: the image cannot be read: {error.strerror}; build or pull it again") from None
    # ctime too: mtime alone can be set back by whoever writes.
    identity = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, recorded)
    mark = marks / hashlib.sha256(repr(identity).encode()).hexdigest() if marks else None
    if mark and mark.exists():
        return
    verify_sif(path, recorded)
    if mark:
        mark.touch()


def _marks() -> Path | None:
    """A folder of this node that only this user can write to; None if somebody else has made one of that name."""
    folder = Path(tempfile.gettempdir()) / f"bridge-rl-verified-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError:
        return None
    return folder if folder.is_dir() and facts.st_uid == os.getuid() and not facts.st_mode & 0o077 else None
