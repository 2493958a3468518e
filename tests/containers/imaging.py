"""Small projects, a real registry and real tools for the tests of `bridge-rl image`."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTHING = "sha256:" + "1" * 64
RECIPES = ("Dockerfile", "Apptainer.def", ".dockerignore", "containers/install.sh", "containers/site.sh")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entries(*names: str) -> str:
    """These packages of the real lock, as they stand there."""
    lock = (ROOT / "containers/locks/train-cu124-py311.txt").read_text(encoding="utf-8")
    found = [re.search(rf"^{name}==.*?(?=^[a-z]|\Z)", lock, re.MULTILINE | re.DOTALL) for name in names]
    return "".join(match[0] for match in found if match)


class Project:
    """A folder with the real recipes, one image `small` and a short lock."""

    def __init__(self, root: Path, lock: str, base: str = "127.0.0.1:1/base:1", digest: str = NOTHING) -> None:
        self.root, self.images = root, root / "images"
        self.yaml = root / "containers/images.yaml"
        (root / "containers/locks").mkdir(parents=True)
        for name in RECIPES:
            shutil.copy(ROOT / name, root / name)
        for name in ("uv", "flash-attn"):
            shutil.copy(ROOT / f"containers/locks/{name}.txt", root / "containers/locks")
        self.lock = root / "containers/locks/short.txt"
        self.lock.write_text(lock, encoding="utf-8")
        self.base, self.base_digest = base, digest
        self.built: list[dict[str, Any]] = []
        self.write()

    def write(self, **changes: Any) -> None:
        """Write images.yaml as the files are now; `changes` go into the image."""
        flash_attn = (self.root / "containers/locks/flash-attn.txt").read_bytes()
        image = {
            "recipes": ["Dockerfile", "Apptainer.def"],
            "base": {"tag": self.base, "digest": self.base_digest},
            "lock": {"name": "short", "sha256": sha256(self.lock.read_bytes())},
            "flash_attn": {"name": "flash-attn", "sha256": sha256(flash_attn)},
            "built": self.built,
        }
        self.yaml.write_text(json.dumps({"images": {"small": {**image, **changes}}}), encoding="utf-8")

    def publish(self, digest: str, pull: str, kind: str = "oci", manifest: str | None = None) -> None:
        """List a built image in images.yaml."""
        entry = {"format": kind, "digest": digest, "base": self.base_digest, "pull": pull}
        entry["lock"] = sha256(self.lock.read_bytes())
        self.built = [entry | ({"manifest": manifest} if manifest else {})]
        self.write()

    def there(self) -> list[str]:
        """Everything in the images' folder that is neither a log nor a lock."""
        return sorted(p.name for p in self.images.glob("*") if not p.name.endswith((".log", ".lock")))

    def command(self, *words: str) -> list[str]:
        """What is run: these words after `bridge-rl image`."""
        return [sys.executable, "-m", "bridge", "image", *words]

    def run(self, *words: object, environment: Mapping[str, str] = {}) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name != "BRIDGE_IMAGES"}
        env = {**clean, "PYTHONPATH": str(ROOT), **environment}
        command = self.command(*map(str, words))
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, check=False)

    def ok(self, *words: object, environment: Mapping[str, str] = {}) -> Any:
        """What the command prints with --json."""
        done = self.run(*words, "--json", environment=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)


def require(**packages: str) -> None:
    """Debian packages by the program that each brings, installed where they are missing.

    Skips with the reason where that cannot be (no root, no Debian), and fails in CI.
    """
    missing = [package for program, package in packages.items() if not shutil.which(program.replace("_", "-"))]
    reason = ""
    if os.getuid() != 0:
        reason = "only root can build on the stand-in base"
    elif missing and not shutil.which("apt-get"):
        reason = f"needs {', '.join(missing)}, and this is no Debian"
    if reason:
        pytest.fail(reason) if "CI" in os.environ else pytest.skip(reason)
    if not missing:
        return
    command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", "install", "--yes", "--no-install-recommends"]
    with Path("/run/lock/bridge-devcluster").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(["apt-get", "-qq", "update"], check=True)
        subprocess.run([*command, *missing], check=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})


class Registry:
    """A docker-registry on loopback, and what the clients need to use it without TLS."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{port}"
        self.storage = folder / "storage"
        insecure = folder / ".config/containers/registries.conf"
        insecure.parent.mkdir(parents=True)
        insecure.write_text(f'[[registry]]\nlocation = "{self.address}"\ninsecure = true\n', encoding="utf-8")
        # Builders keep what they pull; this keeps it out of the machine's own store.
        self.store = folder / "store"
        storage = folder / "storage.conf"
        storage.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{self.store}"\nrunroot = "{folder}/run"\n', encoding="utf-8"
        )
        self.environment = {
            "HOME": str(folder),
            "BUILDAH_ISOLATION": "chroot",
            "CONTAINERS_STORAGE_CONF": str(storage),
        }

    def skopeo(self, *words: object) -> str:
        env = {**os.environ, **self.environment}
        done = subprocess.run(["skopeo", *map(str, words)], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def push(self, source: str, name: str) -> str:
        """Push an image; its digest."""
        digest = self.folder / "digest"
        self.skopeo("copy", "--digestfile", digest, source, f"docker://{self.address}/{name}")
        return digest.read_text(encoding="utf-8").strip()

    def blob(self, digest: str) -> Path:
        """Where the registry keeps the bytes of a digest."""
        value = digest.removeprefix("sha256:")
        return self.storage / "docker/registry/v2/blobs/sha256" / value[:2] / value / "data"


def require_apptainer() -> None:
    """Apptainer and the user that it is tested as, from containers/standin.sh."""
    if not shutil.which("apptainer"):
        require(mmdebstrap="mmdebstrap")  # says why where nothing can be installed
        with Path("/run/lock/bridge-devcluster").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            subprocess.run(["bash", ROOT / "containers/standin.sh", "tools"], check=True)


class OrdinaryUser:
    """The user bridge-standin with a home that it may write to and a copy of the code that it may read."""

    name = "bridge-standin"

    def __init__(self, home: Path) -> None:
        self.home = home
        shutil.copytree(ROOT / "bridge", home / "code/bridge", ignore=shutil.ignore_patterns("__pycache__"))
        packages = next(path for path in map(Path, sys.path) if (path / "typer").is_dir())
        self.python_path = f"{home}/code:{packages}"
        # The interpreter of the tests may lie where only root can look.
        self.python = "/usr/bin/python3"
        probe = self.command(self.python, "-c", "import pydantic, typer, rich, yaml")
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = f"{self.name} cannot run this code: {done.stderr.strip().splitlines()[-1]}"
            pytest.fail(reason) if "CI" in os.environ else pytest.skip(reason)

    def command(self, *words: str) -> list[str]:
        """A command line that runs as this user, without anything of root's environment."""
        environment = {
            "HOME": str(self.home),
            "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": self.python_path,
            "PYTHONDONTWRITEBYTECODE": "1",
            "APPTAINER_NOHTTPS": "true",
        }
        pairs = [f"{name}={value}" for name, value in environment.items()]
        return ["runuser", "-u", self.name, "--", "env", "-i", *pairs, *words]

    def take(self, project: Project) -> Owned:
        """The same project, in this user's home and run by this user."""
        mine = Owned(self.home / "project", project.lock.read_text(encoding="utf-8"))
        mine.user, mine.built = self, project.built
        mine.write()
        subprocess.run(["chown", "-R", f"{self.name}:", self.home], check=True)
        return mine


class Owned(Project):
    """A project of an ordinary user."""

    user: OrdinaryUser

    def command(self, *words: str) -> list[str]:
        return self.user.command(self.user.python, "-m", "bridge", "image", *words)

    def empty(self) -> None:
        shutil.rmtree(self.images)


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder that other users may look into; pytest's own are closed to them."""
    with tempfile.TemporaryDirectory(prefix="bridge-images.") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


@contextmanager
def ordinary_user() -> Iterator[OrdinaryUser]:
    with open_folder() as home:
        yield OrdinaryUser(home)


@contextmanager
def serve_registry() -> Iterator[Registry]:
    with open_folder() as folder, _serve(folder) as serving:
        yield serving


@contextmanager
def _serve(folder: Path) -> Iterator[Registry]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    registry = Registry(folder, port)
    config = folder / "config.yml"
    config.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage:\n  filesystem: {{rootdirectory: {registry.storage}}}\n"
        f"  delete: {{enabled: true}}\nhttp: {{addr: 127.0.0.1:{port}}}\n",
        encoding="utf-8",
    )
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", config], stdout=log, stderr=log)
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        else:
            raise AssertionError((folder / "registry.log").read_text(encoding="utf-8"))
        yield registry
    finally:
        process.terminate()
        process.wait()
        subprocess.run(["umount", registry.store / "overlay"], capture_output=True, check=False)
