"""Experiments whose SFT runs in several processes, and a look at those processes. Shared by two test folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from chain import TINY

from bridge.graph import Edge
from bridge.runs import Run

# 19 passes over 43 rows in batches of 16 end with a step of one row, so all ranks but the first have none there; five
# held-out rows are no multiple of anything either.
SFT = """\
    kind: sft
    model: $model
    data: train_data
    eval_data: held_out
    epochs: 19
    batch: 16
    micro_batch: 3
    lr: 3e-3
    schedule: cosine
    warmup: 5
    save_every: 4
    eval_every: 10
    samples_every: 40
    log_every: 1
"""
STEPS = 52


def experiment(folder: Path, **resources: str) -> Path:
    """An experiment with one SFT stage for each name, all with the same settings but for their resources."""
    head = TINY[: TINY.index("stages:")]
    stages = [
        "stages:\n  train_data: {kind: data, split: sft, size: 43, tokenizer: true}\n",
        "  held_out: {kind: data, split: test, size: 5}\n",
    ]
    stages += [f"  {name}:\n{SFT}    resources: {needed}\n" for name, needed in resources.items()]
    path = folder / "together.yaml"
    path.write_text(head + "".join(stages), encoding="utf-8")
    return path


def workers(run: Run, rank: int | None = None) -> list[int]:
    """Every worker that is alive, or those of one rank. All processes of a run work in its `code` folder."""
    found = []
    for process in (int(path.name) for path in Path("/proc").glob("[0-9]*")):
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            ours = b"bridge.stages.worker" in words and Path(f"/proc/{process}/cwd").resolve() == run.folder / "code"
            if ours and rank in (None, int(environment(process)["RANK"])):
                found.append(process)
        except (OSError, KeyError):  # it has just ended, or just begun
            continue
    return found


def environment(process: int) -> dict[str, str]:
    """The environment that a process was started with."""
    pairs = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def metrics(run: Run, stage: str) -> list[dict[str, Any]]:
    text = (run.artifact(Edge(stage, 0)) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def final(run: Run, stage: str) -> dict[str, Any]:
    """The final checkpoint."""
    state: dict[str, Any] = torch.load(run.artifact(Edge(stage, 0)) / "checkpoint.pt", weights_only=True)
    return state


def assert_like_one_process(run: Run, stage: str, one: str) -> None:
    """Each step's loss, gradient and tokens, the held-out loss and the weights, up to the rounding of float32."""
    ours, theirs = metrics(run, stage), metrics(run, one)
    assert [line["step"] for line in ours] == list(range(1, STEPS + 1))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["tokens"] == other["tokens"]
        assert mine.keys() == other.keys()
        for name in {"loss", "grad_norm", "eval_loss"} & set(mine):
            assert abs(mine[name] - other[name]) < 2e-5, (mine["step"], name)
    weights, expected = final(run, stage)["model"], final(run, one)["model"]
    assert max(float((weights[name] - expected[name]).abs().max()) for name in expected) < 2e-5


def assert_same(run: Run, stage: str, other: Run, its: str) -> None:
    """Bit for bit: weights, optimizer, random generators of all ranks, and the loss of every step."""
    one, two = final(run, stage), final(other, its)
    assert _leaves(one) == _leaves(two)
    for mine, theirs in zip(metrics(run, stage), metrics(other, its), strict=True):
        assert [mine[name] for name in ("step", "loss", "grad_norm")] == [
            theirs[name] for name in ("step", "loss", "grad_norm")
        ]


def _leaves(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy().tobytes()
    if isinstance(value, dict):
        return {name: _leaves(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_leaves(part) for part in value]
    return value
