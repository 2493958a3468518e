"""What a task is, and what its rows are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from bridge.tasks.chain import Chain
from bridge.tasks.dag import Problem
from bridge.tasks.frames import Message
from bridge.tasks.streams import Draw

Split = Literal["sft", "rl", "val", "test"]
Writer = Callable[[Problem | Chain, Draw], str]
"""Words the solution of a problem, drawing from the given stream (`bridge.behaviors.writer`)."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a dataset."""

    id: str
    """The row's number as text, or the data's own name for it."""
    prompt: list[Message]
    response: str | None
    """A worked solution, where there is one."""
    gold: str
    """The right answer; empty in a user's file that has none."""
    extra: dict[str, object] = field(default_factory=dict)
    start: str = ""
    """How the response begins: given, and not to be learnt (R³). `response` is what follows."""


class Task(Protocol):
    """A source of problems with answers that can be checked. A class of yours may take the defaults by naming this one
    as its base (docs/tasks.md)."""

    answer_kind: str
    """How answers are compared: the `kind` of `bridge-rl grade`."""
    response_prefix: str = ""
    """The text that every response starts with; sampling starts after it."""
    worded: bool = False
    """Whether `rows` words its solutions with the writer it is given, so that a data stage may name a `behavior`."""

    def rows(
        self,
        split: Split,
        size: int | None,
        seed: int,
        writer: Writer | None = None,
        rejected: Counter[str] | None = None,
    ) -> Iterator[Example]:
        """The rows of a split in order, `size` of them or all there are; the same arguments give the same rows.

        Splits never share a problem. `rejected` counts the candidates that were refused, by reason.
        """

    def vocabulary(self) -> list[str]:
        """Pieces of the problems' text that a tokenizer made for the task should not cut."""
        return []
