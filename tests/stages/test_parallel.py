"""SFT in several processes on this machine: the result of one process, stops, failures, and no port in common."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chain import bridge_json
from together import STEPS, assert_like_one_process, assert_same, environment, experiment, workers

from bridge.artifacts import open_artifact
from bridge.graph import Edge
from bridge.runs import Run
from bridge.stages.torchrun import LOST_CONTACT, _reason
from bridge.stages.worker import LOST
from bridge.train.parallel import Group, deal

KEY = Edge("two", 0)


# ---- pure


def test_every_row_belongs_to_one_rank() -> None:
    sizes = [5, 9, 1, 9, 7, 3, 2]
    shares = [deal(sizes, rank, 3) for rank in range(3)]
    assert sorted(i for share in shares for i in share) == list(range(7))
    assert shares == [[1, 0, 2], [3, 5], [4, 6]]  # 9 9 7 5 3 2 1, dealt out
    assert [deal([4, 8], rank, 3) for rank in range(3)] == [[1], [0], []]


def test_one_process_shares_and_sums_nothing() -> None:
    group = Group()
    assert (group.leads, group.share([3, 9, 4]), group.sum(0.1), group.seed(7)) == (True, [0, 1, 2], 0.1, 7)
    assert group.lead(lambda: "x") == "x" and group.gather(1) == [1] and group.any(True) and not group.any(False)


@pytest.mark.parametrize(
    ("codes", "reason"),
    [
        ({0: LOST, 1: -9}, "rank 1 on here was ended by SIGKILL (out of memory?)"),
        ({0: LOST, 3: 1, 2: -11}, "rank 2 on here was ended by SIGSEGV"),
        ({0: LOST, 1: 1}, "rank 1 on here ended with exit code 1; the log says why"),
        ({0: LOST}, LOST_CONTACT),
        ({}, LOST_CONTACT),
    ],
)
def test_the_rank_that_failed_first_is_named(
    codes: dict[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "here")
    assert _reason(codes) == reason


# ---- by the launcher


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run: the same SFT in one process and in two."""
    folder = tmp_path_factory.mktemp("two processes; $$ 'and' more")
    path = experiment(folder, one="{cpus: 1}", two="{cpus: 2, processes: 2}")
    return Run(Path(bridge_json("launch", path, "--wait", runs=folder)["dir"]))


def test_two_processes_give_the_result_of_one(run: Run) -> None:
    assert_like_one_process(run, "two", "one")
    assert [line["event"] for line in run.attempts(KEY)] == ["start", "end"]
    artifact = open_artifact(run.artifact(KEY), "checkpoint")
    assert artifact.summary["steps"] == STEPS and artifact.summary["rows"] == 43
    assert artifact.files.keys() == open_artifact(run.artifact(Edge("one", 0)), "checkpoint").files.keys()
    log = run.log(KEY, 1).read_text(encoding="utf-8")
    assert log.count(f"{STEPS}/{STEPS} steps") == 1, log  # one rank speaks
    assert "Warning" not in log and "W1" not in log, log


# ---- by hand


def again(run: Run, folder: Path) -> Run:
    """The run as it was before `two`."""
    shutil.copytree(run.folder, folder / run.id, ignore=shutil.ignore_patterns("two"))
    return Run(folder / run.id)


def start(run: Run, **variables: str) -> subprocess.Popen[bytes]:
    """A runner of `two`, as srun starts it on each node."""
    code = run.folder / "code"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "BRIDGE_"))}
    path = ":".join([str(code), variables.pop("PYTHONPATH", "")]).rstrip(":")
    return subprocess.Popen(
        [sys.executable, "-m", "bridge.stages", str(run.folder), "two", "0"],
        cwd=code,
        env={**inherited, "PYTHONPATH": path, "BRIDGE_PROCESSES": "2", "BRIDGE_CPUS": "2", **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for(condition: Callable[[], object], what: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.02)


def saved(run: Run) -> list[str]:
    return sorted(path.name for path in run.work(KEY).glob("scratch/checkpoints/step-*.pt"))


def last(run: Run) -> dict[str, Any]:
    return run.attempts(KEY)[-1]


def test_stopped_and_killed_on_the_way_it_is_the_undisturbed_run(run: Run, tmp_path: Path) -> None:
    """Two jobs at once, each on a port of its own. Both are told to stop; one is then killed, and goes on."""
    first, second = again(run, tmp_path / "a"), again(run, tmp_path / "b")
    runners = {"a": start(first), "b": start(second)}
    wait_for(lambda: len(workers(first)) == len(workers(second)) == 2, "all workers to start")
    ports = [environment(process)["MASTER_PORT"] for mine in (first, second) for process in workers(mine)]
    assert ports[0] == ports[1] != ports[2] == ports[3]
    told = set()

    def all_told() -> bool:
        for name, mine in (("a", first), ("b", second)):
            if name not in told and saved(mine):
                runners[name].send_signal(signal.SIGUSR2)
                runners[name].send_signal(signal.SIGTERM)
                told.add(name)
        return len(told) == 2

    wait_for(all_told, "both to save")
    assert [runner.wait(180) for runner in runners.values()] == [75, 75]
    assert last(first)["reason"].startswith("two/0: stopped after step ")
    assert not workers(first) and not workers(second)

    before = saved(first)
    runner = start(first)
    wait_for(lambda: saved(first) > before, "the second attempt to save")
    runner.kill()
    runner.wait(10)
    wait_for(lambda: not workers(first), "the workers to end with their runner", 5)
    assert start(first).wait(180) == 0
    assert_same(first, "two", run, "two")
    assert [line["event"] for line in first.attempts(KEY)] == ["start", "end", "start", "start", "end"]


def test_a_rank_that_is_killed_is_named(run: Run, tmp_path: Path) -> None:
    mine = again(run, tmp_path)
    runner = start(mine)
    wait_for(lambda: saved(mine), "the first save")
    [victim] = workers(mine, rank=1)
    os.kill(victim, signal.SIGKILL)
    assert runner.wait(60) == 1
    assert last(mine)["reason"].endswith("was ended by SIGKILL (out of memory?)")
    assert last(mine)["reason"].startswith("rank 1 on ")
    assert not workers(mine)


BROKEN_DISK = """\
import os, sys
def refuse(event, arguments):
    if event == "open" and str(arguments[0]).endswith(os.environ["BROKEN_FILE"]):
        raise OSError(5, "Input/output error", arguments[0])
if os.environ.get("RANK") == "1":
    sys.addaudithook(refuse)
"""


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("stages/base/0/config.json", "cannot be loaded as a language model: [Errno 5] Input/output error"),
        ("bridge/train/journal.py", "OSError: [Errno 5] Input/output error"),
        ("bridge/stages/worker.py", "ended with exit code 1; the log says why"),
    ],
)
def test_an_error_in_rank_1_is_the_reason(run: Run, tmp_path: Path, file: str, reason: str) -> None:
    """Its disk cannot read one file: a model that is refused, a module of the stage, a module of the worker itself."""
    mine = again(run, tmp_path)
    shutil.rmtree(mine.folder / "code/bridge/stages/__pycache__", ignore_errors=True)
    shutil.rmtree(mine.folder / "code/bridge/train/__pycache__", ignore_errors=True)
    (tmp_path / "sitecustomize.py").write_text(BROKEN_DISK, encoding="utf-8")
    assert start(mine, PYTHONPATH=str(tmp_path), BROKEN_FILE=file).wait(180) == 1
    assert reason in last(mine)["reason"], last(mine)
    assert not workers(mine)
    log = mine.log(KEY, 1).read_text(encoding="utf-8")
    assert log.rstrip().endswith(f"error: {last(mine)['reason']}"), log


def test_two_runners_as_on_two_nodes(run: Run, tmp_path: Path) -> None:
    """Node 1 comes first, and finds the address of an earlier attempt. It records nothing and seals nothing."""
    mine = again(run, tmp_path)
    work = mine.work(KEY)
    work.mkdir(parents=True)
    (work / "store.json").write_text('{"host": "127.0.0.1", "port": 1, "attempt": "7.3.0"}', encoding="utf-8")
    facts = {"BRIDGE_NODES": "2", "BRIDGE_PROCESSES": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    facts |= {"SLURM_RESTART_COUNT": "4", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}
    follower = start(mine, **facts, SLURM_NODEID="1")
    time.sleep(1)
    assert follower.poll() is None
    leader = start(mine, **facts, SLURM_NODEID="0")
    assert (leader.wait(180), follower.wait(60)) == (0, 0)
    assert_same(mine, "two", run, "two")  # where the two processes are makes no difference
    assert [line["event"] for line in mine.attempts(KEY)] == ["start", "end"]
    assert mine.log(KEY, 1).with_suffix(".node1.log").exists()
    assert not work.exists()
    again_at_node_1 = start(mine, **facts, SLURM_NODEID="1")  # a requeue of what is sealed
    assert again_at_node_1.wait(60) == 0
