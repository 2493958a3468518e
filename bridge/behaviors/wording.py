"""The sentences of a worked solution."""

from __future__ import annotations

import re
from typing import NamedTuple

from bridge.config.tasks import Style
from bridge.tasks import frames


class Wording(NamedTuple):
    """Sentence templates. Where there are several, each use draws one with equal probability."""

    constant: tuple[str, ...]
    """A quantity that the text gives as a number: {0} name, {1} value. `naming` follows."""
    opener: tuple[str, ...]
    """Turns to a quantity: {0} name. `naming` follows or, if it has a letter already, `reminder`."""
    naming: tuple[str, ...]
    """Gives it a letter: {0} letter."""
    reminder: tuple[str, ...]
    """{0} letter"""
    named_opener: tuple[str, ...]
    """Opener and naming at once: {0} name, {1} letter."""
    analysis: tuple[str, ...]
    """Restates the premise: {0} what the quantity equals."""
    constant_end: tuple[str, ...]
    """{0} letter, {1} value"""
    computed: tuple[str, ...]
    """{0} letter, {1} chain of equal expressions"""
    failed: tuple[str, ...]
    """A parent is missing: {0} its name."""
    failed_many: tuple[str, ...]
    """Several are: {0} their names."""


VARIED = Wording(
    constant=("The text gives {0}: it is {1}.", "We are told that {0} is {1}."),
    opener=("Let us turn to {0}.", "Next we look at {0}."),
    naming=(" Call it {0}.", " We write {0} for it.", " Its letter is {0}."),
    reminder=(" It already has the letter {0}.",),
    named_opener=("Consider {0}, which we call {1}.", "Let {1} stand for {0}.", "Now {0}, written as {1}."),
    analysis=("We know that it equals {0}.",),
    constant_end=("So {0} = {1}.",),
    computed=("Then {0} = {1}.",),
    failed=(
        "But {0} is not known yet, so this has to wait.",
        "This cannot be worked out before {0}, so we come back to it later.",
        "We still lack {0}; let us go on elsewhere.",
    ),
    failed_many=(
        "But {0} are not known yet, so this has to wait.",
        "This cannot be worked out before {0}, so we come back to it later.",
        "We still lack {0}; let us go on elsewhere.",
    ),
)

FIXED = Wording(
    constant=("{0}",),
    opener=("{0}",),
    naming=(", call it {0}.",),
    reminder=(", called {0}.",),
    named_opener=("{0}, call it {1}.",),
    analysis=("It equals {0}.",),
    constant_end=("Then {0} = {1}.",),
    computed=("Then {0} = {1}.",),
    failed=("Not known yet: {0}.",),
    failed_many=("Not known yet: {0}.",),
)

# The fixed sentences with their neighbours' punctuation: each piece is one token.
_FIXED_PIECES = [", call it ", ", called ", ". Then ", ". It equals ", ". Not known yet: "]
_ARITHMETIC = [" = ", " + ", " - ", " * "]


def wording(style: Style) -> Wording:
    """The templates of a style."""
    return FIXED if style.wording == "fixed" else VARIED


def phrases(style: Style) -> list[str]:
    """Pieces of a solution that a tokenizer made for the task should not cut."""
    pieces = _FIXED_PIECES
    if style.wording == "varied":
        templates = [template for templates in VARIED for template in templates]
        pieces = sorted({piece for template in templates for piece in re.split(r"\{\d\}", template) if piece})
    return frames.phrases(style) + _ARITHMETIC + pieces
