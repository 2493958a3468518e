"""The data stage: what it writes, that the same settings give the same bytes, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from igsm_cases import BRIDGE, DEMO

from bridge.config.stages import BEHAVIORS, Behavior, DataSettings
from bridge.config.tasks import IgsmSettings
from bridge.errors import UserError
from bridge.stages.data import run, write_split
from bridge.stages.job import Job
from bridge.tasks.tables import read_examples


def settings(**values: object) -> DataSettings:
    return DataSettings.model_validate({"kind": "data", "split": "sft", "size": 50, **values})


def job(folder: Path, data: DataSettings, task: IgsmSettings = DEMO) -> Job:
    return Job("data/0", data, task, {}, folder / "out", folder / "scratch", threads=1)


def test_the_artifact(tmp_path: Path) -> None:
    summary = run(job(tmp_path, settings(size=300, behavior="bridge", tokenizer=True, seed=3)))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data.parquet", "dataset.json", "tokenizer"]
    assert json.loads((tmp_path / "out" / "dataset.json").read_text(encoding="utf-8")) == summary
    rows = read_examples(tmp_path / "out")
    answers = Counter(row.gold for row in rows)
    top, count = answers.most_common(1)[0]
    assert summary["rows"] == len(rows) == 300
    assert summary["top_answer"] == {"answer": top, "share": count / 300} and count / 300 <= 0.08 + 1 / 300
    assert summary["ops"] == {str(n): k for n, k in sorted(Counter(row.extra["num_ops"] for row in rows).items())}
    assert (summary["split"], summary["seed"]) == ("sft", 3)
    assert summary["behavior"] == BEHAVIORS["bridge"].model_dump()
    assert (summary["answer_kind"], summary["response_prefix"]) == ("number", "")
    assert IgsmSettings.model_validate_json(json.dumps(summary["task"])) == DEMO
    assert set(summary["rejected"]) <= {"duplicate", "answer_share"}  # type: ignore[call-overload]
    assert isinstance(summary["vocabulary"], int) and summary["vocabulary"] < 350


def test_rows_to_be_answered_have_a_solution_too(tmp_path: Path) -> None:
    """So a `val` set can serve for the loss on worked solutions."""
    run(job(tmp_path, settings(split="val"), BRIDGE))
    for row in read_examples(tmp_path / "out"):
        assert row.response is not None and row.response.startswith("<think>\n")
        assert f"\\boxed{{{row.gold}}}" in row.response


@pytest.mark.parametrize("split", ["sft", "test"])
def test_the_same_settings_give_the_same_bytes(tmp_path: Path, split: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run(job(tmp_path / name, settings(split=split, tokenizer=True), BRIDGE))
    files = [path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_vanilla_and_injected_sets_pair_up_row_by_row(tmp_path: Path) -> None:
    found = {}
    for name, behavior in (("vanilla", Behavior()), ("bridge", BEHAVIORS["bridge"])):
        (tmp_path / name).mkdir()
        run(job(tmp_path / name, settings(size=200, behavior=behavior), BRIDGE))
        found[name] = read_examples(tmp_path / name / "out")
    for one, other in zip(found["vanilla"], found["bridge"], strict=True):
        assert (one.prompt, one.gold) == (other.prompt, other.gold)
        assert one.response != other.response


def test_progress_counts_every_row(tmp_path: Path) -> None:
    counted: list[int] = []
    write_split(DEMO, settings(), tmp_path / "x.parquet", counted.append)
    assert sum(counted) == 50


def test_a_refusal_leaves_nothing_behind(tmp_path: Path) -> None:
    impossible = DEMO.model_copy(update={"ops": (40, 40)})
    with pytest.raises(UserError, match="40 operations"):
        write_split(impossible, settings(), tmp_path / "x.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_kill_leaves_no_whole_file_and_the_next_run_is_undisturbed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from bridge.config.stages import DataSettings; from bridge.config.tasks import IgsmSettings\n"
        "from bridge.stages.data import write_split\n"
        "data = DataSettings(kind='data', split='sft', size=40000)\n"
        "write_split(IgsmSettings(name='igsm'), data, Path(sys.argv[1]))\n"
    )
    file = tmp_path / "x.parquet"
    child = subprocess.Popen([sys.executable, "-c", code, str(file)])
    temporary = tmp_path / "x.parquet.tmp"
    deadline = time.monotonic() + 120
    while not (temporary.exists() and temporary.stat().st_size > 0):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert not file.exists()
    write_split(BRIDGE, settings(), file)
    assert len(read_examples(file)) == 50
    assert list(tmp_path.iterdir()) == [file]
