"""A dataset as the training and evaluation stages need it: rows, how answers compare, how responses begin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.config.tasks import TaskSettings
from bridge.errors import UserError
from bridge.tasks import Example, load_task
from bridge.tasks.grading import canonical
from bridge.tasks.tables import read_examples


@dataclass(frozen=True)
class Dataset:
    """Rows with the two facts that belong to all of them."""

    path: Path
    examples: Sequence[Example]
    answer_kind: str
    """How answers are compared: the `kind` of grading."""
    response_prefix: str
    """The text that every response starts with; sampling starts after it."""

    def responses(self) -> list[str]:
        """Every worked solution. Raises UserError where one is missing."""
        for example in self.examples:
            if example.response is None:
                raise UserError(f"{self.path}: row {example.id} has no worked solution to learn from")
        return [example.response or "" for example in self.examples]

    def golds(self) -> list[str]:
        """Every right answer. Raises UserError where one is missing or is no answer of `answer_kind`."""
        for example in self.examples:
            if not example.gold:
                raise UserError(f"{self.path}: row {example.id} has no right answer to grade against")
            try:
                canonical(example.gold, self.answer_kind)
            except UserError as error:
                raise UserError(f"{self.path}: row {example.id}: {error}") from None
        return [example.gold for example in self.examples]


def read_dataset(path: Path, task: TaskSettings, limit: int | None = None) -> Dataset:
    """Read a dataset artifact or a user's own file; `dataset.json` beside the rows wins over the task's own facts.

    Raises UserError for what is no dataset, for an empty one, and for a broken row, which is named.
    """
    examples = read_examples(path)[:limit]
    facts_file = path / "dataset.json" if path.is_dir() else path.with_name("dataset.json")
    if facts_file.is_file():
        facts = json.loads(facts_file.read_text(encoding="utf-8"))
        return Dataset(path, examples, facts["answer_kind"], facts["response_prefix"])
    source = load_task(task)
    return Dataset(path, examples, source.answer_kind, source.response_prefix)
