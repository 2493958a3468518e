"""Bad input at the command line: exit code 2, one clear sentence, nothing changed."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from chain import TINY, bridge, bridge_json, command, tree, write_tiny

from bridge.graph import Edge
from bridge.launch.prepare import prepare
from bridge.record import create

ROOT = Path(__file__).parents[2]
EXTERNAL = """\
name: external
model: {model}
task: {{name: igsm}}
stages:
  sft: {{kind: sft, model: $model, data: {data}, epochs: 1, lr: 1e-5}}
"""


def external(folder: Path, data: str, model: str = "Qwen/Qwen2.5-1.5B") -> Path:
    path = folder / "external.yaml"
    path.write_text(EXTERNAL.format(model=model, data=data), encoding="utf-8")
    return path


@pytest.mark.parametrize("words", [(), ("stages.sft.lrr=1",)])
def test_nothing_is_made_by_plan_and_nothing_by_a_refused_launch(tmp_path: Path, words: tuple[str, ...]) -> None:
    experiment = write_tiny(tmp_path)
    before = tree(tmp_path)
    verb, check = ("launch", 2) if words else ("plan", 0)
    done = bridge(verb, experiment, *words, runs=tmp_path / "runs", check=check)
    assert tree(tmp_path) == before
    if words:
        assert done.stderr == (f"error: {experiment}:22: stages.sft.lrr: unknown key; did you mean 'lr'?\n")
        assert done.stdout == ""


def harm_folder_without_weights(folder: Path) -> tuple[str, ...]:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}", encoding="utf-8")
    (folder / "rows.jsonl").write_text('{"prompt": "1+1?", "response": "2"}\n', encoding="utf-8")
    return (f"model={folder}/model", f"stages.sft.data={folder}/rows.jsonl")


def harm_folder_without_config(folder: Path) -> tuple[str, ...]:
    (folder / "model").mkdir()
    return (f"model={folder}/model",)


def harm_no_artifact(folder: Path) -> tuple[str, ...]:
    (folder / "data").mkdir()
    return (f"stages.sft.data={folder}/data",)


def harm_empty(folder: Path) -> tuple[str, ...]:
    (folder / "rows.jsonl").write_text("", encoding="utf-8")
    return (f"stages.sft.data={folder}/rows.jsonl",)


def harm_broken_row(folder: Path) -> tuple[str, ...]:
    good = json.dumps({"prompt": "1+1?", "response": "2"})
    (folder / "rows.jsonl").write_text(f"{good}\n{good}\n{{broken\n", encoding="utf-8")
    return (f"stages.sft.data={folder}/rows.jsonl",)


def harm_row_without_response(folder: Path) -> tuple[str, ...]:
    (folder / "rows.jsonl").write_text('{"prompt": "1+1?", "gold": "2"}\n', encoding="utf-8")
    return (f"stages.sft.data={folder}/rows.jsonl",)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (harm_folder_without_weights, "a model folder without weights"),
        (harm_folder_without_config, "is no model folder: it has no config.json"),
        (harm_no_artifact, "is no artifact: it has no SEAL.json; a dataset is wanted"),
        (harm_empty, "rows.jsonl: "),
        (harm_broken_row, "rows.jsonl, line 3"),
        (harm_row_without_response, "has no response"),
        (lambda folder: (f"stages.sft.data={folder}/missing.jsonl",), "there is no such file or folder"),
        (lambda folder: ("model=./nothing",), "./nothing: there is no such file or folder"),
        (lambda folder: ("sweep={stages.sfd.lr: [1]}",), "there is no stage 'sfd'"),
        (lambda folder: ("stages.rl={kind: rl}",), "a whole stage cannot be set"),
    ],
)
def test_inputs_that_are_not_what_they_should_be(
    tmp_path: Path, harm: Callable[[Path], tuple[str, ...]], message: str
) -> None:
    (tmp_path / "good.jsonl").write_text('{"prompt": "1+1?", "response": "2"}\n', encoding="utf-8")
    words = harm(tmp_path)
    done = bridge("launch", external(tmp_path, f"{tmp_path}/good.jsonl"), *words, runs=tmp_path / "runs", check=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("plan", "missing.yaml"), "missing.yaml: cannot be read: No such file or directory"),
        (("plan", "."), "cannot be read: Is a directory"),
        (("status", "nothing"), "there is no run 'nothing'"),
        (("logs", "nothing", "sft"), "there is no run 'nothing'"),
        (("resume", "nothing"), "there is no run 'nothing'"),
        (("cancel", "nothing"), "there is no run 'nothing'"),
        (("compare", "a", "b"), "a: there is no such folder"),
        (("inspect", "nothing"), "nothing: does not exist"),
        (("convert", "nothing", "out"), "nothing: does not exist"),
        (("convert", "nothing", "out", "--dtype", "int8"), "int8"),
        (("convert", "nothing", "out", "--max-shard-size", "big"), "'big' is not understood"),
        (("grade", "nothing.jsonl", "-o", "out.jsonl"), "nothing.jsonl"),
        (("data", "igsn", "--split", "sft", "--size", "1", "-o", "x.parquet"), "no task 'igsn'; did you mean 'igsm'?"),
        (("data", "igsm", "--split", "all", "--size", "1", "-o", "x.parquet"), "split"),
        (("data", "igsm", "--split", "sft", "--size", "1", "-o", "x.csv"), "must end in .parquet"),
        (("data", "igsm", "--split", "sft", "--size", "1", "-o", "no/x.parquet"), "no: there is no such folder"),
        (("data", "igsm", "--split", "sft", "--size", "1", "-o", "x.parquet", "opps=[1,2]"), "did you mean 'ops'?"),
        (("eval", "nothing", "--task", "igsm", "-o", "out"), "there is no such file or folder"),
        (("plan", "tiny.yaml", "--profile", "devclustr"), "no profile 'devclustr'; did you mean 'devcluster'?"),
        (("plan", "tiny.yaml", "--scripts"), "needs no sbatch scripts"),
        (("plan", "tiny.yaml", "--profil"), "No such option: --profil"),
        (("plam", "tiny.yaml"), "No such command 'plam'"),
    ],
)
def test_requests_that_cannot_be_served(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    write_tiny(tmp_path)
    before = tree(tmp_path)
    done = bridge(*words, runs=tmp_path / "runs", check=2, cwd=tmp_path)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert tree(tmp_path) == before


def test_a_broken_profile_is_refused_with_its_field(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "mine.yaml").write_text("cluster: slurm\ndefaults: {partiton: gpu}\n", encoding="utf-8")
    done = bridge("plan", "tiny.yaml", "--profile", "./mine.yaml", runs=tmp_path, check=2, cwd=tmp_path)
    assert "mine.yaml: defaults.partiton: unknown key; did you mean 'partition'?" in done.stderr


@contextmanager
def tiny_disk(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        if "CI" in os.environ:
            pytest.fail("CI must be able to mount a tmpfs")
        pytest.skip("a tmpfs cannot be mounted here (not root)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize(
    ("options", "message"), [("ro", "Read-only file system"), ("size=16k", "No space left on device")]
)
def test_a_runs_folder_that_cannot_be_written(tmp_path: Path, options: str, message: str) -> None:
    with tiny_disk(tmp_path / "runs", options) as runs:
        done = bridge("launch", write_tiny(tmp_path), runs=runs, check=2)
        assert message in done.stderr
        assert "--runs" in done.stderr
        assert list(runs.iterdir()) == []


def test_a_runs_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("", encoding="utf-8")
    assert "runs" in bridge("launch", write_tiny(tmp_path), runs=tmp_path / "runs", check=2).stderr


def test_a_second_launch_at_the_same_moment(tmp_path: Path) -> None:
    """While one process launches a run, another one that wants to is told so and changes nothing."""
    experiment = write_tiny(tmp_path)
    first = bridge_json("launch", experiment, "stages.sft.lr=1e-4", runs=tmp_path)
    bridge("cancel", first["run"], runs=tmp_path)
    folder = Path(first["dir"])
    before = (folder / "jobs.jsonl").read_bytes()
    with (folder / "locks" / "launch").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = bridge("resume", first["run"], runs=tmp_path, check=2)
    assert "another process is launching this run right now" in done.stderr
    assert (folder / "jobs.jsonl").read_bytes() == before


def test_two_real_launches_at_once_start_one_queue(tmp_path: Path) -> None:
    words = command("launch", write_tiny(tmp_path), "--json")
    environment = {**os.environ, "BRIDGE_RUNS": str(tmp_path)}
    both = [
        subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=120) for process in both]
    try:
        codes = sorted(process.returncode for process in both)
        assert codes in ([0, 0], [0, 2]), printed
        runs = list(tmp_path.glob("tiny-*"))
        assert len(runs) == 1
        events = [json.loads(line)["event"] for line in (runs[0] / "jobs.jsonl").open(encoding="utf-8")]
        assert events.count("launch") == 1
    finally:
        bridge("cancel", "tiny", runs=tmp_path)


def test_only_one_json_object_on_standard_output(tmp_path: Path) -> None:
    value = bridge_json("plan", write_tiny(tmp_path), runs=tmp_path)
    assert set(value) >= {"experiment", "jobs"}
    assert value["jobs"][4] == {
        "stage": "sft", "kind": "sft", "elements": 1, "arrays": ["0"], "sealed": 0,
        "after": [{"stage": "base", "type": "aftercorr"}, {"stage": "train_data", "type": "aftercorr"}],
    }  # fmt: skip
    assert bridge_json("status", runs=tmp_path) == []


def test_plan_gives_the_same_bytes_and_needs_no_cluster(tmp_path: Path) -> None:
    experiment = write_tiny(tmp_path)
    words = ("plan", experiment, "--profile", "devcluster", "--scripts")
    texts = {bridge(*words, runs=tmp_path).stdout for _ in range(2)}
    assert len(texts) == 1
    text = texts.pop()
    assert text.count("#!/bin/bash") == 11
    assert "--dependency=aftercorr:<convert_sft>" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_a_profile_for_slurm_without_slurm(tmp_path: Path) -> None:
    done = subprocess.run(
        command("launch", write_tiny(tmp_path), "--profile", "devcluster"),
        env={**os.environ, "BRIDGE_RUNS": str(tmp_path / "runs"), "PATH": str(Path(sys.executable).parent)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "this machine has no sbatch" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_answers_come_fast(tmp_path: Path) -> None:
    """Not a benchmark: only that `--help` and `status` do not wait for heavy imports."""
    for words in (("--help",), ("status",)):
        best = 9.0
        for _ in range(3):
            started = time.monotonic()
            bridge(*words, runs=tmp_path)
            best = min(best, time.monotonic() - started)
        assert best < 2.0


@pytest.mark.parametrize("experiment", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda p: p.name)
@pytest.mark.parametrize("profile", sorted((ROOT / "slurm").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_experiment_can_be_planned_with_every_shipped_profile(
    tmp_path: Path, experiment: Path, profile: Path
) -> None:
    words: list[str] = []
    if "name: gsm8k" in experiment.read_text(encoding="utf-8"):  # its data are not shipped
        for name in ("train", "test"):
            row = json.dumps({"question": f"{name}: 1 + 1?", "answer": "1+1 = <<1+1=2>>2\n#### 2"})
            (tmp_path / f"{name}.jsonl").write_text(row + "\n", encoding="utf-8")
        words.append(f"task.path={tmp_path}")
    value = bridge_json("plan", experiment, *words, "--profile", profile, runs=tmp_path)
    assert value["experiment"] == experiment.stem
    assert value["jobs"]


def test_a_run_of_another_folder_is_found_by_its_path(tmp_path: Path) -> None:
    experiment = write_tiny(tmp_path)
    value = bridge_json("launch", experiment, runs=tmp_path / "here")
    bridge("cancel", value["dir"], runs=tmp_path / "elsewhere")
    assert bridge_json("status", value["dir"], runs=tmp_path / "elsewhere")["state"] == "cancelled"


def test_an_input_that_was_changed_after_the_launch_is_refused_by_the_job(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1?", "response": "2"}\n', encoding="utf-8")
    run = create(prepare(external(tmp_path, str(rows)), [], "local").request, tmp_path / "runs")
    rows.write_text('{"prompt": "1+1?", "response": "3"}\n', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "bridge.stages", str(run.folder), "sft", "0"],
        cwd=run.folder / "code", env={**os.environ, "PYTHONPATH": str(run.folder / "code")}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "was changed after the launch" in run.attempts(Edge("sft", 0))[-1]["reason"]


def test_the_record_holds_the_experiment_as_it_was_run(tmp_path: Path) -> None:
    run = create(prepare(write_tiny(tmp_path), ["stages.sft.steps=5", "seed=3"], "local").request, tmp_path / "runs")
    experiment = run.record["experiment"]
    assert (experiment["stages"]["sft"]["steps"], experiment["seed"]) == (5, 3)
    assert run.record["overrides"] == ["stages.sft.steps=5", "seed=3"]


HOSTILE = ["50%a %j%%", "a 'b' \"c\"; echo d", "line\nbreak", "Größe 数据", "$HOME `id`", "-n"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_runs_folder_of_any_name_works(tmp_path: Path, name: str) -> None:
    task = TINY[TINY.index("task:") : TINY.index("stages:")]
    text = f"name: tiny\nmodel: no/model\n{task}stages:\n  test_data: {{kind: data, split: test, size: 3}}\n"
    value = bridge_json("launch", write_tiny(tmp_path, text), "--wait", runs=tmp_path / name)
    assert Path(value["dir"]).parent == tmp_path / name
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([name, "tiny.yaml"])  # and nothing beside it
    assert [e["state"] for e in bridge_json("status", value["run"], runs=tmp_path / name)["elements"]] == ["done"]
    assert "sealed" in bridge("logs", value["run"], "test_data", runs=tmp_path / name).stdout


def test_watch_redraws_in_place_until_the_end(tmp_path: Path) -> None:
    """On a terminal: the table is drawn over itself, and what is left on the screen is the end."""
    task = TINY[TINY.index("task:") : TINY.index("stages:")]
    text = f"name: tiny\nmodel: no/model\n{task}stages:\n  test_data: {{kind: data, split: test, size: 6000}}\n"
    value = bridge_json("launch", write_tiny(tmp_path, text), runs=tmp_path)
    terminal, inside = pty.openpty()
    words = command("status", value["run"], "--watch", "--runs", tmp_path)
    process = subprocess.Popen(words, stdin=inside, stdout=inside, stderr=inside, env={**os.environ, "TERM": "xterm"})
    os.close(inside)
    shown = b""
    with suppress(OSError):  # Linux's way to say that the other side is closed
        while part := os.read(terminal, 4096):
            shown += part
    assert process.wait(timeout=60) == 0
    frames = shown.decode().split("\x1b[1A")  # cursor up: one frame over the other
    assert len(frames) > 2
    assert "running" in frames[0] or "pending" in frames[0]
    assert f"{value['run']}: done" in shown.decode()


def test_a_backslash_in_the_runs_folder_is_refused(tmp_path: Path) -> None:
    assert "no backslash in its path" in bridge("launch", write_tiny(tmp_path), runs=tmp_path / "a\\b", check=2).stderr


def test_only_the_folder_of_a_run_is_prepared(tmp_path: Path) -> None:
    folder = Path(bridge("launch", write_tiny(tmp_path), "--prepare", runs=tmp_path).stdout.strip())
    assert (folder / "run.json").is_file()
    assert not (folder / "jobs.jsonl").exists()
    states = {e["state"] for e in bridge_json("status", folder.name, runs=tmp_path)["elements"]}
    assert states == {"unknown"}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("stages.rl.resources.processes=2", "the stage 'rl' of kind rl runs in one process on one node"),
        ("stages.eval.resources.nodes=2", "the stage 'eval' of kind eval runs in one process on one node"),
        ("stages.sft.resources.nodes=2", "the stage 'sft' wants 2 nodes; this machine is one"),
    ],
)
def test_processes_and_nodes_that_a_stage_cannot_use(tmp_path: Path, setting: str, said: str) -> None:
    assert said in bridge("plan", write_tiny(tmp_path), setting, runs=tmp_path, check=2).stderr


def test_a_limit_that_leaves_no_time_is_refused(tmp_path: Path) -> None:
    words = ("plan", write_tiny(tmp_path), "stages.sft.resources.time=2m", "--profile", "devcluster")
    assert (
        "'sft' has a limit of 2m, but is told to save and stop 120 s before"
        in bridge(*words, runs=tmp_path, check=2).stderr
    )


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 1}', '{"format": 99, "stages": [], "profile": {}, "created": ""}']
)
def test_a_damaged_record_hides_no_other_run(tmp_path: Path, text: str) -> None:
    run = create(prepare(write_tiny(tmp_path), [], "local").request, tmp_path / "runs")
    (tmp_path / "runs" / "broken-1").mkdir()
    (tmp_path / "runs" / "broken-1" / "run.json").write_text(text, encoding="utf-8")
    listed = {item["run"]: item["state"] for item in bridge_json("status", runs=tmp_path / "runs")}
    assert listed == {"broken-1": "damaged", run.id: "unknown"}
    assert "broken-1" in bridge("status", "broken", runs=tmp_path / "runs", check=2).stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("status", "~nouser/x"), "is no usable path"),
        (("status", "x" * 300), "is no usable path"),
        (("plan", "tiny.yaml", "stages.sft.data=~nouser/x"), "is no usable path"),
        (("grade", "rows.jsonl", "-o", "."), "must be a file name"),
        (("grade", "rows.jsonl", "-o", "./rows.jsonl"), "is the input"),
        (("eval", "./model", "--task", "./x.jsonl", "-o", "out", "task.ops=[1,2]"), "leave this out"),
        (("launch", "tiny.yaml", "--profile", "./nopython.yaml"), "/nope/python"),
    ],
)
def test_more_requests_that_cannot_be_served(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    write_tiny(tmp_path)
    (tmp_path / "rows.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "nopython.yaml").write_text("cluster: local\npython: /nope/python\n", encoding="utf-8")
    done = bridge(*words, runs=tmp_path / "runs", check=2, cwd=tmp_path)
    assert message in done.stderr
    assert "fault of bridge-rl" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_closed_standard_output_is_no_fault(tmp_path: Path) -> None:
    text = f"{sys.executable} -m bridge status --runs {tmp_path} --json > /dev/full"
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("delay", [0.15, 0.4, 0.8])
def test_ctrl_c_at_any_moment_of_a_launch_leaves_nothing_running(tmp_path: Path, delay: float) -> None:
    process = subprocess.Popen(
        command("launch", write_tiny(tmp_path), "stages.sft.steps=5000", "--wait"),
        env={**os.environ, "BRIDGE_RUNS": str(tmp_path)}, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode in (130, -signal.SIGINT)  # the second: before Python could catch anything
    if process.returncode == 130:
        assert "interrupted" in printed
    deadline = time.monotonic() + 20
    find = ["pgrep", "-f", f"{tmp_path}/tiny-"]
    while subprocess.run(find, capture_output=True, check=False).stdout:
        assert time.monotonic() < deadline, "something goes on"
        time.sleep(0.1)


def test_an_evaluation_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}', encoding="utf-8")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "rows.jsonl").write_text("", encoding="utf-8")
    before = tree(tmp_path)
    bridge("eval", "./model", "--task", "./rows.jsonl", "-o", "scores", runs=tmp_path / "runs", check=2, cwd=tmp_path)
    assert tree(tmp_path) == before
    assert not (tmp_path / ".scores.work").exists()
