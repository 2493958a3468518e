"""A dataset as the training and evaluation stages need it: rows, how answers compare, how responses begin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bridge.config.tasks import TaskSettings
from bridge.errors import UserError
from bridge.tasks import Example, load_task
from bridge.tasks.grading import canonical, listed_options
from bridge.tasks.tables import read_examples, read_facts


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
        """Every worked solution. Raises UserError where one is missing, or is not whole."""
        for number, example in enumerate(self.examples, 1):
            if example.response is None:
                raise UserError(f"{self.path}: row {number} has no worked solution (`response`) to learn from")
            if example.start:
                raise UserError(
                    f"{self.path}: row {number} begins inside its worked solution (R³'s mixed form); only an "
                    "rl stage without `starts` takes such rows"
                )
        return [example.response or "" for example in self.examples]

    def golds(self) -> list[str]:
        """Every right answer. Raises UserError where one is missing or is no answer of `answer_kind`."""
        for number, example in enumerate(self.examples, 1):
            if not example.gold:
                raise UserError(f"{self.path}: row {number} has no right answer (`gold`) to grade against")
            try:
                canonical(example.gold, self.answer_kind)
            except UserError as error:
                raise UserError(f"{self.path}: row {example.id}: {error}") from None
        return [example.gold for example in self.examples]

    def options(self) -> list[tuple[str, ...]]:
        """The options that each question lists, where answers are choices; else none."""
        choice = self.answer_kind.partition(":")[0] == "choice"
        return [listed_options(example.prompt[-1]["content"]) if choice else () for example in self.examples]


def read_dataset(path: Path, task: TaskSettings, limit: int | None = None) -> Dataset:
    """Read a dataset artifact, a file that `bridge-rl data` wrote, or a user's own file.

    The first two say how their responses begin and how answers compare. In a user's own file responses begin as they
    are written, and answers compare as those of the task.

    Raises UserError for what is no dataset, for an empty one, and for a broken row, which is named.
    """
    facts = read_facts(path)
    kind = facts.get("answer_kind") or load_task(task).answer_kind
    return Dataset(path, read_examples(path)[:limit], kind, facts.get("response_prefix", ""))
