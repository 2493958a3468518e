"""Worked solutions, plain or with behaviors injected, all from one function (BRIDGE, research brief 1.1)."""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_letters

from bridge.behaviors.arithmetic import rewrites
from bridge.behaviors.wording import wording
from bridge.config.stages import Behavior
from bridge.config.tasks import Style
from bridge.tasks import frames
from bridge.tasks.dag import Node, Problem
from bridge.tasks.streams import Draw, shuffle

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
    at, fine = 0, False
    while at < len(needed):
        if fine and 0 < at < len(needed) - 1 and behavior.reflection and draw() < behavior.reflection:
            if distractors and draw() < DISTRACTED:
                node = distractors[int(draw() * len(distractors))]
            else:
                node = needed[at + 1 + int(draw() * (len(needed) - at - 1))]
            if not writer.solved[node]:
                fine = writer.step(node)
            continue
        if not writer.solved[needed[at]]:
            fine = writer.step(needed[at])
        at += 1
    return frames.response(style, writer.steps, str(problem.answer))


class _Writer:
    """Writes one step after the other and keeps what they established."""

    def __init__(self, problem: Problem, behavior: Behavior, style: Style, draw: Draw) -> None:
        self.nodes = problem.nodes
        self.solved = [False] * len(problem.nodes)
        self.letter = [""] * len(problem.nodes)
        self.steps: list[str] = []
        self.subgoal = behavior.subgoal
        self.analysis = ANALYSIS[behavior.analysis]
        self.draw = draw
        self.words = wording(style)
        letters = list(ascii_letters)
        if style.letters == "random":
            shuffle(draw, letters)
        self.letters = iter(letters)

    def step(self, index: int) -> bool:
        """Write the step for a node; True if its value is known afterwards."""
        node = self.nodes[index]
        words = self.words
        if not node.parents:
            self.letter[index] = letter = next(self.letters)
            known = self._say(words.constant).format(name=node.name, value=node.value)
            naming = self._say(words.naming).format(letter=letter)
            end = self._say(words.constant_end).format(letter=letter, value=node.value)
            self.steps.append(f"{known}{'' if naming[0] == ',' else ' '}{naming} {end}")
            self.solved[index] = True
            return True
        text = self._announce(index, node)
        share = self.analysis[min(node.inputs, len(self.analysis) - 1)]
        if node.premise and share and self.draw() < share:
            text += " " + self._say(words.analysis).format(premise=node.premise)
        missing = [self.nodes[parent].name for parent in node.parents if not self.solved[parent]]
        if missing:
            names = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
            text += " " + self._say(words.failed_many if len(missing) > 1 else words.failed).format(names=names)
        else:
            text += " " + self._say(words.computed).format(letter=self.letter[index], chain=self._chain(node))
            self.solved[index] = True
        self.steps.append(text)
        return not missing

    def _announce(self, index: int, node: Node) -> str:
        words = self.words
        if self.letter[index]:
            opener, follow = words.opener, words.reminder
        else:
            self.letter[index] = next(self.letters)
            if self.draw() < 0.5:
                return self._say(words.named_opener).format(name=node.name, letter=self.letter[index])
            opener, follow = words.opener, words.naming
        first = self._say(opener).format(name=node.name)
        second = self._say(follow).format(letter=self.letter[index])
        return f"{first}{'' if second[0] == ',' else ' '}{second}"

    def _chain(self, node: Node) -> str:
        """Formula in letters = formula in numbers = … = value."""
        formula = node.formula
        values = [self.nodes[parent].value for parent in node.parents]
        chain = [formula.format(*[self.letter[parent] for parent in node.parents])]
        if len(formula) > 2:  # more than a bare {}
            chain.append(formula.format(*[value if value >= 0 else f"({value})" for value in values]))
        if self.subgoal and formula.count(" ") > 2:  # more than one operation
            chain += rewrites(formula, values)
        else:
            chain.append(str(node.value))
        return " = ".join(chain)

    def _say(self, templates: tuple[str, ...]) -> str:
        return templates[int(self.draw() * len(templates))] if len(templates) > 1 else templates[0]


def writer(behavior: Behavior, style: Style) -> Callable[[Problem, Draw], str]:
    """What a task needs in order to word the solutions of its problems."""
    return lambda problem, draw: solution(problem, behavior, style, draw)
