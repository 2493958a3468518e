"""Which quantity is computed from which: the dependency graph, with an exact number of operations."""

from __future__ import annotations

from dataclasses import dataclass, field

from bridge.config.tasks import IgsmSettings
from bridge.tasks.igsm.structure import TOTAL, Structure, draw_structure, instances, prerequisites, totals
from bridge.tasks.streams import Draw, between, shuffle

MOST_INPUTS = 4  # of an instance quantity, a number in its premise included
MOST_NODES = 52  # one letter each


@dataclass(slots=True)
class Graph:
    """Quantities in an order in which they can be computed: first those that the answer needs, the question last
    of them, then the distractors. Positions in this order are the names of the nodes."""

    structure: Structure
    quantities: list[int] = field(default_factory=list)
    parents: list[list[int]] = field(default_factory=list)
    """For totals in the order of `prerequisites`, otherwise in no particular order."""
    literal: list[bool] = field(default_factory=list)
    """Whether the premise has a number in it."""
    needed: int = 0
    """How many of the nodes the answer needs."""


def draw_graph(settings: IgsmSettings, ops: int, draw: Draw) -> Graph | None:
    """A dependency graph whose answer needs exactly `ops` operations, or None if this attempt failed."""
    structure = draw_structure(settings, draw)
    chosen = _choose(structure, ops, draw)
    order = _order(structure, chosen, draw)
    if order is None:
        return None
    sequence, links = order
    inputs = _inputs(structure, sequence, links, ops, draw)
    if inputs is None:
        return None
    graph = Graph(structure)
    _connect(graph, sequence, links, inputs, draw)
    graph.needed = len(sequence)
    _add_distractors(settings, graph, draw)
    return graph if len(graph.quantities) <= MOST_NODES else None


def _choose(structure: Structure, ops: int, draw: Draw) -> dict[int, list[int]]:
    """The needed quantities with their prerequisites, costing at most `ops` operations.

    Totals first, those that reach far before the near ones, each with everything under it, while they fit a
    budget (the larger of two uniform draws); then instances up to a second budget.
    """
    chosen: dict[int, list[int]] = {}
    spent = 0
    budget = max(between(draw, 1, ops), between(draw, 1, ops))
    candidates = totals(structure)
    shuffle(draw, candidates)
    candidates.sort(key=lambda candidate: -candidate[0])
    for _, total in candidates:
        if budget - spent < 2:
            break
        if total not in chosen:
            cost, new = _closure(structure, total, chosen)
            if spent + cost <= budget:
                spent += cost
                chosen.update(new)
    budget = between(draw, budget, ops)
    if spent < budget:
        rest = [quantity for quantity in instances(structure) if quantity not in chosen]
        shuffle(draw, rest)
        for quantity in rest[: budget - spent]:
            chosen[quantity] = []
    return chosen


def _closure(structure: Structure, total: int, chosen: dict[int, list[int]]) -> tuple[int, dict[int, list[int]]]:
    """Operations for `total` and everything it needs beyond `chosen`, and those quantities."""
    new: dict[int, list[int]] = {}
    cost = 0
    todo = [total]
    while todo:
        quantity = todo.pop()
        if quantity in chosen or quantity in new:
            continue
        needed = new[quantity] = prerequisites(structure, quantity) if quantity >= TOTAL else []
        cost += max(1, len(needed) - 1)
        todo += needed
    return cost, new


def _order(
    structure: Structure, chosen: dict[int, list[int]], draw: Draw
) -> tuple[list[int], dict[int, list[int]]] | None:
    """Put the quantities in order, built backwards from the question, so that a later one uses each but the last.

    Where nothing placed needs one of the remaining quantities, a placed instance is linked to one. Besides that,
    a placed instance is linked to a random remaining quantity with probability 1/2. An instance has at most two
    links, which cost no operation. Returns the order and the links of each instance; None for a dead end.
    """
    users = dict.fromkeys(chosen, 0)
    for needed in chosen.values():
        for quantity in needed:
            users[quantity] += 1
    unused = [quantity for quantity, count in users.items() if count == 0]
    remaining = list(chosen)
    ready = [unused.pop(int(draw() * len(unused)))]
    links: dict[int, list[int]] = {}
    open_instances: list[int] = []
    backwards: list[int] = []
    while True:
        placed = ready.pop(int(draw() * len(ready)))
        backwards.append(placed)
        remaining.remove(placed)
        if placed < TOTAL:
            links[placed] = []
            open_instances.append(placed)
        if not remaining:
            return backwards[::-1], links
        for quantity in chosen[placed]:
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
            other = unused.pop(int(draw() * len(unused)))
            links[user].append(other)
            ready.append(other)
            if len(links[user]) == 2:
                open_instances.remove(user)


def _inputs(
    structure: Structure, sequence: list[int], links: dict[int, list[int]], ops: int, draw: Draw
) -> list[int] | None:
    """How many inputs each quantity has, so that max(1, inputs - 1) sums to `ops`; None if that cannot be reached."""
    inputs = []
    missing = ops
    growing = []  # instances that can take more inputs: the one at position p has at most p parents and a number
    for position, quantity in enumerate(sequence):
        if quantity >= TOTAL:
            count = len(prerequisites(structure, quantity))
        else:
            count = max(len(links[quantity]), between(draw, 1, min(2, position + 1)))
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


def _connect(graph: Graph, sequence: list[int], links: dict[int, list[int]], inputs: list[int], draw: Draw) -> None:
    """Give each quantity its parents: a total its prerequisites, an instance its links and random earlier ones."""
    place = {quantity: position for position, quantity in enumerate(sequence)}
    graph.quantities = sequence
    for position, quantity in enumerate(sequence):
        if quantity >= TOTAL:
            graph.parents.append([place[other] for other in prerequisites(graph.structure, quantity)])
            graph.literal.append(False)
            continue
        parents = [place[other] for other in links[quantity]]
        spare = inputs[position] - len(parents)
        literal = spare > 0 and (inputs[position] > position or draw() < 0.5)
        _more_parents(parents, spare - literal, position, draw)
        graph.parents.append(parents)
        graph.literal.append(literal)


def _more_parents(parents: list[int], count: int, below: int, draw: Draw) -> None:
    """Add `count` random positions smaller than `below` that are not there yet."""
    while count:
        position = int(draw() * below)
        if position not in parents:
            parents.append(position)
            count -= 1


def _add_distractors(settings: IgsmSettings, graph: Graph, draw: Draw) -> None:
    """Give the instances that the answer does not need a premise too, or drop them where the settings say so.

    With probability 1/2 the parents of one are drawn from distractors only, otherwise from everything that can be
    computed, totals included; a total that nobody needed before joins the distractors.
    """
    rest = [quantity for quantity in instances(graph.structure) if quantity not in graph.quantities]
    shuffle(draw, rest)
    if settings.distractors is not None:
        for quantity in rest[between(draw, 0, min(settings.distractors, len(rest))) :]:
            graph.structure.holds[quantity // 64].remove(quantity % 64)
            rest.remove(quantity)
    if not rest:
        return
    place = {quantity: position for position, quantity in enumerate(graph.quantities)}
    for quantity in rest:
        count = 1
        while count < MOST_INPUTS and draw() < 0.5:
            count += 1
        first = graph.needed if draw() < 0.5 else 0
        if first == 0:
            _add_total(graph, place, draw)
        available = len(graph.quantities) - first
        literal = available == 0 or draw() < 0.5
        parents: list[int] = []
        _more_parents(parents, min(count - literal, available), available, draw)
        _append(graph, place, quantity, [first + position for position in parents], literal or not parents)


def _add_total(graph: Graph, place: dict[int, int], draw: Draw) -> None:
    """Make one random total computable, if everything right under it is already."""
    candidates = totals(graph.structure)
    if candidates:
        total = candidates[int(draw() * len(candidates))][1]
        needed = prerequisites(graph.structure, total)
        if total not in place and needed and all(quantity in place for quantity in needed):
            _append(graph, place, total, [place[quantity] for quantity in needed], False)


def _append(graph: Graph, place: dict[int, int], quantity: int, parents: list[int], literal: bool) -> None:
    place[quantity] = len(graph.quantities)
    graph.quantities.append(quantity)
    graph.parents.append(parents)
    graph.literal.append(literal)
