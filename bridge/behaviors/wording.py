"""The sentences of a worked solution."""

from __future__ import annotations

from typing import NamedTuple

from bridge.config.tasks import Style
from bridge.tasks import frames


class Wording(NamedTuple):
    """Sentence templates. Where there are several, each use draws one with equal probability."""

    constant: tuple[str, ...]
    """A quantity that the text gives as a number: name, value."""
    opener: tuple[str, ...]
    """Turns to a quantity: name. Followed by `naming` or, if it has a letter already, by `reminder`."""
    naming: tuple[str, ...]
    """Gives it a letter: letter."""
    named_opener: tuple[str, ...]
    """Both at once: name, letter."""
    reminder: tuple[str, ...]
    analysis: tuple[str, ...]
    """Restates the premise: premise."""
    constant_end: tuple[str, ...]
    """letter, value"""
    computed: tuple[str, ...]
    """letter, chain of equal expressions"""
    failed: tuple[str, ...]
    """One quantity is missing: name."""
    failed_many: tuple[str, ...]
    """Several are missing: names."""


VARIED = Wording(
    constant=("The text gives {name}: it is {value}.", "We are told that {name} is {value}."),
    opener=("Let us turn to {name}.", "Next we look at {name}."),
    naming=("Call it {letter}.", "We write {letter} for it.", "Its letter is {letter}."),
    named_opener=(
        "Consider {name}, which we call {letter}.",
        "Let {letter} stand for {name}.",
        "Now {name}, written as {letter}.",
    ),
    reminder=("It already has the letter {letter}.",),
    analysis=("We know that it equals {premise}.",),
    constant_end=("So {letter} = {value}.",),
    computed=("Then {letter} = {chain}.",),
    failed=(
        "But {names} is not known yet, so this has to wait.",
        "This cannot be worked out before {names}, so we come back to it later.",
        "We still lack {names}; let us go on elsewhere.",
    ),
    failed_many=(
        "But {names} are not known yet, so this has to wait.",
        "This cannot be worked out before {names}, so we come back to it later.",
        "We still lack {names}; let us go on elsewhere.",
    ),
)

FIXED = Wording(
    constant=("{name}",),
    opener=("{name}",),
    naming=(", call it {letter}.",),
    named_opener=("{name}, call it {letter}.",),
    reminder=(", called {letter}.",),
    analysis=("It equals {premise}.",),
    constant_end=("Then {letter} = {value}.",),
    computed=("Then {letter} = {chain}.",),
    failed=("Not known yet: {names}.",),
    failed_many=("Not known yet: {names}.",),
)

# How a tokenizer cuts the fixed sentences: each piece is one token.
_FIXED_PIECES = [", call it ", ", called ", ". Then ", ". It equals ", ". Not known yet: ", " = ", " + ", " - ", " * "]


def wording(style: Style) -> Wording:
    """The templates of a style."""
    return FIXED if style.wording == "fixed" else VARIED


def phrases(style: Style) -> list[str]:
    """Pieces of the sentences that a tokenizer made for the task should not cut."""
    if style.wording == "fixed":
        return frames.phrases(style) + _FIXED_PIECES
    texts = {template for templates in VARIED for template in templates}
    return frames.phrases(style) + sorted(texts)
