"""`bridge-rl image build` and `mirror` for real: the Dockerfile over the stand-in base, with and without a network."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from imaging import ROOT, Project, Registry, entries, require, serve_registry, sha256

from bridge.launch.image import inside

LOCK = entries("idna", "packaging", "six")
SITE = "opt/venv/lib/python3.11/site-packages"


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    require(
        docker_registry="docker-registry", skopeo="skopeo", buildah="buildah", mmdebstrap="mmdebstrap", podman="podman"
    )
    with serve_registry() as serving:
        yield serving


@pytest.fixture(scope="module")
def project(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A project with a short lock on the stand-in base, which lies in the registry."""
    made = subprocess.run(
        ["bash", ROOT / "containers/standin.sh", "base"], stdout=subprocess.PIPE, text=True, check=True
    )
    digest = registry.push(f"docker-archive:{made.stdout.strip()}", "base:1")
    project = Project(tmp_path_factory.mktemp("project") / "p", LOCK, f"{registry.address}/base:1", digest)
    yield project
    shutil.rmtree(project.root)


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Path]:
    """A folder for large files: pytest would keep them for three runs."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture(scope="module")
def built(project: Project, registry: Registry) -> dict[str, Any]:
    """The image, built from the package index and the registry."""
    return project.ok("build", "small", "FLASH_ATTN=0", "--with", "buildah", environment=registry.environment)  # type: ignore[no-any-return]


def blobs(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and configuration of an OCI archive."""
    with tarfile.open(path) as tar:

        def read(digest: str) -> dict[str, Any]:
            file = tar.extractfile("blobs/" + digest.replace(":", "/"))
            assert file is not None
            return json.load(file)  # type: ignore[no-any-return]

        manifest = read(inside.read_manifest(Path(path)).digest)
        return manifest, read(manifest["config"]["digest"])


def contents(path: str) -> dict[str, tuple[object, ...]]:
    """Every path of the topmost layer, with all that a layer says of it."""
    layer = inside.read_manifest(Path(path)).layers[-1]
    found: dict[str, tuple[object, ...]] = {}
    with (
        tarfile.open(path) as tar,
        tarfile.open(fileobj=tar.extractfile("blobs/" + layer.replace(":", "/")), mode="r|*") as files,
    ):
        for member in files:
            data = files.extractfile(member) if member.isfile() else None
            digest = sha256(data.read()) if data else ""
            found[member.name] = (member.mode, member.uid, member.mtime, member.type, member.linkname, digest)
    return found


def test_what_is_built_is_the_lock_on_its_base_and_nothing_of_this_machine(
    built: dict[str, Any], project: Project
) -> None:
    assert (built["kind"], built["stand_in"]) == ("oci", False)
    assert built["base"] == f"{project.base.rpartition(':')[0]}@{project.base_digest}"
    assert built["installed"] == built["lock"] == sha256(LOCK.encode())
    found = contents(built["path"])
    installed = {
        name.split("/")[-2] for name in found if name.startswith(SITE) and name.endswith(".dist-info/METADATA")
    }
    assert installed == {"idna-3.10.dist-info", "packaging-25.0.dist-info", "six-1.17.0.dist-info"}
    assert not [name for name in found if name.startswith("mnt/") or "/work/" in name]
    _, configuration = blobs(built["path"])
    assert configuration["config"]["Labels"]["bridge-rl.lock"] == "short"
    assert "CUDA_HOME=/usr/local/cuda" in configuration["config"]["Env"]
    said = (project.images / f"{Path(built['path']).name}.cdx.json").read_text(encoding="utf-8")
    bill = json.loads(said)
    parts = {part["name"]: part.get("purl", "") for part in bill["components"]}
    assert parts["six"] == "pkg:pypi/six@1.17.0"
    assert parts["build-essential"].startswith("pkg:deb/debian/build-essential@")
    assert project.ok("verify")[0]["ok"]


def test_two_builds_are_the_same_bit_for_bit(
    built: dict[str, Any], project: Project, registry: Registry, space: Path
) -> None:
    env = {**registry.environment, "BRIDGE_IMAGES": str(space)}
    again = project.ok("build", "small", "FLASH_ATTN=0", "--with", "buildah", environment=env)
    assert again["path"] != built["path"] and again["time"] != built["time"]
    assert again["digest"] == built["digest"], "manifest, configuration and layers"


def test_from_a_mirror_it_is_built_without_a_network_and_with_the_same_content(
    built: dict[str, Any], project: Project, registry: Registry, space: Path
) -> None:
    mirror = space / "mirror"
    saved = project.ok("mirror", mirror, environment=registry.environment)
    assert saved["files"] == 5, "three packages, uv, flash-attn"
    times = {path.name: path.stat().st_mtime_ns for path in (mirror / "wheels").iterdir()}
    assert {name.split("-")[0] for name in times} == {"idna", "packaging", "six", "uv", "flash_attn"}
    assert project.ok("mirror", mirror, environment=registry.environment) == saved
    assert {path.name: path.stat().st_mtime_ns for path in (mirror / "wheels").iterdir()} == times

    # A network of its own that has not even a loopback.
    words = ["build", "small", "FLASH_ATTN=0", "--with", "buildah", "--mirror", mirror, "--json"]
    command = ["unshare", "--net", sys.executable, "-m", "bridge", "image", *map(str, words)]
    env = {**os.environ, **registry.environment, "PYTHONPATH": str(ROOT), "BRIDGE_IMAGES": str(space / "images")}
    done = subprocess.run(command, cwd=project.root, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    offline = json.loads(done.stdout)
    assert not offline["stand_in"]

    (one, first), (other, second) = blobs(built["path"]), blobs(offline["path"])
    assert one["layers"][0] == other["layers"][0], "the base came through the archive as another one"
    # uv notes which packages came from a file, and when that was made.
    online, local = contents(built["path"]), contents(offline["path"])
    differ = {name for name in {*online, *local} if online.get(name) != local.get(name)}
    assert {name.rpartition("/")[2] for name in differ} == {"uv_cache.json", "RECORD"}
    assert first["config"]["Env"] == second["config"]["Env"]

    wheel = next((mirror / "wheels").glob("six-*.whl"))
    data = wheel.read_bytes()
    with zipfile.ZipFile(wheel, "a") as other_wheel:
        other_wheel.writestr("six_more.py", "print('not what was locked')")
    refused = project.run(*words, environment={**registry.environment, "BRIDGE_IMAGES": str(space / "other")})
    assert refused.returncode == 1
    assert "Hash mismatch" in refused.stderr
    assert not list((space / "other").glob("small-*"))
    wheel.unlink()
    refused = project.run(*words, environment=registry.environment)
    assert refused.returncode == 2 and "has no file of six==1.17.0; run: bridge-rl image mirror" in refused.stderr
    [archive] = mirror.glob("base-*.oci.tar")
    wheel.write_bytes(data)
    with archive.open("r+b") as file:
        file.write(b"x")
    refused = project.run(*words, environment=registry.environment)
    assert refused.returncode == 2 and f"{archive}: has changed: expected sha256" in refused.stderr
