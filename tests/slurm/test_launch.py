"""The launcher on a real Slurm: arrays, dependencies, kills, cancels; and the same artifacts as on one machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from chain import TINY, TRAINED, bridge, bridge_json, command, tree, write_tiny
from conftest import Cluster
from launching import FAST, SWEEP, launch, queue, resume, states, wait_for, weights

from bridge.artifacts import open_artifact
from bridge.graph import Edge
from bridge.runs import Run

pytestmark = pytest.mark.slurm


def test_a_sweep_of_seeds_and_behaviors_end_to_end(cluster: Cluster, tmp_path: Path) -> None:
    """3 seeds × 2 behaviors: arrays with dependencies, every artifact sealed, and nothing submitted twice."""
    run = launch(write_tiny(tmp_path, TINY + SWEEP), *FAST, "stages.eval.model=[rl]", runs=tmp_path)
    counts: dict[str, int] = {}
    for key, element in run.elements.items():
        assert open_artifact(run.artifact(key), element.output).fingerprint == element.fingerprint
        counts[key.stage] = counts.get(key.stage, 0) + 1
    assert counts == {
        "train_data": 2, "rl_data": 1, "test_data": 1, "base": 6, "sft": 6, "convert_sft": 6, "rl": 6, "convert_rl": 6,
        "eval": 6,
    }  # fmt: skip

    submitted = [line for line in run.submissions() if line["event"] == "submit"]
    by_stage = {(line["stage"], line["elements"][0]): line for line in submitted}
    ids = {name: line["jobs"][0].partition("_")[0] for name, line in by_stage.items()}
    # three seeds share a train set: two arrays of three, each tied to its own one
    assert by_stage["base", 3]["dependency"] == f"afterok:{ids['train_data', 0]}_1"
    assert by_stage["convert_sft", 3]["dependency"] == f"aftercorr:{ids['sft', 3]}"
    assert by_stage["rl", 3]["dependency"] == f"aftercorr:{ids['convert_sft', 3]},afterok:{ids['rl_data', 0]}"
    text = cluster.run("sacct", "-X", "-n", "-P", "-o", "JobID,State,Submit,Start", "-j", ids["rl", 3])
    rows = [line.split("|") for line in text.splitlines()]
    assert sorted(row[0] for row in rows) == [f"{ids['rl', 3]}_{task}" for task in range(3)]
    assert {row[1] for row in rows} == {"COMPLETED"}
    assert all(row[3] > row[2] for row in rows)  # it waited: it did not start when it was submitted

    # everything was queued before the first result was there: no process has to stay alive
    first_end = min(line["time"] for key in run.elements for line in run.attempts(key) if line["event"] == "end")
    assert max(line["time"] for line in submitted) < first_end + 5
    again = bridge_json("resume", run.id, "--wait", runs=tmp_path)
    assert again["jobs"] == {}
    assert len(run.submissions()) == len(submitted) + 2  # one launch, one release


def test_the_artifacts_are_those_of_a_local_run(cluster: Cluster, tmp_path: Path) -> None:
    """The same experiment file: equal data, equal weights, equal samples, whoever runs the jobs."""
    words = (write_tiny(tmp_path), "stages.eval.model=[rl]")
    here = Run(Path(bridge_json("launch", *words, "--wait", runs=tmp_path / "local")["dir"]))
    there = launch(*words, runs=tmp_path / "slurm")
    assert here.id != there.id
    assert {k: e.fingerprint for k, e in here.elements.items()} == {k: e.fingerprint for k, e in there.elements.items()}
    for key in here.elements:
        ours, theirs = tree(here.artifact(key)), tree(there.artifact(key))
        assert set(ours) == set(theirs)
        for name in set(ours) - {"SEAL.json", "metrics.jsonl", "eval.json", "samples.parquet", "checkpoint.pt"}:
            assert ours[name] == theirs[name], f"{key}: {name}"
    tables = [pq.read_table(run.artifact(Edge("eval", 0)) / "samples.parquet") for run in (here, there)]
    assert tables[0].equals(tables[1])


def test_kill_a_training_job_then_resume(cluster: Cluster, tmp_path: Path) -> None:
    """SIGKILL in the middle of SFT: its children are blocked with the culprit, and resume ends as if undisturbed."""
    text = TINY.partition("  rl:\n")[0] + "  eval: {kind: eval, model: [$model, sft], data: test_data, limit: 4}\n"
    run = launch(write_tiny(tmp_path, text), "stages.sft.steps=300", runs=tmp_path, wait=False)
    saved = run.folder / "stages/sft/.0.work/scratch/checkpoints"
    wait_for(lambda: len(list(saved.glob("step-*.pt"))) > 1, "SFT to save twice")
    os.kill(run.attempts(Edge("sft", 0))[-1]["pid"], 9)
    wait_for(lambda: states(run, tmp_path)["sft/0"]["state"] == "failed", "Slurm to see the end", 60)
    wait_for(lambda: not queue(cluster, run), "the children to leave the queue", 60)
    found = states(run, tmp_path)
    assert found["sft/0"]["reason"].startswith("FAILED")
    assert (found["convert_sft/0"]["state"], found["eval/1"]["state"]) == ("blocked", "blocked")
    assert found["eval/1"]["reason"].startswith("sft/0 failed")
    assert found["eval/0"]["state"] == "done"  # the starting model's evaluation did not need SFT
    resume(run)
    whole = launch(write_tiny(tmp_path, TRAINED), "stages.sft.steps=300", runs=tmp_path / "undisturbed")
    assert weights(run) == weights(whole)
    assert states(run, tmp_path)["sft/0"]["attempts"] == 2


def test_cancel_leaves_nothing_queued_and_resume_works(cluster: Cluster, tmp_path: Path) -> None:
    run = launch(write_tiny(tmp_path), "stages.sft.steps=2000", runs=tmp_path, wait=False)
    wait_for(lambda: (run.folder / "stages/sft/.0.work").exists(), "SFT to begin")
    bridge("cancel", run.id, "sft", runs=tmp_path)
    wait_for(lambda: not queue(cluster, run), "the queue to be empty", 60)
    found = states(run, tmp_path)
    assert {found[name]["state"] for name in ("sft/0", "convert_sft/0", "rl/0", "eval/1", "eval/2")} == {"cancelled"}
    assert not (run.folder / "stages/sft/0").exists()
    assert bridge_json("resume", run.id, runs=tmp_path)["jobs"]
    bridge("cancel", run.id, runs=tmp_path)
    wait_for(lambda: not queue(cluster, run), "the queue to be empty", 60)


def test_a_refused_array_takes_back_what_was_submitted(cluster: Cluster, tmp_path: Path) -> None:
    """The second kind of stage asks for a partition that does not exist: sbatch's own words, and an empty queue."""
    write_tiny(tmp_path)
    conf = os.environ["SLURM_CONF"]
    text = f"cluster: slurm\nslurm_conf: {conf}\nstages:\n  init: {{partition: nowhere}}\n"
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    done = bridge("launch", "tiny.yaml", "--profile", "./mine.yaml", runs=tmp_path / "runs", check=1, cwd=tmp_path)
    assert "invalid partition" in done.stderr.lower()
    run = Run(next((tmp_path / "runs").glob("tiny-*")))
    wait_for(lambda: not queue(cluster, run), "the queue to be empty", 60)


def test_doctor_on_the_cluster(cluster: Cluster, tmp_path: Path) -> None:
    checks = bridge_json("doctor", "--profile", "devcluster", runs=tmp_path)
    found = {check["name"]: check for check in checks}
    assert found["slurm controller"]["ok"] and found["accounting"]["ok"] and found["partitions"]["ok"]


def test_launched_from_inside_a_job_nothing_leaks(cluster: Cluster, tmp_path: Path) -> None:
    """A launch from inside an allocation: its SLURM_* and the shell's variables do not reach the new job."""
    experiment = write_tiny(tmp_path)
    out = tmp_path / "outer.txt"
    script = tmp_path / "outer.sh"
    script.write_text(
        f"#!/bin/bash\nexport BRIDGE_RUNS={tmp_path}/runs SBATCH_PARTITION=nowhere LEAK=5ecret\n"
        f"cd {Path.cwd()}\n{sys.executable} -m bridge launch {experiment} --profile devcluster --json > {out} 2>&1\n",
        encoding="utf-8",
    )
    job = cluster.run("sbatch", "--parsable", "--mem=500M", "--output=/dev/null", str(script))
    cluster.settle(job)
    value = json.loads(out.read_text(encoding="utf-8"))
    run = Run(Path(value["dir"]))
    wait_for(lambda: run.artifact(Edge("test_data", 0)).exists(), "the first stages")
    bridge("cancel", run.id, runs=tmp_path / "runs")
    for path in run.folder.rglob("*"):
        if path.is_file() and path.suffix != ".diff":
            assert b"5ecret" not in path.read_bytes(), path


@pytest.fixture
def slow_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real sbatch, which answers two seconds late from the second array on: time to interrupt a submission."""
    real = shutil.which("sbatch")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(
        f'#!/bin/bash\nanswer=$({real} "$@") || exit\n'
        f"if [ -e {tmp_path}/once ]; then touch {tmp_path}/twice; sleep 2; fi\ntouch {tmp_path}/once\necho $answer\n",
        encoding="utf-8",
    )
    (folder / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / "twice"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_launch_is_interrupted_while_it_submits(
    cluster: Cluster, tmp_path: Path, slow_sbatch: Path, number: signal.Signals
) -> None:
    """Ctrl-C takes back everything, the array in flight too; after SIGKILL `cancel` finds what is on no record."""
    process = subprocess.Popen(
        command("launch", write_tiny(tmp_path), "--profile", "devcluster"),
        env={**os.environ, "BRIDGE_RUNS": str(tmp_path / "runs")}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    wait_for(slow_sbatch.exists, "the second array to be submitted")
    process.send_signal(number)
    _, printed = process.communicate(timeout=60)
    run = Run(next((tmp_path / "runs").glob("tiny-*")))
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted" in printed
    else:
        time.sleep(3)
        assert len(run.submissions()) == 2  # the launch and the first array; the second is in the queue all the same
        time.sleep(2)
        assert {line["event"] for line in run.submissions()} == {"launch", "submit"}
        assert not any(run.attempts(key) for key in run.elements)  # all of it is held
        bridge("cancel", run.id, runs=tmp_path / "runs")
    wait_for(lambda: not queue(cluster, run), "the queue to be empty", 30)
