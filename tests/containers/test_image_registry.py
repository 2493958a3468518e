"""`bridge-rl image` with real tools: a registry on loopback, skopeo, buildah, Apptainer."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from imaging import (
    NOTHING,
    ROOT,
    OrdinaryUser,
    Project,
    Registry,
    entries,
    ordinary_user,
    require,
    require_apptainer,
    serve_registry,
    sha256,
)

from bridge.launch.image import inside

LOCK = entries("idna", "packaging", "six")


@pytest.fixture(scope="module")
def registry() -> Iterator[Registry]:
    require(docker_registry="docker-registry", skopeo="skopeo", buildah="buildah", busybox="busybox-static")
    with serve_registry() as serving:
        yield serving


def tiny(registry: Registry, folder: Path, installed: str) -> Path:
    """A real image in an OCI archive that says that it has `installed`, and that Apptainer can look into."""
    root = folder / "rootfs"
    shutil.rmtree(root, ignore_errors=True)
    for name in ("opt/bridge", "usr/lib", "var/lib/dpkg", "bin", "etc", "proc", "sys", "dev", "tmp", "root", "home"):
        (root / name).mkdir(parents=True)
    (root / inside.INSTALLED).write_text(installed, encoding="utf-8")
    (root / inside.OS_RELEASE).write_text("ID=debian\n", encoding="utf-8")
    (root / inside.DPKG).write_text("Package: x\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1\n")
    for name in ("hosts", "resolv.conf", "passwd", "group"):
        (root / "etc" / name).touch()
    shutil.copy(shutil.which("busybox") or "busybox", root / "bin/busybox")
    for name in ("sh", "cat"):
        (root / "bin" / name).symlink_to("busybox")
    archive = folder / "tiny.oci.tar"
    archive.unlink(missing_ok=True)
    script = f'c=$(buildah from scratch) && buildah copy -q "$c" "{root}" / && i=$(buildah commit -q --rm "$c")'
    script += f' && buildah push -q "$i" "oci-archive:{archive}" && buildah rmi "$i"'
    env = {**os.environ, **registry.environment}
    done = subprocess.run(["sh", "-ec", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return archive


@pytest.fixture
def project(tmp_path: Path, registry: Registry) -> Project:
    """A project whose image is published in the registry."""
    made = Project(tmp_path / "p", LOCK)
    digest = registry.push(f"oci-archive:{tiny(registry, tmp_path, LOCK)}", "small:1")
    made.publish(digest, f"docker://{registry.address}/small")
    return made


def pull(project: Project, registry: Registry) -> subprocess.CompletedProcess[str]:
    return project.run("pull", "small", "--with", "skopeo", environment=registry.environment)


def test_an_image_is_pulled_by_digest_and_a_flipped_byte_is_found(project: Project, registry: Registry) -> None:
    made = project.ok("pull", "small", "--with", "skopeo", environment=registry.environment)
    [digest] = [built["digest"] for built in project.built]
    path = Path(made["path"])
    assert path == project.images / f"small-{digest[7:23]}.oci.tar"
    assert (made["digest"], made["sha256"]) == (digest, sha256(path.read_bytes()))
    assert made["pulled_from"] == f"docker://{registry.address}/small@{digest}"
    assert project.there() == [path.name, f"{path.name}.cdx.json", f"{path.name}.json"]

    bill = json.loads((project.images / f"{path.name}.cdx.json").read_text(encoding="utf-8"))
    assert bill["metadata"]["component"]["version"] == digest
    assert [part["name"] for part in bill["components"]] == ["127.0.0.1:1/base", "idna", "packaging", "six", "x"]
    (project.images / f"{path.name}.cdx.json").unlink()
    assert project.ok("sbom", "small") == {f"{path}.cdx.json": bill}

    assert [row["ok"] for row in project.ok("verify")] == [True]
    [image] = project.ok("list", "small")["images"]
    assert (image["here"][0]["wrong"], image["here"][0]["notes"]) == ([], [])

    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    for words, code in ((("verify",), 1), (("sbom", "small"), 2)):
        done = project.run(*words)
        assert done.returncode == code
        said = done.stdout + done.stderr
        assert f"expected sha256:{made['sha256']}, found sha256:{sha256(path.read_bytes())}" in said


def test_a_moved_tag_changes_nothing_while_the_digest_is_there(
    project: Project, registry: Registry, tmp_path: Path
) -> None:
    other = registry.push(f"oci-archive:{tiny(registry, tmp_path, LOCK + '# moved')}", "small:1")
    [digest] = [built["digest"] for built in project.built]
    assert other != digest
    assert project.ok("pull", "small", "--with", "skopeo", environment=registry.environment)["digest"] == digest


def test_a_digest_that_is_gone_or_never_was_is_refused(project: Project, registry: Registry) -> None:
    project.publish(NOTHING, f"docker://{registry.address}/small")
    done = pull(project, registry)
    assert done.returncode == 1
    assert f"docker://{registry.address}/small@{NOTHING} was not pulled" in done.stderr
    assert "manifest unknown" in done.stderr
    assert project.there() == []


def test_a_registry_that_gives_other_bytes_is_refused(project: Project, registry: Registry) -> None:
    [digest] = [built["digest"] for built in project.built]
    manifest = json.loads(registry.blob(digest).read_text(encoding="utf-8"))
    layer = registry.blob(manifest["layers"][0]["digest"])
    data = layer.read_bytes()
    layer.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        done = pull(project, registry)
    finally:
        layer.write_bytes(data)
    assert done.returncode == 1
    assert manifest["layers"][0]["digest"] in done.stderr
    assert project.there() == []


def test_an_image_that_holds_another_lock_is_refused_with_what_differs(
    project: Project, registry: Registry, tmp_path: Path
) -> None:
    other = LOCK.replace("six==1.17.0", "six==1.16.0")
    digest = registry.push(f"oci-archive:{tiny(registry, tmp_path, other)}", "other:1")
    project.publish(digest, f"docker://{registry.address}/other")
    done = pull(project, registry)
    assert done.returncode == 1
    for word in (f"expected sha256 {sha256(LOCK.encode())}", f"found {sha256(other.encode())}", "six 1.17.0 → 1.16.0"):
        assert word in done.stderr
    assert project.there() == []


def test_what_was_built_from_something_else_is_refused_and_what_lies_here_is_named(
    project: Project, registry: Registry
) -> None:
    project.ok("pull", "small", "--with", "skopeo", environment=registry.environment)
    before = sha256(project.lock.read_bytes())
    project.lock.write_text(entries("six"), encoding="utf-8")
    now = sha256(project.lock.read_bytes())
    project.write()
    for base, expected, found in ((project.base_digest, now, before), ("sha256:" + "2" * 64, now, before)):
        project.write(base={"tag": project.base, "digest": base})
        done = pull(project, registry)
        assert done.returncode == 2
        assert f"was built from another lock: expected {expected}, found {found}" in done.stderr
        verified = project.run("verify")
        assert verified.returncode == 1
        assert f"was built from another lock: expected sha256 {expected}, found {found}" in verified.stdout
    assert f"was built on another base: expected sha256:{'2' * 64}, found {NOTHING}" in verified.stdout
    project.lock.write_text(LOCK, encoding="utf-8")
    project.built = []
    project.write()
    assert "which images.yaml no longer lists: nothing" in project.run("verify").stdout


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_pull_that_is_stopped_leaves_nothing_that_counts(
    project: Project, registry: Registry, tmp_path: Path, number: signal.Signals
) -> None:
    slow = tmp_path / "bin/skopeo"
    slow.parent.mkdir()
    slow.write_text(
        f'#!/bin/sh\n{shutil.which("skopeo")} "$@"\ntouch {tmp_path}/came\nexec sleep 60\n', encoding="utf-8"
    )
    slow.chmod(0o755)
    env = {**os.environ, **registry.environment, "PYTHONPATH": str(ROOT), "PATH": f"{slow.parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "bridge", "image", "pull", "small", "--with", "skopeo"]
    process = subprocess.Popen(
        command,
        cwd=project.root,
        env=env,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A test session in the background ignores it, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (tmp_path / "came").exists():
        assert process.poll() is None
        time.sleep(0.02)
    if number == signal.SIGKILL:
        os.killpg(process.pid, number)
        process.wait()
        assert project.there() == [".small.work"], "the killed process was not in the middle of it"
    else:
        process.send_signal(number)  # Ctrl-C, of which the tool itself hears nothing here
        assert process.wait(timeout=30) == 130
        assert project.there() == []
    assert project.ok("list")["images"][0]["here"] == []
    project.ok("pull", "small", "--with", "skopeo", environment=registry.environment)
    assert ".small.work" not in project.there() and len(project.there()) == 3


def test_check_asks_the_registry_for_the_base(project: Project, registry: Registry, tmp_path: Path) -> None:
    [digest] = [built["digest"] for built in project.built]
    project.base, project.base_digest, project.built = f"{registry.address}/small:1", digest, []
    simple = fake_index(tmp_path / "index", project)
    env = {**registry.environment, "UV_DEFAULT_INDEX": simple.as_uri()}
    project.write()
    found = project.ok("check", environment=env)
    assert (found["ok"], found["problems"]) == (True, [])
    assert [(base["state"], base["tag_now"]) for base in found["bases"]] == [("there", digest)]

    other = registry.push(f"oci-archive:{tiny(registry, tmp_path, 'moved')}", "small:1")
    done = project.run("check", environment=env)
    assert done.returncode == 0
    assert f"the tag was moved: expected {digest}, found {other}" in done.stdout

    project.base_digest = NOTHING
    project.write()
    done = project.run("check", "--json", environment=env)
    assert (done.returncode, json.loads(done.stdout)["bases"][0]["state"]) == (1, "missing")

    (page,) = simple.glob("six/index.html")
    lines = page.read_text(encoding="utf-8").splitlines()
    page.write_text("\n".join(lines[1:]).replace("<a ", '<a data-yanked="" '), encoding="utf-8")
    [six] = json.loads(project.run("check", "--json", environment=env).stdout)["problems"]
    assert (six["package"], len(six["missing"]), len(six["yanked"])) == ("six==1.17.0", 1, 1)
    page.unlink()
    done = project.run("check", environment=env)
    assert done.returncode == 1
    assert "six==1.17.0: 2 locked files are gone; it can NOT be installed any more" in done.stdout

    unreachable = project.run("check", environment={**env, "UV_DEFAULT_INDEX": "http://127.0.0.1:1/simple"})
    assert unreachable.returncode == 1 and "http://127.0.0.1:1/simple/" in unreachable.stderr


def fake_index(folder: Path, project: Project) -> Path:
    """A folder index that lists every file of the project's locks; no file is behind it."""
    from bridge.launch.image.locks import read_lock

    for entry in [e for lock in ("uv", "flash-attn", "short") for e in read_lock(project.root, lock)]:
        links = [
            f'<a href="{entry.name}-{entry.version}{"" if place else ".0"}.tar.gz#sha256={digest}">x</a>'
            for place, digest in enumerate(sorted(entry.hashes))
        ]
        (folder / entry.name).mkdir(parents=True)
        (folder / entry.name / "index.html").write_text("\n".join(links), encoding="utf-8")
    return folder


# ---- Apptainer, as an ordinary user: root cannot open images here, and on a cluster nobody is root


@pytest.fixture
def user(registry: Registry) -> Iterator[OrdinaryUser]:
    require_apptainer()
    with ordinary_user() as made:
        yield made


def test_apptainer_makes_a_sif_of_a_published_oci_image(
    project: Project, registry: Registry, user: OrdinaryUser
) -> None:
    [digest] = [built["digest"] for built in project.built]
    mine = user.take(project)
    made = mine.ok("pull", "small")
    path = Path(made["path"])
    assert made["kind"] == "sif" and made["tool"].startswith("apptainer 1.")
    assert made["digest"] == "sha256:" + sha256(path.read_bytes()) and path.name == f"small-{made['sha256'][:16]}.sif"
    assert made["pulled_from"] == f"docker://{registry.address}/small@{digest}"
    bill = mine.ok("sbom", "small")[f"{path}.cdx.json"]
    assert [part["name"] for part in bill["components"]] == ["127.0.0.1:1/base", "idna", "packaging", "six", "x"]
    assert mine.ok("verify") == [{"image": "small", "path": str(path), "ok": True, "wrong": [], "notes": []}]
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - 5000)
        file.write(b"flipped")
    done = mine.run("verify")
    assert done.returncode == 1 and f"expected {made['digest']}, found sha256:" in done.stdout


def test_a_published_sif_is_pulled_by_its_manifest_and_known_by_its_file(
    project: Project, registry: Registry, user: OrdinaryUser
) -> None:
    mine = user.take(project)
    first = mine.ok("pull", "small")
    address = f"oras://{registry.address}/sif"
    pushed = subprocess.run(
        user.command("apptainer", "push", first["path"], f"{address}:1"), capture_output=True, text=True, check=False
    )
    assert pushed.returncode == 0, pushed.stderr
    raw = registry.skopeo("inspect", "--raw", f"docker://{registry.address}/sif:1")
    manifest = "sha256:" + sha256(raw.encode())
    mine.publish(first["digest"], address, "sif", manifest)
    mine.empty()
    again = mine.ok("pull", "small")
    assert (again["digest"], again["pulled_from"]) == (first["digest"], f"{address}@{manifest}")
    assert mine.ok("verify")[0]["ok"]

    mine.empty()
    mine.publish(NOTHING, address, "sif", manifest)
    done = mine.run("pull", "small")
    assert done.returncode == 1
    assert f"{address}@{manifest}: expected {NOTHING}, found {first['digest']}; nothing was kept" in done.stderr
    assert mine.there() == []
