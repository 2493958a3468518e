"""The folder where images lie: each file with its record, and what is wrong with either.

NAME-DIGEST.sif, or NAME-DIGEST.oci.tar; beside it FILE.cdx.json, what is in it; and written last FILE.json, the record.
A file without a record is no image.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

import bridge
from bridge.artifacts import file_digest, flush, write_json
from bridge.config.base import Settings
from bridge.config.images import Digest, Image, Name, Sha256, read_images
from bridge.config.problems import named, refuse, sentences
from bridge.config.words import nearest
from bridge.errors import UserError
from bridge.launch.prepare import shipped
from bridge.progress import progress

SUFFIX = {"sif": ".sif", "oci": ".oci.tar"}
RECORD, SBOM = ".json", ".cdx.json"
# What an image is made of besides base and locks.
RECIPES = ("Dockerfile", "Apptainer.def", "containers/install.sh", "containers/locks/uv.txt")
MIB = 1 << 20


class Record(Settings):
    """What is known of one image file."""

    format: Literal[1] = 1
    """Of this record."""
    image: Name
    """Which image of images.yaml it is."""
    kind: Literal["sif", "oci"]
    """One file that Apptainer runs, or an archive that any registry takes."""
    digest: Digest
    """sif: of the file. oci: of the manifest, as a registry names it."""
    sha256: Sha256
    """Of the file."""
    size: int
    """Of the file, in bytes."""
    lock: Sha256
    """Of the lock that it was built from."""
    installed: Sha256
    """Of /opt/bridge/installed.txt inside: the lock, and that of flash-attn unless it was left out."""
    base: str
    """What it was built on."""
    base_digest: Digest
    """Of that; for an archive, of the file."""
    arguments: dict[str, str]
    """The recipe's arguments; empty if it was pulled."""
    recipes: dict[str, Sha256]
    """The files that it was built with; empty if it was pulled."""
    stand_in: bool = False
    """Whether it was built on another base than the image's own, on purpose."""
    pulled_from: str | None = None
    """Address and digest; nothing if it was built here."""
    tool: str
    """What built or pulled it, with its version."""
    time: str
    """When, in UTC."""

    @property
    def file(self) -> str:
        return f"{self.image}-{self.digest.removeprefix('sha256:')[:16]}{SUFFIX[self.kind]}"


@dataclass(frozen=True)
class Source:
    """images.yaml, what it says, and the folder of the recipes."""

    file: Path
    images: Mapping[str, Image]

    @property
    def root(self) -> Path:
        return self.file.parent.parent

    def image(self, name: str) -> Image:
        """One image by its name. Raises UserError when there is none."""
        if name not in self.images:
            raise UserError(f"{self.file}: there is no image {name!r}{nearest(name, self.images)}")
        return self.images[name]

    def choose(self, name: str | None) -> dict[str, Image]:
        """One image, or all of them."""
        return {name: self.image(name)} if name else dict(self.images)

    def recipes(self) -> dict[str, str]:
        """SHA-256 of every file that builds an image."""
        return {name: file_digest(self.root / name) for name in RECIPES}


def open_source(file: Path | None) -> Source:
    """`--file`, else containers/images.yaml here, else the one that comes with bridge-rl.

    Raises UserError when it cannot be read or recipes are missing beside it.
    """
    here = Path("containers/images.yaml")
    found = file or (here if here.is_file() else shipped("containers", "images.yaml"))
    if found is None:
        raise UserError("containers/images.yaml is missing from this installation; install bridge-rl again")
    source = Source(found.absolute(), read_images(found))
    missing = [name for name in RECIPES if not (source.root / name).is_file()]
    if missing:
        raise UserError(
            f"{found}: {', '.join(missing)} is missing from {source.root}; --file names CHECKOUT/containers/images.yaml"
        )
    return source


def images_folder(source: Source) -> Path:
    """$BRIDGE_IMAGES, else images/ beside the recipes; here if those lie inside the installed package."""
    chosen = os.environ.get("BRIDGE_IMAGES")
    installed = source.root.is_relative_to(Path(bridge.__file__).parent)
    return Path(chosen or (Path() if installed else source.root) / "images").expanduser().absolute()


def records(folder: Path, name: str | None = None) -> list[Record]:
    """The images that lie in a folder, newest first. Raises UserError for a record that cannot be read."""
    found = []
    for path in folder.glob("*" + RECORD):
        if path.name.endswith(SBOM):
            continue
        try:
            record = Record.model_validate_json(path.read_bytes())
        except ValidationError as error:
            problems = sentences(error, {(): Record.model_fields})
            raise refuse(
                f"{path} (the record of an image; remove it with its image, then build or pull again)",
                [named(where, text) for where, text in problems],
            ) from None
        if path.name != record.file + RECORD:
            raise UserError(f"{path}: is the record of {record.file}; take back its name")
        if name in (None, record.image):
            found.append(record)
    return sorted(found, key=lambda record: record.time, reverse=True)


def differences(record: Record, image: Image) -> list[str]:
    """Why an image that is whole is still not the one that images.yaml describes; empty if it is."""
    found = []
    if record.lock != image.lock.sha256:
        found.append(f"was built from another lock: expected sha256 {image.lock.sha256}, found {record.lock}")
    if record.base_digest != image.base.digest and not record.stand_in:
        found.append(f"was built on another base: expected {image.base.digest}, found {record.base_digest}")
    if record.pulled_from:
        listed = [built.digest for built in image.built]
        known = record.pulled_from.rpartition("@")[2]
        if not {record.digest, known} & set(listed):
            found.append(f"was pulled as {known}, which images.yaml no longer lists: {', '.join(listed) or 'nothing'}")
    return found


def notes(record: Record, image: Image, recipes: Mapping[str, str]) -> list[str]:
    """What somebody who reads about an image should know of it, and what is no fault."""
    found = []
    if record.stand_in:
        found.append(f"stands on {record.base} instead of the image's base")
    if record.pulled_from is None and record.digest not in [built.digest for built in image.built]:
        found.append("built here")
    changed = [name for name, digest in record.recipes.items() if recipes.get(name) != digest]
    if changed:
        found.append(f"changed since it was built: {', '.join(changed)}")
    return found


@contextmanager
def work_folder(folder: Path, name: str) -> Iterator[Path]:
    """A folder to make one image in, empty and removed at the end; what a killed process left there goes first.

    Raises UserError when another process is making the same image.
    """
    work = folder / f".{name}.work"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{folder}: another process is making the image {name} right now; try again later"
            ) from None
        _remove(work)
        work.mkdir()
        try:
            yield work
        finally:
            _remove(work)


def _remove(folder: Path) -> None:
    def open_up(_: Any, path: str, __: Any) -> None:
        Path(path).parent.chmod(0o700)  # builders leave folders that even their owner may not write to
        Path(path).unlink()

    if folder.exists():
        shutil.rmtree(folder, onerror=open_up)


def verify(folder: Path, record: Record) -> None:
    """Read an image from the first byte to the last, and compare it with its record.

    Raises UserError when it is not there or differs.
    """
    path, expected = folder / record.file, f"sha256:{record.sha256}"
    try:
        found = "sha256:" + digest_shown(path, f"reading {record.file}")
    except OSError as error:
        raise UserError(f"{path}: the image cannot be read: {error.strerror}; build or pull it again") from None
    if found != expected:
        raise UserError(
            f"{path}: the image has changed: expected {expected}, found {found}; remove it, then build or pull it again"
        )


def digest_shown(path: Path, label: str) -> str:
    """SHA-256 of a large file, with its progress."""
    with progress(label, -(-path.stat().st_size // MIB), "MiB") as meter:
        return file_digest(path, lambda _: meter.advance())


def now() -> str:
    """The time in UTC, as records hold it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def publish(folder: Path, made: Path, record: Record, sbom: Mapping[str, Any]) -> Path:
    """Put an image under its name, and its record last. A kill in between leaves a file that is no image."""
    target = folder / record.file
    (folder / (record.file + RECORD)).unlink(missing_ok=True)
    flush(made)
    made.replace(target)
    write_json(folder / (record.file + SBOM), sbom)
    write_json(folder / (record.file + RECORD), record.model_dump(mode="json"))
    return target
