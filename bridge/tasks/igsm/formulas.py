"""What each premise says: shapes of formulas, numbers, values, and the sketch that decides the split."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from bridge.config.tasks import IgsmSettings
from bridge.tasks.igsm.graph import Graph
from bridge.tasks.igsm.structure import TOTAL
from bridge.tasks.streams import Draw, between

# A formula is `[literal operator] inner`. Its shape is the sum of one of each:
CONSTANT, SAME, SUM, DIFFERENCE, PRODUCTS = 0, 1, 2, 3, 4  # inner; products: pairs multiplied, then summed
PLAIN, PLUS, TIMES = 0, 8, 16  # operator; a constant is its literal and has no operator
NO_PREMISE = 32  # a total

BINS = 23
REDRAWS = 40  # shapes drawn for one graph before it is given up
WORD = (1 << 64) - 1


class Formulas(NamedTuple):
    """The formulas of a graph's nodes, by position."""

    shapes: list[int]
    literals: list[int]
    """0 where there is none."""
    parents: list[list[int]]
    values: list[int]


def draw_formulas(settings: IgsmSettings, graph: Graph, bins: Container[int], draw: Draw) -> Formulas | None:
    """Formulas whose values are in bounds and whose sketch, modulo BINS, lies in `bins`; None if none was found.

    Shapes are drawn first, then numbers, twice if the first ones lead out of bounds.
    """
    numbers = settings.split_by == "numbers"
    shapes = _fixed_shapes(graph)
    two = [position for position, shape in enumerate(shapes) if shape == SUM and len(graph.parents[position]) == 2]
    literal = [position for position, has in enumerate(graph.literal) if has and shapes[position] != CONSTANT]
    for _ in range(REDRAWS):
        # Two parents are added or subtracted, a number is added or a factor, all with probability 1/2.
        for position in two:
            shapes[position] = SUM if draw() < 0.5 else DIFFERENCE
        for position in literal:
            shapes[position] = (shapes[position] & 7) + (PLUS if draw() < 0.5 else TIMES)
        if not numbers and sketch(graph, shapes) % BINS not in bins:
            continue
        for _ in range(2):
            literals = _draw_literals(settings, shapes, draw)
            if numbers and sketch(graph, shapes, literals) % BINS not in bins:
                continue
            found = _evaluate(settings, graph, shapes, literals)
            if found is not None:
                return Formulas(shapes, literals, *found)
    return None


def _fixed_shapes(graph: Graph) -> list[int]:
    """The shapes before anything is drawn."""
    shapes = []
    for quantity, parents in zip(graph.quantities, graph.parents, strict=True):
        if quantity >= TOTAL:
            near = graph.quantities[parents[-1]] < TOTAL
            shapes.append(NO_PREMISE + (SUM if near else PRODUCTS))
        else:
            shapes.append(min(len(parents), SUM))
    return shapes


def _draw_literals(settings: IgsmSettings, shapes: list[int], draw: Draw) -> list[int]:
    low, high = settings.literals
    literals = []
    for shape in shapes:
        if shape == CONSTANT:
            literals.append(between(draw, low, high))
        elif shape & TIMES:
            literals.append(between(draw, max(low, 2), high))
        elif shape & PLUS:
            literals.append(between(draw, max(low, 1), high))
        else:
            literals.append(0)
    return literals


def _evaluate(
    settings: IgsmSettings, graph: Graph, shapes: list[int], literals: list[int]
) -> tuple[list[list[int]], list[int]] | None:
    """Parents and values from the leaves up; None if a value that is bounded is out of bounds.

    Where values below zero are not allowed, a difference takes the smaller from the larger.
    """
    modulus = settings.modulus
    most = modulus or settings.max_answer
    lowest = 1 - most if settings.negative and not modulus else 0
    fixed = settings.negative or modulus is not None
    every = settings.bound == "all"
    question = graph.needed - 1
    all_parents = list(graph.parents)
    values: list[int] = []
    for position, parents in enumerate(all_parents):
        shape = shapes[position]
        inner = shape & 7
        if inner == DIFFERENCE:
            value = values[parents[0]] - values[parents[1]]
            if value < 0 and not fixed:
                all_parents[position], value = parents[::-1], -value
        elif inner == PRODUCTS:
            value = sum([values[a] * values[b] for a, b in zip(parents[::2], parents[1::2], strict=True)])
        else:
            value = 0
            for parent in parents:
                value += values[parent]
        if shape & TIMES:
            value *= literals[position]
        else:
            value += literals[position]
        if modulus:
            value %= modulus
        if (every or position == question) and not lowest <= value < most:
            return None
        values.append(value)
    return all_parents, values


def sketch(graph: Graph, shapes: list[int], literals: list[int] | None = None) -> int:
    """A digest of how the answer is computed: shapes and who depends on whom, and the numbers if given.

    Problems that differ only in names, in the order of premises, of addends or of the two sides of a difference, or
    in distractors, have the same digest. It is built from the leaves up, so it does not tell a quantity that is
    used twice from two quantities that are computed alike. Multiplying by the odd constant of splitmix64 and
    folding the high bits back mixes well enough for bins.
    """
    labels = shapes[: graph.needed]
    if literals is not None:
        labels = [label + 64 * (literal + 1) for label, literal in zip(labels, literals, strict=False)]
    digests: list[int] = []
    for label, parents in zip(labels, graph.parents, strict=False):
        label += 1
        for parent in parents:
            label += digests[parent]
        label = (label * 0x9E3779B97F4A7C15) & WORD
        digests.append(label ^ (label >> 29))
    return digests[-1] >> 8
