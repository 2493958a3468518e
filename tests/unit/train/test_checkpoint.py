"""Training checkpoints: readable without code, whole or not there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bridge.train.checkpoint import latest, read_checkpoint, save_step, write_checkpoint


def state(step: int) -> dict[str, Any]:
    return {"step": step, "model": {"w": torch.full((100, 100), float(step))}, "window": {"loss": [0.5]}}


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "torn":
        data = data[: len(data) // 2]
    elif how == "flipped":
        data[data.find(bytes(torch.full((4,), 3.0).numpy())) + 2] ^= 0x40  # inside the tensor of step 3
    else:
        data = bytearray()
    path.write_bytes(data)


def test_it_reads_back_without_running_code(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c.pt", state(4))
    got = torch.load(tmp_path / "c.pt", weights_only=True)
    assert got["step"] == 4 and got["window"] == {"loss": [0.5]}
    assert torch.equal(got["model"]["w"], torch.full((100, 100), 4.0))


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 9, 10, 200):
        save_step(tmp_path, step, state(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010.pt", "step-00000200.pt"]
    found = latest(tmp_path)
    assert found is not None and found["step"] == 200


@pytest.mark.parametrize("how", ["torn", "flipped", "empty"])
def test_a_damaged_newest_file_gives_the_one_before(tmp_path: Path, how: str) -> None:
    save_step(tmp_path, 2, state(2))
    save_step(tmp_path, 3, state(3))
    damage(tmp_path / "step-00000003.pt", how)
    assert read_checkpoint(tmp_path / "step-00000003.pt") is None
    found = latest(tmp_path)
    assert found is not None and found["step"] == 2


def test_nothing_to_go_back_to(tmp_path: Path) -> None:
    assert latest(tmp_path / "missing") is None
    save_step(tmp_path, 3, state(3))
    damage(tmp_path / "step-00000003.pt", "torn")
    assert latest(tmp_path) is None


def test_a_pickle_that_runs_code_is_not_read(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"step": 1, "model": Evil()}, tmp_path / "step-00000001.pt")
    assert latest(tmp_path) is None
    assert not (tmp_path / "ran").exists()


WRITER = """
import sys, torch
from pathlib import Path
from bridge.train.checkpoint import save_step
step = 0
while True:
    step += 1
    save_step(Path(sys.argv[1]), step, {"step": step, "model": {"w": torch.full((300, 300), float(step))}})
    print(step, flush=True)
"""


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(3):
            assert writer.stdout.readline()
        time.sleep(0.0137)
        writer.send_signal(signal.SIGKILL)
        seen = [int(line) for line in writer.stdout] or [3]
    found = latest(tmp_path)
    assert found is not None
    assert found["step"] >= seen[-1]
    assert bool((found["model"]["w"] == found["step"]).all())
