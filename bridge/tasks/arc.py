"""ARC (Clark et al., 2018): science questions. The hub's rows hold options as two lists, the original ones as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from reprlib import repr as brief
from typing import Any

from bridge.config.tasks import ArcSettings
from bridge.errors import UserError
from bridge.tasks.public import Item, PublicTask, Reject, options, text


class Arc(PublicTask[ArcSettings]):
    """The ARC task (see `bridge.tasks.Task`). Options are lettered from A, whether the data say A or 1."""

    answer_kind = "choice"
    variants = ("challenge", "easy")

    @property
    def variant(self) -> str:
        return self.settings.level

    def items(self, where: str, record: Mapping[str, Any]) -> Iterator[Item | Reject]:
        question, choices = record.get("question"), record.get("choices")
        if isinstance(question, Mapping):
            choices, question = question.get("choices"), question.get("stem")
        if isinstance(choices, list) and all(isinstance(choice, Mapping) for choice in choices):
            texts = [choice.get("text") for choice in choices]
            labels = [choice.get("label") for choice in choices]
        elif isinstance(choices, Mapping) and all(isinstance(choices.get(f), list) for f in ("text", "label")):
            texts, labels = choices["text"], choices["label"]
        else:
            raise UserError(f"{where}: `choices` must be a list of text and label, or two lists of them")
        stem = text(where, {"question": question}, "question").strip()
        if "answerKey" not in record:
            raise UserError(f"{where}: `answerKey` is missing")
        key = record["answerKey"]
        if not key:
            yield "no_label"
            return
        if len(texts) != len(labels) or labels.count(key) != 1:
            raise UserError(f"{where}: `answerKey` must be one of the labels {brief(labels)}, but it is {brief(key)}")
        yield Item(
            f"{stem}\n{options(where, texts)}", "ABCDEFGHIJ"[labels.index(key)], None, str(record.get("id") or "")
        )
