"""Artifacts: sealed or absent.

A directory is an artifact only if `SEAL.json` in it is valid. A producer works in a temporary sibling; the seal is
written last, everything is flushed to disk, and one rename publishes the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from bridge.errors import UserError

SEAL = "SEAL.json"
PRUNED = "PRUNED.json"
FORMAT = 1
_MAX_RECORD = 64 << 20  # bytes


@dataclass(frozen=True)
class Seal:
    """What `SEAL.json` holds."""

    kind: str
    """dataset, checkpoint, model, eval …"""
    format: int
    fingerprint: str
    """Of everything that made the artifact: settings, inputs' fingerprints, code."""
    made_by: str
    """RUN/STAGE/ELEMENT."""
    files: Mapping[str, Mapping[str, Any]]
    """Relative path → size in bytes and SHA-256."""
    summary: Mapping[str, Any]
    """What the stage says about its result."""


def file_digest(path: Path, report: Callable[[int], object] | None = None) -> str:
    """SHA-256 of a file, in hexadecimal. `report` is given the number of bytes of each block that was read."""
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            hasher.update(block)
            if report:
                report(len(block))
    return hasher.hexdigest()


def seal(folder: Path, kind: str, fingerprint: str, made_by: str, summary: Mapping[str, Any]) -> Seal:
    """Flush every file of `folder` to disk and write its seal. The folder is not yet published."""
    (folder / SEAL).unlink(missing_ok=True)
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(p for p in folder.rglob("*") if not p.is_dir()):
        if path.is_symlink() or not path.is_file():
            raise ValueError(f"{path}: an artifact holds plain files only")
        flush(path)
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": file_digest(path)}
    result = Seal(kind, FORMAT, fingerprint, made_by, files, summary)
    write_json(folder / SEAL, asdict(result))
    for path in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        flush(path)
    return result


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """JSON that appears under its name only when it is whole and on disk."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    flush(temporary)
    temporary.replace(path)
    flush(path.parent)


def publish(folder: Path, target: Path) -> None:
    """Make a sealed folder visible under its final name, by one rename.

    Raises:
        FileExistsError: something else stands there and is not empty.
    """
    if not (folder / SEAL).is_file():
        raise ValueError(f"{folder}: not sealed")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.rename(target)
    except OSError as error:
        raise FileExistsError(f"{target}: cannot be published: {error.strerror}") from error
    flush(target.parent)


def read_seal(folder: Path) -> Seal | None:
    """The seal of a folder, or None if it has none that can be read. Files are not looked at."""
    try:
        value = _read_record(folder / SEAL)
        found = Seal(**value) if value["format"] == FORMAT else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if found is not None and _is_as_written(found) else None


def _read_record(path: Path) -> Any:
    """The JSON in a record. ValueError for a pipe, which would be waited for, and for what has no end."""
    if not path.is_file() or path.stat().st_size > _MAX_RECORD:
        raise ValueError(f"{path}: is no small file")
    return json.loads(path.read_text(encoding="utf-8"))


def _is_as_written(found: Seal) -> bool:
    files = found.files.values() if type(found.files) is dict else [None]
    texts = (found.kind, found.fingerprint, found.made_by)
    return (
        all(type(text) is str for text in texts)
        and type(found.summary) is dict
        and all(type(facts) is dict and type(facts.get("size")) is int and "sha256" in facts for facts in files)
    )


def is_sealed(folder: Path, fingerprint: str) -> bool:
    """Whether an artifact with this fingerprint stands there with all its files, by seal and sizes (none is read).

    What `prune` removed does not count as missing.
    """
    found = read_seal(folder)
    if found is None or found.fingerprint != fingerprint:
        return False
    missing = set()
    for name, facts in found.files.items():
        try:
            if (folder / name).stat().st_size != facts["size"]:
                return False
        except OSError:
            missing.add(name)
    return not missing or missing <= pruned(folder, found)


def open_artifact(folder: Path, kind: str, *, digests: bool = True) -> Seal:
    """The seal of an artifact of this kind whose files are all there and whole.

    Raises:
        UserError: the folder is no artifact, of another kind, or a file is missing or was changed.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder")
    found = read_seal(folder)
    if found is None:
        raise UserError(f"{folder}: is no artifact: it has no valid {SEAL}")
    if found.kind != kind:
        raise UserError(f"{folder}: is a {found.kind}, but a {kind} is wanted")
    for name, facts in found.files.items():
        path = folder / name
        if not path.is_file() and name in pruned(folder, found):
            raise UserError(
                f"{folder}: the file {name} was removed by `bridge-rl prune`; remove this folder, then resume makes it "
                "again"
            )
        if not path.is_file():
            raise UserError(f"{folder}: damaged: the file {name} is missing; remove this folder, then resume")
        if path.stat().st_size != facts["size"] or (digests and file_digest(path) != facts["sha256"]):
            raise UserError(
                f"{folder}: damaged: the file {name} was changed after it was sealed; remove this folder, then resume"
            )
    return found


def prunable(found: Seal) -> list[str]:
    """The files of an artifact that may go once its consumers are sealed: what training goes on from, and no result."""
    if found.kind != "checkpoint":
        return []
    names = [name for name in found.files if name.endswith(".pt")]
    return [name for name in names if not {"..", "/"} & set(PurePosixPath(name).parts)]


def prune(folder: Path, found: Seal) -> None:
    """Remove the prunable files of an artifact; its seal stays. What is removed is on record before it goes."""
    names = prunable(found)
    write_json(folder / PRUNED, {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "files": names})
    for name in names:
        (folder / name).unlink(missing_ok=True)


def pruned(folder: Path, found: Seal) -> frozenset[str]:
    """Files of an artifact that `prune` removed or was about to; whatever else the record lists is not heeded."""
    try:
        names = frozenset(_read_record(folder / PRUNED)["files"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return frozenset()
    return names & frozenset(prunable(found))


def flush(path: Path) -> None:
    """Force the content of a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
