"""A problem whose solution is a graph of quantities: what behaviors need to know, whatever the task."""

from __future__ import annotations

from typing import NamedTuple

from bridge.tasks.streams import Draw, take


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
    modulus: int = 0
    """Values are counted modulo this; 0: they are plain integers."""

    @property
    def answer(self) -> int:
        return self.nodes[self.steps[-1]].value


def reordered(problem: Problem, draw: Draw) -> Problem:
    """The same problem with its steps in a random order in which they can be computed, the question still last.

    A step is drawn uniformly from those whose parents are there already (Kahn's algorithm).
    """
    *needed, question = problem.steps
    missing = {node: sum([parent in needed for parent in set(problem.nodes[node].parents)]) for node in needed}
    users: dict[int, list[int]] = {node: [] for node in needed}
    for node in needed:
        for parent in set(problem.nodes[node].parents):
            users[parent].append(node)
    ready = [node for node in needed if missing[node] == 0]
    steps: list[int] = []
    while ready:
        steps.append(take(draw, ready))
        for node in users[steps[-1]]:
            missing[node] -= 1
            if missing[node] == 0:
                ready.append(node)
    return problem._replace(steps=[*steps, question])
