"""Edges and arrays on a real Slurm: exact, typed, and never tied to a job that is over."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest
from chain import TINY, TRAINED, bridge, bridge_json, write_tiny
from conftest import Cluster
from launching import FAST, launch, profile, queue, resume, states, wait_for

from bridge.graph import Edge
from bridge.runs import Run

pytestmark = pytest.mark.slurm


def test_250_elements_under_a_limit_of_101(cluster: Cluster, tmp_path: Path) -> None:
    """Three arrays a stage, tied task by task; two scheduler calls show them all; one command cancels them all."""
    sweep = TINY + f"sweep:\n  stages.train_data.seed: {list(range(250))}\n"
    words = (write_tiny(tmp_path, sweep), "--profile", profile(tmp_path, throttle=1))
    value = bridge_json("launch", *words, runs=tmp_path)
    run = Run(Path(value["dir"]))
    submitted = {(e["stage"], e["elements"][0]): e for e in run.submissions() if e["event"] == "submit"}
    for stage in ("train_data", "base", "sft", "convert_sft"):
        assert [len(submitted[stage, first]["jobs"]) for first in (0, 101, 202)] == [101, 101, 48]
    child, parent = submitted["convert_sft", 101], submitted["sft", 101]
    assert child["dependency"] == f"aftercorr:{parent['jobs'][0].partition('_')[0]}"
    in_queue = cluster.run("squeue", "-h", "-r", "-o", "%F_%K", "-n", f"{run.id}/convert_sft.1").split()
    assert sorted(in_queue) == sorted(child["jobs"])
    running = cluster.run("squeue", "-h", "-r", "-t", "running", "-o", "%j").splitlines()
    for name in ("train_data.0", "train_data.1", "train_data.2"):
        assert running.count(f"{run.id}/{name}") <= 1  # the throttle
    calls = _count_calls(tmp_path, ("squeue", "sacct"), run)
    assert calls == ["sacct", "squeue"]
    bridge("cancel", run.id, runs=tmp_path)
    wait_for(lambda: not queue(cluster, run), "the queue to be empty", 60)


def _count_calls(folder: Path, names: tuple[str, ...], run: Run) -> list[str]:
    """The Slurm commands that one `status` of the run really calls, each through a script that notes its name."""
    tools = folder / "tools"
    tools.mkdir()
    for name in names:
        script = tools / name
        script.write_text(
            f'#!/bin/sh\necho {name} >> {folder}/calls\nexec {shutil.which(name)} "$@"\n', encoding="utf-8"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        states(run, folder)
    return (folder / "calls").read_text(encoding="utf-8").split()


def test_one_failed_element_blocks_only_what_needs_it(cluster: Cluster, tmp_path: Path) -> None:
    """The first of two learning rates diverges: its convert, RL and evaluations are blocked, the other's end."""
    text = TINY + "sweep:\n  stages.sft.lr: [1e30, 3e-3]\n"
    run = launch(write_tiny(tmp_path, text), *FAST, runs=tmp_path, check=1)
    found = states(run, tmp_path)
    assert found["sft/0"]["state"] == "failed"
    for name in ("convert_sft/0", "rl/0", "convert_rl/0", "eval/0", "eval/2"):
        assert found[name]["state"] == "blocked", name
        assert found[name]["reason"].startswith("sft/0 failed: ")
        assert "the gradient is not finite" in found[name]["reason"]  # the culprit's own words
    for name in ("convert_sft/1", "rl/1", "convert_rl/1", "eval/1", "eval/3"):
        assert found[name]["state"] == "done", name
    assert not queue(cluster, run)
    # the same again: what failed is tried again, and only that
    again = bridge_json("resume", run.id, runs=tmp_path)
    assert {stage: len(jobs) for stage, jobs in again["jobs"].items()} == {
        "sft": 1, "convert_sft": 1, "rl": 1, "convert_rl": 1, "eval": 2,
    }  # fmt: skip
    assert [e["elements"] for e in run.submissions() if e.get("stage") == "eval"][-2:] == [[0], [2]]
    bridge("cancel", run.id, runs=tmp_path)


def test_a_child_is_tied_to_a_job_of_an_earlier_launch(cluster: Cluster, tmp_path: Path) -> None:
    """The convert jobs are cancelled by a person while both trainings run; resume ties new ones to the running jobs."""
    text = TRAINED + "sweep:\n  seed: [0, 1]\n"
    run = launch(write_tiny(tmp_path, text), "stages.sft.steps=150", runs=tmp_path, wait=False)
    wait_for(lambda: all((run.work(Edge("sft", i)) / "scratch").exists() for i in (0, 1)), "both trainings to begin")
    before = states(run, tmp_path)
    parent = before["sft/0"]["job"].partition("_")[0]
    cluster.run("scancel", before["convert_sft/0"]["job"].partition("_")[0])
    wait_for(lambda: states(run, tmp_path)["convert_sft/1"]["state"] == "cancelled", "Slurm to cancel")
    resume(run)
    tied = [e for e in run.submissions() if e["event"] == "submit" and e["stage"] == "convert_sft"]
    assert tied[-1]["dependency"] == f"aftercorr:{parent}"
    assert [len(run.attempts(Edge("sft", i))) for i in (0, 1)] == [2, 2]  # one start and one end: it ran once
    assert {e["state"] for e in states(run, tmp_path).values()} == {"done"}


def test_a_parent_that_ends_while_its_child_is_submitted(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch would tie a child to any number, and start it: the parent is looked at again before anything is let go."""
    run = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=2000", runs=tmp_path, wait=False)
    wait_for(lambda: (run.work(Edge("sft", 0)) / "scratch").exists(), "SFT to begin")
    before = states(run, tmp_path)
    cluster.run("scancel", before["convert_sft/0"]["job"])
    wait_for(lambda: states(run, tmp_path)["convert_sft/0"]["state"] == "cancelled", "Slurm to cancel")
    tools = tmp_path / "tools"
    tools.mkdir()
    parent = before["sft/0"]["job"]
    (tools / "sbatch").write_text(
        f"#!/bin/sh\nscancel {parent}\nwhile squeue -h -j {parent} | grep -q .; do sleep 0.2; done\n"
        f'exec {shutil.which("sbatch")} "$@"\n',
        encoding="utf-8",
    )
    (tools / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    done = bridge("resume", run.id, runs=tmp_path, check=1)
    assert "sft/0, which others wait for, cancelled" in done.stderr
    wait_for(lambda: not queue(cluster, run), "the queue to be empty", 60)
    assert not run.attempts(Edge("convert_sft", 0))  # no child has started


def test_plan_prints_what_launch_submits(cluster: Cluster, tmp_path: Path) -> None:
    """Scripts and options of `plan --scripts`, with the job ids filled in, are those that sbatch was given."""
    experiment = write_tiny(tmp_path)
    mine = profile(tmp_path)
    plan = bridge("plan", experiment, "--scripts", "--profile", mine, runs=tmp_path).stdout
    run = launch(experiment, "--profile", mine, runs=tmp_path, wait=False)
    bridge("cancel", run.id, runs=tmp_path)
    for script in (run.folder / "scripts").glob("*/*_submission.sh"):
        assert script.read_text(encoding="utf-8") in plan
    array = next(e["jobs"][0].partition("_")[0] for e in run.submissions() if e.get("stage") == "train_data")
    line = next(line for line in plan.splitlines() if line.endswith("# base"))
    assert "--dependency=aftercorr:<train_data>" in line
    assert next(e for e in run.submissions() if e.get("stage") == "base")["dependency"] == f"aftercorr:{array}"
