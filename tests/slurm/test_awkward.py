"""Awkward moments on a real Slurm: while something ends or starts, with the controller away, with numbers reused."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chain import TRAINED, bridge, bridge_json, command, write_tiny
from conftest import Cluster, another_cluster
from launching import ends, launch, profile, queue, resume, saved_steps, states, wait_for

from bridge.graph import Edge
from bridge.runs import Run

pytestmark = pytest.mark.slurm

SFT = Edge("sft", 0)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster of these tests alone: they break it."""
    with another_cluster() as own, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", own.env["SLURM_CONF"])
        yield own


def test_the_same_experiment_in_two_folders_is_two_runs(cluster: Cluster, tmp_path: Path) -> None:
    """They have one name: neither launch nor cancel of the one touches the other."""
    experiment = write_tiny(tmp_path, TRAINED)
    first = launch(experiment, "stages.sft.steps=2000", runs=tmp_path / "a", wait=False)
    wait_for(lambda: saved_steps(first), "SFT to save")
    second = launch(experiment, "stages.sft.steps=2000", runs=tmp_path / "b", wait=False)
    assert first.id == second.id
    bridge("cancel", second.id, runs=tmp_path / "b")
    assert states(first, tmp_path / "a")["sft/0"]["state"] == "running"
    bridge("cancel", first.id, runs=tmp_path / "a")


def test_resume_right_after_cancel(cluster: Cluster, tmp_path: Path) -> None:
    """A job that is still ending is waited for: it is not in hand, and nothing may be tied to it."""
    run = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=200", runs=tmp_path, wait=False)
    wait_for(lambda: saved_steps(run), "SFT to save")
    bridge("cancel", run.id, runs=tmp_path)
    assert {"sft", "convert_sft"} <= set(resume(run)["jobs"])
    assert {e["state"] for e in states(run, tmp_path).values()} == {"done"}


def test_a_warning_while_python_starts(cluster: Cluster, tmp_path: Path) -> None:
    """As from a slow file system: nobody listens yet, the step dies of the signal, and the element is started again."""
    slow = tmp_path / "slow-python"
    slow.write_text(f'#!/bin/sh\nsleep 4\nexec {sys.executable} "$@"\n', encoding="utf-8")
    slow.chmod(0o755)
    mine = profile(tmp_path, python=str(slow))
    run = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=4", "--profile", mine, runs=tmp_path, wait=False)
    job = states(run, tmp_path)["train_data/0"]["job"]
    wait_for(lambda: "_0.0 " in cluster.ask("squeue", "-h", "-s", "-o", "%i ", "-j", job).stdout, "the first step")
    cluster.run("scancel", "--signal=USR2", job)
    wait_for(lambda: run.artifact(Edge("train_data", 0)).exists(), "the first stage to end", 60)
    starts = cluster.run("sacct", "-X", "-n", "-P", "-D", "-o", "State", "-j", job).splitlines()
    assert len(starts) == 2
    bridge("cancel", run.id, runs=tmp_path)


def test_the_controller_is_away_when_a_stage_wants_to_be_requeued(cluster: Cluster, tmp_path: Path) -> None:
    run = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=300", runs=tmp_path, wait=False)
    wait_for(lambda: saved_steps(run), "SFT to save")
    cluster.run("scancel", "--signal=USR2", states(run, tmp_path)["sft/0"]["job"])
    cluster.script("stop", "slurmctld")
    wait_for(lambda: ends(run) == [75], "the stage to stop", 60)
    cluster.script("start", "slurmctld")
    wait_for(lambda: ends(run) == [75, 0], "the second attempt", 200)
    assert len({line["job"] for line in run.attempts(SFT)}) == 1  # requeued, not submitted again
    bridge("cancel", run.id, runs=tmp_path)


def test_numbers_that_a_cluster_gives_out_again(cluster: Cluster, tmp_path: Path) -> None:
    """A controller that lost its state gives one run's numbers to another: each run knows its own jobs all the same."""
    first = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=2000", runs=tmp_path / "a", wait=False)
    wait_for(lambda: saved_steps(first), "SFT to save")
    jobs = (first.folder / "jobs.jsonl").read_text(encoding="utf-8")
    text = write_tiny(tmp_path, TRAINED).read_text(encoding="utf-8").replace("name: tiny", "name: other")
    other = tmp_path / "other.yaml"
    other.write_text(text, encoding="utf-8")
    folder = Path(bridge_json("launch", other, "--profile", profile(tmp_path), "--prepare", runs=tmp_path / "b")["dir"])
    (folder / "jobs.jsonl").write_text(jobs, encoding="utf-8")
    found = states(Run(folder), tmp_path / "b")
    assert found["sft/0"]["state"] == "blocked"
    assert "no longer in the queue" in found["sft/0"]["reason"]
    bridge("cancel", folder.name, runs=tmp_path / "b")
    assert states(first, tmp_path / "a")["sft/0"]["state"] == "running"
    bridge("cancel", first.id, runs=tmp_path / "a")


def test_a_job_that_dies_on_the_host_after_a_requeue_says_why(cluster: Cluster, tmp_path: Path) -> None:
    secrets = tmp_path / "secrets"
    secrets.write_text("HF_TOKEN=x\n", encoding="utf-8")
    secrets.chmod(0o600)
    mine = profile(tmp_path, secrets_file=str(secrets))
    run = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=300", "--profile", mine, runs=tmp_path, wait=False)
    wait_for(lambda: saved_steps(run), "SFT to save")
    secrets.unlink()
    cluster.run("scancel", "--signal=USR2", states(run, tmp_path)["sft/0"]["job"])
    wait_for(lambda: states(run, tmp_path)["sft/0"]["state"] == "failed", "the second start to fail", 60)
    reason = states(run, tmp_path)["sft/0"]["reason"]
    assert "secrets: No such file or directory" in reason
    assert "`resume` goes on" in reason
    wait_for(lambda: not queue(cluster, run), "the children to leave the queue", 60)


def test_a_launch_that_is_terminated_takes_everything_back(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the array that sbatch has not even sent yet when the signal comes."""
    tools = tmp_path / "tools"
    tools.mkdir()
    real = subprocess.run(["which", "sbatch"], capture_output=True, text=True, check=True).stdout.strip()
    (tools / "sbatch").write_text(f'#!/bin/sh\nsleep 3\nexec {real} "$@"\n', encoding="utf-8")
    (tools / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    process = subprocess.Popen(
        command("launch", write_tiny(tmp_path), "--profile", profile(tmp_path)),
        env={**os.environ, "BRIDGE_RUNS": str(tmp_path / "runs")}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    wait_for(lambda: list((tmp_path / "runs").glob("tiny-*/scripts/rl_data/*_submission.sh")), "two submissions", 60)
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "what it had submitted is cancelled" in printed
    assert "the jobs go on" not in printed
    run = Run(next((tmp_path / "runs").glob("tiny-*")))
    time.sleep(5)  # an sbatch that was left alone would have sent its array by now
    wait_for(lambda: not queue(cluster, run), "the queue to be empty", 60)
