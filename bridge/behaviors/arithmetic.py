"""Arithmetic written out one operation at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

_TOKEN = re.compile(r"\{\}|\d+|[()+*-]")

Tokens = list[str | int]
"""Places of numbers, and `+ - * ( )` as text."""


class _Operation(NamedTuple):
    """One operation on the numbers of a formula, each of which has a place of its own."""

    left: int
    """Where the left number stands, and then the result."""
    operator: str
    right: int
    rest: str
    """What is left of the formula afterwards, with `{place}` for each number; empty for a single number."""


class _Plan(NamedTuple):
    numbers: list[int | None]
    """The number at each place; None for a parent's."""
    operations: list[_Operation]
    last: int
    """The place of the value."""


def rewrites(formula: str, values: Sequence[int], modulus: int = 0) -> list[str]:
    """What is left of the formula in numbers after each single operation; the last is the plain value.

    Order (as BRIDGE): the innermost parenthesis first, and inside it, as outside, the leftmost product, then the
    leftmost sum or difference. `2 * ({} + {} + {})` of 3, 4, -5 gives `2 * (7 + (-5))`, `2 * 2`, `4`. A negative
    number stands in parentheses unless it stands alone; its sign is no operation. With a modulus, each operation's
    result is reduced.
    """
    plan = _plan(formula)
    parents = iter(values)
    numbers = [next(parents) if number is None else number for number in plan.numbers]
    texts = [str(number) if number >= 0 else f"({number})" for number in numbers]
    chain: list[str] = []
    for left, operator, right, rest in plan.operations:
        if operator == "*":
            value = numbers[left] * numbers[right]
        else:
            value = numbers[left] + numbers[right] if operator == "+" else numbers[left] - numbers[right]
        if modulus:
            value %= modulus
        numbers[left] = value
        if rest:
            texts[left] = str(value) if value >= 0 else f"({value})"
            chain.append(rest.format(*texts))
    chain.append(str(numbers[plan.last]))
    return chain


@lru_cache(maxsize=4096)
def _plan(formula: str) -> _Plan:
    """The operations of a formula of `Node`, with `{}` for each parent, in order: it does not depend on the numbers.

    ValueError on anything else.
    """
    if _TOKEN.sub("", formula).strip():
        raise ValueError(f"formula {formula!r}: only numbers, + - * ( ) and {{}} can be rewritten")
    numbers: list[int | None] = []
    tokens: Tokens = []
    for token in _TOKEN.findall(formula):
        if token in "()+*-":
            tokens.append(token)
        else:
            tokens.append(len(numbers))
            numbers.append(None if token == "{}" else int(token))
    operations = []
    while len(tokens) > 1:
        start, end = 0, len(tokens)
        if ")" in tokens:
            end = tokens.index(")")
            start = end - 1
            while tokens[start - 1] != "(":
                start -= 1
        at = start + 1
        if "*" in tokens[start:end]:
            at = tokens.index("*", start, end)
        left, operator, right = tokens[at - 1 : at + 2]
        assert isinstance(left, int) and isinstance(operator, str) and isinstance(right, int)
        del tokens[at : at + 2]
        if start > 0 and tokens[start + 1] == ")":
            del tokens[start + 1], tokens[start - 1]
        operations.append(_Operation(left, operator, right, _text(tokens) if len(tokens) > 1 else ""))
    assert isinstance(tokens[0], int)
    return _Plan(numbers, operations, tokens[0])


def _text(tokens: Tokens) -> str:
    text = " ".join([token if isinstance(token, str) else f"{{{token}}}" for token in tokens])
    return text.replace("( ", "(").replace(" )", ")")
