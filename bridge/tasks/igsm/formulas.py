"""What each premise says: shapes of formulas, numbers, values, and the sketch that decides the split."""

from __future__ import annotations

from typing import NamedTuple

from bridge.config.tasks import IgsmSettings
from bridge.tasks.igsm.graph import Graph
from bridge.tasks.igsm.structure import TOTAL
from bridge.tasks.streams import Draw, between

TRIES = 6  # draws of one quantity when every value is bounded
WORD = (1 << 64) - 1


class Formula(NamedTuple):
    """`[literal (+ or *)] inner`, where inner is nothing, one parent, a sum or a difference; or a total."""

    operator: str
    """`+`, `*`, or empty without a literal beside parents."""
    literal: int
    inner: str
    """`constant`, `same`, `sum`, `difference`, `total` (instances summed) or `products` (pairs multiplied, summed)."""
    parents: list[int]
    value: int


def draw_formulas(settings: IgsmSettings, graph: Graph, draw: Draw) -> list[Formula] | None:
    """One formula for each node of the graph, or None if a value got out of bounds."""
    lowest = 1 - settings.max_answer if settings.negative else 0
    bounded = settings.bound == "all"
    formulas: list[Formula] = []
    values: list[int] = []
    for position, quantity in enumerate(graph.quantities):
        tries = TRIES if bounded and quantity < TOTAL else 1
        while True:
            formula = _draw_formula(settings, graph, position, values, draw)
            tries -= 1
            if lowest <= formula.value < settings.max_answer:
                break
            if tries == 0:
                if bounded or position == graph.needed - 1:
                    return None
                break
        formulas.append(formula)
        values.append(formula.value)
    return formulas


def _draw_formula(settings: IgsmSettings, graph: Graph, position: int, values: list[int], draw: Draw) -> Formula:
    parents = graph.parents[position]
    quantity = graph.quantities[position]
    if quantity >= TOTAL:
        if quantity % 64 == graph.structure.layer[(quantity - TOTAL) // 64] + 1:
            return Formula("", 0, "total", parents, sum([values[p] for p in parents]))
        products = [values[a] * values[b] for a, b in zip(parents[::2], parents[1::2], strict=True)]
        return Formula("", 0, "products", parents, sum(products))
    low, high = settings.literals
    if not parents:
        literal = between(draw, low, high)
        return Formula("", literal, "constant", parents, literal)
    inner = "same" if len(parents) == 1 else "sum"
    value = sum([values[p] for p in parents])
    if len(parents) == 2 and draw() < 0.5:
        inner = "difference"
        first, second = parents if draw() < 0.5 else parents[::-1]
        value = values[first] - values[second]
        if value < 0 and not settings.negative:
            first, second, value = second, first, -value
        parents = [first, second]
    if not graph.literal[position]:
        return Formula("", 0, inner, parents, value)
    if draw() < 0.5:
        literal = between(draw, max(low, 1), high)
        return Formula("+", literal, inner, parents, literal + value)
    literal = between(draw, max(low, 2), high)
    return Formula("*", literal, inner, parents, literal * value)


def _mix(number: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit words that leaves no trace of small inputs."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & WORD
    return number ^ (number >> 31)


_INNER = {"constant": 1, "same": 2, "sum": 3, "difference": 4, "total": 5, "products": 6}
_OPERATOR = {"": 1, "+": 2, "*": 3}


def sketch(graph: Graph, formulas: list[Formula], numbers: bool) -> int:
    """A 64-bit digest of what the answer is computed from, without names; with the numbers if asked.

    Problems that differ only in names, in the order of premises or addends, or in distractors have the same
    digest. It is built from the leaves up, so a quantity used twice counts as two equal ones.
    """
    digests: list[int] = []
    for formula in formulas[: graph.needed]:
        own = [digests[p] for p in formula.parents]
        if formula.inner == "difference":
            own[1] = _mix(own[1] + 1)
        elif formula.inner == "products":
            own = [_mix(a + 3 * b + 2) for a, b in zip(own[::2], own[1::2], strict=True)]
        label = 8 * _INNER[formula.inner] + _OPERATOR[formula.operator]
        if numbers:
            label += 64 * (formula.literal + 1)
        digests.append(_mix((_mix(label) + sum([_mix(other) for other in own])) & WORD))
    return digests[-1]
