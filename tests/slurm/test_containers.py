"""Stages inside a real Apptainer image that holds the whole lock, as an ordinary user, under a real Slurm.

The image is built once over a stand-in base and kept between runs (containers/standin.sh). In it the stages run on
torch 2.6 and the CPU: the same code as outside, where the current torch runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chain import TRAINED, write_tiny
from conftest import Cluster
from launching import FAST, ends, finish, patient, saved_steps, wait_for, weights

from bridge.runs import Run

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1800)]

REPO = Path(__file__).parents[2]
STANDIN = REPO / "containers" / "standin.sh"
USER = "bridge-standin"
MINE = "x y $HOME `id` \\n \"q'"
LONG = ("stages.sft.steps=400", "stages.sft.save_every=20")
LEAKS = [
    "export LEAKED=1 PYTHONHOME= TERM=xterm https_proxy=http://me:open@host NO_PROXY=x APPTAINER_BIND=/var/lib",
    "export APPTAINERENV_LD_PRELOAD=/x; leak() { :; }; export -f leak",
]
HOSTILE = "a b;'\"$x `id` ü%j#"


@pytest.fixture(scope="module")
def sif() -> Path:
    """The image of the whole lock; built in some minutes where it is not there."""
    if os.geteuid() != 0 and "CI" not in os.environ:
        pytest.skip("only root can build the stand-in base")
    for command in ("tools", "sif"):
        done = subprocess.run([STANDIN, command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return Path(done.stdout.strip())


class Person:
    """An ordinary user of the cluster, with a folder of their own and a profile."""

    def __init__(self, folder: Path, cluster: Cluster, sif: Path, importable: str) -> None:
        self.folder, self.cluster, self.sif, self.importable = folder, cluster, sif, importable
        self.runs = folder / HOSTILE
        self.experiment = folder / "tiny.yaml"
        self.profile()

    def profile(self, **settings: Any) -> None:
        value = {
            "cluster": "slurm",
            "slurm_conf": str(self.cluster.state / "etc" / "slurm.conf"),
            "images": {"train": str(self.sif)},
            "defaults": {"cpus": 1, "mem": "2500M", "time": "30m", "runtime": "apptainer", "scratch": str(self.folder)},
            **settings,
        }
        (self.folder / "mine.yaml").write_text(yaml.safe_dump(value), encoding="utf-8")

    @property
    def variables(self) -> dict[str, str]:
        return {
            "HOME": str(self.folder), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8",
            "BRIDGE_RUNS": str(self.runs), "PYTHONPATH": self.importable,
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip

    def command(self, *words: str | Path) -> list[str]:
        """bridge-rl as this user, with Debian's own Python."""
        python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        return ["runuser", "-u", USER, "--", python, "-m", "bridge", *map(str, words)]

    def bridge(self, *words: str | Path, check: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run bridge-rl as this user."""
        variables = {**self.variables, **env}
        command = self.command(*words)
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, cwd=self.folder)
        assert done.returncode == check, done.stdout + done.stderr
        return done

    def launch(self, *words: str, check: int = 0, **env: str) -> Run:
        flags = ("--profile", "./mine.yaml", "--json")
        done = self.bridge("launch", self.experiment, "image=train", *words, *flags, check=check, **env)
        return Run(Path(json.loads(done.stdout)["dir"]))

    def states(self, run: Run) -> dict[str, dict[str, Any]]:
        value = json.loads(self.bridge("status", run.id, "--json").stdout)
        return {f"{e['stage']}/{e['element']}": e for e in value["elements"]}


@pytest.fixture(scope="module")
def importable() -> Iterator[str]:
    """A PYTHONPATH for this user: the checkout and its packages, or copies where only root can read these."""
    packages = Path(sysconfig.get_path("purelib"))
    test = ["runuser", "-u", USER, "--", "test", "-r", REPO / "bridge/cli.py", "-a", "-r", packages]
    if subprocess.run(test, check=False).returncode == 0:
        yield f"{REPO}:{packages}"
        return
    with tempfile.TemporaryDirectory(prefix="bridge-importable-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        for part in ("bridge", "containers", "jobs", "slurm"):
            shutil.copytree(REPO / part, Path(name) / "repo" / part)
        large = shutil.ignore_patterns("torch", "transformers", "wandb", "mypy", "sympy", "__pycache__")
        shutil.copytree(packages, Path(name) / "packages", ignore=large)
        yield f"{name}/repo:{name}/packages"


@pytest.fixture
def person(cluster: Cluster, sif: Path, importable: str) -> Iterator[Person]:
    folder = Path(tempfile.mkdtemp(prefix="bridge-person-", dir="/tmp"))
    try:
        write_tiny(folder)
        found = Person(folder, cluster, sif, importable)
        for path in (folder, *folder.iterdir()):
            shutil.chown(path, USER)
        yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # a job that was cancelled may be removing its own folder


def lock() -> dict[str, str]:
    """Package → version of the lock, read by a rule of its own; names as PyPI normalises them."""
    text = (REPO / "containers" / "locks" / "train-cu124-py311.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9.-]+)==([^ ;\\]+)", text, flags=re.MULTILINE))


def test_the_whole_chain_inside(person: Person) -> None:
    run = person.launch(*FAST, "stages.eval.model=[rl]", "--wait")
    image = run.record["image"]
    found = image["inside"]["packages"]
    assert {name: found.get(name) for name in lock()} == lock()
    assert set(found) - set(lock()) <= {"pip"}
    assert image["inside"]["python"].startswith("3.11.") and image["runtime"] == "apptainer"
    assert image["sha256"] == json.loads(Path(f"{person.sif}.json").read_text(encoding="utf-8"))["sha256"]
    assert image["lock"]["name"] == "train-cu124-py311"
    shown = person.bridge("status", run.id).stdout
    assert "image train: SHA-256" in shown and "torch 2.6.0" in shown and "vllm 0.8.1" in shown
    assert all(state["state"] == "done" for state in person.states(run).values())
    assert run.artifact(next(iter(run.elements))).owner() == USER
    assert not list(person.folder.glob("bridge.*")), "each job removes its folder"


def test_doctor_looks_into_the_image_on_a_node(person: Person) -> None:
    words = person.command("doctor", "--profile", "./mine.yaml", "--json")

    def ask() -> str:
        done = subprocess.run(
            words, env=person.variables, capture_output=True, text=True, check=False, cwd=person.folder
        )
        return done.stdout

    found = {check["name"]: check for check in patient(ask) if check["name"].startswith("image")}
    assert all(check["ok"] for check in found.values()), found
    assert f"{len(lock())} packages, as locked" in found["image train"]["found"], found
    assert "CUDA 12.4, NCCL 2.21.5, no GPU is visible" in found["image train: torch"]["found"]
    assert {"image train: vllm", "image train: deepspeed", "image train: flash_attn"} <= set(found)


def runner(run: Run, stage: str) -> int | None:
    """The process of a stage's runner, as the host numbers it; None where there is none."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            same = (path / "cwd").samefile(run.folder / "code")
        except OSError:
            continue
        if words[0].endswith(b"python") and f"scripts/{stage}".encode() in b" ".join(words) and same:
            return int(path.name)
    return None


def test_a_preempted_stage_is_requeued_by_the_host_and_ends_bit_for_bit_the_same(person: Person) -> None:
    person.experiment.write_text(TRAINED, "utf-8")
    calm = person.launch(*LONG)
    person.experiment.write_text(TRAINED.replace("name: tiny", "name: again"), "utf-8")
    secret = {"WANDB_API_KEY": "sesame", "LEAK": "1"}
    person.profile(secrets=["WANDB_API_KEY"], env={"MINE": MINE}, setup=LEAKS)
    run = person.launch(*LONG, **secret)
    wait_for(lambda: saved_steps(run), "a checkpoint inside the image", 300)
    seen = Path(f"/proc/{runner(run, 'sft')}/environ").read_bytes().decode().split("\0")
    inside = dict(item.split("=", 1) for item in seen if "=" in item)
    assert inside["WANDB_API_KEY"] == "sesame" and inside["MINE"] == MINE and inside["HOME"] == "/tmp/home"
    assert inside["PYTHONPATH"] == str(run.folder / "code"), "no shell has read it"
    assert "/var/lib" not in inside["APPTAINER_BIND"].split(",")
    assert inside["PYTHONNOUSERSITE"] == "1" and inside["HF_HUB_OFFLINE"] == "1" and inside["TMPDIR"] == "/tmp"
    assert inside["SLURM_ARRAY_TASK_ID"] == "0" and inside["SLURM_PROCID"] == "0"
    allowed = ("SLURM", "BRIDGE_", "SUBMITIT_", "APPTAINER_", "SINGULARITY_", "PMI", "HF_", "VLLM_", "WANDB_", "TORCH")
    rest = {name for name in inside if not name.startswith(allowed)}
    assert rest <= {
        "PATH", "HOME", "TMPDIR", "LANG", "LC_CTYPE", "USER", "LOGNAME", "PWD", "MINE", "PYTHONPATH",
        "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE", "XDG_CACHE_HOME", "CUDA_HOME", "CUDA_CACHE_PATH", "MPLCONFIGDIR",
        "NUMBA_CACHE_DIR",
        "OUTLINES_CACHE_DIR", "TRITON_CACHE_DIR", "TRANSFORMERS_OFFLINE", "RAY_USAGE_STATS_ENABLED", "LD_LIBRARY_PATH",
        "PS1", "PROMPT_COMMAND", "SHLVL", "_",
    }, rest  # fmt: skip
    job = person.states(run)["sft/0"]["job"]
    person.cluster.run("scontrol", "requeue", job)  # what a preemption does: TERM, then the queue again
    wait_for(lambda: len(run.attempts(next(k for k in run.elements if k.stage == "sft"))) >= 3, "a second attempt", 200)
    job = person.states(run)["sft/0"]["job"]
    number = len(saved_steps(run))
    wait_for(lambda: len(saved_steps(run)) != number or ends(run)[-1:] == [0], "it goes on", 200)
    person.cluster.ask("scancel", "--signal=USR2", job)  # what Slurm does before the time limit
    person.bridge("resume", run.id, **secret)
    finish(run)
    finish(calm)  # it ran meanwhile
    assert set(ends(run)) <= {75, 0} and ends(run)[-1] == 0 and len(ends(run)) >= 2
    assert weights(run) == weights(calm)
    texts = [p for p in run.folder.rglob("*") if p.is_file() and p.suffix in (".json", ".jsonl", ".log", ".sh", ".out")]
    assert texts and not [p for p in texts if "sesame" in p.read_text("utf-8", errors="replace")]


def test_another_image_is_refused_by_the_job_and_by_resume(person: Person) -> None:
    copy = person.folder / "train.sif"
    shutil.copyfile(person.sif, copy)
    copy.chmod(0o644)
    shutil.copyfile(f"{person.sif}.json", f"{copy}.json")
    for path in (copy, Path(f"{copy}.json")):
        shutil.chown(path, USER)
    with copy.open("r+b") as file:
        file.seek(2_000_000_000)
        byte = file.read(1)[0]
        file.seek(2_000_000_000)
        file.write(bytes([byte ^ 1]))
    person.sif = copy
    person.profile()
    run = person.launch()
    wait_for(lambda: person.states(run)["train_data/0"]["state"] == "failed", "the job to refuse the image", 300)
    assert "is another image than at the launch" in person.states(run)["train_data/0"]["reason"]
    Path(f"{copy}.json").write_text(json.dumps({"sha256": "0" * 64}), encoding="utf-8")
    done = person.bridge("resume", run.id, check=2)
    assert "was launched with another image" in done.stderr and "--force" in done.stderr
    person.bridge("cancel", run.id)


def test_a_failure_inside_is_told(person: Person) -> None:
    run = person.launch()
    wait_for(lambda: runner(run, "train_data"), "a stage inside the image", 120)
    pid = runner(run, "train_data")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: person.states(run)["train_data/0"]["state"] == "failed", "the state", 60)
    reason = person.states(run)["train_data/0"]["reason"]
    assert re.search(r"NonZeroExitCode|exit 137", reason) and "INFO" not in reason
    assert person.states(run)["sft/0"]["state"] == "blocked"
    person.bridge("cancel", run.id)
