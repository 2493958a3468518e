"""What a task is, and what its rows are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from bridge.tasks.dag import Problem
from bridge.tasks.frames import Message
from bridge.tasks.streams import Draw

Split = Literal["sft", "rl", "val", "test"]
Writer = Callable[[Problem, Draw], str]
"""Words the solution of a problem, drawing from the given stream (`bridge.behaviors.writer`)."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a dataset."""

    id: str
    """The row's number as text."""
    prompt: list[Message]
    response: str | None
    """A worked solution, where there is one."""
    gold: str
    """The right answer; empty in a user's file that has none."""
    extra: dict[str, object] = field(default_factory=dict)


class Task(Protocol):
    """A source of problems with answers that can be checked."""

    answer_kind: str
    """How answers are compared: the `kind` of `bridge-rl grade`."""
    response_prefix: str
    """The text that every response starts with; sampling starts after it."""

    def rows(
        self, split: Split, size: int, seed: int, writer: Writer | None = None, rejected: Counter[str] | None = None
    ) -> Iterator[Example]:
        """The rows of a split in order. `rejected` counts the candidates that were refused, by reason."""

    def vocabulary(self) -> list[str]:
        """Pieces of the problems' text that a tokenizer made for the task should not cut."""
