"""The stages init, sft, rl and eval on a small problem: what they write, and that a cut changes nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from small import StopAfter, job, settings, sums, write_dataset, write_model

from bridge.errors import UserError
from bridge.stages import eval as evaluation
from bridge.stages import init, rl, sft
from bridge.stages.job import Job, StopEarlyError
from bridge.train.model import load_model, load_tokenizer

SFT = {
    "steps": 12, "batch": 10, "micro_batch": 4, "lr": 1e-3, "schedule": "cosine", "warmup": 3, "save_every": 5,
    "log_every": 4, "samples_every": 6, "eval_every": 6,
}  # fmt: skip
RL = {
    "steps": 6, "prompts": 4, "group": 4, "minibatches": 2, "lr": 1e-3, "max_new_tokens": 24, "micro_batch": 3,
    "kl": 0.1, "save_every": 2, "log_every": 2, "samples_every": 3, "rollout_batch": 8, "format_reward": 0.1,
}  # fmt: skip
EVAL = {"samples": 4, "max_new_tokens": 14, "rollout_batch": 16}
TIMES = {"seconds", "tokens_per_second", "sample_seconds", "grade_seconds"}


@pytest.fixture(scope="module")
def taught(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that knows the form and some of the sums."""
    folder = tmp_path_factory.mktemp("taught")
    stage = settings("sft", steps=300, batch=20, micro_batch=20, lr=5e-3, schedule="linear", warmup=10)
    sft.run(job(folder, stage, model=base, data=data))
    return as_model(folder / "out", folder / "model")


def as_model(checkpoint: Path, folder: Path) -> Path:
    """What the convert stage does, by transformers itself."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(checkpoint))
    model.load_state_dict(final(checkpoint)["model"])
    model.save_pretrained(folder)
    for file in checkpoint.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def final(out: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(out / "checkpoint.pt", weights_only=True)
    return state


def lines(out: Path, name: str = "metrics") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / f"{name}.jsonl").read_bytes().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMES} for line in found]


def assert_same_run(a: Path, b: Path) -> None:
    """Bit for bit: weights, optimizer, metrics (but for times), sample tables."""
    one, two = final(a), final(b)
    assert one["step"] == two["step"]
    for name, weight in one["model"].items():
        assert torch.equal(weight, two["model"][name]), name
    for index, own in one["optimizer"]["state"].items():
        for name, value in own.items():
            assert torch.equal(value, two["optimizer"]["state"][index][name]), (index, name)
    assert lines(a) == lines(b)
    assert lines(a, "samples") == lines(b, "samples")


def test_init_is_decided_by_its_seed(tmp_path: Path, base: Path) -> None:
    again, other = write_model(tmp_path / "again"), write_model(tmp_path / "other", seed=1)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (base, again, other)]
    assert weights[0] == weights[1] != weights[2]


def test_init_writes_what_transformers_loads(base: Path) -> None:
    model, tokenizer = load_model(base, torch.device("cpu")), load_tokenizer(base)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer) == 19
    assert model.lm_head.weight.dtype == torch.float32
    assert (model.config.eos_token_id, model.config.pad_token_id) == (1, 0)
    assert model.generation_config.eos_token_id == 1
    assert tokenizer("1+2=3\n#### 3")["input_ids"] == [6, 15, 7, 16, 8, 4, 17, 17, 17, 17, 18, 8]
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "qwen2"


def test_init_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tokenizer: true"):
        init.run(job(tmp_path, settings("init"), tokenizer=tmp_path))


def test_sft_learns_and_writes_its_artifact(tmp_path: Path, base: Path, data: Path) -> None:
    held_out = write_dataset(tmp_path / "held", sums(20, start=100))
    stage = settings("sft", **{**SFT, "steps": 40, "lr": 5e-3, "schedule": "constant", "eval_data": "x"})
    summary = sft.run(job(tmp_path, stage, model=base, data=data, eval_data=held_out))
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        "checkpoint.pt", "config.json", "generation_config.json", "metrics.jsonl", "samples.jsonl", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    metrics = lines(out)
    assert [line["step"] for line in metrics] == list(range(4, 41, 4))
    assert metrics[0]["loss"] > 2.2 and metrics[-1]["loss"] < 1.2
    assert metrics[-1]["eval_loss"] < 1.2 and summary["eval_loss"] == metrics[-1]["eval_loss"]
    assert {"lr", "grad_norm", "tokens"} <= set(metrics[0])
    assert [row["step"] for row in lines(out, "samples")] == [step for step in range(6, 41, 6) for _ in range(4)]
    assert {"prompt", "completion", "reward", "gold"} <= set(lines(out, "samples")[0])
    assert json.loads((out / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"] == [1]
    state = final(out)
    assert {"model", "optimizer", "scheduler", "rng", "cursor", "step"} <= set(state)
    assert state["step"] == 40


def test_sft_on_the_response_leaves_the_prompt_alone(tmp_path: Path, base: Path) -> None:
    """The loss of the first step, worked out from the untrained model's own probabilities."""
    data = write_dataset(tmp_path / "data", sums(1))
    ids = load_tokenizer(base)("0+0=<sep>0+0=0\n0+0=0\n#### 0<eos>")["input_ids"]
    model = load_model(base, torch.device("cpu"))
    logp = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    each = [-logp[i - 1, ids[i]].item() for i in range(1, len(ids))]
    for name, expected in (("response", each[4:]), ("all", each)):
        stage = settings("sft", steps=1, batch=1, lr=1e-3, loss_on=name)
        sft.run(job(tmp_path / name, stage, model=base, data=data))
        assert lines(tmp_path / name / "out")[0]["loss"] == pytest.approx(sum(expected) / len(expected), abs=1e-5)


def test_sft_accumulation_does_not_change_the_result(tmp_path: Path, base: Path, data: Path) -> None:
    runs = []
    for size in (1, 10):
        sft.run(job(tmp_path / str(size), settings("sft", **{**SFT, "micro_batch": size}), model=base, data=data))
        runs.append(lines(tmp_path / str(size) / "out"))
    for one, two in zip(*runs, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], abs=1e-4)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)


def test_sft_epochs_see_every_row_exactly_so_often(tmp_path: Path, base: Path) -> None:
    data = write_dataset(tmp_path / "data", sums(7))
    stage = settings("sft", epochs=2, batch=4, lr=1e-3, log_every=1)
    assert sft.run(job(tmp_path, stage, model=base, data=data))["steps"] == 4  # 14 rows in 4 + 4 + 4 + 2
    tokens = [line["tokens"] for line in lines(tmp_path / "out")]
    rows = [len(row["prompt"]) + 1 + len(row["response"]) + 1 for row in sums(7)]
    assert sum(tokens) == 2 * sum(rows) and len(tokens) == 4


def test_sft_cuts_long_rows_and_drops_those_without_a_response(tmp_path: Path, base: Path) -> None:
    rows = [*sums(3), {"prompt": "1" * 40, "response": "1", "gold": "1"}]
    data = write_dataset(tmp_path / "data", rows)
    stage = settings("sft", steps=1, batch=3, lr=1e-3, max_length=20)
    summary = sft.run(job(tmp_path, stage, model=base, data=data))
    # row 0 has 5 + 19 tokens and is cut; row 3 has 41 prompt tokens and is cut and dropped
    assert (summary["rows"], summary["rows_cut"], summary["rows_dropped"]) == (3, 2, 1)
    with pytest.raises(UserError, match="max_length 5"):
        stage = settings("sft", steps=1, batch=3, lr=1e-3, max_length=5)
        sft.run(job(tmp_path / "none", stage, model=base, data=data))


@pytest.fixture(scope="module")
def sft_whole(base: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    sft.run(job(folder, settings("sft", **SFT), model=base, data=data))
    return folder / "out"


@pytest.mark.parametrize("looks", [1, 5, 7, 11])
def test_sft_stopped_and_started_again_is_the_undisturbed_run(
    tmp_path: Path, base: Path, data: Path, sft_whole: Path, looks: int
) -> None:
    stage = settings("sft", **SFT)
    with pytest.raises(StopEarlyError, match=f"after step {looks} of 12"):
        sft.run(job(tmp_path, stage, StopAfter(looks), model=base, data=data))
    torch.rand(5)  # another process has another random state
    sft.run(job(tmp_path, stage, model=base, data=data))
    assert_same_run(tmp_path / "out", sft_whole)


def test_sft_goes_back_to_the_checkpoint_before_a_torn_one(
    tmp_path: Path, base: Path, data: Path, sft_whole: Path
) -> None:
    stage = settings("sft", **SFT)
    with pytest.raises(StopEarlyError):
        sft.run(job(tmp_path, stage, StopAfter(11), model=base, data=data))
    newest = tmp_path / "scratch" / "checkpoints" / "step-00000011.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    sft.run(job(tmp_path, stage, model=base, data=data))
    assert_same_run(tmp_path / "out", sft_whole)


RUNNER = """
import importlib, json, sys
from pathlib import Path
from small import job, settings
kind, folder, values, model, data = sys.argv[1:]
stage = settings(kind, **json.loads(values))
importlib.import_module("bridge.stages." + kind).run(job(Path(folder), stage, model=Path(model), data=Path(data)))
"""


def run_and_kill(kind: str, folder: Path, values: dict[str, Any], model: Path, data: Path, metrics_line: int) -> None:
    """Run a stage in a process of its own and kill it once it has written so many lines of metrics."""
    environment = {"PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-c", RUNNER, kind, str(folder), json.dumps(values), str(model), str(data)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        metrics, deadline = folder / "out" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= metrics_line):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (folder / "out" / "checkpoint.pt").exists()


@pytest.mark.slow
def test_sft_killed_and_started_again_is_the_undisturbed_run(tmp_path: Path, base: Path, data: Path) -> None:
    values = {**SFT, "steps": 40, "samples_every": 10, "log_every": 1, "save_every": 7}
    sft.run(job(tmp_path / "whole", settings("sft", **values), model=base, data=data))
    run_and_kill("sft", tmp_path / "killed", values, base, data, 17)
    sft.run(job(tmp_path / "killed", settings("sft", **values), model=base, data=data))
    assert_same_run(tmp_path / "killed" / "out", tmp_path / "whole" / "out")


@pytest.fixture(scope="module")
def rl_whole(taught: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    rl.run(job(folder, settings("rl", **RL), model=taught, data=data))
    return folder / "out"


def test_rl_writes_its_artifact(rl_whole: Path) -> None:
    assert {path.name for path in rl_whole.iterdir()} == {
        "checkpoint.pt", "config.json", "generation_config.json", "metrics.jsonl", "samples.jsonl", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    metrics = lines(rl_whole)
    assert [line["step"] for line in metrics] == [2, 4, 6]
    for line in metrics:
        assert line["logprob_gap"] < 1e-4
        assert 0 <= line["kl"] < 1 and line["entropy"] > 0
        assert 0 < line["reward"] == pytest.approx(line["correct"])  # no completion has think and answer blocks
    rows = lines(rl_whole, "samples")
    assert [row["step"] for row in rows] == [3] * 16 + [6] * 16
    for start in range(0, 32, 4):
        group = rows[start : start + 4]
        assert len({row["prompt"] for row in group}) == 1
        assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-5)
        assert all((row["reward"] > 0) == (row["answer"] == row["gold"]) for row in group)


@pytest.mark.parametrize("looks", [1, 3, 4])
def test_rl_stopped_and_started_again_is_the_undisturbed_run(
    tmp_path: Path, taught: Path, data: Path, rl_whole: Path, looks: int
) -> None:
    stage = settings("rl", **RL)
    with pytest.raises(StopEarlyError, match=f"after step {looks} of 6"):
        rl.run(job(tmp_path, stage, StopAfter(looks), model=taught, data=data))
    rl.run(job(tmp_path, stage, model=taught, data=data))
    assert_same_run(tmp_path / "out", rl_whole)


@pytest.mark.slow
def test_rl_killed_and_started_again_is_the_undisturbed_run(tmp_path: Path, taught: Path, data: Path) -> None:
    values = {**RL, "steps": 20, "log_every": 1, "save_every": 3}
    rl.run(job(tmp_path / "whole", settings("rl", **values), model=taught, data=data))
    run_and_kill("rl", tmp_path / "killed", values, taught, data, 8)
    rl.run(job(tmp_path / "killed", settings("rl", **values), model=taught, data=data))
    assert_same_run(tmp_path / "killed" / "out", tmp_path / "whole" / "out")


def test_rl_raises_the_reward(tmp_path: Path, taught: Path) -> None:
    """Whatever is asked, 7 is right: about one answer in ten at first."""
    data = write_dataset(tmp_path / "data", [{**row, "gold": "7"} for row in sums(100)])
    stage = settings(
        "rl", steps=30, prompts=16, group=8, lr=1e-3, max_new_tokens=24, micro_batch=128, betas=[0.9, 0.99],
        warmup=5, log_every=5,
    )  # fmt: skip
    rl.run(job(tmp_path, stage, model=taught, data=data))
    metrics = lines(tmp_path / "out")
    assert metrics[0]["reward"] < 0.3 and metrics[-1]["reward"] > 0.6
    assert all(line["clip_fraction"] == 0 for line in metrics)  # one update per batch: nothing to clip


def test_rl_without_a_mixed_group_changes_nothing(tmp_path: Path, base: Path) -> None:
    """An untrained model never writes the answer, so no group teaches anything."""
    rows = [{"prompt": "1+1=", "response": "", "gold": "77777777"}]
    data = write_dataset(tmp_path / "data", rows)
    stage = settings("rl", steps=2, prompts=2, group=2, lr=1.0, max_new_tokens=4, weight_decay=0.5)
    rl.run(job(tmp_path, stage, model=base, data=data))
    before = load_model(base, torch.device("cpu")).state_dict()
    after = final(tmp_path / "out")["model"]
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())
    (line,) = lines(tmp_path / "out")
    assert line["groups_skipped"] == 1.0 and "loss" not in line


@pytest.mark.parametrize(("gold", "message"), [("", "row 2 has no right answer"), ("two", "row 1: .*two")])
def test_rl_needs_right_answers(tmp_path: Path, base: Path, gold: str, message: str) -> None:
    data = write_dataset(tmp_path / "data", [*sums(1), {"prompt": "1+1=", "response": "2", "gold": gold}])
    with pytest.raises(UserError, match=message):
        rl.run(job(tmp_path, settings("rl", steps=1, lr=1e-3), model=base, data=data))


def test_sft_needs_no_right_answers_but_worked_ones(tmp_path: Path, base: Path) -> None:
    rows = [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+2=", "response": "3", "gold": "three"}]
    stage = settings("sft", steps=2, batch=2, lr=1e-3, samples_every=1)
    sft.run(job(tmp_path, stage, model=base, data=write_dataset(tmp_path / "data", rows)))
    assert [row["reward"] for row in lines(tmp_path / "out", "samples")] == [None] * 4
    data = write_dataset(tmp_path / "data", [*rows, {"prompt": "1+3="}])
    with pytest.raises(UserError, match="row 3 has no worked solution"):
        sft.run(job(tmp_path / "none", stage, model=base, data=data))


@pytest.fixture(scope="module")
def evaluated(taught: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    evaluation.run(job(folder, settings("eval", **EVAL), model=taught, data=data))
    return folder / "out"


def test_eval_scores_are_those_of_its_samples(evaluated: Path) -> None:
    result = json.loads((evaluated / "eval.json").read_text(encoding="utf-8"))
    rows = pq.read_table(evaluated / "samples.parquet").to_pylist()
    assert (result["questions"], result["samples"]) == (100, 4)
    assert [(int(row["question"]), row["sample"]) for row in rows] == [(q, i) for q in range(100) for i in range(4)]
    by_question = [[row["correct"] for row in rows[i : i + 4]] for i in range(0, 400, 4)]
    mean = sum(map(sum, by_question)) / 400
    assert result["metrics"]["pass@1"]["value"] == pytest.approx(mean)
    assert result["metrics"]["pass@4"]["value"] == pytest.approx(sum(map(any, by_question)) / 100)
    assert result["metrics"]["strict_maj@4"]["value"] == pytest.approx(sum(sum(q) > 2 for q in by_question) / 100)
    low, high = result["metrics"]["pass@1"]["interval"]
    assert low < mean < high
    assert result["truncated"] == pytest.approx(sum(row["truncated"] for row in rows) / 400)
    assert sum(result["reasons"].values()) == 400
    for row in rows:
        assert row["correct"] == (row["answer"] == row["gold"])
        assert row["tokens"] == 14 if row["truncated"] else row["tokens"] <= 14
    assert 0 < result["truncated"] < 1  # answers of two lines do not fit
    assert len({row["seed"] for row in rows}) == 400
    assert any(len({row["completion"] for row in rows[i : i + 4]}) > 1 for i in range(0, 400, 4))


@pytest.mark.parametrize("change", [{}, {"rollout_batch": 64}])
def test_eval_stopped_and_started_again_samples_only_the_rest(
    tmp_path: Path, taught: Path, data: Path, evaluated: Path, change: dict[str, int]
) -> None:
    with pytest.raises(StopEarlyError, match="after 12 of 100 questions"):
        evaluation.run(job(tmp_path, settings("eval", **EVAL), StopAfter(3), model=taught, data=data))
    chunks = sorted((tmp_path / "scratch").glob("samples-*.parquet"))
    times = [path.stat().st_mtime_ns for path in chunks[:2]]
    chunks[2].write_bytes(chunks[2].read_bytes()[:50])  # as if torn: it is sampled again
    evaluation.run(job(tmp_path, settings("eval", **{**EVAL, **change}), model=taught, data=data))
    assert [path.stat().st_mtime_ns for path in chunks[:2]] == times
    one, two = (pq.read_table(folder / "samples.parquet").to_pylist() for folder in (tmp_path / "out", evaluated))
    assert one == two


def test_eval_greedy_and_a_limit(tmp_path: Path, taught: Path, data: Path) -> None:
    stage = settings("eval", samples=2, temperature=0.0, limit=5, max_new_tokens=20)
    result = evaluation.run(job(tmp_path, stage, model=taught, data=data))
    rows = pq.read_table(tmp_path / "out" / "samples.parquet").to_pylist()
    assert result["questions"] == 5 and len(rows) == 10
    assert all(rows[i]["completion"] == rows[i + 1]["completion"] for i in range(0, 10, 2))


@pytest.mark.parametrize(
    ("model", "message"),
    [("nowhere", "neither a folder nor"), ("empty", "no config.json"), ("bare", "no weights")],
)
def test_what_is_no_model(
    tmp_path: Path, base: Path, data: Path, model: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((base / "config.json").read_bytes())
    with pytest.raises(UserError, match=message):
        evaluation.run(job(tmp_path, settings("eval"), model=tmp_path / model, data=data))


def test_an_empty_dataset(tmp_path: Path, base: Path) -> None:
    data = write_dataset(tmp_path / "data", [])
    stage: Job = job(tmp_path, settings("sft", steps=1, lr=1e-3), model=base, data=data)
    with pytest.raises(UserError, match="no rows"):
        sft.run(stage)
