"""Following a training that is still running: every whole step once, never a half one, and a clean end."""

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIG, folder, loaded

from bridge.convert import convert, follow
from bridge.convert import follow as follow_function
from bridge.convert.api import Report
from bridge.convert.steps import steps

module = sys.modules[follow_function.__module__]


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "QUIET", 0.3)
    monkeypatch.setattr(module, "LOOK", 0.05)
    path = tmp_path / "ckpt"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


def save(path: Path, value: float) -> None:
    """A step as this project's trainer writes it: temporary name, then rename."""
    temporary = path.with_name(path.name + ".tmp")
    torch.save({"model": {"w": torch.full((4,), value)}, "step": int(value)}, temporary)
    temporary.replace(path)


def shards(path: Path, value: float, ranks: int = 2, write: int = 2) -> None:
    path.mkdir(exist_ok=True)
    for rank in range(write):
        torch.save({"w": torch.full((4,), value)}, path / f"model_world_size_{ranks}_rank_{rank}.pt")


def one(source: Path, out: Path) -> Report:
    return convert(source, out)


def test_steps_are_converted_as_they_appear_until_the_last(training: Path, tmp_path: Path) -> None:
    save(training / "step-00000001.pt", 1)

    def train() -> None:
        for step in (2, 3):
            time.sleep(0.5)
            save(training / f"step-{step:08d}.pt", step)

    trainer = threading.Thread(target=train)
    trainer.start()
    done = follow(training, tmp_path / "out", one, until=3)
    trainer.join()
    assert list(done.converted) == [f"step-{step:08d}.pt" for step in (1, 2, 3)]
    for step in (1, 2, 3):
        assert loaded(tmp_path / "out" / f"step-{step:08d}")["w"].tolist() == [step] * 4
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"step-{step:08d}" for step in (1, 2, 3)]
    again = follow(training, tmp_path / "out", one, until=3)
    assert again.converted == {}


def test_a_step_that_is_still_being_written_is_left_alone(training: Path, tmp_path: Path) -> None:
    shards(training / "global_step_1", 1)
    shards(training / "global_step_2", 2, write=1)
    growing = training / "global_step_3"
    shards(growing, 3)
    whole = (growing / "model_world_size_2_rank_1.pt").read_bytes()
    (growing / "model_world_size_2_rank_1.pt").write_bytes(whole[:100])
    seen: dict[str, list[str]] = {}

    def watched(source: Path, out: Path) -> Report:
        seen.setdefault(source.name, []).append(str((growing / "model_world_size_2_rank_1.pt").stat().st_size))
        return convert(source, out)

    def train() -> None:
        for size in range(200, len(whole), 200):
            (growing / "model_world_size_2_rank_1.pt").write_bytes(whole[:size])
            time.sleep(0.1)
        (growing / "model_world_size_2_rank_1.pt").write_bytes(whole)
        time.sleep(0.4)
        shards(training / "global_step_2", 2)

    trainer = threading.Thread(target=train)
    trainer.start()
    done = follow(training, tmp_path / "out", watched, until=3)
    trainer.join()
    assert set(done.converted) >= {"global_step_1", "global_step_3"}
    assert seen["global_step_3"] == [str(len(whole))]  # looked into once, and then whole
    assert done.refused == {}


def test_verls_tracker_holds_a_step_back(training: Path) -> None:
    for step in (1, 2):
        shards(training / f"global_step_{step}", step)
    names = [path.name for path in training.iterdir()]
    tracker = training / "latest_checkpointed_iteration.txt"
    for text, want in [("1", ["global_step_1"]), ("", ["global_step_2", "global_step_1"])]:
        tracker.write_text(text, encoding="utf-8")
        assert [path.name for path in steps(training, names)] == want


def test_a_seal_or_a_folder_that_is_gone_is_the_end(training: Path, tmp_path: Path) -> None:
    save(training / "step-00000001.pt", 1)
    (training / "SEAL.json").write_text("{}", encoding="utf-8")
    done = follow(training, tmp_path / "out", one)
    assert list(done.converted) == ["step-00000001.pt"]
    (training / "SEAL.json").unlink()
    threading.Timer(0.5, shutil.rmtree, [training]).start()
    assert follow(training, tmp_path / "out", one).converted == {}


def test_a_step_that_cannot_be_converted_is_reported_and_tried_again_when_it_changes(
    training: Path, tmp_path: Path
) -> None:
    (training / "step-00000001.pt").write_bytes(b"\x80\x02cposix\nsystem\n.")
    save(training / "step-00000002.pt", 2)
    shards(training / "global_step_3", 3, write=1)  # cut short, and after the seal nobody writes any more
    (training / "SEAL.json").write_text("{}", encoding="utf-8")
    done = follow(training, tmp_path / "out", one)
    assert list(done.converted) == ["step-00000002.pt"]
    assert "bare pickle" in done.refused["step-00000001.pt"]
    assert "1 of its 2 files are missing" in done.refused["global_step_3"]
    save(training / "step-00000001.pt", 1)
    assert list(follow(training, tmp_path / "out", one).converted) == ["step-00000001.pt"]


COMMAND = [sys.executable, "-m", "bridge", "convert", "--follow"]


@pytest.fixture
def followed(tmp_path: Path) -> Iterator[tuple[Path, Path, Any]]:
    source = folder(tmp_path / "ckpt", {"w": torch.ones(3)}, "step-00000001.pt").parent
    out = tmp_path / "out"
    process = subprocess.Popen([*COMMAND, str(source), str(out)], stderr=subprocess.PIPE, text=True)
    yield source, out, process
    process.kill()


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_130(followed: tuple[Path, Path, Any], number: int) -> None:
    _, out, process = followed
    wait_for(out / "step-00000001" / "config.json")
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors
    assert [path.name for path in out.iterdir()] == ["step-00000001"]


def test_a_killed_follower_goes_on_where_it_was(followed: tuple[Path, Path, Any]) -> None:
    source, out, process = followed
    wait_for(out / "step-00000001" / "config.json")
    process.kill()
    process.wait()
    (out / ".step-00000002.tmp-1").mkdir()  # what a kill in the middle of the next step would leave
    save(source / "step-00000002.pt", 2)
    done = subprocess.run(
        [*COMMAND, str(source), str(out), "--until", "2", "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["converted"]) == ["step-00000002.pt"]
    assert sorted(path.name for path in out.iterdir()) == ["step-00000001", "step-00000002"]
