"""A graph with formulas in words: names, premises and question."""

from __future__ import annotations

from bridge.config.tasks import IgsmSettings
from bridge.tasks.dag import Node, Problem
from bridge.tasks.igsm.formulas import Formula
from bridge.tasks.igsm.graph import Graph
from bridge.tasks.igsm.names import categories, quantity
from bridge.tasks.igsm.structure import TOTAL, Structure
from bridge.tasks.streams import Draw, between, shuffle


def draw_names(settings: IgsmSettings, structure: Structure, draw: Draw) -> tuple[list[str], list[str]]:
    """Names of the items and of the categories: consecutive categories of one family."""
    families = categories(settings)
    family = families[int(draw() * len(families))]
    start = between(draw, 0, len(family) - structure.depth)
    items: list[str] = []
    heads: list[str] = []
    for layer in range(structure.depth):
        head, names = family[start + layer]
        heads.append(head)
        pool = list(names)
        shuffle(draw, pool)
        items += pool[: structure.layer.count(layer)]
    return items, heads


def write_problem(settings: IgsmSettings, graph: Graph, formulas: list[Formula], ops: int, draw: Draw) -> Problem:
    """The problem in words: the premises in random order, one a line, then the question."""
    items, heads = draw_names(settings, graph.structure, draw)
    names: list[str] = []
    for code in graph.quantities:
        container, thing = divmod(code % TOTAL, 64)
        names.append(quantity(items[container], heads[thing] if code >= TOTAL else items[thing]))
    nodes: list[Node] = []
    lines: list[str] = []
    for name, formula in zip(names, formulas, strict=True):
        premise = _premise(formula, names)
        if premise:
            lines.append(f"The number of {name} equals {premise}.")
        inputs = len(formula.parents) + (formula.inner == "constant" or formula.operator != "")
        nodes.append(Node(name, tuple(formula.parents), _formula(formula), formula.value, premise, inputs))
    shuffle(draw, lines)
    lines.append(f"What is the number of {names[graph.needed - 1]}?")
    return Problem("\n".join(lines), nodes, list(range(graph.needed)), list(range(graph.needed, len(nodes))), ops)


def _premise(formula: Formula, names: list[str]) -> str:
    """What stands after "equals"; totals have no premise."""
    if formula.inner == "constant":
        return str(formula.literal)
    own = [names[p] for p in formula.parents]
    if formula.inner == "same":
        inner = own[0]
    elif formula.inner == "difference":
        inner = f"the difference of {own[0]} and {own[1]}"
    elif formula.inner == "sum":
        inner = f"the sum of {', '.join(own[:-1])} and {own[-1]}"
    else:
        return ""
    if formula.operator == "+":
        return f"{formula.literal} more than {inner}"
    return f"{formula.literal} times {inner}" if formula.operator else inner


def _formula(formula: Formula) -> str:
    """The formula with a `{}` for each parent."""
    count = len(formula.parents)
    if formula.inner == "constant":
        return str(formula.literal)
    if formula.inner == "products":
        return " + ".join(["{} * {}"] * (count // 2))
    inner = (" - " if formula.inner == "difference" else " + ").join(["{}"] * count)
    if not formula.operator:
        return inner
    if count > 1 and (formula.operator == "*" or formula.inner == "difference"):
        inner = f"({inner})"
    return f"{formula.literal} {formula.operator} {inner}"
