"""Two evaluations are compared only where they were graded by the same rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bridge.artifacts import seal
from bridge.errors import UserError
from bridge.launch.scores import comparison

ANSWERS = {"0": ["7", "8", None, "7"], "1": ["7", "7", "8", "8"]}  # of four samples two are right, so 1 and 1/2


def evaluation(folder: Path, **grading: str) -> Path:
    rows = [(q, s, a) for q, answers in ANSWERS.items() for s, a in enumerate(answers)]
    columns: dict[str, Any] = {
        "question": [q for q, _, _ in rows],
        "sample": [s for _, s, _ in rows],
        "prompt": ["?"] * len(rows),
        "gold": ["7"] * len(rows),
        "answer": [a for _, _, a in rows],
        "correct": [a == "7" for _, _, a in rows],
    }
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "samples.parquet")
    (folder / "eval.json").write_text(json.dumps({"settings": {"grading": grading}}), encoding="utf-8")
    seal(folder, "eval", folder.name, "a test", {})
    return folder


def test_ties_count_as_the_evaluations_say(tmp_path: Path) -> None:
    shared = comparison(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", ties="share"))
    lost = comparison(evaluation(tmp_path / "c", ties="lose"), evaluation(tmp_path / "d", ties="lose"))
    assert {row["metric"]: row["a"] for row in shared}["maj@4"] == 0.75
    assert {row["metric"]: row["a"] for row in lost}["maj@4"] == 0.5


def test_different_rules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="were graded by different rules"):
        comparison(evaluation(tmp_path / "a"), evaluation(tmp_path / "b", percent="hundredth"))
