"""Which items exist and which holds which: the structure graph, and the quantities it gives rise to."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from bridge.config.tasks import IgsmSettings
from bridge.tasks.streams import Draw, between, take

# A quantity is one integer. Instance "number of item y in each item x": 64 x + y. Total of category c in each
# item x: TOTAL + 64 x + c. At most 4 categories of 6 items exist, so 64 is roomy.
TOTAL = 4096


class Structure(NamedTuple):
    """A layered graph: items of one category hold items of the next one."""

    layer: list[int]
    """Item → its category, 0 being the outermost."""
    depth: int
    """Number of categories."""
    holds: list[list[int]]
    """Item → the items of the next category that it holds."""


def draw_structure(settings: IgsmSettings, draw: Draw) -> Structure:
    """Draw categories, items and edges; every item that is not innermost holds something.

    The number of edges (instance quantities) is uniform between the least possible and what fits.
    """
    while True:
        widths = [between(draw, *settings.width) for _ in range(between(draw, *settings.depth))]
        least = sum(widths[:-1])
        if least <= settings.max_instances:
            break
    layer = [index for index, width in enumerate(widths) for _ in range(width)]
    holds: list[list[int]] = [[] for _ in layer]
    spare: list[int] = []  # instances that do not exist yet
    start = 0
    for upper, lower in pairwise(widths):
        below = start + upper
        for item in range(start, below):
            first = between(draw, below, below + lower - 1)
            holds[item].append(first)
            row = 64 * item
            spare += range(row + below, row + first)
            spare += range(row + first + 1, row + below + lower)
        start = below
    for _ in range(between(draw, 0, min(len(spare), settings.max_instances - least))):
        instance = take(draw, spare)
        holds[instance // 64].append(instance % 64)
    return Structure(layer, len(widths), holds)


def prerequisites(structure: Structure, total: int) -> list[int]:
    """What a total is computed from. Of the next category: the instances, summed. Of a category further in:
    for each item held, its number and its own total, multiplied and summed."""
    item, category = divmod(total - TOTAL, 64)
    first = 64 * item
    if category == structure.layer[item] + 1:
        return [first + other for other in structure.holds[item]]
    needed: list[int] = []
    for other in structure.holds[item]:
        needed += (first + other, TOTAL + 64 * other + category)
    return needed


def instances(structure: Structure) -> list[int]:
    """Every instance quantity."""
    return [64 * item + other for item, held in enumerate(structure.holds) for other in held]


def totals(structure: Structure) -> list[list[int]]:
    """Every total by the distance between the item's category and the one counted, the nearest first."""
    by_distance: list[list[int]] = [[] for _ in range(structure.depth - 1)]
    for item, layer in enumerate(structure.layer):
        for category in range(layer + 1, structure.depth):
            by_distance[category - layer - 1].append(TOTAL + 64 * item + category)
    return by_distance
