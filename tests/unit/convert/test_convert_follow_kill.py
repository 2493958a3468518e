"""A follower that is killed again and again: what it leaves is whole, and in the end everything is bit-equal."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from checkpoints import CONFIG
from safetensors.torch import load_file

STEPS = 6
COMMAND = [sys.executable, "-m", "bridge", "convert", "--follow"]


def truth(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"layer.{index}.weight": torch.randn(512, 2048, generator=generator) for index in range(4)}


def write_slowly(path: Path, step: int) -> None:
    """As a foreign trainer does it: under the final name, in pieces, with pauses."""
    whole = path.with_name("whole.tmp")
    torch.save({"model": truth(step), "step": step}, whole)
    data = whole.read_bytes()
    whole.unlink()
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), len(data) // 6):
            file.write(data[start : start + len(data) // 6])
            time.sleep(0.2)


def assert_bit_equal(folder: Path) -> None:
    found, want = load_file(folder / "model.safetensors"), truth(int(folder.name.removeprefix("step-")))
    assert found.keys() == want.keys()
    assert all(torch.equal(found[name], want[name]) for name in want), folder
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["torch_dtype"] == "float32"


def test_killed_at_random_moments(tmp_path: Path) -> None:
    source, out = tmp_path / "ckpt", tmp_path / "out"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")

    def train() -> None:
        for step in range(1, STEPS + 1):
            write_slowly(source / f"step-{step}.pt", step)

    trainer = threading.Thread(target=train)
    trainer.start()
    draw = random.Random(0)
    cut = 0
    for _ in range(4):
        process = subprocess.Popen([*COMMAND, str(source), str(out)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        before = set(out.glob(".*.tmp-*"))
        while not set(out.glob(".*.tmp-*")) - before:  # until a conversion has begun
            assert time.monotonic() < deadline
        time.sleep(draw.choice([0, 0.001, 0.003, 0.01, 0.03]))
        process.kill()
        process.wait()
        cut += bool(set(out.glob(".*.tmp-*")))
        for folder in out.glob("step-*"):
            assert_bit_equal(folder)
    assert cut  # at least one of the kills was in the middle
    trainer.join()
    command = [*COMMAND, str(source), str(out), "--until", str(STEPS), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["refused"] == {}
    assert sorted(path.name for path in out.iterdir()) == [f"step-{step}" for step in range(1, STEPS + 1)]
    for folder in out.iterdir():
        assert_bit_equal(folder)
