"""Progress: a bar on a terminal, plain lines elsewhere, and a file for whoever watches."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from bridge.progress import Meter, duration

PROGRAM = "from bridge.progress import progress\nwith progress('sft/0', 4, 'steps', done=1) as m:\n"
PROGRAM += "    for _ in range(3): m.advance(1, loss=0.25)\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.4, "59s"), (60, "1m00s"), (185, "3m05s"), (3600, "1h00m"), (7800, "2h10m")]
)
def test_durations_as_people_write_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_resumed_job_does_not_count_old_work_in_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    meter = Meter("rl/0", 120, "steps", done=100, first=100, started=100.0)
    assert meter.left is None
    clock[0] = 110.0
    meter.advance(5, reward=0.5)
    assert (meter.rate, meter.left) == (0.5, 30.0)
    assert meter.line() == "rl/0: 105/120 steps, 0.5/s, 30s left  reward 0.5"


def test_in_a_log_file_there_are_plain_lines_and_the_facts_are_in_the_file(tmp_path: Path) -> None:
    environment = {**os.environ, "BRIDGE_PROGRESS": str(tmp_path / "progress.json")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("sft/0: 4/4 steps, ")
    assert lines[-1].endswith("0s left  loss 0.25")
    assert "\x1b" not in done.stderr
    facts = json.loads((tmp_path / "progress.json").read_text(encoding="utf-8"))
    assert (facts["done"], facts["total"], facts["unit"], facts["note"]) == (4, 4, "steps", "loss 0.25")


def test_on_a_terminal_there_is_a_bar() -> None:
    leader, follower = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=follower, env={**os.environ, "COLUMNS": "120"})
    process.wait(60)
    os.close(follower)
    shown = os.read(leader, 65536).decode("utf-8", "replace")
    os.close(leader)
    assert process.returncode == 0
    assert "━" in shown
    assert "4/4" in shown
    assert "steps/s" in shown
