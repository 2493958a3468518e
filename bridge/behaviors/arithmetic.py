"""Arithmetic written out one operation at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence

_TOKEN = re.compile(r"\(-\d+\)|\d+|[()+*-]")


def number(value: int) -> str:
    """A number inside a formula: a negative one stands in parentheses."""
    return str(value) if value >= 0 else f"({value})"


def substitute(formula: str, values: Sequence[int]) -> str:
    """The formula with a number for each `{}`."""
    return formula.format(*map(number, values))


def rewrites(expression: str) -> list[str]:
    """The expressions after each single operation; the last is the plain value. Empty if nothing is left to do.

    Order (as BRIDGE): the innermost parenthesis first, and inside it, as outside, the leftmost product, then the
    leftmost sum or difference. `2 * (3 + 4 + (-5))` gives `2 * (7 + (-5))`, `2 * 2`, `4`.

    A minus sign belongs to its number when both stand in parentheses alone, and is no operation.
    """
    tokens: list[str | int] = [
        token if token in "()+*-" else int(token.strip("()")) for token in _TOKEN.findall(expression)
    ]
    chain: list[str] = []
    while len(tokens) > 1:
        start, end = 0, len(tokens)
        if ")" in tokens:
            end = tokens.index(")")
            start = end - tokens[:end][::-1].index("(")
        at = next((i for i in range(start, end) if tokens[i] == "*"), start + 1)
        left, operator, right = tokens[at - 1 : at + 2]
        assert isinstance(left, int) and isinstance(right, int)
        value = left * right if operator == "*" else left + right if operator == "+" else left - right
        if end - start == 3 and end < len(tokens) and tokens[end] == ")":
            tokens[start - 1 : end + 1] = [value]
        else:
            tokens[at - 1 : at + 2] = [value]
        chain.append(_text(tokens) if len(tokens) > 1 else str(value))
    return chain


def _text(tokens: list[str | int]) -> str:
    words = [token if isinstance(token, str) else number(token) for token in tokens]
    return " ".join(words).replace("( ", "(").replace(" )", ")")
