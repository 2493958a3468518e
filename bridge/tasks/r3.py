"""R³'s JSON forms: worked solutions (train), the same cut at a start state (mix), and questions (test).

R³ is "Training Large Language Models for Reasoning through Reverse Curriculum Reinforcement Learning" (Xi et al.,
2024). The mathematics files are `{item_id, question, answer_cot, answer_value}`, the others `{instruction, input,
output}` with the answer at the end of `output`, after `###` or `####`. In a mixed file the given steps stand in the
question.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bridge.config.stages import Starts
from bridge.errors import UserError
from bridge.tasks.base import Example
from bridge.tasks.starts import pieces_given

GIVEN = "\n\n### Response:"
_ANSWER = re.compile(r"\s*#{3,4}[ \t]*([^#\n]+?)\s*\Z")


class Row(NamedTuple):
    """A row of one of the forms."""

    id: str
    question: str
    start: str | None
    """The steps that are given; None if the file is not of the mixed form."""
    rest: str | None
    """The steps that follow, without the answer; None in a test file."""
    gold: str


def parse(where: str, record: Mapping[str, Any]) -> Row:
    """A row of R³'s JSON. Raises UserError, beginning with `where`."""
    if "answer_value" in record:
        question, rest = _text(where, record, "question"), record.get("answer_cot")
        if not isinstance(rest, str | None):
            raise UserError(f"{where}: `answer_cot` must be text")
        rest = None if rest is None else _ANSWER.sub("", rest)
        gold = record["answer_value"]
        if isinstance(gold, bool) or not isinstance(gold, str | int | float) or not str(gold).strip():
            raise UserError(f"{where}: `answer_value` must be the answer, as text or a number")
    else:
        question, output, extra = _text(where, record, "instruction"), record.get("output"), record.get("input") or ""
        found = _ANSWER.search(output) if isinstance(output, str) else None
        if found is None or not isinstance(extra, str):
            raise UserError(f"{where}: `output` must be text that ends with `### ANSWER`, and `input` text")
        rest, gold = found.string[: found.start()], found[1]
        question = f"{question}\n{extra}" if extra else question
    asked, mark, start = question.partition(GIVEN)
    given = start.removeprefix(" ") if mark else None
    return Row(str(record.get("item_id") or ""), asked, given, rest, str(gold).strip())


def _text(where: str, record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: `{field}` must be text, and not empty")
    return value


def is_r3(record: Mapping[str, Any]) -> bool:
    """Whether a record has the fields of one of the forms."""
    return ("answer_value" in record and "question" in record) or ("instruction" in record and "output" in record)


def write(path: Path, rows: Iterable[Example], kind: str, form: str, starts: Starts) -> int:
    """Write examples as a JSON list, row by row; returns how many.

    Args:
        kind: how answers compare: numbers make the mathematics form, choices and labels the other.
        form: `train`, `mix` (each solution cut at its start states, `starts`) or `test` (questions and answers only).

    Raises UserError where a row has no worked solution and the form needs one.
    """
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write("[")
        for row in rows:
            for question, rest in _cut(row, form, starts):
                file.write(",\n" if count else "\n")
                json.dump(_record(row, question, rest, kind, form), file, ensure_ascii=False, indent=1)
                count += 1
        file.write("\n]\n")
    return count


def _cut(row: Example, form: str, starts: Starts) -> list[tuple[str, str]]:
    """(question with the given steps, remaining steps) of each row that an example gives."""
    if "question" not in row.extra:
        raise UserError(f"row {row.id}: only rows of a public data set have R³'s form; write a .parquet file")
    question, work = str(row.extra["question"]), str(row.extra.get("work") or "")
    if form == "test":
        return [(question, "")]
    if not work:
        raise UserError(f"row {row.id}: has no worked solution, which R³'s {form} form is made of")
    if form == "train":
        return [(question, work)]
    lines = [line for line in work.split("\n") if line.strip()]
    return [
        (f"{question}{GIVEN} " + "\n".join(lines[:start]), "\n".join(lines[start:]))
        for start in pieces_given(len(lines), starts)
    ]


def _record(row: Example, question: str, rest: str, kind: str, form: str) -> dict[str, str]:
    if kind != "number":
        return {"instruction": question, "input": "", "output": f"{rest} ### {row.gold}".strip()}
    record = {"item_id": row.id, "question": question, "answer_cot": rest, "answer_value": row.gold}
    if form == "test":
        del record["answer_cot"]
    return record
