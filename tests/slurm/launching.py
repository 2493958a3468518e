"""What the tests of the launcher on a real Slurm share."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from chain import bridge_json
from conftest import Cluster

from bridge.graph import Edge
from bridge.runs import Run

SWEEP = """\
sweep:
  stages.train_data.behavior: [vanilla, bridge]
  seed: [0, 1, 2]
"""
FAST = ("stages.sft.steps=4", "stages.rl.steps=2", "stages.eval.limit=4", "stages.eval.model=[sft, rl]")


def launch(experiment: Path, *words: str, runs: Path, wait: bool = True, check: int = 0) -> Run:
    """Launch on the cluster that SLURM_CONF names, unless the words name a profile.

    An end that is to be good is waited for by `finish`; one with another exit code by the program's own --wait.
    """
    flags = ["--wait"] if wait and check else []
    if "--profile" not in words:
        flags += ["--profile", profile(experiment.parent)]
    run = Run(Path(bridge_json("launch", experiment, *words, *flags, runs=runs, check=check)["dir"]))
    if wait and not check:
        finish(run)
    return run


def resume(run: Run) -> dict[str, Any]:
    """Resume a run and wait for its end; what was submitted."""
    value: dict[str, Any] = bridge_json("resume", run.id, runs=run.folder.parent)
    finish(run)
    return value


def finish(run: Run) -> None:
    """Wait until everything of a run is sealed and has said so.

    --wait asks a cluster ever more rarely, up to every 15 s; these tests would spend minutes between two questions.
    """
    wait_for(lambda: len(run.sealed()) == len(run.elements), f"the end of {run.folder}", 400)
    wait_for(lambda: all(run.attempts(key)[-1]["event"] == "end" for key in run.elements), "the last word", 30)


def profile(folder: Path, stages: dict[str, dict[str, object]] | None = None, **settings: object) -> str:
    """A profile for the dev cluster with some settings of its own; what to give to --profile."""
    value = {
        "cluster": "slurm",
        "slurm_conf": os.environ["SLURM_CONF"],
        "defaults": {"cpus": 1, "mem": "1500M", "time": "30m"},
        "stages": stages or {},
        **settings,
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(value), encoding="utf-8")
    return str(path)


def states(run: Run, runs: Path) -> dict[str, dict[str, Any]]:
    value = bridge_json("status", run.id, runs=runs)
    return {f"{e['stage']}/{e['element']}": e for e in value["elements"]}


def wait_for(condition: Callable[[], object], what: str, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.05)


def patient(ask: Callable[[], str], seconds: float = 300) -> list[dict[str, Any]]:
    """The checks of `doctor --json`, which is asked again while the jobs of other tests leave it no node."""
    end = time.monotonic() + seconds
    while True:
        checks: list[dict[str, Any]] = json.loads(ask())
        if not any("nodes are busy" in check["found"] for check in checks) or time.monotonic() > end:
            return checks


def queue(cluster: Cluster, run: Run) -> list[str]:
    return [line for line in cluster.run("squeue", "-h", "-o", "%j").splitlines() if line.startswith(run.id)]


def saved_steps(run: Run, stage: str = "sft") -> list[Path]:
    """Checkpoints that a running training stage has saved so far."""
    return sorted((run.folder / "stages" / stage / ".0.work/scratch/checkpoints").glob("step-*.pt"))


def ends(run: Run, stage: str = "sft", element: int = 0) -> list[int]:
    """The exit codes of the attempts that have ended."""
    return [line["exit"] for line in run.attempts(Edge(stage, element)) if line["event"] == "end"]


def weights(run: Run, stage: str = "convert_sft", element: int = 0) -> bytes:
    return (run.folder / "stages" / stage / str(element) / "model.safetensors").read_bytes()
