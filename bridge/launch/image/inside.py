"""Reads single files out of an image, without running anything of it where the format allows that."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bridge.errors import UserError, WorkFailedError
from bridge.progress import progress

INSTALLED = "opt/bridge/installed.txt"
DPKG = "var/lib/dpkg/status"
# etc/os-release is a link to it.
OS_RELEASE = "usr/lib/os-release"
WANTED = (INSTALLED, DPKG, OS_RELEASE)


@dataclass(frozen=True)
class Manifest:
    """The manifest of the one image in an OCI archive."""

    digest: str
    """`sha256:…`, as a registry names it."""
    layers: list[str]
    """Digests, the base first."""


def read_manifest(archive: Path) -> Manifest:
    """The manifest of an OCI archive, checked against the digest that the archive gives for it.

    Raises UserError when the file is no OCI archive of one image.
    """
    try:
        with tarfile.open(archive) as tar:
            index = json.loads(_member(tar, "index.json"))
            if len(index["manifests"]) != 1:
                raise UserError(f"{archive}: holds {len(index['manifests'])} images; one is wanted")
            digest: str = index["manifests"][0]["digest"]
            raw = _member(tar, _blob(digest))
        manifest = json.loads(raw)
        layers = [layer["digest"] for layer in manifest["layers"]]
    except (tarfile.TarError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{archive}: is no OCI archive of one image: {error}") from None
    found = "sha256:" + hashlib.sha256(raw).hexdigest()
    if found != digest:
        raise UserError(f"{archive}: the manifest has changed: expected {digest}, found {found}")
    return Manifest(digest, layers)


def _blob(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is no file")
    return file.read()


def read_oci(archive: Path, wanted: Iterable[str] = WANTED) -> dict[str, bytes]:
    """Those of the wanted files that the image holds, by path from its root (no slash in front).

    The topmost layer that has a file decides. Raises UserError when the file is no OCI archive.
    """
    manifest = read_manifest(archive)
    open_names = set(wanted)
    found: dict[str, bytes] = {}
    with tarfile.open(archive) as tar, progress("reading layers", len(manifest.layers), "layers") as meter:
        for digest in reversed(manifest.layers):
            here: dict[str, bytes] = {}
            removed: set[str] = set()
            if open_names:
                with tarfile.open(fileobj=tar.extractfile(_blob(digest)), mode="r|*") as layer:
                    for member in layer:
                        name = member.name.removeprefix("./").lstrip("/")
                        folder, _, last = name.rpartition("/")
                        if name in open_names and member.isfile():
                            data = layer.extractfile(member)
                            here[name] = data.read() if data else b""
                        elif last.startswith(".wh."):  # a whiteout: what lies below is not there
                            gone = folder if last == ".wh..wh..opq" else f"{folder}/{last[4:]}".lstrip("/")
                            removed |= {n for n in open_names if n == gone or n.startswith(gone + "/")}
            found |= here
            open_names -= here.keys() | removed
            meter.advance()
    return found


def read_sif(tool: str, image: Path, wanted: Iterable[str] = WANTED) -> dict[str, bytes]:
    """Those of the wanted files that a SIF holds. `tool` is apptainer or singularity.

    Raises WorkFailedError when the image cannot be opened.
    """
    found = {}
    for name in wanted:
        # `test` first: a file that is not there is an answer, an image that does not start is none.
        script = f"if [ -f /{name} ]; then cat /{name}; else exit 44; fi"
        command = [tool, "--silent", "exec", "--containall", "--cleanenv", str(image), "sh", "-c", script]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode == 0:
            found[name] = done.stdout
        elif done.returncode != 44:
            words = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
            raise WorkFailedError(f"{image}: {tool} cannot look into it: {words[0]}")
    return found


def debian_packages(status: str) -> list[dict[str, str]]:
    """The installed packages of a dpkg status file, as their fields."""
    found = []
    for paragraph in re.split(r"\n\n+", status):
        fields = dict(re.findall(r"^([A-Za-z-]+): *(.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            found.append(fields)
    return sorted(found, key=lambda fields: (fields["Package"], fields["Architecture"]))


def os_id(os_release: str) -> str:
    """`debian`, `ubuntu` …"""
    match = re.search(r'^ID="?([a-z0-9._-]+)', os_release, re.MULTILINE)
    return match[1] if match else "linux"


def archive_kind(path: Path) -> str:
    """`oci-archive` or `docker-archive`, as the builders call them. Raises UserError for another file."""
    try:
        with tarfile.open(path) as tar:
            names: set[str] = set()
            for member in tar:
                names.add(member.name)
                # The docker layout comes second: newer tools write archives that are both.
                if member.name == "oci-layout":
                    return "oci-archive"
    except (tarfile.TarError, OSError) as error:
        raise UserError(f"{path}: cannot be read as an archive of an image: {error}") from None
    if "manifest.json" in names:
        return "docker-archive"
    raise UserError(f"{path}: is neither an OCI nor a docker archive; make one with: skopeo copy … oci-archive:FILE")
