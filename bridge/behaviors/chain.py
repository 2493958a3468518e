"""BRIDGE's behaviors in worked solutions of GSM8K's kind. An extension of ours: BRIDGE has them for generated graphs.

The graph is that of the solution's own calculator marks, so nothing is claimed that the solution does not hold.
"""

from __future__ import annotations

import re

from bridge.behaviors.solution import ANALYSIS
from bridge.config.stages import Behavior
from bridge.tasks.chain import MARK, Chain, Step, decimal, numbers, plain, rewritten
from bridge.tasks.streams import Draw

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])|\n+")
_RESULT = re.compile(r"=\s*([$€£]?)\s*\Z")

RESTATED = ("We are told: {0}", "The question says: {0}", "Recall: {0}")
TRIED = ("Let us try {0} at once.", "Could we work out {0} now?", "Perhaps we can go straight to {0}.")
MISSING = (
    "In place of ? we need {0}, and that is not worked out yet, so we go back.",
    "That takes {0}, which is not worked out yet; first things first.",
    "We still lack {0}, so this has to wait.",
)


def chain_solution(chain: Chain, behavior: Behavior, draw: Draw) -> str:
    """The lines of a solution with behaviors injected.

    `subgoal` writes a calculation of several operations as a chain of one-operation rewrites, where each of them is a
    short decimal and the last is exactly the mark's result. `analysis` puts the sentence of the question before a line
    that takes a number from it, if only one sentence holds that number. `reflection` tries, before a line that is
    neither the first nor the last, a later calculation that needs a result not known yet, says which, and goes back.
    """
    steps = chain.steps()
    sentences = [sentence.strip() for sentence in _SENTENCE.split(chain.question) if sentence.strip()]
    shares = ANALYSIS[behavior.analysis]
    told: set[str] = set()
    lines: list[str] = []
    for at, line in enumerate(chain.lines):
        own = [step for step in steps if step.line == at]
        if 0 < at < len(chain.lines) - 1 and behavior.reflection and draw() < behavior.reflection:
            lines += _detour(chain, steps, at, draw)
        inputs = sum(len(step.operands) for step in own)
        share = shares[min(inputs, len(shares) - 1)]
        if own and share and draw() < share:
            lines += _restated(own, sentences, told, draw)
        lines.append(_with_rewrites(line, steps) if behavior.subgoal else line)
    return "\n".join(lines if chain.marks else map(plain, lines))


def _detour(chain: Chain, steps: list[Step], at: int, draw: Draw) -> list[str]:
    """A failed attempt at a calculation of a later line: what it lacks is named, and nothing that is not known yet.

    Nothing where every later one can be done already, or needs a number that is found in neither the question nor the
    lines before, or lacks something that itself lacks something.
    """
    stated = {*numbers(chain.question), *(number for line in chain.lines[:at] for number in numbers(plain(line)))}

    def lacks(step: Step) -> list[Step] | None:
        pairs = list(zip(step.operands, step.parents, strict=True))
        if any(parent < 0 and operand not in stated for operand, parent in pairs):
            return None
        missing = dict.fromkeys(parent for _, parent in pairs if parent >= 0 and steps[parent].line >= at)
        return [steps[parent] for parent in missing]

    ready: list[tuple[str, list[Step]]] = []
    for step in steps:
        missing = lacks(step) if step.line > at else None
        masked = _masked(step, missing) if missing and all(lacks(parent) == [] for parent in missing) else None
        if missing and masked:
            ready.append((masked, missing))
    if not ready:
        return []
    masked, missing = ready[int(draw() * len(ready))]
    tried = TRIED[int(draw() * len(TRIED))].format(masked)
    names = " and ".join(step.expression.strip() for step in missing)
    return [f"{tried} {MISSING[int(draw() * len(MISSING))].format(names)}"]


def _masked(step: Step, missing: list[Step]) -> str | None:
    """The expression with `?` for the results of `missing`; None where one is written in a way that is not found."""
    masked = step.expression.strip()
    for parent in missing:
        shown = decimal(parent.value)
        masked, count = re.subn(rf"(?<![\d.]){re.escape(shown or '')}(?:\.0+)?(?![\d.])", "?", masked)
        if not shown or not count:
            return None
    return masked


def _restated(own: list[Step], sentences: list[str], told: set[str], draw: Draw) -> list[str]:
    """The one sentence of the question that holds a number of these steps, unless it was told already."""
    for operand in dict.fromkeys(operand for step in own for operand in step.operands):
        holding = [sentence for sentence in sentences if operand in numbers(sentence)]
        if len(holding) == 1 and not holding[0].endswith("?") and holding[0] not in told:
            told.add(holding[0])
            return [RESTATED[int(draw() * len(RESTATED))].format(holding[0])]
    return []


def _with_rewrites(line: str, steps: list[Step]) -> str:
    """The line with what is left of each calculation after each single operation, before its result."""
    values = {step.expression: step.value for step in steps}
    parts: list[str] = []
    done = 0
    for mark in MARK.finditer(line):
        before = line[done : mark.start()]
        result = _RESULT.search(before)
        chain = rewritten(mark[1], values[mark[1]]) if result and mark[1] in values else []
        if result and chain:
            before = f"{before[: result.start()]}= {' = '.join(chain)} = {result[1]}"
        parts += [before, mark[0]]
        done = mark.end()
    return "".join(parts) + line[done:]
