"""The whole chain on this machine: data → SFT → convert → RL → convert → evaluate, by the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from chain import bridge, bridge_json, command, tree, write_tiny

from bridge.artifacts import open_artifact
from bridge.graph import Edge
from bridge.runs import Run

STAGES = {
    "train_data": 1, "rl_data": 1, "test_data": 1, "base": 1, "sft": 1, "convert_sft": 1, "rl": 1, "convert_rl": 1,
    "eval": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("it's a folder; echo")


@pytest.fixture(scope="module")
def run(runs: Path) -> Run:
    """One finished run, shared by the tests of this file."""
    value = bridge_json("launch", write_tiny(runs), "--wait", runs=runs)
    assert set(value) == {"run", "dir", "jobs"}
    return Run(Path(value["dir"]))


def test_every_stage_is_sealed_and_whole(run: Run) -> None:
    counts: dict[str, int] = {}
    for key, element in run.elements.items():
        seal = open_artifact(run.artifact(key), element.output)
        assert seal.fingerprint == element.fingerprint
        assert seal.made_by == f"{run.id}/{element.name}"
        counts[key.stage] = counts.get(key.stage, 0) + 1
    assert counts == STAGES
    assert not list(run.folder.rglob(".*.work"))


def test_status_as_json_and_as_text(run: Run, runs: Path) -> None:
    value = bridge_json("status", run.id, runs=runs)
    assert value["state"] == "done"
    assert len(value["elements"]) == 11
    first = value["elements"][0]
    assert set(first) >= {"stage", "element", "state", "reason", "job", "attempts", "artifact"}
    assert (first["stage"], first["state"], first["attempts"]) == ("train_data", "done", 1)
    assert "eval/2" in bridge("status", run.id, runs=runs).stdout
    assert run.id in bridge("status", runs=runs).stdout


def test_a_second_launch_submits_nothing(run: Run, runs: Path) -> None:
    before = tree(run.folder / "stages")
    again = bridge_json("launch", runs / "tiny.yaml", "--wait", runs=runs)
    assert again == {"run": run.id, "dir": str(run.folder), "jobs": {}}
    assert bridge_json("resume", run.id, "--wait", runs=runs)["jobs"] == {}
    assert tree(run.folder / "stages") == before
    assert [j["sealed"] for j in bridge_json("plan", runs / "tiny.yaml", runs=runs)["jobs"]] == list(STAGES.values())


def test_logs(run: Run, runs: Path) -> None:
    shown = bridge("logs", run.id, "sft", runs=runs).stdout
    assert shown.startswith("==> sft/0 <==\n") and shown.endswith("sft/0: sealed\n")
    assert "24/24 steps" in bridge("logs", run.id, "sft/0", "--attempt", 1, runs=runs).stdout
    assert "has had 1 attempts" in bridge("logs", run.id, "sft/0", "--attempt", 2, runs=runs, check=2).stderr
    assert "did you mean 'sft'" in bridge("logs", run.id, "stf", runs=runs, check=2).stderr
    log = run.log(Edge("sft", 0), 1)
    nodes = {log.with_suffix(f".node{node}.log"): text for node, text in ((1, ""), (2, "two\n"), (10, "ten\n"))}
    for path, text in nodes.items():
        path.write_text(text, encoding="utf-8")
    shown = bridge("logs", run.id, "sft/0", runs=runs).stdout
    assert shown.endswith("sealed\n==> sft/0 on node 2 <==\ntwo\n==> sft/0 on node 10 <==\nten\n")
    for path in nodes:
        path.unlink()


def test_the_record_says_what_was_run(run: Run) -> None:
    record = json.loads((run.folder / "run.json").read_text(encoding="utf-8"))
    assert record["experiment"]["name"] == "tiny"
    assert len(record["code"]["digest"]) == 64
    assert record["versions"]["torch"]
    assert (run.folder / "code" / "bridge" / "stages" / "sft.py").is_file()
    assert (run.folder / "experiment.yaml").read_text(encoding="utf-8").startswith("name: tiny")
    assert [line["event"] for line in run.submissions()].count("launch") == 1


def test_the_models_load_in_transformers_and_hold_the_checkpoint(run: Run) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("sft", "rl"):
        folder = run.folder / "stages" / f"convert_{name}" / "0"
        model = AutoModelForCausalLM.from_pretrained(folder)
        saved = torch.load(run.folder / "stages" / name / "0" / "checkpoint.pt", weights_only=True)["model"]
        for key, value in model.state_dict().items():
            assert torch.equal(value, saved[key]), key
        assert AutoTokenizer.from_pretrained(folder)("#### 7").input_ids


def test_evaluations_hold_every_sample(run: Run) -> None:
    for index in range(3):
        folder = run.folder / "stages" / "eval" / str(index)
        rows = pq.read_table(folder / "samples.parquet").to_pylist()
        assert len(rows) == 20 * 8
        value = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
        share = sum(row["correct"] for row in rows) / len(rows)
        assert value["metrics"]["pass@1"]["value"] == pytest.approx(share)
        low, high = value["metrics"]["pass@8"]["interval"]
        assert 0 <= low <= value["metrics"]["pass@8"]["value"] <= high <= 1


def test_compare(run: Run, runs: Path) -> None:
    folder = run.folder / "stages" / "eval"
    rows = {row["metric"]: row for row in bridge_json("compare", folder / "1", folder / "2", runs=runs)}
    a, b = (json.loads((folder / n / "eval.json").read_text(encoding="utf-8"))["metrics"] for n in "12")
    row = rows["pass@1"]
    assert row["questions"] == 20
    assert row["difference"] == pytest.approx(b["pass@1"]["value"] - a["pass@1"]["value"])
    assert (
        "is a model, but a eval"
        in bridge("compare", run.folder / "stages/base/0", folder / "1", runs=runs, check=2).stderr
    )


def test_metrics_and_sample_tables(run: Run) -> None:
    sft = [json.loads(line) for line in (run.folder / "stages/sft/0/metrics.jsonl").open(encoding="utf-8")]
    assert [line["step"] for line in sft] == list(range(1, 25))
    assert sft[-1]["loss"] < sft[0]["loss"]
    samples = [json.loads(line) for line in (run.folder / "stages/rl/0/samples.jsonl").open(encoding="utf-8")]
    assert {"prompt", "completion", "reward", "advantage"} <= set(samples[0])


def test_inspect_and_eval_of_what_a_run_made(run: Run, runs: Path, tmp_path: Path) -> None:
    facts = bridge_json("inspect", run.folder / "stages/sft/0", runs=runs)
    assert (facts["artifact"], facts["step"]) == ("checkpoint", 24)
    out = tmp_path / "scores"
    words = ("eval", run.folder / "stages/convert_sft/0", "--task", run.folder / "stages/test_data/0", "--samples", 2)
    value = bridge_json(*words, "--limit", 4, "-o", out, "max_new_tokens=32", runs=runs)
    assert (value["questions"], value["samples"]) == (4, 2)
    assert open_artifact(out, "eval")
    assert bridge_json(*words, "--limit", 4, "-o", out, "max_new_tokens=32", runs=runs) == value
    assert "holds something else" in bridge(*words, "--limit", 3, "-o", out, runs=runs, check=2).stderr


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain: {what}"
        time.sleep(0.01)


def over(run: Run, runs: Path) -> dict[str, dict[str, Any]]:
    """The states of all elements once nothing of the run is queued or running."""
    value: dict[str, Any] = {}

    def settled() -> bool:
        value.update(bridge_json("status", run.id, runs=runs))
        return value["state"] not in ("running", "pending", "waiting", "requeued")

    wait_for(settled, "the run to settle", 300)
    return {f"{e['stage']}/{e['element']}": e for e in value["elements"]}


LONGER = ("stages.sft.steps=200", "stages.rl.steps=12", "stages.rl.save_every=1", "stages.eval.limit=4")


def test_kill_in_the_middle_then_resume_gives_the_same_weights(tmp_path: Path) -> None:
    """SIGKILL at SFT, later at RL; each time the run says what happened, and resume goes on from the last save."""
    undisturbed = bridge_json(
        "launch", write_tiny(tmp_path), *LONGER, "--wait", "--runs", tmp_path / "a", runs=tmp_path
    )
    folder, runs = Path(undisturbed["dir"]), tmp_path / "b"
    run = Run(Path(bridge_json("launch", write_tiny(tmp_path), *LONGER, runs=runs)["dir"]))
    for stage in ("sft", "rl"):
        work = run.folder / "stages" / stage / ".0.work"
        wait_for(lambda work=work: len(list(work.glob("scratch/checkpoints/step-*.pt"))) > 1, f"{stage} to save twice")  # type: ignore[misc]
        lines = (run.folder / "attempts" / stage / "0.jsonl").read_text(encoding="utf-8").splitlines()
        os.kill(json.loads(lines[-1])["pid"], signal.SIGKILL)
        states = over(run, runs)
        assert states[f"{stage}/0"]["state"] == "failed"
        assert "killed" in states[f"{stage}/0"]["reason"]
        assert not (run.folder / "stages" / stage / "0").exists()
        blocked = states["eval/2"]
        assert (blocked["state"], blocked["reason"].split(":")[0]) == ("blocked", f"{stage}/0 failed")
        assert bridge_json("resume", run.id, runs=runs)["jobs"]
    assert {s["state"] for s in over(run, runs).values()} == {"done"}
    for stage in ("sft", "rl"):
        total = {"sft": 200, "rl": 12}[stage]
        log = (run.folder / "logs" / stage / "0.2.log").read_text(encoding="utf-8")
        assert f"{stage}/0: {total}/{total} steps" in log
        assert f"{stage}/0: 1/{total} steps" not in log  # it did not begin again
        ours, theirs = (f / f"stages/convert_{stage}/0/model.safetensors" for f in (run.folder, folder))
        assert ours.read_bytes() == theirs.read_bytes()
        metrics = (run.folder / f"stages/{stage}/0/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["step"] for line in metrics] == list(range(1, total + 1))


def test_ctrl_c_stops_everything_and_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "BRIDGE_RUNS": str(tmp_path)}
    words = command("launch", write_tiny(tmp_path), "--wait")
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    wait_for(lambda: list(tmp_path.glob("tiny-*/stages/sft/.0.work")), "SFT to begin")
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "go on with `bridge-rl resume tiny-" in printed
    run = Run(next(tmp_path.glob("tiny-*")))
    find = ["pgrep", "-f", str(run.folder)]
    wait_for(lambda: not subprocess.run(find, capture_output=True, check=False).stdout, "every process to end", 20)
    assert bridge_json("status", run.id, runs=tmp_path)["state"] == "cancelled"
    bridge("resume", run.id, "--wait", runs=tmp_path)
    assert bridge_json("status", run.id, runs=tmp_path)["state"] == "done"


def test_cancel_one_stage_leaves_the_rest(tmp_path: Path) -> None:
    value = bridge_json("launch", write_tiny(tmp_path), runs=tmp_path)
    run = Run(Path(value["dir"]))
    wait_for(lambda: (run.folder / "stages/sft/.0.work").exists(), "SFT to begin")
    bridge("cancel", run.id, "rl", runs=tmp_path)
    states = {name: e["state"] for name, e in over(run, tmp_path).items()}
    assert (states["sft/0"], states["eval/1"]) == ("done", "done")
    assert (states["rl/0"], states["convert_rl/0"], states["eval/2"]) == ("cancelled",) * 3


def test_the_queue_process_is_killed(tmp_path: Path) -> None:
    """Its jobs go on; resume starts another queue that waits for them and finishes the run in one go."""
    value = bridge_json("launch", write_tiny(tmp_path), "stages.sft.steps=400", "stages.eval.limit=4", runs=tmp_path)
    run = Run(Path(value["dir"]))
    wait_for(lambda: len(list(run.work(Edge("sft", 0)).glob("scratch/checkpoints/*.pt"))) > 1, "SFT to save")
    os.kill(int(value["jobs"]["sft"][0]), signal.SIGKILL)
    assert bridge_json("status", run.id, runs=tmp_path)["state"] == "running"
    bridge("resume", run.id, "--wait", runs=tmp_path)
    assert len(run.attempts(Edge("sft", 0))) == 2  # one start, one end: it was never run twice


def test_cancel_from_another_folder_stops_the_process(tmp_path: Path) -> None:
    """The runs folder is spelled in another way: a link, a relative path."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    words = ("launch", write_tiny(tmp_path), "stages.sft.steps=5000", "--runs", "link")
    value = json.loads(bridge(*words, "--json", runs=tmp_path, cwd=tmp_path).stdout)
    run = Run(Path(value["dir"]))
    wait_for(lambda: run.work(Edge("sft", 0)).exists(), "SFT to begin")
    bridge("cancel", run.id, runs=tmp_path / "real")
    find = ["pgrep", "-f", run.id]
    wait_for(lambda: not subprocess.run(find, capture_output=True, check=False).stdout, "every process to end", 20)
    assert {s["state"] for n, s in over(run, tmp_path / "real").items() if n.startswith(("sft", "rl/"))} == {
        "cancelled"
    }


def test_a_damaged_artifact_is_made_again_and_nothing_is_lost(run: Run, runs: Path) -> None:
    """A file of a sealed artifact is gone: it no longer counts, and resume makes it again."""
    folder = run.folder / "stages" / "convert_rl" / "0"
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    assert bridge_json("status", run.id, runs=runs)["state"] != "done"
    bridge("resume", run.id, "--wait", runs=runs)
    assert (folder / "model.safetensors").read_bytes() == weights
    assert len(list(folder.parent.glob(".0.damaged-*"))) == 1


def test_a_copied_data_file_scores_as_in_the_run(run: Run, runs: Path, tmp_path: Path) -> None:
    """The rows alone carry how responses begin: evaluated by hand, a model gets the samples that it got in the run."""
    rows = tmp_path / "rows.parquet"
    rows.write_bytes((run.folder / "stages/test_data/0/data.parquet").read_bytes())
    words = ("eval", run.folder / "stages/convert_sft/0", "--task", rows, "--limit", 4, "-o", tmp_path / "scores")
    bridge(*words, "max_new_tokens=64", runs=runs)
    ours = pq.read_table(tmp_path / "scores/samples.parquet", columns=["completion"]).to_pylist()
    theirs = pq.read_table(run.folder / "stages/eval/1/samples.parquet", columns=["completion"]).to_pylist()
    assert ours == theirs[: len(ours)]


def test_rows_of_your_own_train_with_any_style_of_the_task(run: Run, tmp_path: Path) -> None:
    """The example of docs/data.md, with the task's default settings."""
    row = {"prompt": "What is 2 + 3?", "response": "2 + 3 = 5\n#### 5", "gold": "5"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    model = run.folder / "stages" / "base" / "0"
    (tmp_path / "own.yaml").write_text(
        f"name: own\nmodel: {json.dumps(str(model))}\ntask: {{name: igsm}}\nstages:\n"
        "  sft: {kind: sft, model: $model, data: ./rows.jsonl, steps: 2, batch: 2, lr: 1e-3}\n"
        "  eval: {kind: eval, model: sft, data: ./rows.jsonl, samples: 2, max_new_tokens: 16}\n",
        encoding="utf-8",
    )
    done = bridge("launch", "own.yaml", "--wait", "--json", runs=tmp_path / "runs", cwd=tmp_path)
    own = Path(json.loads(done.stdout)["dir"])
    samples = pq.read_table(own / "stages/eval/0/samples.parquet").to_pylist()
    assert not any(row["completion"].startswith("<think>") for row in samples)
    # other questions with the same row numbers are other questions
    other = run.folder / "stages" / "eval" / "1"
    assert "of which 0 are the same" in bridge("compare", own / "stages/eval/0", other, runs=tmp_path, check=2).stderr
