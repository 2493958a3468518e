"""Worked solutions, plain or with behaviors injected, all from one function (BRIDGE, research brief 1.1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from string import ascii_letters

from bridge.behaviors.arithmetic import rewrites
from bridge.behaviors.wording import wording
from bridge.config.stages import Behavior
from bridge.config.tasks import Style
from bridge.tasks import frames
from bridge.tasks.chain import Chain
from bridge.tasks.dag import Node, Problem
from bridge.tasks.streams import Draw, take

DISTRACTED = 0.3  # how often a detour goes to a quantity that the answer does not need

# Level → probability of restating the premise of a quantity with 0, 1, 2 … inputs; more inputs use the last one.
ANALYSIS = (
    (0.0,),
    (0.0, 0.0, 0.1, 0.4, 0.8, 1.0),
    (0.0, 0.1, 0.4, 0.8, 1.0),
    (0.0, 0.4, 0.8, 1.0),
    (0.0, 1.0),
)


def solution(problem: Problem, behavior: Behavior, style: Style, draw: Draw) -> str:
    """The response to a problem: its needed quantities in order, each with a letter, then the answer.

    With `behavior.reflection`, detours: between the first step and the last, after a step that succeeded, the
    solver turns to another quantity. If that cannot be computed yet, it says which quantities are missing and goes
    back; the quantity keeps its letter. Two failed detours never follow each other.
    """
    writer = _Writer(problem, behavior, style, draw)
    needed, distractors = problem.steps, problem.distractors
    last = len(needed) - 1
    at, fine = 0, False
    while at <= last:
        if writer.solved[needed[at]]:  # by a detour that happened to succeed
            at += 1
        elif fine and 0 < at < last and behavior.reflection and draw() < behavior.reflection:
            if distractors and draw() < DISTRACTED:
                node = distractors[int(draw() * len(distractors))]
            else:
                node = needed[at + 1 + int(draw() * (last - at))]
            if not writer.solved[node]:
                fine = writer.step(node)
        else:
            fine = writer.step(needed[at])
            at += 1
    return frames.response(style, writer.steps, str(problem.answer))


class _Writer:
    """Writes one step after the other and keeps what they established."""

    def __init__(self, problem: Problem, behavior: Behavior, style: Style, draw: Draw) -> None:
        self.nodes = problem.nodes
        self.modulus = problem.modulus
        self.solved = [False] * len(problem.nodes)
        self.letter = [""] * len(problem.nodes)
        self.steps: list[str] = []
        self.subgoal = behavior.subgoal
        self.analysis = ANALYSIS[behavior.analysis]
        self.draw = draw
        self.words = wording(style)
        self.letters = list(reversed(ascii_letters))
        self.shuffled = style.letters == "random"

    def step(self, index: int) -> bool:
        """Write the step for a node; True if its value is known afterwards."""
        node = self.nodes[index]
        words = self.words
        if not node.parents:
            self.letter[index] = letter = self._new_letter()
            known = self._say(words.constant).format(node.name, node.value)
            end = self._say(words.constant_end).format(letter, node.value)
            self.steps.append(f"{known}{self._say(words.naming).format(letter)} {end}")
            self.solved[index] = True
            return True
        text = self._announce(index, node.name)
        share = self.analysis[min(node.inputs, len(self.analysis) - 1)]
        if node.premise and share and self.draw() < share:
            text += " " + self._say(words.analysis).format(node.premise)
        missing = [self.nodes[parent].name for parent in node.parents if not self.solved[parent]]
        if missing:
            names = f"{', '.join(missing[:-1])} and {missing[-1]}" if len(missing) > 1 else missing[0]
            text += " " + self._say(words.failed_many if len(missing) > 1 else words.failed).format(names)
        else:
            text += " " + self._say(words.computed).format(self.letter[index], self._chain(node))
            self.solved[index] = True
        self.steps.append(text)
        return not missing

    def _announce(self, index: int, name: str) -> str:
        """Turn to a node and say its letter."""
        words = self.words
        letter = self.letter[index]
        if letter:
            return self._say(words.opener).format(name) + self._say(words.reminder).format(letter)
        self.letter[index] = letter = self._new_letter()
        if self.draw() < 0.5:
            return self._say(words.named_opener).format(name, letter)
        return self._say(words.opener).format(name) + self._say(words.naming).format(letter)

    def _new_letter(self) -> str:
        return take(self.draw, self.letters) if self.shuffled else self.letters.pop()

    def _chain(self, node: Node) -> str:
        """Formula in letters = formula in numbers = … = value."""
        formula = node.formula
        values = [self.nodes[parent].value for parent in node.parents]
        chain = [formula.format(*[self.letter[parent] for parent in node.parents])]
        if len(formula) > 2:  # more than a bare {}
            chain.append(formula.format(*[value if value >= 0 else f"({value})" for value in values]))
        if self.subgoal and formula.count(" ") > 2:  # more than one operation
            chain += rewrites(formula, values, self.modulus)
        else:
            chain.append(str(node.value))
        return " = ".join(chain)

    def _say(self, templates: tuple[str, ...]) -> str:
        return templates[int(self.draw() * len(templates))] if len(templates) > 1 else templates[0]


def writer(behavior: Behavior, style: Style) -> Callable[[Problem | Chain, Draw], str]:
    """What a task needs in order to word the solutions of its problems. It can be sent to another process."""
    return partial(_write, behavior, style)


def _write(behavior: Behavior, style: Style, problem: Problem | Chain, draw: Draw) -> str:
    from bridge.behaviors.chain import chain_solution

    if isinstance(problem, Chain):
        return chain_solution(problem, behavior, draw)
    return solution(problem, behavior, style, draw)
