"""Which quantity is computed from which: the dependency graph, with an exact number of operations."""

from __future__ import annotations

from dataclasses import dataclass, field

from bridge.config.tasks import IgsmSettings
from bridge.tasks.igsm.structure import TOTAL, Structure, draw_structure, instances, prerequisites, totals
from bridge.tasks.streams import Draw, between, shuffle, take

MOST_INPUTS = 4  # of an instance quantity, a number in its premise included
MOST_NODES = 52  # one letter each
ORDERS = 3  # attempts to order the chosen quantities before a new choice is made

Needs = dict[int, list[int]]
"""Quantity → its prerequisites; none for an instance."""


@dataclass(slots=True)
class Graph:
    """Quantities in an order in which they can be computed: first those that the answer needs, the question last
    of them, then the distractors. Positions in this order are the names of the nodes."""

    structure: Structure
    quantities: list[int] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)
    """For totals in the order of `prerequisites`, otherwise in random order."""
    literal: list[bool] = field(default_factory=list)
    """Whether the premise has a number in it."""
    needed: int = 0
    """How many of the nodes the answer needs."""

    def append(self, quantity: int, parents: list[int], literal: bool) -> None:
        self.quantities.append(quantity)
        self.parents.append(parents)
        self.literal.append(literal)


def draw_graph(settings: IgsmSettings, ops: int, draw: Draw) -> Graph | None:
    """A dependency graph whose answer needs exactly `ops` operations, or None if this attempt failed."""
    structure = draw_structure(settings, draw)
    needs, spent = _choose(structure, ops, draw)
    if not _reachable(needs, ops - spent):
        return None
    for _ in range(ORDERS):
        order = _order(needs, draw)
        inputs = _inputs(needs, *order, ops, draw) if order else None
        if order and inputs:
            break
    else:
        return None
    graph = Graph(structure)
    _connect(graph, needs, *order, inputs, draw)
    graph.needed = len(needs)
    _add_distractors(settings, graph, draw)
    return graph if len(graph.quantities) <= MOST_NODES else None


def _choose(structure: Structure, ops: int, draw: Draw) -> tuple[Needs, int]:
    """The needed quantities and what they cost, at most `ops` operations.

    Totals first, those that reach far before the near ones, each with everything under it, until one at its
    distance does not fit a budget (the larger of two uniform draws); then instances up to a second budget.
    """
    needs: Needs = {}
    spent = 0
    budget = max(between(draw, 1, ops), between(draw, 1, ops))
    for candidates in reversed(totals(structure)):
        while candidates and budget - spent >= 2:
            total = take(draw, candidates)
            if total not in needs:
                cost = _add_closure(structure, total, needs, budget - spent)
                if cost == 0:
                    break
                spent += cost
    budget = between(draw, budget, ops)
    if spent < budget:
        rest = [quantity for quantity in instances(structure) if quantity not in needs]
        for _ in range(min(len(rest), budget - spent)):
            needs[take(draw, rest)] = []
            spent += 1
    return needs, spent


def _add_closure(structure: Structure, total: int, needs: Needs, budget: int) -> int:
    """Add `total` and everything it needs, if that costs at most `budget` operations; returns the operations."""
    new: Needs = {}
    cost = 0
    todo = [total]
    while todo:
        quantity = todo.pop()
        if quantity in needs or quantity in new:
            continue
        if quantity < TOTAL:
            new[quantity] = []
            cost += 1
        else:
            new[quantity] = needed = prerequisites(structure, quantity)
            cost += max(1, len(needed) - 1)
            todo += needed
        if cost > budget:
            return 0
    needs.update(new)
    return cost


def _reachable(needs: Needs, missing: int) -> bool:
    """Whether the instances could take up `missing` operations, wherever they come to stand (two each at most)."""
    return missing <= 2 * sum([quantity < TOTAL for quantity in needs])


def _order(needs: Needs, draw: Draw) -> tuple[list[int], dict[int, list[int]]] | None:
    """Put the quantities in order, built backwards from the question, so that a later one uses each but the last.

    Where nothing placed needs one of the remaining quantities, a placed instance is linked to one. Besides that,
    a placed instance is linked to a random remaining quantity with probability 1/2. An instance has at most two
    links, which cost no operation. Returns the order and the links of each instance; None for a dead end.
    """
    users = dict.fromkeys(needs, 0)
    for needed in needs.values():
        for quantity in needed:
            users[quantity] += 1
    unused = [quantity for quantity, count in users.items() if count == 0]
    remaining = list(needs)
    ready = [take(draw, unused)]
    links: dict[int, list[int]] = {}
    open_instances: list[int] = []
    backwards: list[int] = []
    while True:
        placed = take(draw, ready)
        backwards.append(placed)
        remaining.remove(placed)
        if placed < TOTAL:
            links[placed] = []
            open_instances.append(placed)
        if not remaining:
            return backwards[::-1], links
        for quantity in needs[placed]:
            users[quantity] -= 1
            if users[quantity] == 0:
                ready.append(quantity)
        if placed < TOTAL and ready and draw() < 0.5:
            other = remaining[int(draw() * len(remaining))]
            links[placed].append(other)
            if other in unused:
                unused.remove(other)
                ready.append(other)
        if not ready:
            if not open_instances:
                return None
            user = open_instances[int(draw() * len(open_instances))]
            other = take(draw, unused)
            links[user].append(other)
            ready.append(other)
            if len(links[user]) == 2:
                open_instances.remove(user)


def _inputs(needs: Needs, sequence: list[int], links: dict[int, list[int]], ops: int, draw: Draw) -> list[int] | None:
    """How many inputs each quantity has, so that max(1, inputs - 1) sums to `ops`; None if that cannot be reached."""
    inputs = []
    missing = ops
    growing = []  # instances that can take more inputs: the one at position p has at most p parents and a number
    for position, quantity in enumerate(sequence):
        if quantity >= TOTAL:
            count = len(needs[quantity])
        else:
            count = 1 if position == 0 or draw() < 0.5 else 2
            count = max(len(links[quantity]), count)
            if position >= 2:
                growing.append(position)
        inputs.append(count)
        missing -= max(1, count - 1)
    while missing > 0:
        if not growing:
            return None
        chosen = int(draw() * len(growing))
        position = growing[chosen]
        inputs[position] = max(3, inputs[position] + 1)
        missing -= 1
        if inputs[position] == min(MOST_INPUTS, position + 1):
            growing[chosen] = growing[-1]
            growing.pop()
    return inputs


def _connect(
    graph: Graph, needs: Needs, sequence: list[int], links: dict[int, list[int]], inputs: list[int], draw: Draw
) -> None:
    """Give each quantity its parents: a total its prerequisites, an instance its links and random earlier ones.

    Where there is room for a number among the inputs, it takes it with probability 1/2, or if parents are too few.
    """
    place = {quantity: position for position, quantity in enumerate(sequence)}
    for position, quantity in enumerate(sequence):
        if quantity >= TOTAL:
            graph.append(quantity, [place[other] for other in needs[quantity]], False)
            continue
        parents = [place[other] for other in links[quantity]]
        spare = inputs[position] - len(parents)
        literal = spare > 0 and (inputs[position] > position or draw() < 0.5)
        _more_parents(parents, spare - literal, 0, position, draw)
        graph.append(quantity, parents, literal)


def _more_parents(parents: list[int], count: int, first: int, end: int, draw: Draw) -> None:
    """Add `count` random positions in first … end - 1 that are not there yet, and put all in random order."""
    while count > 0:
        position = first + int(draw() * (end - first))
        if position not in parents:
            parents.append(position)
            count -= 1
    if len(parents) > 1:
        shuffle(draw, parents)


def _add_distractors(settings: IgsmSettings, graph: Graph, draw: Draw) -> None:
    """Give the instances that the answer does not need a premise too, or drop them where the settings say so.

    With probability 1/2 the parents of one are drawn from distractors only, otherwise from everything that can be
    computed, totals included; a total that nobody needed before joins the distractors.
    """
    structure = graph.structure
    place = {quantity: position for position, quantity in enumerate(graph.quantities)}
    rest = [quantity for quantity in instances(structure) if quantity not in place]
    shuffle(draw, rest)
    if settings.distractors is not None:
        kept = between(draw, 0, min(settings.distractors, len(rest)))
        for quantity in rest[kept:]:
            structure.holds[quantity // 64].remove(quantity % 64)
        del rest[kept:]
    candidates = [total for group in totals(structure) for total in group] if rest else []
    for quantity in rest:
        count = 1
        while count < MOST_INPUTS and draw() < 0.5:
            count += 1
        first = graph.needed if draw() < 0.5 else 0
        if first == 0:
            total = candidates[int(draw() * len(candidates))]
            needed = prerequisites(structure, total)
            if total not in place and needed and all(other in place for other in needed):
                place[total] = len(graph.quantities)
                graph.append(total, [place[other] for other in needed], False)
        end = len(graph.quantities)
        literal = end == first or draw() < 0.5
        parents: list[int] = []
        _more_parents(parents, min(count - literal, end - first), first, end, draw)
        place[quantity] = end
        graph.append(quantity, parents, literal or not parents)
