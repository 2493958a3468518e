"""Arithmetic written out one operation at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

_TOKEN = re.compile(r"\{\}|\d+|[()+*-]")

Tokens = list[str | int]
"""Numbers, and `+ - * ( )` as text. A negative number is one token."""


@lru_cache(maxsize=4096)
def _tokens(formula: str) -> tuple[str | int, ...]:
    """The tokens of a formula of `Node`, with `{}` for each parent. ValueError on anything else."""
    if _TOKEN.sub("", formula).strip():
        raise ValueError(f"formula {formula!r}: only numbers, + - * ( ) and {{}} can be rewritten")
    return tuple(int(token) if token.isdecimal() else token for token in _TOKEN.findall(formula))


def rewrites(formula: str, values: Sequence[int], modulus: int = 0) -> list[str]:
    """What is left of the formula in numbers after each single operation; the last is the plain value.

    Order (as BRIDGE): the innermost parenthesis first, and inside it, as outside, the leftmost product, then the
    leftmost sum or difference. `2 * ({} + {} + {})` of 3, 4, -5 gives `2 * (7 + (-5))`, `2 * 2`, `4`. A negative
    number stands in parentheses unless it stands alone; its sign is no operation. With a modulus, each operation's
    result is reduced.
    """
    parents = iter(values)
    tokens: Tokens = [next(parents) if token == "{}" else token for token in _tokens(formula)]
    chain: list[str] = []
    while len(tokens) > 3:
        if ")" in tokens:
            end = tokens.index(")")
            start = end - 1
            while tokens[start] != "(":
                start -= 1
            _fold(tokens, start + 1, end, modulus)
            if tokens[start + 2] == ")":
                del tokens[start + 2], tokens[start]
        else:
            _fold(tokens, 0, len(tokens), modulus)
        if len(tokens) > 1:
            chain.append(_text(tokens))
    if len(tokens) == 3:
        _fold(tokens, 0, 3, modulus)
    chain.append(str(tokens[0]))
    return chain


def _fold(tokens: Tokens, start: int, end: int, modulus: int) -> None:
    """Carry out the first operation of a part without parentheses: the leftmost product, else the leftmost one."""
    at = start + 1
    if "*" in tokens[start:end]:
        at = tokens.index("*", start, end)
    left, operator, right = tokens[at - 1 : at + 2]
    assert isinstance(left, int) and isinstance(right, int)
    value = left * right if operator == "*" else left + right if operator == "+" else left - right
    tokens[at - 1 : at + 2] = [value % modulus if modulus else value]


def _text(tokens: Tokens) -> str:
    text = " ".join(
        [token if isinstance(token, str) else str(token) if token >= 0 else f"({token})" for token in tokens]
    )
    return text.replace("( ", "(").replace(" )", ")") if " )" in text else text
