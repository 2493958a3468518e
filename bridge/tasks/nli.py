"""MNLI (Williams et al., 2018) and SNLI (Bowman et al., 2015): does a premise entail a hypothesis?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from reprlib import repr as brief
from typing import Any, TypeVar

from bridge.config.tasks import FileTask, MnliSettings, SnliSettings
from bridge.errors import UserError
from bridge.tasks import r3
from bridge.tasks.public import Item, PublicTask, Reject, text, worked_item

S = TypeVar("S", bound=FileTask)

LABELS = ("yes", "it is not possible to tell", "no")
"""In the order of the hub's numbers 0, 1, 2, and in R³'s words."""
_WORDS = dict(zip(("entailment", "neutral", "contradiction"), LABELS, strict=True))


class Nli(PublicTask[S]):
    """What the two have in common. A row on which the annotators did not agree (`-` or -1) is left out."""

    answer_kind = "label"

    def items(self, where: str, record: Mapping[str, Any]) -> Iterator[Item | Reject]:
        if r3.is_r3(record):
            item = worked_item(where, record)
            if item.gold not in LABELS:
                raise UserError(f"{where}: the answer must be one of {', '.join(LABELS)}, but it is {brief(item.gold)}")
            yield item
            return
        hub = "gold_label" not in record
        premise, hypothesis = ("premise", "hypothesis") if hub else ("sentence1", "sentence2")
        if hub and "label" not in record:
            raise UserError(f"{where}: `label` (`gold_label` in the authors' files) is missing")
        label = record["label" if hub else "gold_label"]
        if label in ("-", -1, None, ""):
            yield "no_label"
            return
        if type(label) is int and label in range(3):
            gold = LABELS[label]
        elif isinstance(label, str) and label in _WORDS:
            gold = _WORDS[label]
        else:
            raise UserError(f"{where}: the label must be {', '.join(_WORDS)}, 0 to 2, or -, but it is {brief(label)}")
        question = (
            f"Premise: {text(where, record, premise).strip()}\nHypothesis: {text(where, record, hypothesis).strip()}\n"
            "Does the premise entail the hypothesis?"
        )
        yield Item(question, gold, None, str(record.get("pairID") or ""))


class Mnli(Nli[MnliSettings]):
    """The MNLI task (see `bridge.tasks.Task`)."""

    variants = ("matched", "mismatched")
    test_pools = ("dev", "test")

    @property
    def variant(self) -> str:
        return self.settings.genres


class Snli(Nli[SnliSettings]):
    """The SNLI task (see `bridge.tasks.Task`)."""
