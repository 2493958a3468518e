"""`image mirror` and `image check`: what an image is built from, kept for the day when upstream deletes it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock as Mutex
from typing import Any

from bridge.artifacts import file_digest, flush, write_json
from bridge.config.images import Base, Image
from bridge.errors import UserError, WorkFailedError
from bridge.launch.image import store
from bridge.launch.image.index import File, Index, download, shown
from bridge.launch.image.locks import UV, Entry, preference, read_lock, require_locks
from bridge.progress import progress

AT_ONCE = 4
SKOPEO_TIMEOUT = "60s"  # for one question; a copy may take as long as it takes


# ---- which files


@dataclass(frozen=True)
class Found:
    """What an index has of one package of a lock."""

    entry: Entry
    missing: frozenset[str]
    """Hashes that the lock allows and no file of the index has."""
    yanked: frozenset[str]
    """Names of locked files that their authors have withdrawn; they can still be had."""
    chosen: File | None
    """What an image installs; None: nothing of it is left."""


def compare(entry: Entry, files: Iterable[File]) -> Found:
    """Which files of a lock's entry an index still has. Pure."""
    locked = [file for file in files if file.sha256 in entry.hashes]
    usable = [(rank, file.name, file) for file in locked if (rank := preference(file.name)) is not None]
    return Found(
        entry,
        entry.hashes - {file.sha256 for file in locked},
        frozenset(file.name for file in locked if file.yanked),
        min(usable)[2] if usable else None,
    )


def entries_of(root: Path, locks: Iterable[str]) -> list[Entry]:
    """The packages of several locks, each once."""
    return list(dict.fromkeys(entry for lock in locks for entry in read_lock(root, lock)))


def locks_of(images: Iterable[Image]) -> list[str]:
    """The names of the locks that these images are built from."""
    names = [name for image in images for name in (image.lock.name, image.flash_attn.name)]
    return [UV, *dict.fromkeys(names)]


def chosen(source: store.Source, name: str | None) -> dict[str, Image]:
    """One image or all, once their locks are known to be the recorded ones. Raises UserError."""
    images = source.choose(name)
    for image in images.values():
        require_locks(source.root, [image.lock, image.flash_attn], source.file)
    return images


def look_up(index: Index, entries: list[Entry]) -> list[Found]:
    """Ask an index about every entry. Raises WorkFailedError when it cannot be asked."""
    with progress("asking the index", len(entries), "packages") as meter, ThreadPoolExecutor(AT_ONCE) as pool:
        found = []
        try:
            for entry, files in zip(entries, pool.map(lambda e: index.files(e.name), entries), strict=True):
                found.append(compare(entry, files))
                meter.advance()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found


# ---- check


def check(source: store.Source, name: str | None, index: Index) -> dict[str, Any]:
    """What upstream no longer has of what these images are built from.

    A registry that cannot be asked is part of the answer.

    Raises:
        UserError: a lock is not the recorded one.
        WorkFailedError: the index cannot be asked.
    """
    images = chosen(source, name)
    found = look_up(index, entries_of(source.root, locks_of(images.values())))
    packages = [
        {
            "package": f"{item.entry.name}=={item.entry.version}",
            "missing": sorted(item.missing),
            "yanked": sorted(item.yanked),
            "can_be_installed": item.chosen is not None,
        }
        for item in found
        if item.missing or item.yanked or item.chosen is None
    ]
    bases = [check_base(base) for base in {image.base.digest: image.base for image in images.values()}.values()]
    return {
        "packages": len(found),
        "files": sum(len(item.entry.hashes) for item in found),
        "problems": packages,
        "bases": bases,
        "ok": not any(item.missing for item in found) and all(base["state"] == "there" for base in bases),
    }


def check_base(base: Base) -> dict[str, Any]:
    """Whether the registry still has a base by its digest, and where its tag points now."""
    facts: dict[str, Any] = {"base": base.tag, "digest": base.digest, "tag_now": None}
    if not shutil.which("skopeo"):
        return facts | {"state": "not asked", "reason": "skopeo is not installed here"}
    raw, reason = _raw_manifest(base.address)
    if raw is None:
        gone = "manifest unknown" in reason or "not found" in reason
        facts |= {"state": "missing" if gone else "not asked", "reason": reason}
    else:
        facts |= {"state": "there", "reason": ""}
    of_tag, _ = _raw_manifest(base.tag)
    if of_tag is not None:
        facts["tag_now"] = "sha256:" + hashlib.sha256(of_tag).hexdigest()
    return facts


def _raw_manifest(address: str) -> tuple[bytes | None, str]:
    command = ["skopeo", "--command-timeout", SKOPEO_TIMEOUT, "inspect", "--raw", f"docker://{address}"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode == 0:
        return done.stdout, ""
    return None, _reason(done.stderr)


def _reason(stderr: bytes) -> str:
    """What skopeo says last, without its log's frame."""
    line = (stderr.decode(errors="replace").strip().splitlines() or ["skopeo failed"])[-1]
    framed = re.search(r'msg="((?:[^"\\]|\\.)*)"', line)
    return framed[1].replace('\\"', '"') if framed else line


# ---- mirror


@dataclass(frozen=True)
class Mirror:
    """A folder with bases and package files; MIRROR.json says which."""

    folder: Path
    bases: Mapping[str, Mapping[str, str]]
    """By address with digest: `file` and `sha256` of an OCI archive."""
    files: Mapping[str, str]
    """SHA-256 → name in `wheels/`."""

    @property
    def wheels(self) -> Path:
        return self.folder / "wheels"

    def base(self, address: str) -> Path:
        """The archive of a base. Raises UserError when it is not there or is not what was saved."""
        if address not in self.bases:
            raise UserError(f"{self.folder}: has no base {address}; {self._remedy}")
        facts = self.bases[address]
        path = self.folder / facts["file"]
        if not path.is_file():
            raise UserError(f"{path}: is missing; {self._remedy}")
        found = store.digest_shown(path, "reading the base")
        if found != facts["sha256"]:
            raise UserError(f"{path}: has changed: expected sha256 {facts['sha256']}, found {found}; {self._remedy}")
        return path

    def require(self, locks: Iterable[str], root: Path) -> None:
        """Raises UserError when a package of these locks has no file here. Hashes are the installer's to check."""
        there = {sha256 for sha256, name in self.files.items() if (self.wheels / name).is_file()}
        missing = [f"{e.name}=={e.version}" for e in entries_of(root, locks) if not e.hashes & there]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise UserError(f"{self.wheels}: has no file of {', '.join(missing[:5])}{more}; {self._remedy}")

    @property
    def _remedy(self) -> str:
        return f"run: bridge-rl image mirror {self.folder}"


def open_mirror(folder: Path) -> Mirror:
    """A folder that `image mirror` has filled. Raises UserError when it is none."""
    folder = folder.absolute()
    try:
        value = json.loads((folder / "MIRROR.json").read_text(encoding="utf-8"))
        return Mirror(folder, dict(value["bases"]), dict(value["files"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: is no mirror: MIRROR.json: {error}; run: bridge-rl image mirror {folder}") from None


def save(source: store.Source, name: str | None, index: Index, folder: Path) -> dict[str, Any]:
    """Save base and package files of these images in a folder; what is there already and right is not fetched again.

    Raises:
        UserError: a lock is not the recorded one, a locked file is gone, or skopeo is missing. Nothing was fetched.
        WorkFailedError: something cannot be fetched. What has come stays, and the same command goes on.
    """
    if not shutil.which("skopeo"):
        raise UserError("image mirror copies the base with skopeo, and it is not installed here")
    images = chosen(source, name)
    found = look_up(index, entries_of(source.root, locks_of(images.values())))
    gone = [f"{item.entry.name}=={item.entry.version}" for item in found if item.chosen is None]
    if gone:
        raise UserError(f"{shown(index.url)}: no longer has a file that an image can install of: {', '.join(gone)}")
    known = open_mirror(folder) if (folder / "MIRROR.json").exists() else Mirror(folder, {}, {})
    known.wheels.mkdir(parents=True, exist_ok=True)
    files = [item.chosen for item in found if item.chosen]
    fetch(files, known.wheels)
    names = {file.sha256: file.name for file in files}
    value: dict[str, dict[str, Any]] = {"bases": dict(known.bases), "files": {**known.files, **names}}
    write_json(folder / "MIRROR.json", value)
    bases = {base.address: save_base(base, folder) for base in (image.base for image in images.values())}
    value["bases"] |= bases
    write_json(folder / "MIRROR.json", value)
    size = sum((known.wheels / name).stat().st_size for name in names.values())
    return {"folder": str(folder), "bases": bases, "files": len(names), "bytes": size}


def fetch(files: list[File], folder: Path) -> None:
    """Download files, a few at once. Raises as `download` does."""
    size = sum(file.size for file in files)
    mutex = Mutex()
    with progress("fetching", -(-size // store.MIB), "MiB") as meter, ThreadPoolExecutor(AT_ONCE) as pool:
        came = 0

        def report(count: int) -> None:
            nonlocal came
            with mutex:
                came += count
                if came // store.MIB > meter.done:
                    meter.advance(came // store.MIB - meter.done)

        jobs = [pool.submit(download, file, folder, report) for file in files]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def save_base(base: Base, folder: Path) -> dict[str, str]:
    """Copy a base by its digest into an OCI archive, unless that is there and whole. Raises WorkFailedError."""
    name = f"base-{base.digest.removeprefix('sha256:')[:16]}.oci.tar"
    target, part, note = folder / name, folder / f".{name}.part", folder / f"{name}.json"
    if target.is_file() and note.is_file():
        known: dict[str, str] = json.loads(note.read_text(encoding="utf-8"))
        if known.get("sha256") == store.digest_shown(target, "reading the base"):
            return known
    part.unlink(missing_ok=True)
    source = f"docker://{base.address}"
    command = ["skopeo", "copy", "--override-os", "linux", "--override-arch", "amd64", source, f"oci-archive:{part}"]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, check=False)
    if done.returncode:
        part.unlink(missing_ok=True)
        raise WorkFailedError(f"{base.tag}: {base.digest} cannot be copied: {_reason(done.stderr)}")
    flush(part)
    facts = {"file": name, "sha256": file_digest(part)}
    part.replace(target)
    write_json(note, facts)
    return facts
