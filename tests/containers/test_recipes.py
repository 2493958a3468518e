"""The recipes, the locks and images.yaml say the same. Nothing is built and nothing is fetched."""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from bridge.config.images import read_images
from bridge.errors import UserError

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "containers"
LOCKS = sorted((CONTAINERS / "locks").glob("*.txt"))
IMAGES = read_images(CONTAINERS / "images.yaml")
# Every override weakens what a package says of itself, so each needs a reason, here and in overrides.txt.
ALLOWED_OVERRIDES = {"xgrammar": "0.1.18"}  # the release that vLLM 0.8.1 pins was deleted from PyPI


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def pins(path: Path) -> dict[str, str]:
    """Package to version, of a lock or a file of exact requirements."""
    return dict(re.findall(r"^([a-z0-9][a-z0-9.-]*)==([^\s;]+)", text(path), re.MULTILINE))


def entries(path: Path) -> list[str]:
    """The logical lines of a lock, without comments."""
    lines = re.sub(r"^\s*#.*\n", "", text(path), flags=re.MULTILINE)
    return [line for line in lines.replace("\\\n", " ").splitlines() if line.strip()]


def lock_of(name: str) -> dict[str, str]:
    return pins(CONTAINERS / "locks" / f"{name}.txt")


def docker_arguments() -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(.*)$", text(ROOT / "Dockerfile"), re.MULTILINE))


def section(name: str) -> list[str]:
    """The lines of one section of Apptainer.def that are no comments."""
    found = re.search(rf"^%{name}\n((?:(?!%).*\n)*)", text(ROOT / "Apptainer.def"), re.MULTILINE)
    assert found is not None, name
    return [line.strip() for line in found[1].splitlines() if line.strip() and not line.strip().startswith("#")]


def apptainer_arguments() -> dict[str, str]:
    return dict(line.split("=", 1) for line in section("arguments"))  # type: ignore[misc]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_recipes_have_the_same_parameters_and_they_are_those_of_the_image() -> None:
    docker, apptainer = docker_arguments(), apptainer_arguments()
    assert apptainer.pop("BOOTSTRAP") == "docker"
    assert docker == apptainer
    assert docker["BASE"] == IMAGES["train"].base.address
    assert docker["LOCK"] == IMAGES["train"].lock.name
    assert re.fullmatch(r"\d+(;\d+)*", docker["FLASH_ATTN"]), "which GPUs it is compiled for must be named"


def test_both_recipes_hand_the_script_what_it_asks_for_and_nothing_else() -> None:
    asked = set(re.findall(r"^#   ([A-Z_]+)  ", text(CONTAINERS / "install.sh"), re.MULTILINE))
    assert asked == set(docker_arguments()) - {"BASE"}
    post = " ".join(section("post"))
    assert set(re.findall(r'(\w+)="\{\{ \1 \}\}"', post)) == asked


def test_both_recipes_copy_and_export_the_same() -> None:
    docker = text(ROOT / "Dockerfile")
    assert sorted(re.findall(r"^COPY (.*)$", docker, re.MULTILINE)) == sorted(section("files"))
    environment = re.search(r"^ENV ((?:.*\\\n)*.*)$", docker, re.MULTILINE)
    assert environment is not None
    words = environment[1].replace("\\\n", " ").replace("${PATH}", "$PATH").split()
    assert words == [line.removeprefix("export ") for line in section("environment")]
    run = re.search(r"^RUN ((?:.*\\\n)*.*)$", docker, re.MULTILINE)
    assert run is not None
    assert run[1].split()[-2:] == section("post")[-1].split() == ["sh", "/opt/bridge/install.sh"]
    for source in re.findall(r"^COPY (\S+)", docker, re.MULTILINE):
        assert f"!{source}" in text(ROOT / ".dockerignore").splitlines(), "the builder is not sent this file"
        assert (ROOT / source).exists()


def test_one_moment_bounds_packages_and_times() -> None:
    fence = load(CONTAINERS / "make_locks.py").FENCE
    moment = datetime.fromisoformat(fence.replace("Z", "+00:00"))
    assert int(docker_arguments()["SOURCE_DATE_EPOCH"]) == int(moment.timestamp())
    assert f"ubuntu_snapshot={moment:%Y%m%dT%H%M%SZ}\n" in text(CONTAINERS / "install.sh")
    assert f"--exclude-newer {fence} " in text(CONTAINERS / "locks" / "train-cu124-py311.txt")


@pytest.mark.parametrize("image", IMAGES, ids=str)
def test_hashes_of_locks_are_those_that_are_written_down(image: str) -> None:
    for lock in (IMAGES[image].lock, IMAGES[image].flash_attn):
        data = (CONTAINERS / "locks" / f"{lock.name}.txt").read_bytes()
        assert hashlib.sha256(data).hexdigest() == lock.sha256, "run: python3 containers/make_locks.py"


@pytest.mark.parametrize("image", IMAGES, ids=str)
def test_what_was_built_was_built_from_what_is_here(image: str) -> None:
    for built in IMAGES[image].built:
        assert (built.lock, built.base) == (IMAGES[image].lock.sha256, IMAGES[image].base.digest)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda p: p.stem)
def test_every_entry_is_exact_and_hashed_and_names_no_index(lock: Path) -> None:
    found = entries(lock)
    assert found
    for entry in found:
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*==\S+( +--hash=sha256:[0-9a-f]{64})+\s*", entry), entry[:100]
    assert "://" not in text(lock)


def test_every_lock_is_made_by_the_one_command_that_it_repeats() -> None:
    made = load(CONTAINERS / "make_locks.py").LOCKS
    assert set(made) == {path.stem for path in LOCKS}
    for path in LOCKS:
        command = re.search(r"^#    uv pip compile (.*)$", text(path), re.MULTILINE)
        assert command is not None
        assert command[1].split() == [*made[path.stem], "--no-config", "-o", f"locks/{path.name}"]


def test_overrides_are_those_that_are_allowed_and_are_in_the_lock() -> None:
    overrides = pins(CONTAINERS / "overrides.txt")
    assert overrides == ALLOWED_OVERRIDES
    lock = lock_of("train-cu124-py311")
    assert {name: lock[name] for name in overrides} == overrides
    assert all("overrides.txt" not in text(path) for path in LOCKS if path.stem != "train-cu124-py311")


def test_the_lock_has_the_stack_that_is_promised() -> None:
    lock = lock_of(IMAGES["train"].lock.name)
    promised = {
        "torch": "2.6.0",
        "vllm": "0.8.1",
        "transformers": "4.51.3",
        "deepspeed": "0.16.5",
        "pyarrow": "19.0.1",
        "safetensors": "0.5.3",
        "wandb": "0.19.10",
        "submitit": "1.5.2",
        "peft": "0.15.2",
        "nvidia-cuda-runtime-cu12": "12.4.127",  # what makes this torch the CUDA 12.4 one
    }
    assert {name: lock[name] for name in promised} == promised
    assert {"math-verify", "ninja", "packaging", "psutil", "setuptools", "wheel", "pip"} <= set(lock)
    assert lock_of(IMAGES["train"].flash_attn.name) == {"flash-attn": "2.7.4.post1"}


def test_the_next_lock_differs_in_vllm_and_keeps_torch() -> None:
    lock, following = (lock_of(IMAGES[name].lock.name) for name in ("train", "train-next"))
    assert following["vllm"] == "0.8.5.post1"
    for name in ("torch", "transformers", "deepspeed", "peft", "pyarrow", "safetensors", "wandb", "submitit"):
        assert following[name] == lock[name]


@pytest.mark.parametrize("image", IMAGES, ids=str)
def test_bridge_rl_finds_what_it_needs(image: str) -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML; newer ones run this")
    project = tomllib.loads(text(ROOT / "pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["train"], *extras["vllm"], *extras["math"]]
    lock = lock_of(IMAGES[image].lock.name)
    for requirement in map(Requirement, needed):
        version = lock[requirement.name.lower()]
        assert requirement.specifier.contains(Version(version)), f"{requirement} but the lock has {version}"


def test_a_hash_is_written_beside_its_own_lock() -> None:
    before = "a:\n  lock:\n    name: one\n    sha256: ''\n  other:\n    name: one-more\n    sha256: 'x'\n"
    after = load(CONTAINERS / "make_locks.py").with_hashes(before, {"one": "1" * 64})
    assert after == before.replace("''", "1" * 64)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("digest: sha256:da", "digest: sha256:xx", "images.train.base.digest: must be a digest"),
        ("nvidia/cuda:12.4.1-devel-ubuntu22.04", "nvidia/cuda", "images.train.base.tag: must be like host/name:tag"),
        ("built: []", "bilt: []", "images.train.bilt: unknown key"),
        ("recipes: [Dockerfile, Apptainer.def]", "recipes: []", "images.train.recipes: "),
        ("built: []", "built: [{format: sif}]", "images.train.built.0.digest: is required"),
    ],
)
def test_a_wrong_line_of_images_yaml_is_refused_by_name(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "images.yaml"
    whole = text(CONTAINERS / "images.yaml")
    assert old in whole
    path.write_text(whole.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_images(path)
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_shellcheck_has_nothing_to_say() -> None:
    scripts = [*CONTAINERS.glob("*.sh"), *(ROOT / "slurm").glob("*.sbatch"), ROOT / "slurm/devcluster/cluster.sh"]
    assert len(scripts) == 10
    subprocess.run([Path(sys.executable).with_name("shellcheck"), *scripts], check=True)


def test_hadolint_has_nothing_to_say() -> None:
    subprocess.run([Path(sys.executable).with_name("hadolint"), ROOT / "Dockerfile"], check=True)
