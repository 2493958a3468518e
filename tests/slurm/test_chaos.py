"""A sweep to which everything happens at once: kills, requeues, cancels, lost daemons, at moments drawn from a seed."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from chain import TINY, bridge, tree, write_tiny
from conftest import Cluster, another_cluster
from launching import launch, profile, queue, states, wait_for

from bridge.launch.states import STUCK
from bridge.runs import Run

pytestmark = pytest.mark.slurm

SEED = int(os.environ.get("BRIDGE_CHAOS_SEED", "0"))
SIZE = int(os.environ.get("BRIDGE_CHAOS_SIZE", "2"))  # elements of each training stage
ACTIONS = 8
SWEEP = TINY + f"sweep:\n  seed: {list(range(SIZE))}\n"
WORDS = ("stages.sft.steps=150", "stages.eval.model=[sft]", "stages.eval.limit=10", "stages.rl.steps=1")


def test_whatever_happens_every_artifact_is_that_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(SEED)
    with another_cluster() as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
        words = (*WORDS, "--profile", profile(tmp_path))
        run = launch(write_tiny(tmp_path, SWEEP), *words, runs=tmp_path, wait=False)
        told = [act(rng, cluster, run) for _ in range(ACTIONS)]
        for _ in range(20):  # resume whenever nothing is going on any more
            wait_for(lambda: over(run), f"the run to come to rest after {told}", 300)
            found = states(run, tmp_path)
            assert all(e["state"] == "done" or e["reason"] for e in found.values())  # nothing is unexplained
            if all(e["state"] == "done" for e in found.values()):
                break
            bridge("resume", run.id, runs=tmp_path)
        else:
            raise AssertionError(f"20 times resumed, and not done after {told}: {states(run, tmp_path)}")
        wait_for(lambda: not queue(cluster, run), "the queue to be empty", 60)
        whole = launch(write_tiny(tmp_path, SWEEP), *words, runs=tmp_path / "undisturbed")
    for key in run.elements:
        sealed = [line for line in run.attempts(key) if line.get("exit") == 0]
        assert len(sealed) == 1, (key, told)
        assert not run.work(key).exists()
        ours, theirs = tree(run.artifact(key)), tree(whole.artifact(key))
        timed = {"SEAL.json", "metrics.jsonl", "eval.json", "samples.parquet", "checkpoint.pt"}
        assert set(ours) == set(theirs)
        assert all(ours[name] == theirs[name] for name in set(ours) - timed), (key, told)
        if key.stage == "eval":
            tables = [pq.read_table(r.artifact(key) / "samples.parquet") for r in (run, whole)]
            assert tables[0].equals(tables[1]), (key, told)


def over(run: Run) -> bool:
    from bridge.launch.submit import observe

    return all(s.open is False or s.state in STUCK for s in observe(run))


def act(rng: random.Random, cluster: Cluster, run: Run) -> str:
    """One misfortune, some seconds after the last one; what it was."""
    time.sleep(rng.uniform(1, 5))
    runs = run.folder.parent
    jobs = cluster.ask("squeue", "-h", "-r", "-t", "running", "-o", "%F_%K").stdout.split()
    job = rng.choice(sorted(jobs)) if jobs else None
    processes = [
        line["pid"] for key in run.elements if (lines := run.attempts(key)) and (line := lines[-1])["event"] == "start"
    ]
    name, action = rng.choice(
        [
            ("kill", lambda: kill(rng, processes)),
            ("warn", lambda: job and cluster.ask("scancel", "--signal=USR2", job)),
            ("warn twice", lambda: [job and cluster.ask("scancel", "--signal=USR2", job) for _ in range(2)]),
            ("requeue", lambda: job and cluster.ask("scontrol", "requeue", job)),
            ("scancel", lambda: job and cluster.ask("scancel", job)),
            (
                "cancel",
                lambda: bridge("cancel", run.id, rng.choice(["sft", "eval/0"]), runs=run.folder.parent, check=None),
            ),
            ("resume", lambda: bridge("resume", run.id, runs=runs, check=None)),
            ("slurmctld", lambda: bounce(cluster, "slurmctld", rng.choice(["kill", "stop"]), 2)),
            ("slurmdbd", lambda: bounce(cluster, "slurmdbd", "kill", 4)),
            ("node", lambda: bounce(cluster, rng.choice(["n1", "n2"]), "kill", rng.choice([1, 30]))),
        ]
    )  # type: tuple[str, Callable[[], object]]
    action()
    return f"{name} {job}"


def kill(rng: random.Random, processes: list[int]) -> None:
    if processes:
        with suppress(ProcessLookupError):
            os.kill(rng.choice(processes), signal.SIGKILL)


def bounce(cluster: Cluster, daemon: str, verb: str, seconds: float) -> None:
    cluster.script(verb, daemon)
    time.sleep(seconds)
    cluster.script("start", daemon)
