"""The images of `containers/images.yaml`: what each is built from, and what was built of it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError, model_validator

from bridge.config.base import Settings, matching
from bridge.config.problems import named, refuse, sentences
from bridge.config.yaml import read_mapping

ADDRESS = r"[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)+"

Digest = Annotated[str, AfterValidator(matching(r"sha256:[0-9a-f]{64}", "a digest: sha256: and 64 hexadecimal digits"))]
Sha256 = Annotated[str, AfterValidator(matching(r"[0-9a-f]{64}", "a SHA-256: 64 hexadecimal digits"))]
Name = Annotated[str, AfterValidator(matching(r"[a-z0-9][a-z0-9.-]*", "small letters, digits, dots and dashes"))]
Tag = Annotated[str, AfterValidator(matching(rf"{ADDRESS}:[A-Za-z0-9_][A-Za-z0-9_.-]*", "like host/name:tag"))]
Address = Annotated[
    str, AfterValidator(matching(rf"(docker|oras)://{ADDRESS}", "like docker://host/name, without a tag"))
]


class Base(Settings):
    """The image that an image is built on."""

    tag: Tag
    """Its name for people. Nothing is ever pulled by it."""
    digest: Digest
    """What is pulled."""

    @property
    def address(self) -> str:
        """`host/name@sha256:…`, as the recipes name it."""
        return f"{self.tag.rpartition(':')[0]}@{self.digest}"


class Lock(Settings):
    """One file of `containers/locks/`."""

    name: Name
    """The file's name without `.txt`."""
    sha256: Sha256
    """Of the whole file."""


class Built(Settings):
    """One image that was built, and what it was built from: if that differs from the image's own, it is old."""

    format: Literal["oci", "sif"]
    """`oci`: an image in a registry. `sif`: one file."""
    digest: Digest
    """oci: of the manifest. sif: of the file."""
    lock: Sha256
    """Of the lock that it was built from."""
    base: Digest
    """Of the base that it was built on."""
    pull: Address | None = None
    """Where it can be had; the digest is appended. `docker://` for oci, `oras://` for sif."""
    manifest: Digest | None = None
    """sif that can be pulled: of the manifest under which the registry has the file. It is what is appended."""

    @model_validator(mode="after")
    def _can_be_pulled(self) -> Built:
        scheme = "docker" if self.format == "oci" else "oras"
        if self.pull and not self.pull.startswith(scheme):
            raise ValueError(f"pull: must begin with {scheme}://, because the format is {self.format}")
        if bool(self.manifest) != (self.format == "sif" and self.pull is not None):
            raise ValueError("manifest: is for a sif that can be pulled, and such a one needs it")
        return self

    @property
    def reference(self) -> str | None:
        """What is pulled: `docker://host/name@sha256:…`; nothing if it is nowhere to be had."""
        return f"{self.pull}@{self.manifest or self.digest}" if self.pull else None


class Image(Settings):
    """What one image is built from, and what was built of it."""

    recipes: Annotated[list[Literal["Dockerfile", "Apptainer.def"]], Field(min_length=1)]
    """Files at the root of the repository; each alone makes the image."""
    base: Base
    """What it is built on: the recipes' argument BASE."""
    lock: Lock
    """The Python packages in it: the recipes' argument LOCK."""
    flash_attn: Lock
    """The package that is compiled, unless FLASH_ATTN=0 leaves it out."""
    built: list[Built] = []
    """Nothing where nobody has published one."""

    @property
    def mark(self) -> str:
        """SHA-256 of what decides the packages inside: it enters the fingerprint of whatever is made in the image."""
        return hashlib.sha256(f"{self.lock.sha256} {self.base.digest}".encode()).hexdigest()


class Images(Settings):
    """The whole file."""

    images: dict[Name, Image]
    """By the name that an experiment gives as `image`."""


def read_images(path: Path) -> dict[str, Image]:
    """The images that the file names, by name. Raises UserError when it cannot be read or has a wrong setting."""
    _, raw = read_mapping(path)
    try:
        return Images.model_validate(raw).images
    except ValidationError as error:
        raise refuse(
            str(path), [named(where, text) for where, text in sentences(error, {(): Images.model_fields})]
        ) from None
