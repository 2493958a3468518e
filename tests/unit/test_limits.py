"""Caps on attempts, time and silence."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from chain import write_tiny

from bridge.config.profile import Allocation
from bridge.graph import Edge
from bridge.launch.prepare import prepare
from bridge.record import create
from bridge.runs import Run
from bridge.stages.limits import exhausted, spent

SFT = Edge("sft", 0)


@pytest.mark.parametrize(
    ("attempts", "need", "why"),
    [
        ([], Allocation(max_attempts=1, max_total_time="1s"), None),
        ([5.0, 5.0], Allocation(max_attempts=3, max_total_time="11s"), None),
        ([5.0, 5.0], Allocation(max_attempts=2), "it was started 2 times, and max_attempts is 2"),
        ([3600.0, 60.0], Allocation(max_total_time="1h"), "its attempts took 1h01m, and max_total_time is 1h"),
    ],
)
def test_when_no_further_attempt_is_made(attempts: list[float], need: Allocation, why: str | None) -> None:
    found = exhausted(attempts, need)
    assert found == why if why is None else str(found).startswith(why)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create(prepare(write_tiny(tmp_path), [], "local").request, tmp_path)


def attempt(run: Run, number: int, start: float, end: float | None, job: str) -> None:
    run.note_attempt(SFT, {"event": "start", "attempt": number, "time": start, "job": job})
    if end is not None:
        run.note_attempt(SFT, {"event": "end", "attempt": number, "time": end, "job": job, "exit": 75})


def test_slurm_counts_the_attempts_of_one_job(run: Run) -> None:
    """The third was killed: it lasted until the last line of its log."""
    attempt(run, 1, 0.0, 10.0, "11_0")
    attempt(run, 2, 100.0, 130.0, "12_0")
    attempt(run, 3, time.time() - 50, None, "12_0")
    run.log(SFT, 3).parent.mkdir()
    run.log(SFT, 3).write_text("step 1", encoding="utf-8")
    first, second = spent(run, SFT, "12_0")
    assert first == 30.0
    assert second == pytest.approx(50.0, abs=2.0)


def test_this_machine_counts_the_attempts_since_the_last_launch(run: Run) -> None:
    attempt(run, 1, 0.0, 10.0, "4711")
    run.note_submission({"event": "launch", "time": 50.0})
    attempt(run, 2, 60.0, 65.0, "4712")
    attempt(run, 3, 70.0, None, "4713")  # killed before it wrote a line
    assert spent(run, SFT, "4714") == [5.0, 0.0]


HANGS = """
import subprocess, sys, time
from pathlib import Path
from bridge.config.profile import Allocation
from bridge.stages.job import StopFlag
from bridge.stages.limits import Watchdog
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
need = Allocation(max_quiet="2s", max_total_time="30m")
Watchdog(Path(sys.argv[1]), 0.0, need, StopFlag(), lambda why: print(why, flush=True)).start()
def stuck_here():
    time.sleep(60)
stuck_here()
"""


def test_a_stage_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """It says where every thread stands, notes the reason, and leaves no process behind."""
    done = subprocess.run(
        [sys.executable, "-c", HANGS, tmp_path / "progress.json"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    child, why = done.stdout.split("\n", 1)
    assert why.startswith("made no progress for ")
    assert "longer than its max_quiet" in why
    assert "in stuck_here" in done.stderr
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text(encoding="ascii").split()[2] == "Z"


SUSPENDED = """
import os, signal, subprocess, sys, time
from pathlib import Path
from bridge.config.profile import Allocation
from bridge.stages.job import StopFlag
from bridge.stages.limits import Watchdog
Watchdog(Path("/nowhere"), 0.0, Allocation(max_quiet="6s"), StopFlag(), print).start()
subprocess.Popen(["sh", "-c", f"sleep 1; kill -STOP {os.getpid()}; sleep 7; kill -CONT {os.getpid()}"])
time.sleep(9)
print("still here", flush=True)
os._exit(0)
"""


def test_time_in_which_slurm_suspended_the_job_does_not_count(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SUSPENDED], capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stdout) == (0, "still here\n")
