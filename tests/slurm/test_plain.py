"""slurm/*.sbatch: the same stages without our launcher, through plain sbatch on the real cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chain import TINY, bridge, bridge_json, command, write_tiny
from conftest import Cluster

from bridge.artifacts import open_artifact
from bridge.graph import Edge
from bridge.runs import Run

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).parents[2]
LONG = ("stages.sft.steps=150", "stages.rl.steps=2", "stages.eval.limit=4", "stages.eval.model=[rl]")
STAGES = ("train_data", "rl_data", "test_data", "base", "sft", "convert_sft", "rl", "convert_rl", "eval")
SFT = Edge("sft", 0)


@pytest.fixture
def home(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a user stands: a folder with slurm/, and the environment with bridge-rl active. Leaves no job behind."""
    home = tmp_path / "it's 100% mine; really"
    home.mkdir()
    shutil.copytree(ROOT / "slurm", home / "slurm", ignore=shutil.ignore_patterns("devcluster"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.chdir(home)
    (home / "mine.yaml").write_text(f"cluster: slurm\nslurm_conf: {os.environ['SLURM_CONF']}\n", encoding="utf-8")
    yield home
    rows = [line.split("|", 1) for line in cluster.run("squeue", "-h", "-o", "%F|%Z").splitlines()]
    subprocess.run(["scancel", "--quiet", *(job for job, folder in rows if folder.startswith(str(home)))], check=False)


def prepared(home: Path, *settings: str, text: str = TINY) -> Run:
    """A run's folder as a user gets it: its path is all that is printed."""
    done = bridge(
        "launch", write_tiny(home, text), *settings, "--profile", "./mine.yaml", "--prepare", runs=home / "runs"
    )
    run = Run(Path(done.stdout.strip()))
    assert not run.submissions() and not run.sealed()
    return run


def wait_for(condition: Callable[[], object], what: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.2)


def submitted(printed: str) -> dict[str, str]:
    """Stage → job id, from what chain.sbatch says at its end."""
    return dict(zip(STAGES, printed.partition("scancel ")[2].split(), strict=True))


def test_the_chain_of_a_sweep_with_a_warning_in_the_middle(cluster: Cluster, home: Path) -> None:
    """`sbatch slurm/chain.sbatch RUN`, so from inside a job, with two seeds; USR2 makes one SFT element come back."""
    run = prepared(home, *LONG, text=TINY + "sweep: {seed: [0, 1]}\n")
    job = cluster.run("sbatch", "--parsable", "--output=chain.out", "slurm/chain.sbatch", run.folder.relative_to(home))
    cluster.settle(job)
    ids = submitted((home / "chain.out").read_text(encoding="utf-8"))
    wait_for(lambda: list(run.work(SFT).glob("scratch/checkpoints/step-*.pt")), "SFT to save")
    cluster.run("scancel", "--signal=USR2", f"{ids['sft']}_0")
    wait_for(lambda: any(line.get("exit") == 75 for line in run.attempts(SFT)), "SFT to save and stop")
    wait_for(lambda: len(run.sealed()) == len(run.elements), "the end of the chain", 400)

    for key, element in run.elements.items():
        assert open_artifact(run.artifact(key), element.output).fingerprint == element.fingerprint
    value = bridge_json("status", run.id, runs=run.folder.parent)
    assert value["state"] == "done" and {e["state"] for e in value["elements"]} == {"done"}
    wait_for(lambda: all(run.attempts(key)[-1]["event"] == "end" for key in run.elements), "the last word", 20)
    assert [line.get("exit") for line in run.attempts(SFT)] == [None, 75, None, 0]
    assert {key for key in run.elements if len(run.attempts(key)) > 2} == {SFT}
    for key, element in run.elements.items():
        assert {line["job"] for line in run.attempts(key)} == {f"{ids[key.stage]}_{key.element}"}
        for parent in element.parents:
            assert run.attempts(key)[0]["time"] >= run.attempts(parent)[-1]["time"]

    again = cluster.run("sbatch", "--parsable", "--array=0-1", "slurm/sft.sbatch", run.folder)
    assert set(cluster.settle(f"{again}_0", f"{again}_1").values()) == {"COMPLETED"}
    assert len(run.attempts(SFT)) == 4  # sealed: nothing is done twice


def test_a_cancelled_job_stays_cancelled_and_its_children_too(cluster: Cluster, home: Path) -> None:
    run = prepared(home, *LONG, "stages.sft.steps=5000")
    ids = submitted(cluster.run("bash", "slurm/chain.sbatch", run.folder))
    wait_for(lambda: list(run.work(SFT).glob("scratch/checkpoints/step-*.pt")), "SFT to save")
    cluster.run("scancel", ids["sft"])
    jobs = [f"{ids[stage]}_0" for stage in ("sft", "convert_sft", "rl", "convert_rl")]
    assert set(cluster.settle(*jobs).values()) == {"CANCELLED"}
    time.sleep(6)  # a requeued job would be back by now (cred_expire of the dev cluster)
    assert not cluster.run("squeue", "-h", "-j", f"{ids['sft']},{ids['eval']}")
    assert cluster.states(jobs[0]) == {jobs[0]: "CANCELLED"}
    assert len([line for line in run.attempts(SFT) if line["event"] == "start"]) == 1
    assert SFT not in run.sealed()
    # our own commands go on from there: what is sealed stays, what is missing is submitted
    again = bridge_json("resume", run.id, runs=run.folder.parent)["jobs"]
    bridge("cancel", run.id, runs=run.folder.parent)
    assert "sft" in again and "train_data" not in again


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("stage.sbatch",), "usage: sbatch slurm/stage.sbatch RUN STAGE"),
        (("stage.sbatch", "{run}"), "STAGE is missing"),
        (("sft.sbatch", "nowhere"), "nowhere/code: No such file or directory"),
        (("rl.sbatch", "{run}", "nothing"), "there is no element nothing/0"),
    ],
)
def test_bad_requests_fail_with_a_reason(cluster: Cluster, home: Path, words: tuple[str, ...], message: str) -> None:
    run = prepared(home)
    file, *rest = (word.format(run=run.folder) for word in words)
    job = cluster.run("sbatch", "--parsable", "--output=out.txt", f"slurm/{file}", *rest)
    assert cluster.settle(f"{job}_0") == {f"{job}_0": "FAILED"}
    assert message in (home / "out.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"), [((), "usage: bash slurm/chain.sbatch RUN"), (("nowhere",), "nowhere/run.json")]
)
def test_a_chain_of_nothing_submits_nothing(cluster: Cluster, home: Path, words: tuple[str, ...], message: str) -> None:
    done = subprocess.run(["bash", "slurm/chain.sbatch", *words], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and message in done.stderr and done.stdout == ""
    assert "train_data" not in cluster.run("squeue", "-h", "-o", "%j").split()


def test_prepare_makes_a_run_and_submits_nothing(cluster: Cluster, home: Path) -> None:
    run = prepared(home)
    value = bridge_json("launch", home / "tiny.yaml", "--profile", "./mine.yaml", "--prepare", runs=home / "runs")
    assert value == {"run": run.id, "dir": str(run.folder), "jobs": {}}
    assert str(run.folder) not in cluster.run("squeue", "-h", "-o", "%Z")  # another test's run may have the same id
    words = command("launch", home / "tiny.yaml", "-p", "./mine.yaml", "--prepare", "stages.sft.lrr=1")
    assert subprocess.run(words, capture_output=True, check=False).returncode == 2


def test_they_are_short_enough_to_read() -> None:
    files = sorted((ROOT / "slurm").glob("*.sbatch"))
    assert [file.stem for file in files] == ["chain", "convert", "eval", "rl", "sft", "stage"]
    assert all(len(file.read_text(encoding="utf-8").splitlines()) <= 26 for file in files)
