"""SFT on several nodes of a real Slurm: the result of one process, one seal, a requeue that goes on, a reason."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from chain import bridge, bridge_json
from conftest import Cluster
from launching import ends, saved_steps, states, wait_for
from together import assert_like_one_process, assert_same, environment, experiment, workers

from bridge.artifacts import open_artifact
from bridge.graph import Edge
from bridge.runs import Run

pytestmark = pytest.mark.slurm

STAGES = {
    "one": "{cpus: 1}",
    "two": "{nodes: 2}",
    "cut": "{nodes: 2}",
    "hurt": "{nodes: 2}",
    "four": "{nodes: 2, processes: 2, cpus: 2}",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes and 'names'")


@pytest.fixture(scope="module")
def run(cluster: Cluster, runs: Path) -> Run:
    """A run in which `cut` was warned on the way, and a worker of `hurt` on the second node was killed."""
    conf = os.environ["SLURM_CONF"]
    (runs / "nodes.yaml").write_text(
        f'cluster: slurm\nslurm_conf: {conf}\ndefaults: {{cpus: 1, mem: 2G, time: 30m, scratch: "{runs}"}}\n',
        encoding="utf-8",
    )
    words = (experiment(runs, **STAGES), "--profile", runs / "nodes.yaml")
    run = Run(Path(bridge_json("launch", *words, runs=runs)["dir"]))
    todo = {"cut": warn, "hurt": kill}

    def all_done() -> bool:
        for stage in [stage for stage in todo if saved_steps(run, stage)]:
            todo.pop(stage)(cluster, run, runs)
        return not todo

    wait_for(all_done, "`cut` and `hurt` to save", 240)
    wait_for(lambda: all(ends(run, stage) for stage in STAGES) and ends(run, "cut")[-1] == 0, "the end", 240)
    wait_for(lambda: not cluster.run("squeue", "-h", "-n", f"{run.id}/cut,{run.id}/four"), "the queue to be empty")
    assert not list(runs.glob("bridge.*")), "each job removes its folder on the nodes"
    return run


def warn(cluster: Cluster, run: Run, runs: Path) -> None:
    """What Slurm sends before the time limit: USR2 to every process of the step, on all nodes."""
    cluster.run("scancel", "--signal=USR2", states(run, runs)["cut/0"]["job"])


def kill(cluster: Cluster, run: Run, runs: Path) -> None:
    job = states(run, runs)["hurt/0"]["job"].replace("_", " ").split()[0]
    [process] = [p for p in workers(run, rank=1) if environment(p)["SLURM_ARRAY_JOB_ID"] == job]
    os.kill(process, signal.SIGKILL)


@pytest.mark.parametrize("stage", ["two", "cut", "four"])
def test_several_nodes_give_the_result_of_one_process(run: Run, stage: str) -> None:
    assert_like_one_process(run, stage, "one")


def test_warned_on_the_way_it_is_requeued_and_is_the_undisturbed_run(run: Run) -> None:
    """One requeue, one record of each attempt, the same weights bit for bit."""
    assert ends(run, "cut") == [75, 0]
    assert [line["attempt"] for line in run.attempts(Edge("cut", 0))] == [1, 1, 2, 2]
    assert_same(run, "cut", run, "two")
    logs = {path.name for path in run.log(Edge("cut", 0), 1).parent.glob("0.*")}
    assert logs == {"0.1.log", "0.1.node1.log", "0.2.log", "0.2.node1.log"}


def test_rank_0_alone_records_and_seals(cluster: Cluster, run: Run, runs: Path) -> None:
    for stage in ("two", "four"):
        key = Edge(stage, 0)
        assert open_artifact(run.artifact(key), "checkpoint").fingerprint == run.elements[key].fingerprint
        assert [line["event"] for line in run.attempts(key)] == ["start", "end"]
        log = run.log(key, 1)
        assert log.read_text(encoding="utf-8").count(f"{stage}/0: sealed") == 1
        assert log.with_suffix(".node1.log").read_text(encoding="utf-8") == ""  # and nothing went wrong there
        job = states(run, runs)[f"{stage}/0"]["job"]
        facts = cluster.run("sacct", "-n", "-P", "-X", "-o", "State,ExitCode,NNodes", "-j", job)
        assert facts == "COMPLETED|0:0|2"


def test_a_worker_killed_on_the_second_node_is_the_reason(run: Run, runs: Path) -> None:
    assert ends(run, "hurt") == [1]
    [end] = [line for line in run.attempts(Edge("hurt", 0)) if line["event"] == "end"]
    assert end["reason"] == "rank 1 on n2 was ended by SIGKILL (out of memory?)"
    found = states(run, runs)["hurt/0"]
    assert found["state"] == "failed" and end["reason"] in found["reason"]
    assert not workers(run)
    bridge("cancel", run.id, runs=runs, check=None)
