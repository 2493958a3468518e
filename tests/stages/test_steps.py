"""Models of a training that is still running: whole, bit-equal, made whatever stops it, and never in its way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small import StopAfter, job, settings

from bridge.stages import rl, sft
from bridge.stages.job import StopEarlyError
from bridge.stages.steps import Steps, kept_steps
from bridge.train.checkpoint import save_step
from bridge.train.model import copy_configuration, load_model

RL = {"steps": 6, "prompts": 8, "group": 8, "lr": 1e-3, "max_new_tokens": 16, "save_every": 3}
SFT = {"batch": 10, "micro_batch": 10, "lr": 1e-3, "save_every": 5}
KILLED = {**SFT, "steps": 40, "keep_every": 4}


@pytest.fixture(scope="module")
def taught(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is right now and then, so that RL has something to learn from."""
    folder = tmp_path_factory.mktemp("taught")
    stage = settings("sft", steps=200, batch=20, micro_batch=20, lr=5e-3, keep_every=200)
    sft.run(job(folder, stage, model=base, data=data))
    return folder / "out" / "steps" / "step-00000200"


def weights(folder: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}


def trained(out: Path) -> dict[str, bytes]:
    state = torch.load(out / "checkpoint.pt", weights_only=True)["model"]
    return {name: tensor.numpy().tobytes() for name, tensor in state.items() if name != "lm_head.weight"}  # tied


def until(found: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_every_kept_step_of_rl_is_the_model_of_that_step(tmp_path: Path, taught: Path, data: Path) -> None:
    stage = settings("rl", **RL, keep_every=2)
    summary = rl.run(job(tmp_path / "whole", stage, model=taught, data=data))
    steps = tmp_path / "whole" / "out" / "steps"
    assert summary["models"] == [2, 4, 6]
    assert sorted(path.name for path in steps.iterdir()) == [f"step-{n:08d}" for n in (2, 4, 6)]
    assert weights(steps / "step-00000006") == trained(tmp_path / "whole" / "out")
    assert len({weights(path)["model.norm.weight"] for path in steps.iterdir()}) == 3
    short = settings("rl", **{**RL, "steps": 4})  # the learning rate is constant, so its end is the other's step 4
    rl.run(job(tmp_path / "short", short, model=taught, data=data))
    assert weights(steps / "step-00000004") == trained(tmp_path / "short" / "out")
    assert not (tmp_path / "short" / "out" / "steps").exists()
    assert load_model(steps / "step-00000002", torch.device("cpu")).generation_config.eos_token_id == [1]


def test_stopped_at_any_step_and_gone_on_makes_the_same_models(tmp_path: Path, base: Path, data: Path) -> None:
    stage = settings("sft", **SFT, steps=9, keep_every=2)
    sft.run(job(tmp_path / "whole", stage, model=base, data=data))
    for looks in (1, 4, 7):
        folder = tmp_path / f"cut{looks}"
        with pytest.raises(StopEarlyError):
            sft.run(job(folder, stage, StopAfter(looks), model=base, data=data))
        summary = sft.run(job(folder, stage, model=base, data=data))
        assert summary["models"] == [2, 4, 6, 8]
        for n in (2, 4, 6, 8):
            name = f"step-{n:08d}"
            assert weights(folder / "out/steps" / name) == weights(tmp_path / "whole/out/steps" / name), (looks, n)


RUN = """
import sys; from pathlib import Path
from small import job, settings
from test_steps import KILLED
from bridge.stages import sft
folder, base, data = map(Path, sys.argv[1:])
sft.run(job(folder, settings("sft", **KILLED), model=base, data=data))
"""


def test_killed_training_leaves_no_follower_and_goes_on_to_the_same_models(
    tmp_path: Path, base: Path, data: Path
) -> None:
    places = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": places}
    command = [sys.executable, "-c", RUN, str(tmp_path / "killed"), str(base), str(data)]
    steps = tmp_path / "killed" / "out" / "steps"
    process = subprocess.Popen(command, env=environment)
    until(lambda: (steps / "step-00000004").exists())
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not followers(steps))
    for model in steps.glob("step-*"):
        assert load_file(model / "model.safetensors"), model
    for folder in ("killed", "whole"):
        summary = sft.run(job(tmp_path / folder, settings("sft", **KILLED), model=base, data=data))
        assert summary["models"] == list(range(4, 41, 4))
    names = [f"step-{n:08d}" for n in range(4, 41, 4)]
    assert sorted(path.name for path in steps.iterdir()) == names
    for name in names:
        assert weights(steps / name) == weights(tmp_path / "whole/out/steps" / name), name


def followers(steps: Path) -> list[Path]:
    """The processes that convert into `steps`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"bridge.stages.steps" in (words := path.read_bytes()) and str(steps).encode() in words.split(b"\0"):
                found.append(path)
        except OSError:
            continue
    return found


def state(model: Path, step: int) -> dict[str, object]:
    return {"step": step, "model": load_model(model, torch.device("cpu")).state_dict()}


def test_checkpoints_wait_for_their_models_and_then_go(tmp_path: Path, base: Path) -> None:
    saved, out = tmp_path / "saved", tmp_path / "steps"
    saved.mkdir()
    copy_configuration(base, saved, [1])
    with kept_steps(saved, out, 2) as steps:
        steps.start(0)
        for step in range(1, 30):
            save_step(saved, step, state(base, step), steps.wanted)
        assert steps.finish() == list(range(2, 30, 2))
        save_step(saved, 30, state(base, 30), steps.wanted)
    assert sorted(path.name for path in saved.glob("*.pt")) == ["step-00000029.pt", "step-00000030.pt"]


def test_a_failed_conversion_stops_neither_the_training_nor_keeps_its_checkpoints(
    tmp_path: Path, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved, out = tmp_path / "saved", tmp_path / "steps"
    saved.mkdir()
    copy_configuration(base, saved, [1])
    with kept_steps(saved, out, 1) as steps:
        steps.start(0)
        for step in (1, 2):
            save_step(saved, step, state(base, step), steps.wanted)
        until(lambda: (out / "step-00000002").exists())
        (saved / "config.json").write_text("[]", encoding="utf-8")
        save_step(saved, 3, state(base, 3), steps.wanted)
        until(lambda: not steps.wanted(saved / "step-00000003.pt"))
        for step in (4, 5, 6):
            save_step(saved, step, state(base, step), steps.wanted)
        assert steps.finish() == [1, 2]
    assert len(list(saved.glob("*.pt"))) == 2
    assert "no more models of single steps are made" in capfd.readouterr().err


def test_models_of_a_lost_past_are_made_again(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        (tmp_path / "steps" / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "steps" / ".step-00000008.tmp-1").mkdir()
    (tmp_path / "saved").mkdir()
    steps = Steps(tmp_path / "saved", tmp_path / "steps", 2)
    steps.start(4)
    assert steps.finish() == [2, 4]
    assert len(list((tmp_path / "steps").iterdir())) == 2
