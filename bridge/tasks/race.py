"""RACE (Lai et al., 2017): a file of one passage with its questions, or the hub's rows of one question each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from reprlib import repr as brief
from typing import Any

from bridge.config.tasks import RaceSettings
from bridge.errors import UserError
from bridge.tasks import r3
from bridge.tasks.public import Item, PublicTask, Reject, options, text, worked_item


class Race(PublicTask[RaceSettings]):
    """The RACE task (see `bridge.tasks.Task`)."""

    answer_kind = "choice"
    variants = ("high", "middle")

    @property
    def variant(self) -> str:
        return self.settings.level

    def items(self, where: str, record: Mapping[str, Any]) -> Iterator[Item | Reject]:
        if r3.is_r3(record):
            item = worked_item(where, record)
            if item.gold not in tuple("ABCD"):
                raise UserError(f"{where}: the answer must be a letter from A to D, but it is {brief(item.gold)}")
            yield item
            return
        passage = text(where, record, "article").strip()
        name = str(record.get("id") or record.get("example_id") or "")
        if "questions" not in record:
            yield _item(where, passage, record.get("question"), record.get("options"), record.get("answer"), "")
            return
        columns = [record.get(field) for field in ("questions", "options", "answers")]
        if not all(isinstance(column, list) for column in columns) or len({len(c or ()) for c in columns}) != 1:
            raise UserError(f"{where}: `questions`, `options` and `answers` must be lists of one length")
        for number, (question, choices, answer) in enumerate(zip(*columns, strict=True)):
            yield _item(f"{where}, question {number}", passage, question, choices, answer, f"{name}-{number}")


def _item(where: str, passage: str, question: object, choices: object, answer: object, name: str) -> Item:
    if not isinstance(choices, list):
        raise UserError(f"{where}: `options` must be a list of texts")
    if answer not in ("A", "B", "C", "D")[: len(choices)]:
        raise UserError(f"{where}: the answer must be the letter of an option, but it is {brief(answer)}")
    asked = text(where, {"question": question}, "question").strip()
    return Item(f"Passage: {passage}\n\nQuestion: {asked}\n{options(where, choices)}", str(answer), None, name)
