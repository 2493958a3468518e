"""Stopping early on a real Slurm: the stage is told, saves, is started again, and ends as if undisturbed."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from chain import TINY, TRAINED, bridge, write_tiny
from conftest import Cluster
from launching import ends, launch, profile, queue, resume, saved_steps, states, wait_for, weights

from bridge.graph import Edge
from bridge.runs import Run

pytestmark = pytest.mark.slurm

SFT = Edge("sft", 0)
STEPS = "stages.sft.steps=400"  # some seconds of training
# A model that is trained and evaluated.
EVALUATED = TINY.partition("  rl:\n")[0] + "  eval: {kind: eval, model: sft, data: test_data}\n"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> bytes:
    """The weights that SFT ends with when nothing happens to it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return weights(launch(write_tiny(folder, TRAINED), STEPS, runs=folder))


def sealed_again(run: Run, cluster: Cluster, undisturbed: bytes, attempts: int, or_more: bool = False) -> None:
    """The run ends, SFT with these attempts and the undisturbed weights, and the log of each attempt is there."""
    wait_for(lambda: not queue(cluster, run), "the run to end", 240)
    found = states(run, run.folder.parent)
    assert {e["state"] for e in found.values()} == {"done"}, {n: e for n, e in found.items() if e["state"] != "done"}
    made = found["sft/0"]["attempts"]
    assert made == attempts or (or_more and made > attempts)
    assert weights(run) == undisturbed
    assert all(run.log(SFT, number).read_text(encoding="utf-8") for number in range(1, made + 1))


def test_a_warning_delivered_twice_requeues_once(cluster: Cluster, tmp_path: Path, undisturbed: bytes) -> None:
    """USR2 reaches the training inside srun: it saves, exits with 75, and exactly this element is started again."""
    run = launch(write_tiny(tmp_path, TRAINED), STEPS, runs=tmp_path, wait=False)
    wait_for(lambda: saved_steps(run), "SFT to save")
    job = states(run, tmp_path)["sft/0"]["job"]
    cluster.run("scancel", "--signal=USR2", job)
    cluster.run("scancel", "--signal=USR2", job)
    wait_for(lambda: ends(run) == [75], "the stage to save and stop")
    wait_for(lambda: states(run, tmp_path)["sft/0"]["state"] in ("requeued", "running"), "Slurm to requeue it", 30)
    sealed_again(run, cluster, undisturbed, attempts=2)
    assert states(run, tmp_path)["sft/0"]["job"] == job
    restarts = cluster.run("sacct", "-X", "-n", "-P", "-D", "-o", "State", "-j", job).splitlines()
    assert len(restarts) == 2


def test_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    """A warning 115 s before a limit of two minutes: the stage is stopped by Slurm itself, and goes on where it was.

    slurmctld looks at limits every 30 s.
    """
    short = profile(tmp_path, warn=115, stages={"sft": {"partition": "short", "time": "2m"}})
    run = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=1500", "--profile", short, runs=tmp_path, wait=False)
    wait_for(lambda: 75 in ends(run), "the warning before the limit", 100)
    wait_for(lambda: len(run.attempts(SFT)) > 2, "the second attempt", 60)
    wait_for(lambda: "sft/0: " in run.log(SFT, 2).read_text(encoding="utf-8"), "its first line", 60)
    stopped = int(run.attempts(SFT)[1]["reason"].split("step ")[1].split()[0])
    shown = run.log(SFT, 2).read_text(encoding="utf-8").split("sft/0: ")[1]
    assert int(shown.split("/")[0]) > stopped
    bridge("cancel", run.id, runs=tmp_path)


def test_a_cap_on_attempts_is_a_failure_that_resume_lifts(cluster: Cluster, tmp_path: Path, undisturbed: bytes) -> None:
    run = launch(write_tiny(tmp_path, TRAINED), STEPS, "stages.sft.resources.max_attempts=1", runs=tmp_path, wait=False)
    wait_for(lambda: saved_steps(run), "SFT to save")
    cluster.run("scancel", "--signal=USR2", states(run, tmp_path)["sft/0"]["job"])
    wait_for(lambda: states(run, tmp_path)["sft/0"]["state"] == "failed", "the cap", 60)
    reason = states(run, tmp_path)["sft/0"]["reason"]
    assert "stopped after step" in reason
    assert "it was started 1 times, and max_attempts is 1" in reason
    wait_for(lambda: not queue(cluster, run), "the children to leave the queue", 60)
    resume(run)
    sealed_again(run, cluster, undisturbed, attempts=2)


def test_a_cap_on_the_time_of_all_attempts(cluster: Cluster, tmp_path: Path) -> None:
    """The stage is asked to save and stop when its time is used up, and is not started again."""
    limit = ("stages.sft.steps=5000", "stages.sft.resources.max_total_time=15s")
    run = launch(write_tiny(tmp_path, TRAINED), *limit, runs=tmp_path, check=1)
    reason = states(run, tmp_path)["sft/0"]["reason"]
    assert "stopped after step" in reason
    assert "and max_total_time is 15s" in reason
    assert saved_steps(run)  # nothing is lost
    assert states(run, tmp_path)["convert_sft/0"]["state"] == "blocked"


def test_a_persons_scancel_is_not_undone(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm sends TERM; the stage saves and leaves with 75; and still the job does not come back."""
    run = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=2000", runs=tmp_path, wait=False)
    wait_for(lambda: saved_steps(run), "SFT to save")
    cluster.run("scancel", states(run, tmp_path)["sft/0"]["job"])
    wait_for(lambda: not queue(cluster, run), "the queue to be empty", 60)
    found = states(run, tmp_path)
    assert found["sft/0"]["state"] == "cancelled"
    assert found["convert_sft/0"]["state"] == "cancelled"
    time.sleep(8)  # longer than a requeued job waits before it starts again
    assert not queue(cluster, run)
    assert len(ends(run)) == 1


def test_a_preempted_training_goes_on(cluster: Cluster, tmp_path: Path, undisturbed: bytes) -> None:
    """A job of a higher partition takes the node: the stage saves, Slurm requeues it, and it ends as if undisturbed."""
    low = profile(tmp_path, stages={"sft": {"partition": "lowprio", "exclusive": True, "sbatch": ["--nodelist=n1"]}})
    run = launch(write_tiny(tmp_path, TRAINED), STEPS, "--profile", low, runs=tmp_path, wait=False)
    wait_for(lambda: saved_steps(run), "SFT to save")
    cluster.submit("sleep 2", "--exclusive", "--nodelist=n1", "--partition=debug")
    wait_for(lambda: ends(run) == [75], "the preemption", 60)
    assert "stopped after step" in run.attempts(SFT)[-1]["reason"]
    sealed_again(run, cluster, undisturbed, attempts=2, or_more=True)  # jobs of other tests take nodes too


def test_an_evaluation_goes_on_with_the_samples_it_has(cluster: Cluster, tmp_path: Path) -> None:
    slow = {"samples": 4, "max_new_tokens": 200, "rollout_batch": 4}
    settings = [f"stages.eval.{name}={value}" for name, value in slow.items()]
    run = launch(write_tiny(tmp_path, EVALUATED), "stages.sft.steps=4", *settings, runs=tmp_path, wait=False)
    key = Edge("eval", 0)
    wait_for(lambda: len(list((run.work(key) / "scratch").glob("samples-*"))) > 1, "the first samples")
    cluster.run("scancel", "--signal=USR2", states(run, tmp_path)["eval/0"]["job"])
    wait_for(lambda: ends(run, "eval") == [75], "the evaluation to stop")
    stored = len(list((run.work(key) / "scratch").glob("samples-*")))
    wait_for(lambda: ends(run, "eval") == [75, 0], "the evaluation to end", 240)
    reason = next(line["reason"] for line in run.attempts(key) if line.get("exit") == 75)
    assert f"stopped after {stored} of 20 questions; saved" in reason
    first = run.log(key, 2).read_text(encoding="utf-8")
    assert f"{stored + 1}/20 questions" in first  # the second attempt began where the first one stopped
    # the same model and problems, sampled without a break
    model, data, out = run.artifact(Edge("convert_sft", 0)), run.artifact(Edge("test_data", 0)), tmp_path / "whole"
    rest = [f"{name}={value}" for name, value in slow.items() if name != "samples"]
    bridge("eval", model, "--task", data, "--samples", 4, "-o", out, *rest, runs=tmp_path)
    tables = [pq.read_table(folder / "samples.parquet") for folder in (run.artifact(key), out)]
    assert tables[0].equals(tables[1])


def test_a_stage_without_progress_is_reported_and_not_killed(cluster: Cluster, tmp_path: Path) -> None:
    run = launch(
        write_tiny(tmp_path, TRAINED),
        "stages.sft.steps=2000",
        "stages.sft.resources.quiet=3s",
        runs=tmp_path,
        wait=False,
    )
    wait_for(lambda: saved_steps(run), "SFT to save")
    process = run.attempts(SFT)[-1]["pid"]
    os.kill(process, signal.SIGSTOP)
    wait_for(lambda: "but no progress for" in states(run, tmp_path)["sft/0"]["reason"], "the silence to be seen", 20)
    assert states(run, tmp_path)["sft/0"]["state"] == "running"
    os.kill(process, signal.SIGCONT)
    wait_for(lambda: states(run, tmp_path)["sft/0"]["reason"] == "RUNNING", "the training to go on", 20)
    bridge("cancel", run.id, runs=tmp_path)
    progress = json.loads((run.work(SFT) / "progress.json").read_text(encoding="utf-8"))
    assert progress["done"] > 0
