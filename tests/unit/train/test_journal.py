"""metrics.jsonl and samples.jsonl after a resume; W&B offline."""

import json
from pathlib import Path

import pytest
from small import settings

from bridge.config.stages import OptimizerSettings
from bridge.train.journal import Journal, open_journal


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_rewind_drops_later_lines_and_a_torn_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (10, 20, 30):
        journal.metrics(step, {"loss": step / 10})
        journal.samples(step, [{"completion": "é\u2028x"}, {"completion": "b"}])
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 20, "lo')
    journal.rewind(20)
    assert steps(tmp_path / "metrics.jsonl") == [10, 20]
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_bytes().split(b"\n") if line]
    assert [row["step"] for row in rows] == [10, 10, 20, 20]
    assert rows[0]["completion"] == "é\u2028x"
    assert journal.last() == {"step": 20, "loss": 2.0}


def test_rewind_to_the_start_and_without_files(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.rewind(0)
    assert not list(tmp_path.iterdir())
    journal.metrics(5, {"loss": 1.0})
    journal.rewind(0)
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == ""


@pytest.mark.slow
def test_wandb_offline_keeps_its_id_and_leaves_plain_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    out.mkdir()
    scratch.mkdir()
    stage = settings("sft", steps=1, lr=1.0, wandb="some-project")
    assert isinstance(stage, OptimizerSettings)
    for step in (1, 2):  # the second time is a resumed stage
        with open_journal(stage, "sft/0", out, scratch) as journal:
            journal.metrics(step, {"loss": 0.5})
            journal.samples(step, [{"prompt": "p", "completion": "c", "reward": 1.0}])
    run_id = (scratch / "wandb-id").read_text(encoding="utf-8")
    # Folders are named by second and id, with a number behind where that is taken; the file in them has the id alone.
    files = list((out / "wandb").glob("offline-run-*/*.wandb"))
    assert files and {path.name for path in files} == {f"run-{run_id}.wandb"}
    assert not [path for path in out.rglob("*") if path.is_symlink()]
    assert steps(out / "metrics.jsonl") == [1, 2]
