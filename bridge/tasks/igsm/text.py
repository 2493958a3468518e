"""A graph with formulas in words: names, premises and question."""

from __future__ import annotations

from functools import cache

from bridge.config.tasks import IgsmSettings
from bridge.tasks.dag import Node, Problem
from bridge.tasks.igsm.formulas import CONSTANT, DIFFERENCE, NO_PREMISE, PLUS, PRODUCTS, TIMES, Formulas
from bridge.tasks.igsm.graph import Graph
from bridge.tasks.igsm.names import families, quantity
from bridge.tasks.igsm.structure import TOTAL, Structure
from bridge.tasks.streams import Draw, between, shuffle, take


def draw_names(settings: IgsmSettings, structure: Structure, draw: Draw) -> tuple[list[str], list[str]]:
    """Names of the items and of the categories: consecutive categories of one family."""
    choices = families(settings)
    family = choices[int(draw() * len(choices))]
    start = between(draw, 0, len(family) - structure.depth)
    items: list[str] = []
    heads: list[str] = []
    for layer in range(structure.depth):
        head, names = family[start + layer]
        heads.append(head)
        pool = list(names)
        items += [take(draw, pool) for _ in range(structure.layer.count(layer))]
    return items, heads


def write_problem(settings: IgsmSettings, graph: Graph, formulas: Formulas, ops: int, draw: Draw) -> Problem:
    """The problem in words: the premises in random order, one a line, then the question."""
    items, heads = draw_names(settings, graph.structure, draw)
    names = [
        quantity(items[code // 64], items[code % 64])
        if code < TOTAL
        else quantity(items[(code - TOTAL) // 64], heads[code % 64])
        for code in graph.quantities
    ]
    nodes: list[Node] = []
    lines: list[str] = []
    for name, shape, literal, parents, value in zip(
        names, formulas.shapes, formulas.literals, formulas.parents, formulas.values, strict=True
    ):
        count = len(parents)
        premise = ""
        if not shape & NO_PREMISE:
            premise = _premise(shape, count).format(literal, *[names[p] for p in parents])
            lines.append(f"The number of {name} equals {premise}.")
        inputs = count + (shape == CONSTANT or shape & (PLUS | TIMES) != 0)
        nodes.append(Node(name, tuple(parents), _formula(shape, count, literal), value, premise, inputs))
    shuffle(draw, lines)
    modulo = f", modulo {settings.modulus}" if settings.modulus else ""
    lines.append(f"What is the number of {names[graph.needed - 1]}{modulo}?")
    needed, distractors = list(range(graph.needed)), list(range(graph.needed, len(nodes)))
    return Problem("\n".join(lines), nodes, needed, distractors, ops, settings.modulus or 0)


def permuted(text: str, draw: Draw) -> str:
    """The same problem with its premises in another random order."""
    *premises, question = text.split("\n")
    shuffle(draw, premises)
    return "\n".join([*premises, question])


@cache
def _premise(shape: int, parents: int) -> str:
    """What stands after "equals": a template for the literal and the parents' names."""
    if shape == CONSTANT:
        return "{0}"
    inner = ", ".join(f"{{{index}}}" for index in range(1, parents)) + f" and {{{parents}}}"
    if parents == 1:
        inner = "{1}"
    elif shape & 7 == DIFFERENCE:
        inner = "the difference of " + inner
    else:
        inner = "the sum of " + inner
    return {0: "", PLUS: "{0} more than ", TIMES: "{0} times "}[shape & (PLUS | TIMES)] + inner


@cache
def _formula(shape: int, parents: int, literal: int) -> str:
    """The formula with a `{}` for each parent."""
    if shape == CONSTANT:
        return str(literal)
    if shape & 7 == PRODUCTS:
        return " + ".join(["{} * {}"] * (parents // 2))
    inner = (" - " if shape & 7 == DIFFERENCE else " + ").join(["{}"] * parents)
    if not shape & (PLUS | TIMES):
        return inner
    if parents > 1 and (shape & TIMES or shape & 7 == DIFFERENCE):
        inner = f"({inner})"
    return f"{literal} {'*' if shape & TIMES else '+'} {inner}"
