"""A worked solution of GSM8K as a graph of its calculator steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

MARK = re.compile(r"<<([^<>\n=]*)=([^<>\n=]*)>>")
"""A calculator mark: `<<48/2=24>>`."""
NUMBER = re.compile(r"(?<![\w.])(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")
_RESULT = re.compile(r"\s*(-?(?:\d+(?:\.\d+)?|\.\d+))\s*")
_TOKEN = re.compile(r"\d+(?:\.\d+)?|\.\d+|[()+*/-]")

Tokens = list[Fraction | str]


class Step(NamedTuple):
    """One calculator mark."""

    line: int
    expression: str
    operands: tuple[Fraction, ...]
    value: Fraction
    parents: tuple[int, ...]
    """For each operand the earlier step whose result it is, or -1: a number of the question or of common knowledge."""


class Chain(NamedTuple):
    """A question and its worked solution."""

    question: str
    lines: tuple[str, ...]
    """The lines of the solution with their marks, without the answer."""
    marks: bool
    """Whether the marks stay in the text that is learnt."""

    def steps(self) -> list[Step]:
        """The calculator steps that can be read, in order.

        An operand is taken for an earlier step's result if it has that value and the question does not hold the same
        number: where both could be meant, nothing is claimed.
        """
        asked = set(numbers(self.question))
        found: list[Step] = []
        for at, line in enumerate(self.lines):
            for mark in MARK.finditer(line):
                tokens, result = tokens_of(mark[1]), _RESULT.fullmatch(mark[2])
                if tokens is None or result is None:
                    continue
                operands = tuple(token for token in tokens if isinstance(token, Fraction))
                earlier = {step.value: number for number, step in enumerate(found)}
                parents = tuple(-1 if operand in asked else earlier.get(operand, -1) for operand in operands)
                found.append(Step(at, mark[1], operands, Fraction(result[1]), parents))
        return found


def numbers(text: str) -> list[Fraction]:
    """The numbers of a text."""
    return [Fraction(found.replace(",", "")) for found in NUMBER.findall(text)]


def plain(line: str) -> str:
    """A line without its marks."""
    return MARK.sub("", line)


def tokens_of(expression: str) -> Tokens | None:
    """Numbers and `+ - * / ( )` of an expression; None if it holds anything else."""
    if _TOKEN.sub("", expression).strip():
        return None
    return [token if token in "()+*/-" else Fraction(token) for token in _TOKEN.findall(expression)]


def fold(tokens: Sequence[Fraction | str]) -> Tokens | None:
    """The expression after its first operation. None if it is not well formed or divides by zero.

    The innermost parenthesis comes first, and inside it, as outside, the leftmost product or quotient, then the
    leftmost sum or difference.
    """
    left, right = 0, len(tokens)
    if ")" in tokens:
        right = tokens.index(")")
        opened = [at for at in range(right) if tokens[at] == "("]
        if not opened:
            return None
        left = opened[-1] + 1
    inside = list(tokens[left:right])
    if len(inside) < 3 or len(inside) % 2 == 0:
        return None
    if not all(isinstance(token, Fraction) == (at % 2 == 0) for at, token in enumerate(inside)):
        return None
    at = next((at for at, token in enumerate(inside) if token in ("*", "/")), 1)
    value = _operate(inside[at - 1], str(inside[at]), inside[at + 1])
    if value is None:
        return None
    inside[at - 1 : at + 2] = [value]
    if right < len(tokens) and len(inside) == 1:
        left, right = left - 1, right + 1  # the parentheses go
    return [*tokens[:left], *inside, *tokens[right:]]


def _operate(left: Fraction | str, operator: str, right: Fraction | str) -> Fraction | None:
    assert isinstance(left, Fraction) and isinstance(right, Fraction)
    if operator == "/":
        return left / right if right else None
    return left * right if operator == "*" else left + right if operator == "+" else left - right


def rewritten(expression: str, value: Fraction) -> list[str]:
    """What is left of an expression after each single operation but the last; empty where there is only one operation,
    where a number on the way has no short decimal form, or where the result is not exactly `value`."""
    tokens = tokens_of(expression)
    chain: list[str] = []
    while tokens is not None and len(tokens) > 1:
        tokens = fold(tokens)
        if tokens is None:
            return []
        shown = [token if isinstance(token, str) else decimal(token) for token in tokens]
        if None in shown:
            return []
        chain.append(" ".join(map(str, shown)).replace("( ", "(").replace(" )", ")"))
    return chain[:-1] if tokens == [value] else []


def decimal(value: Fraction) -> str | None:
    """A number as a decimal of at most six places, negative ones in parentheses; None where it is no such decimal."""
    scaled = value * 10**6
    if scaled.denominator != 1:
        return None
    digits = f"{abs(int(scaled)):07d}"
    shown = f"{digits[:-6]}.{digits[-6:]}".rstrip("0").rstrip(".")
    return f"(-{shown})" if value < 0 else shown
