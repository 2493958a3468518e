"""Rows in the forms of the public data sets, made up for the tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.config.tasks import FileTask, parse_task
from bridge.tasks import resolve_task


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def task(name: str, path: Path, **settings: Any) -> FileTask:
    """The settings of a public task, resolved as a launch does it."""
    found = resolve_task(parse_task({"name": name, "path": str(path), **settings}))
    assert isinstance(found, FileTask)
    return found


def gsm8k(number: int) -> dict[str, str]:
    """Twice `number` and 3 more, in two calculator steps."""
    twice = 2 * number
    return {
        "question": f"Ann has {number} pens.\u2028Bob has twice as many. Cem has 3 more than Bob. How many has Cem?",
        "answer": f"Bob has {number}*2=<<{number}*2={twice}>>{twice} pens.\n"
        f"Cem has {twice}+3=<<{twice}+3={twice + 3}>>{twice + 3} pens.\n#### {twice + 3}",
    }


def svamp(number: int) -> dict[str, Any]:
    return {
        "ID": f"chal-{number}",
        "Body": f"Dee had {number}.0 cups and broke 2.0 of them",
        "Question": "How many cups are left?",
        "Equation": f"( {number}.0 - 2.0 )",
        "Answer": float(number - 2),
        "Type": "Subtraction",
    }


def arc(number: int, labels: str = "ABCD", key: int = 2) -> dict[str, Any]:
    choices = [{"text": f"thing {number + place}", "label": label} for place, label in enumerate(labels)]
    return {
        "id": f"Q{number}",
        "question": {"stem": f"Which thing is {number + key}?", "choices": choices},
        "answerKey": labels[key],
    }


def arc_hub(number: int) -> dict[str, Any]:
    row = arc(number)
    choices = row["question"]["choices"]
    lists = {field: [choice[field] for choice in choices] for field in ("text", "label")}
    return {"id": row["id"], "question": row["question"]["stem"], "choices": lists, "answerKey": row["answerKey"]}


NLI = ("entailment", "neutral", "contradiction")


def nli(number: int, label: str | None = None) -> dict[str, Any]:
    return {
        "gold_label": label or NLI[number % 3],
        "sentence1": f"{number} dogs\u2028run.",
        "sentence2": f'"{number} animals" move.',
        "pairID": f"{number}x",
        "annotator_labels": ["neutral"],
    }


def nli_hub(number: int) -> dict[str, Any]:
    return {"premise": f"{number} dogs run.", "hypothesis": f"{number} animals move.", "label": number % 3}


def race(number: int, questions: int = 2) -> dict[str, Any]:
    return {
        "id": f"high{number}.txt",
        "article": f"Passage {number}.\nIt has two lines.",
        "questions": [f"What is {number} and {q}?" for q in range(questions)],
        "options": [["one", "two", "three", f"{number}-{q}"] for q in range(questions)],
        "answers": ["D"] * questions,
    }
