"""A lock as data: what it names, and which of the files that it allows an image takes. No effects but reading."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from bridge.artifacts import file_digest
from bridge.config.images import Image, Lock
from bridge.errors import UserError

UV = "uv"
"""The lock of uv itself, which installs the others in every image."""
# What make_locks.py resolves for: CPython 3.11 on x86-64 with glibc 2.28 or later.
PYTHON_MINOR, GLIBC_MINOR = 11, 28


@dataclass(frozen=True)
class Entry:
    """One package of a lock."""

    name: str
    version: str
    hashes: frozenset[str]
    """SHA-256 of each file that may be installed, in hexadecimal."""


def parse_lock(text: str, name: str) -> list[Entry]:
    """The packages of a lock, in its order; `name` is the file, for messages.

    Raises UserError when an entry is not exact or has no hash.
    """
    without_comments = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    found = []
    for line in without_comments.replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        match = re.fullmatch(r"([a-z0-9][a-z0-9.-]*)==(\S+)((?: +--hash=sha256:[0-9a-f]{64})+) *", line)
        if match is None:
            raise UserError(f"{name}: not `package==version --hash=sha256:…`: {' '.join(line.split())[:80]}")
        found.append(Entry(match[1], match[2], frozenset(re.findall(r"sha256:(\w+)", match[3]))))
    return found


def lock_file(root: Path, name: str) -> Path:
    """Where a lock lies; `root` is the folder with the recipes."""
    return root / "containers" / "locks" / f"{name}.txt"


def read_lock(root: Path, name: str) -> list[Entry]:
    """The packages of one lock. Raises UserError when it is not there or is no lock."""
    path = lock_file(root, name)
    try:
        return parse_lock(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}; take it back from the repository") from None


def require_locks(root: Path, locks: Iterable[Lock], images_file: Path) -> None:
    """Raises UserError when a lock is not the file whose hash images.yaml has."""
    for lock in locks:
        path = lock_file(root, lock.name)
        read_lock(root, lock.name)
        found = file_digest(path)
        if found != lock.sha256:
            raise UserError(
                f"{path}: has changed: expected sha256 {lock.sha256} ({images_file}), found {found}; take the file "
                "back from the repository, or write all locks and hashes again: python3 containers/make_locks.py"
            )


def changes(expected: Iterable[Entry], found: Iterable[Entry]) -> list[str]:
    """What `found` has otherwise, a line each: `torch 2.6.0 → 2.7.0`, `+ new 1.0`, `- gone 1.0`, `six 1.0: hashes`."""
    old, new = ({entry.name: entry for entry in entries} for entries in (expected, found))
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in old:
            lines.append(f"+ {name} {new[name].version}")
        elif name not in new:
            lines.append(f"- {name} {old[name].version}")
        elif old[name].version != new[name].version:
            lines.append(f"{name} {old[name].version} → {new[name].version}")
        elif old[name].hashes != new[name].hashes:
            lines.append(f"{name} {old[name].version}: hashes")
    return lines


def installed_locks(image: Image, arguments: Mapping[str, str]) -> list[Lock]:
    """The locks that install.sh installs, in its order."""
    return [image.lock] if arguments.get("FLASH_ATTN") == "0" else [image.lock, image.flash_attn]


@cache
def wheel_ranks() -> dict[str, int]:
    """Tag of a wheel that the image can install → its place; smaller is better. The order is that of `packaging`."""
    glibc = []
    for minor in range(GLIBC_MINOR, 4, -1):
        glibc.append(f"manylinux_2_{minor}_x86_64")
        glibc += {17: ["manylinux2014_x86_64"], 12: ["manylinux2010_x86_64"], 5: ["manylinux1_x86_64"]}.get(minor, [])
    platforms = [*glibc, "linux_x86_64"]
    own = f"cp3{PYTHON_MINOR}"
    older = range(PYTHON_MINOR - 1, -1, -1)
    pure = [f"py3{PYTHON_MINOR}", "py3", *(f"py3{minor}" for minor in older)]
    binary = [f"{own}-{own}", f"{own}-abi3", f"{own}-none", *(f"cp3{minor}-abi3" for minor in older if minor >= 2)]
    tags = [f"{kind}-{platform}" for kind in [*binary, *(f"{name}-none" for name in pure)] for platform in platforms]
    tags += [f"{name}-none-any" for name in [own, *pure]]
    return {tag: place for place, tag in enumerate(tags)}


def preference(filename: str) -> int | None:
    """How well a file suits the image, smaller is better; None: it cannot be installed there."""
    if not filename.endswith(".whl"):
        source = (".tar.gz", ".zip", ".tar.bz2", ".tgz")
        return len(wheel_ranks()) if filename.endswith(source) else None
    tags = filename.removesuffix(".whl").split("-")[-3:]
    ranks = [wheel_ranks().get("-".join(tag)) for tag in product(*(part.split(".") for part in tags))]
    return min((rank for rank in ranks if rank is not None), default=None)
