"""Solve a problem from its words alone. Shares nothing with the generator: it is the generator's judge."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import NamedTuple

_PREMISE, _QUESTION, _MODULO = "The number of ", "What is the number of ", ", modulo "


class UnsolvableError(ValueError):
    """The text is not a problem that can be solved, with the reason."""


class Solved(NamedTuple):
    """One quantity as the text defines it."""

    value: int
    parents: list[str]
    """The quantities that it is computed from, as the text calls them: "each X's Y"."""


class Reader:
    """The premises and the question of one text, and what follows from them."""

    def __init__(self, text: str) -> None:
        """Raises UnsolvableError on a line that is neither a premise nor the question."""
        *premises, question = text.split("\n")
        self.premises: dict[str, str] = {}
        """Quantity → what it equals, in words."""
        self.modulus = 0
        """Values are counted modulo this; 0: they are plain integers."""
        self.held: dict[str, list[str]] = {}
        """Container, as "each X" → its items."""
        for line in premises:
            name, equals, right = line[len(_PREMISE) : -1].partition(" equals ")
            container, owns, item = name.partition("'s ")
            if not (equals and owns and line.startswith(_PREMISE) and line.endswith(".")):
                raise UnsolvableError(f"not a premise: {line!r}")
            if name in self.premises:
                raise UnsolvableError(f"defined twice: {name}")
            self.premises[name] = right
            self.held.setdefault(container, []).append(item)
        if not (question.startswith(_QUESTION) and question.endswith("?")):
            raise UnsolvableError(f"not a question: {question!r}")
        self.question, _, modulus = question[len(_QUESTION) : -1].partition(_MODULO)
        if modulus:
            if not (modulus.isdecimal() and int(modulus) > 1):
                raise UnsolvableError(f"not a question: {question!r}")
            self.modulus = int(modulus)
        self._solved: dict[str, Solved | None] = {}

    def solve(self, name: str) -> Solved:
        """What a quantity is; a circular or undefined one raises UnsolvableError."""
        if name in self._solved:
            solved = self._solved[name]
            if solved is None:
                raise UnsolvableError(f"defined in a circle: {name}")
            return solved
        self._solved[name] = None
        solved = self._defined(name)
        if self.modulus:
            solved = Solved(solved.value % self.modulus, solved.parents)
        self._solved[name] = solved
        return solved

    def given(self, name: str, values: Mapping[str, int]) -> int:
        """What a quantity would be if its parents had these values, and nothing were counted modulo anything."""
        other = copy(self)
        other.modulus = 0
        other._solved = {parent: Solved(value, []) for parent, value in values.items()}
        return other._defined(name).value

    def _defined(self, name: str) -> Solved:
        return self._premise(self.premises[name]) if name in self.premises else self._total(name)

    def _premise(self, right: str) -> Solved:
        number, operator, rest = 0, "", right
        if right[:1].isdecimal():
            digits, _, rest = right.partition(" ")
            number = int(digits)
            if not rest:
                return Solved(number, [])
            operator = "more than " if rest.startswith("more than ") else "times "
            if not rest.startswith(operator):
                raise UnsolvableError(f"cannot be read: {right!r}")
            rest = rest[len(operator) :]
        if rest.startswith("the sum of "):
            parents = self._names(rest[len("the sum of ") :])
            value = sum([self.solve(parent).value for parent in parents])
        elif rest.startswith("the difference of "):
            parents = self._names(rest[len("the difference of ") :])
            if len(parents) != 2:
                raise UnsolvableError(f"cannot be read: {right!r}")
            value = self.solve(parents[0]).value - self.solve(parents[1]).value
        else:
            parents = self._names(rest)
            if len(parents) != 1:
                raise UnsolvableError(f"cannot be read: {right!r}")
            value = self.solve(parents[0]).value
        return Solved(value * number if operator == "times " else value + number, parents)

    def _names(self, text: str) -> list[str]:
        """The quantities of a list such as "A, B and C"."""
        first, _, last = text.rpartition(" and ")
        return [*first.split(", "), last] if first else [last]

    def _is(self, item: str, category: str) -> bool:
        """Whether an item is of a category: its last word says so."""
        return item.endswith(" " + category)

    def _total(self, name: str) -> Solved:
        """All things of a category in a container, however deep they lie."""
        container, _, category = name.rpartition("'s ")
        value = 0
        parents: list[str] = []
        for item in self.held.get(container, ()):
            own = f"{container}'s {item}"
            if self._is(item, category):
                value += self.solve(own).value
                parents.append(own)
            elif self._reaches(item, category):
                inner = f"each {item}'s {category}"
                value += self.solve(own).value * self.solve(inner).value
                parents += [own, inner]
        if not parents:
            raise UnsolvableError(f"nothing says what {name} equals")
        return Solved(value, parents)

    def _reaches(self, item: str, category: str) -> bool:
        return any(
            self._is(other, category) or self._reaches(other, category) for other in self.held.get("each " + item, ())
        )


def solve(text: str, modulus: int = 0) -> int:
    """The answer to the question of a problem text: ours, BRIDGE's, or the original iGSM's.

    Texts of the original do not say that they are counted modulo 23, so `modulus` does; ours do. Raises
    UnsolvableError where there is no answer.
    """
    if "How many " not in text:
        reader = Reader(text)
        return reader.solve(reader.question).value
    from bridge.tasks.igsm.originals import answer

    return answer(text, modulus)
