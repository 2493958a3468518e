"""Solve a problem from its words alone. Shares nothing with the generator: it is the generator's judge."""

from __future__ import annotations

import re
from typing import NamedTuple

_PREMISE = re.compile(r"The number of each (.+?)'s (.+?) equals (.+)\.")
_QUESTION = re.compile(r"What is the number of each (.+)'s (.+)\?")
_RIGHT = re.compile(r"(?:(\d+)(?: (more than|times) (?=each|the)|$))?(?:the (sum|difference) of )?(.*)")
_EACH = re.compile(r"each ((?:(?!'s ).)+)'s ((?:(?!, each| and each).)+)")

Key = tuple[str, str]
"""(container, thing), where thing is an item or a category."""


class UnsolvableError(ValueError):
    """The text is not a problem that can be solved, with the reason."""


class Solved(NamedTuple):
    """One quantity as the text defines it."""

    value: int
    parents: tuple[Key, ...]


class Reader:
    """The premises and the question of one text, and what follows from them."""

    def __init__(self, text: str) -> None:
        """Raises UnsolvableError on a line that is neither a premise nor the question."""
        *premises, question = text.split("\n")
        self.premises: dict[Key, str] = {}
        self.held: dict[str, list[str]] = {}
        """Container → its items."""
        for line in premises:
            match = _PREMISE.fullmatch(line)
            if match is None:
                raise UnsolvableError(f"not a premise: {line!r}")
            container, item, right = match.groups()
            if (container, item) in self.premises:
                raise UnsolvableError(f"defined twice: {line!r}")
            self.premises[container, item] = right
            self.held.setdefault(container, []).append(item)
        match = _QUESTION.fullmatch(question)
        if match is None:
            raise UnsolvableError(f"not a question: {question!r}")
        self.question: Key = (match[1], match[2])
        self._solved: dict[Key, Solved] = {}
        self._open: set[Key] = set()

    def solve(self, key: Key) -> Solved:
        """The value of a quantity; a circular or undefined one raises UnsolvableError."""
        if key not in self._solved:
            if key in self._open:
                raise UnsolvableError(f"defined in a circle: each {key[0]}'s {key[1]}")
            self._open.add(key)
            self._solved[key] = self._defined(self.premises[key]) if key in self.premises else self._total(*key)
        return self._solved[key]

    def _defined(self, right: str) -> Solved:
        match = _RIGHT.fullmatch(right)
        assert match is not None  # the pattern takes everything
        number, operator, inner, rest = match.groups()
        parents = tuple(_EACH.findall(rest))
        written = [f"each {container}'s {thing}" for container, thing in parents]
        expected = " and ".join(filter(None, [", ".join(written[:-1]), *written[-1:]]))
        if rest != expected or (len(parents) > 1) != bool(inner) or not (number or parents):
            raise UnsolvableError(f"cannot be read: {right!r}")
        values = [self.solve(parent).value for parent in parents]
        value = sum(values)
        if inner == "difference":
            if len(values) != 2:
                raise UnsolvableError(f"a difference of {len(values)} quantities: {right!r}")
            value = values[0] - values[1]
        if operator == "times":
            value *= int(number)
        elif number:
            value += int(number)
        return Solved(value, parents)

    def _total(self, container: str, category: str) -> Solved:
        """All things of a category in a container, however deep they lie. An item's category is its last word."""
        value = 0
        parents: list[Key] = []
        for item in self.held.get(container, []):
            if item.rpartition(" ")[2] == category:
                value += self.solve((container, item)).value
                parents.append((container, item))
            elif self._reaches(item, category):
                value += self.solve((container, item)).value * self.solve((item, category)).value
                parents += [(container, item), (item, category)]
        if not parents:
            raise UnsolvableError(f"nothing says what each {container}'s {category} equals")
        return Solved(value, tuple(parents))

    def _reaches(self, container: str, category: str) -> bool:
        return any(
            item.rpartition(" ")[2] == category or self._reaches(item, category)
            for item in self.held.get(container, [])
        )


def solve(text: str) -> int:
    """The answer to the question of a problem text. Raises UnsolvableError where there is none."""
    reader = Reader(text)
    return reader.solve(reader.question).value
