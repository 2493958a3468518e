"""A problem whose solution is a graph of quantities: what behaviors need to know, whatever the task."""

from __future__ import annotations

from typing import NamedTuple


class Node(NamedTuple):
    """One quantity of a problem."""

    name: str
    """As the problem's text calls it."""
    parents: tuple[int, ...]
    """The nodes it is computed from, in the order in which the formula uses them."""
    formula: str
    """Numbers, `+ - *`, parentheses and one `{}` for each parent: `3 * ({} - {})`."""
    value: int
    premise: str
    """What the text says the quantity equals; empty if the text does not define it in a sentence of its own."""
    inputs: int
    """Number of parents, a number in the premise counting as one more."""


class Problem(NamedTuple):
    """A problem in words and as a graph."""

    text: str
    nodes: list[Node]
    steps: list[int]
    """The nodes that the answer needs, in an order in which they can be computed; the question is the last."""
    distractors: list[int]
    """The other nodes."""
    ops: int
    """Operations that the answer needs: the sum over its nodes of max(1, inputs - 1)."""

    @property
    def answer(self) -> int:
        return self.nodes[self.steps[-1]].value
