"""`prune` removes what can be made again and never a result, `runs` lists; a kill at any moment leaves no doubt."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chain import TINY, bridge, bridge_json, command, tree, write_tiny

from bridge.artifacts import PRUNED, SEAL, is_sealed, open_artifact, prunable, prune, publish, read_seal, seal
from bridge.errors import UserError, WorkFailedError
from bridge.graph import Edge
from bridge.launch import prune as pruning
from bridge.launch.prepare import prepare
from bridge.record import create
from bridge.runs import Run

SFT, CONVERT = Edge("sft", 0), Edge("convert_sft", 0)
FILES = {
    "dataset": ("train.parquet",),
    "model": ("model.safetensors", "training.pt"),  # a model is a result, whatever its files are called
    "checkpoint": ("checkpoint.pt", "metrics.jsonl", "config.json"),
    "eval": ("eval.json", "samples.parquet"),
}


def make_artifact(folder: Path, kind: str, fingerprint: str) -> Path:
    folder.mkdir(parents=True)
    for name in FILES[kind]:
        (folder / name).write_bytes(name.encode() * 1000)
    seal(folder, kind, fingerprint, "run/stage/0", {})
    return folder


def make_run(folder: Path, *unsealed: str, text: str = TINY) -> Run:
    """A real record of the tiny experiment; every artifact is sealed but those of `unsealed`, with made-up content."""
    run = create(prepare(write_tiny(folder, text), [], "local").request, folder / "runs")
    for key, element in run.elements.items():
        if element.name not in unsealed:
            publish(make_artifact(run.work(key) / "out", element.output, element.fingerprint), run.artifact(key))
            shutil.rmtree(run.work(key))
    return run


def removed(run: Run, *words: str) -> list[str]:
    value = bridge_json("prune", run.id, "--yes", *words, runs=run.folder.parent)
    assert value["bytes"] == sum(item["bytes"] for item in value["removed"])
    return [str(Path(item["path"]).relative_to(run.folder)) for item in value["removed"]]


# ---- one artifact


def test_the_seal_stays_and_who_wants_the_file_is_told(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "x", "checkpoint", "f")
    before = tree(folder)
    found = read_seal(folder)
    assert found is not None
    prune(folder, found)
    after = tree(folder)
    record = json.loads(after.pop(PRUNED))
    assert record["files"] == ["checkpoint.pt"]
    assert after == {name: data for name, data in before.items() if name != "checkpoint.pt"}
    assert is_sealed(folder, "f")
    with pytest.raises(UserError, match=r"the file checkpoint.pt was removed by `bridge-rl prune`; remove this folder"):
        open_artifact(folder, "checkpoint")
    (folder / "metrics.jsonl").unlink()
    assert not is_sealed(folder, "f")


@pytest.mark.parametrize("kind", ["dataset", "model", "eval"])
def test_a_forged_record_excuses_no_result(tmp_path: Path, kind: str) -> None:
    """A result with a record that says it was pruned is damaged, like any other with a missing file."""
    folder = make_artifact(tmp_path / "x", kind, "f")
    found = read_seal(folder)
    assert found is not None and prunable(found) == []
    (folder / PRUNED).write_text(json.dumps({"files": list(FILES[kind])}), encoding="utf-8")
    assert is_sealed(folder, "f")
    (folder / FILES[kind][-1]).unlink()
    assert not is_sealed(folder, "f")
    with pytest.raises(UserError, match="damaged"):
        open_artifact(folder, kind)


@pytest.mark.parametrize(
    "record", ["", "[]", "{}", '{"files": 3}', '{"files": [["checkpoint.pt"]]}', '{"files": ["metrics.jsonl"]}', "\xff"]
)
def test_a_broken_record_excuses_nothing(tmp_path: Path, record: str) -> None:
    folder = make_artifact(tmp_path / "x", "checkpoint", "f")
    (folder / PRUNED).write_bytes(record.encode("latin-1"))
    (folder / "checkpoint.pt").unlink()
    assert not is_sealed(folder, "f")
    with pytest.raises(UserError, match=r"damaged: the file checkpoint.pt is missing"):
        open_artifact(folder, "checkpoint")


def test_no_seal_leads_prune_out_of_its_folder(tmp_path: Path) -> None:
    folder = make_artifact(tmp_path / "x", "checkpoint", "f")
    value = json.loads((folder / SEAL).read_text(encoding="utf-8"))
    value["files"] |= {name: {"size": 0, "sha256": ""} for name in ("../out.pt", "/out.pt", "sub/../../out.pt")}
    (folder / SEAL).write_text(json.dumps(value), encoding="utf-8")
    found = read_seal(folder)
    assert found is not None and prunable(found) == ["checkpoint.pt"]


def test_killed_at_every_step_it_leaves_no_doubt(tmp_path: Path) -> None:
    """The process kills itself before its n-th look at the disk, for every n: a missing file is always on record."""
    program = (
        "import os, sys; from pathlib import Path; from bridge.artifacts import prune, read_seal\n"
        "folder, left = Path(sys.argv[1]), int(sys.argv[2]); seal = read_seal(folder)\n"
        "def look(event, arguments):\n"
        "    global left\n"
        "    if event in ('open', 'os.rename', 'os.remove'):\n"
        "        left -= 1\n"
        "        if left < 0: os.kill(os.getpid(), 9)\n"
        "sys.addaudithook(look); prune(folder, seal); os._exit(0)\n"
    )
    outcomes = []
    for step in range(50):
        folder = tmp_path / str(step)
        folder.mkdir()
        for number in range(4):
            (folder / f"shard-{number}.pt").write_bytes(bytes(1000))
        (folder / "config.json").write_text("{}", encoding="utf-8")
        whole = seal(folder, "checkpoint", "f", "r", {})
        done = subprocess.run([sys.executable, "-c", program, folder, str(step)], check=False)
        assert is_sealed(folder, "f")
        gone = set(whole.files) - set(tree(folder))
        outcomes.append(len(gone))
        if gone:
            assert gone <= set(json.loads((folder / PRUNED).read_text(encoding="utf-8"))["files"])
            with pytest.raises(UserError, match="was removed by `bridge-rl prune`"):
                open_artifact(folder, "checkpoint")
        else:
            open_artifact(folder, "checkpoint")
        prune(folder, whole)  # once more: it ends what the killed one began
        assert set(tree(folder)) == {"config.json", SEAL, PRUNED, *({PRUNED + ".tmp"} & set(tree(folder)))}
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert set(outcomes) == {0, 1, 2, 3, 4}


# ---- a run


def test_only_checkpoints_whose_consumers_are_sealed_and_left_over_folders(tmp_path: Path) -> None:
    run = make_run(tmp_path, "convert_rl/0", "eval/2")
    for key in (SFT, Edge("eval", 2)):  # of a sealed element, and of one that may still need it
        (run.work(key) / "scratch").mkdir(parents=True)
        (run.work(key) / "scratch" / "step.pt").write_bytes(bytes(50))
    before = tree(run.folder)
    assert removed(run) == ["stages/sft/.0.work", "stages/sft/0/checkpoint.pt"]
    after = tree(run.folder)
    gone = {"stages/sft/.0.work/scratch/step.pt", "stages/sft/0/checkpoint.pt"}
    assert set(before) - set(after) == gone
    new = set(after) - set(before)
    assert {name for name in new if not name.startswith("locks/")} == {"stages/sft/0/" + PRUNED}
    assert all(after[name] == before[name] for name in set(before) - gone)
    assert removed(run) == []


def test_a_pruned_run_is_done_and_nothing_is_submitted_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert removed(run) == ["stages/sft/0/checkpoint.pt", "stages/rl/0/checkpoint.pt"]
    value = bridge_json("status", run.id, runs=run.folder.parent)
    assert value["state"] == "done" and {e["state"] for e in value["elements"]} == {"done"}
    assert bridge_json("resume", run.id, runs=run.folder.parent)["jobs"] == {}


def test_a_job_that_wants_what_was_pruned_says_what_to_do(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    removed(run)
    shutil.rmtree(run.artifact(CONVERT))
    words = [sys.executable, "-m", "bridge.stages", run.folder, "convert_sft", "0"]
    done = subprocess.run(words, cwd=run.folder / "code", env={**os.environ, "PYTHONPATH": "."}, check=False)
    assert done.returncode == 1
    reason = run.attempts(CONVERT)[-1]["reason"]
    assert f"{run.artifact(SFT)}: the file checkpoint.pt was removed by `bridge-rl prune`" in reason
    assert "remove this folder, then resume makes it again" in reason


def test_what_was_pruned_can_be_made_again(tmp_path: Path) -> None:
    """The remedy of that message, on a real run: SFT again, the same checkpoint, and the model made from it stays."""
    lines = TINY.partition("  rl:\n")[0].replace("  rl_data: {kind: data, split: rl, size: 100}\n", "")
    text = lines.replace("  test_data: {kind: data, split: test, size: 20}\n", "").replace("steps: 24", "steps: 2")
    experiment = write_tiny(tmp_path, text + "  model: {kind: convert, checkpoint: sft}\n")
    run = Run(Path(bridge_json("launch", experiment, "--wait", runs=tmp_path)["dir"]))
    before = (run.artifact(SFT) / "checkpoint.pt").read_bytes()
    assert removed(run) == ["stages/sft/0/checkpoint.pt"]
    shutil.rmtree(run.artifact(SFT))
    assert list(bridge_json("resume", run.id, "--wait", runs=tmp_path)["jobs"]) == ["sft"]
    assert (run.artifact(SFT) / "checkpoint.pt").read_bytes() == before
    assert open_artifact(run.artifact(SFT), "checkpoint").fingerprint == run.elements[SFT].fingerprint


def test_a_checkpoint_that_nothing_was_made_of_is_a_result(tmp_path: Path) -> None:
    text = TINY.partition("  rl:\n")[0]
    assert removed(make_run(tmp_path, text=text)) == []


def test_a_damaged_model_keeps_its_checkpoint(tmp_path: Path) -> None:
    """One flipped bit, which neither status nor sizes show: the only thing to make the model from must stay."""
    run = make_run(tmp_path)
    weights = run.artifact(CONVERT) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[7] ^= 1
    weights.write_bytes(data)
    before = tree(run.folder / "stages")
    done = bridge("prune", run.id, "--yes", runs=run.folder.parent, check=2)
    assert f"{run.artifact(CONVERT)}: damaged: the file model.safetensors was changed" in done.stderr
    assert tree(run.folder / "stages") == before


@pytest.mark.parametrize("lock", ["launch", "sft.0", "eval.1"])
def test_it_waits_for_nobody(tmp_path: Path, lock: str) -> None:
    """While a launch is under way, or while any element runs, however it was started."""
    run = make_run(tmp_path)
    before = tree(run.folder / "stages")
    with (run.folder / "locks" / lock).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        done = bridge("prune", run.id, "--yes", runs=run.folder.parent, check=2)
    what = "another process is launching" if lock == "launch" else f"{lock.replace('.', '/')} is queued or running"
    assert what in done.stderr
    assert tree(run.folder / "stages") == before


def test_a_run_that_is_going_on(tmp_path: Path) -> None:
    """The real queue of this machine works on another element: nothing is removed until it is cancelled."""
    run = make_run(tmp_path, "eval/0", "base/0")
    bridge("resume", run.id, runs=run.folder.parent)
    try:
        done = bridge("prune", run.id, "--yes", runs=run.folder.parent, check=2)
        assert "is queued or running" in done.stderr and f"bridge-rl cancel {run.id}" in done.stderr
    finally:
        bridge("cancel", run.id, runs=run.folder.parent)
    assert removed(run) == ["stages/sft/0/checkpoint.pt", "stages/rl/0/checkpoint.pt"]


def test_what_changed_after_the_question_is_asked_again(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    items = pruning.removable(run)
    shutil.rmtree(run.artifact(CONVERT))
    with pytest.raises(UserError, match="changed while prune was asking"):
        pruning.remove(run, items)
    assert (run.artifact(SFT) / "checkpoint.pt").exists()


def test_without_room_for_the_record_nothing_goes(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.artifact(SFT) / (PRUNED + ".tmp")).mkdir()
    with pytest.raises(WorkFailedError, match=r"PRUNED.json.tmp: Is a directory"):
        pruning.remove(run, pruning.removable(run))
    assert (run.artifact(SFT) / "checkpoint.pt").exists()


# ---- the question


def test_without_a_terminal_it_does_not_guess(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before = tree(run.folder)
    done = bridge("prune", run.id, runs=run.folder.parent, check=2)
    assert "stages/sft/0/checkpoint.pt" in done.stderr and "26.0 kB  in all" in done.stderr
    assert "there is no terminal to ask at; --yes does not ask" in done.stderr
    assert tree(run.folder) == before


@pytest.mark.parametrize(("answer", "code", "gone"), [("y\n", 0, True), ("\n", 0, False), ("\x03", 130, False)])
def test_the_question_at_a_terminal(tmp_path: Path, answer: str, code: int, gone: bool) -> None:
    run = make_run(tmp_path)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, command("prune", run.id), {**os.environ, "BRIDGE_RUNS": str(run.folder.parent)})
    shown = b""
    while b"[y/N]" not in shown:
        shown += os.read(terminal, 1000)
    os.write(terminal, answer.encode())
    try:
        while more := os.read(terminal, 1000):
            shown += more
    except OSError:  # the other end is closed
        pass
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code, shown
    assert b"13.0 kB  stages/sft/0/checkpoint.pt" in shown
    assert (run.artifact(SFT) / "checkpoint.pt").exists() is not gone


# ---- bad input, and the list of runs


def harm_record(folder: Path) -> None:
    (folder / "runs" / "tiny-broken").mkdir(parents=True)
    (folder / "runs" / "tiny-broken" / "run.json").write_text("{", encoding="utf-8")


def two_runs(folder: Path) -> None:
    for seed in (1, 2):
        create(prepare(write_tiny(folder), [f"seed={seed}"], "local").request, folder / "runs")


@pytest.mark.parametrize(
    ("before", "words", "message"),
    [
        (None, ("prune",), "Missing argument 'RUN'"),
        (None, ("prune", "nothing", "--yes"), "there is no run 'nothing'"),
        (None, ("prune", "nothing", "--force"), "No such option: --force"),
        (None, ("prune", "a", "b"), "unexpected extra argument"),
        (None, ("runs", "extra"), "unexpected extra argument"),
        (two_runs, ("prune", "tiny", "--yes"), "fits several runs"),
        (harm_record, ("prune", "tiny", "--yes"), "is damaged: not valid JSON"),
    ],
)
def test_requests_that_cannot_be_served(
    tmp_path: Path, before: Callable[[Path], Any] | None, words: tuple[str, ...], message: str
) -> None:
    if before is not None:
        before(tmp_path)
    was = tree(tmp_path)
    done = bridge(*words, runs=tmp_path / "runs", check=2, cwd=tmp_path)
    assert message in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert tree(tmp_path) == was


def test_runs_lists_what_status_lists_with_sizes(tmp_path: Path) -> None:
    run = make_run(tmp_path, "eval/2")
    harm_record(tmp_path)
    rows = {row["run"]: row for row in bridge_json("runs", runs=tmp_path / "runs")}
    assert list(rows) == [row["run"] for row in bridge_json("status", runs=tmp_path / "runs")]
    assert (rows[run.id]["state"], rows[run.id]["done"], rows[run.id]["elements"]) == ("unknown", 10, 11)
    assert rows[run.id]["bytes"] == sum(map(len, tree(run.folder).values()))
    assert rows["tiny-broken"]["state"] == "damaged" and rows["tiny-broken"]["bytes"] == 1
    shown = bridge("runs", runs=tmp_path / "runs").stdout
    assert shown == bridge("status", runs=tmp_path / "runs").stdout
    assert run.id in shown and "10/11" in shown
    assert bridge_json("runs", runs=tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_949, "99.9 kB"), (99_950, "100 kB"), (999_499, "999 kB"),
     (999_500, "1.0 MB"), (3_090_000_000, "3.1 GB"), (5_000_000_000_000_000, "5000 TB")],
)  # fmt: skip
def test_sizes_for_people(count: int, text: str) -> None:
    assert pruning.size_text(count) == text
