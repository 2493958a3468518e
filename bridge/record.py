"""A new run: what it is made of, and its write-once record.

A request holds everything that defines a run. From the same request the same id follows, so the same experiment with
the same code and inputs is the same run.
"""

from __future__ import annotations

import dataclasses
import getpass
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import bridge
from bridge.artifacts import SEAL, file_digest, open_artifact
from bridge.errors import UserError
from bridge.graph import Edge, External, Graph, digest, fingerprints
from bridge.runs import FORMAT, RECORD, Run, RunElement, read_elements, user_path

PACKAGES = ("torch", "transformers", "tokenizers", "vllm", "deepspeed", "numpy", "pyarrow", "safetensors", "submitit")

Json = dict[str, Any]

# ---- inputs from outside


def external_digests(graph: Graph) -> dict[str, Json]:
    """For each external input its absolute path (or hub name) and a digest of its content.

    Raises:
        UserError: it is not there, or is not what its stage wants.
    """
    found: dict[str, Json] = {}
    for stage, _, element in graph.all_elements():
        for field, source in element.inputs:
            if isinstance(source, External):
                wanted = type(element.settings).input_kinds[field]
                found[source.text] = external_digest(source.text, wanted, f"stages.{stage}.{field}")
    return found


def external_digest(text: str, wanted: str, where: str) -> Json:
    """The absolute path (or hub name) of one input, and a digest of its content. `where` is for messages."""
    path = user_path(text).absolute()
    if path.is_dir():
        return {"path": str(path), "digest": _folder_digest(path, wanted, where), "binds": places(path)}
    if path.is_file() and wanted == "dataset":
        if path.suffix not in (".parquet", ".jsonl", ".json"):
            raise UserError(
                f"{where}: {text}: a data file must be .parquet, .jsonl or R³'s .json, or an artifact folder"
            )
        return {"path": str(path), "digest": file_digest(path), "binds": places(path)}
    if path.exists():
        raise UserError(f"{where}: {text}: is no folder; a {wanted} is wanted")
    if wanted == "model" and text.count("/") == 1 and not text.startswith((".", "~", "/")):
        return {"path": text, "digest": digest(["hub", text])}  # a hub name; transformers looks it up
    raise UserError(f"{where}: {text}: there is no such file or folder ({path})")


def places(path: Path) -> dict[str, str]:
    """What must be seen inside an image, so that an input can be read: the path inside → the one outside.

    That is the input itself, and for each link in it the folder it leads to, as the link spells it: inside, what is
    bound hangs in plain folders, so `..` is what stands before in the path, whatever links there are outside.
    """
    found = {str(path): str(path)}

    def follow(inside: Path, outside: Path) -> None:
        for file in outside.rglob("*"):
            here, there = inside / file.relative_to(outside), file
            while there.is_symlink() and there.exists():
                step = there.readlink()
                here, there = Path(os.path.normpath(here.parent / step)), there.parent / step
                place, real = (here, there) if there.is_dir() else (here.parent, there.parent)
                if not any(place.is_relative_to(known) for known in found):
                    found[str(place)] = os.path.realpath(real)
                    if place == here:
                        follow(here, there)

    if path.is_dir():
        follow(path, path)
    return found


def _folder_digest(path: Path, wanted: str, where: str) -> str:
    if (path / SEAL).exists():
        try:
            return open_artifact(path, wanted, digests=False).fingerprint
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    if wanted != "model":
        raise UserError(f"{where}: {path}: is no artifact: it has no {SEAL}; a {wanted} is wanted")
    if not (path / "config.json").is_file():
        raise UserError(f"{where}: {path}: is no model folder: it has no config.json")
    weights = [*path.glob("*.safetensors"), *path.glob("pytorch_model*.bin")]
    if not weights:
        raise UserError(f"{where}: {path}: is a model folder without weights (no *.safetensors, no pytorch_model*.bin)")
    files = sorted(p for p in path.iterdir() if p.is_file())
    return digest([[p.name, file_digest(p)] for p in files])


# ---- a new run


def code_files() -> dict[str, Path]:
    """The package's own files: relative name → path."""
    root = Path(bridge.__file__).parent
    found = {}
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        if path.is_file() and "__pycache__" not in inside.parts and inside.parts[0] != "_shipped":
            found[f"bridge/{inside.as_posix()}"] = path
    return found


def code_digest() -> str:
    """SHA-256 over names and contents of the package's files."""
    return digest([[name, file_digest(path)] for name, path in code_files().items()])


@dataclass(frozen=True)
class Request:
    """Everything that defines a run, resolved; from it the same id always follows."""

    graph: Graph
    text: str
    """The experiment file."""
    source: str
    """Where it came from, for people."""
    experiment: Json
    """The experiment with overrides applied."""
    overrides: Sequence[str]
    profile_name: str
    profile: Json
    externals: Mapping[str, Json]
    code: str
    """Digest of the code."""
    files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Files of the user's own that travel with the code: name in its folder → content."""
    image: Json | None = None
    """What the image is built from; None where no stage runs in one."""
    images: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Kind of a stage → digest of what its image is built from; only kinds that run in one."""

    def fingerprints(self) -> dict[tuple[str, int], str]:
        digests = {text: e["digest"] for text, e in self.externals.items()}
        return fingerprints(self.graph, self.code, digests, self.images)

    @property
    def run_id(self) -> str:
        """NAME-ID, from the fingerprints and the profile name: a limit changed in the profile keeps the run."""
        prints = sorted(f"{stage}/{index}/{mark}" for (stage, index), mark in self.fingerprints().items())
        return f"{self.graph.name}-{digest([prints, self.profile_name])[:8]}"


def create(request: Request, runs: Path, image: Json | None = None) -> Run:
    """The run directory for a request: the one that is there already, or a new one, published by one rename.

    `image` is what the record says of the image as it is here.
    """
    if "\\" in str(runs):
        raise UserError(f"{runs}: the runs folder must have no backslash in its path: Slurm reads one in its own way")
    run = Run(runs / request.run_id)
    if (run.folder / RECORD).is_file():
        return run
    temporary = runs / f".{run.id}.{os.getpid()}.tmp"
    try:
        runs.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        _fill(temporary, request, run.id, image)
        try:
            temporary.rename(run.folder)
        except OSError:
            if not (run.folder / RECORD).is_file():  # else another launch made the same run a moment earlier
                raise
    except OSError as error:
        raise UserError(
            f"{runs}: the runs folder cannot be written: {error.strerror}; choose another with --runs or BRIDGE_RUNS"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return run


def _fill(folder: Path, request: Request, run_id: str, image: Json | None) -> None:
    for name, path in code_files().items():
        target = folder / "code" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for name, content in request.files.items():
        target = folder / "code" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    commit, diff = _git_state()
    if diff:
        (folder / "code" / "uncommitted.diff").write_bytes(diff)
    for sub in ("stages", "scripts", "logs", "attempts", "locks"):
        (folder / sub).mkdir()
    (folder / "experiment.yaml").write_text(request.text, encoding="utf-8")
    record = {
        "format": FORMAT,
        "run": run_id,
        "name": request.graph.name,
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "source": request.source,
        "overrides": list(request.overrides),
        "experiment": request.experiment,
        "profile_name": request.profile_name,
        "profile": request.profile,
        "externals": dict(request.externals),
        "code": {"digest": request.code, "commit": commit, "uncommitted_changes": bool(diff)},
        "versions": _versions(),
        "image": {**request.image, **image} if request.image and image else request.image,
        "launched_by": {"user": _user(), "host": socket.gethostname(), "command": sys.argv},
        "stages": _stages(request),
    }
    with (folder / RECORD).open("w", encoding="utf-8") as file:
        json.dump(record, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _stages(request: Request) -> list[Json]:
    prints = request.fingerprints()
    return [
        {
            "name": node.name,
            "kind": node.kind,
            "output": node.elements[0].settings.output,
            "elements": [
                {
                    "label": element.label,
                    "settings": element.settings.model_dump(mode="json"),
                    "task": element.task.model_dump(mode="json"),
                    "inputs": {
                        field: {"stage": source.stage, "element": source.element}
                        if isinstance(source, Edge)
                        else {"path": request.externals[source.text]["path"]}
                        for field, source in element.inputs
                    },
                    "fingerprint": prints[node.name, index],
                }
                for index, element in enumerate(node.elements)
            ],
        }
        for node in request.graph.stages
    ]


def recorded_elements(request: Request) -> list[RunElement]:
    """The elements of a request as a run's record would hold them."""
    return list(read_elements(_stages(request)))


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return str(os.getuid())


def _versions() -> Json:
    found: Json = {"bridge-rl": bridge.__version__, "python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _git_state() -> tuple[str | None, bytes]:
    """Commit and uncommitted changes of the checkout that the code comes from; (None, b"") outside of one."""
    root = Path(bridge.__file__).parent

    def git(*words: str) -> bytes | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None, b""  # installed from a wheel, perhaps below somebody else's checkout
    commit = git("rev-parse", "HEAD")
    return commit.decode().strip() if commit else None, git("diff", "HEAD", "--", ".") or b""
