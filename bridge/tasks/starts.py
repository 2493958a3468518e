"""Start states for R³: where a demonstration is cut, so that a policy begins with its first steps given.

The rule is that of R³'s released data, in which every mixed row can be found with it: of n pieces, the first
min(n − 1, round(i · n / M)) are given, i = 0 … M − 1 (Python's rounding, half to even). i = 0 is the bare question.
Cuts that coincide in short demonstrations are kept, as there.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

from bridge.config.stages import Starts

_MARKER = re.compile(r"(?:\A|\n)[ \t]*####")
_LINE = re.compile(r"\n+")
_SENTENCE = re.compile(r"\n+|(?<=[.!?])[\"')\]]*\s+(?=[^\s])")


def pieces_given(count: int, starts: Starts) -> list[int]:
    """How many of `count` pieces are given at each start state, fewest first. One piece or none gives only the bare
    question, M times."""
    most = max(count - 1, 0)
    given = [min(most, round(index * count / starts.m)) for index in range(starts.m)]
    return given if starts.from_question else given[1:]


def token_starts(ids: Sequence[int], ends: Sequence[int], text: str, end: int, starts: Starts) -> list[int]:
    """How many tokens of a demonstration are given at each start state, fewest first.

    Token ids are cut, never text that is tokenised again, so that what is given is exactly what SFT has shown.

    Args:
        ids: the demonstration's tokens.
        ends: for each token the offset in `text` at which it ends.
        text: the demonstration.
        end: offset at which the answer marker begins: nothing is given from here on.
        starts: the settings. A piece is a line or sentence with the white space after it, or a token.
    """
    room = bisect_left(ends, end + 1)  # tokens that end before the marker
    room = max(min(room, len(ids)), 0)
    if starts.unit == "token":
        return [min(room, given) for given in pieces_given(room, starts)]
    pattern = _LINE if starts.unit == "line" else _SENTENCE
    breaks = [match.end() for match in pattern.finditer(text, 0, end) if text[: match.start()].strip()]
    breaks = [at for at in breaks if text[at:end].strip()]
    given = pieces_given(len(breaks) + 1, starts)
    # A token that reaches over the break belongs to what follows: it is not given.
    return [bisect_left(ends, breaks[pieces - 1] + 1) if pieces else 0 for pieces in given]


def stage_of(step: int, steps: int, starts: int) -> int:
    """Which start state a staged curriculum uses at a step: the last (nearest to the answer) first, the bare question
    last, each for the same share of the steps."""
    return starts - 1 - min(step * starts // max(steps, 1), starts - 1)


def answer_begins(text: str) -> int:
    """The offset at which a demonstration's answer begins: the end of the think block, or else the last `####` line."""
    found = text.find("\n</think>")
    if found < 0:
        found = max((match.start() for match in _MARKER.finditer(text)), default=len(text))
    return found
