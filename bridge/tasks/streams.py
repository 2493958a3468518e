"""Random streams. Only `random()` of the standard generator is used: its values are the same in every Python."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import TypeVar

T = TypeVar("T")
Draw = Callable[[], float]
"""A source of uniform numbers in [0, 1)."""


def stream(*key: object) -> Draw:
    """An independent stream for each key, such as `(seed, split, index, "wording")`."""
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    return Random(int.from_bytes(digest, "little")).random


def between(draw: Draw, low: int, high: int) -> int:
    """A uniform integer in low … high, both included."""
    return low + int(draw() * (high - low + 1))


def shuffle(draw: Draw, items: list[T]) -> None:
    """Put the items in a random order, in place."""
    for last in range(len(items) - 1, 0, -1):
        other = int(draw() * (last + 1))
        items[last], items[other] = items[other], items[last]


def take(draw: Draw, items: list[T]) -> T:
    """Remove a random item and return it; the others change their order."""
    chosen = int(draw() * len(items))
    items[chosen], items[-1] = items[-1], items[chosen]
    return items.pop()
