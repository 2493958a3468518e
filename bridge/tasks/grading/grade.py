"""One response, one verdict."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from bridge.errors import UserError
from bridge.tasks.grading import numbers, words
from bridge.tasks.grading.response import final_part

Reason = Literal["correct", "wrong", "no_answer", "truncated", "think_unclosed", "grader_error"]
KINDS = ("number", "choice", "label", "latex")
REASONS: tuple[Reason, ...] = get_args(Reason)


class Grade(NamedTuple):
    """The verdict on one response."""

    answer: str | None
    """The answer in canonical form ("72", "-3/4", "C", "yes"): equal answers are equal strings. None: there is none."""
    correct: bool
    reason: Reason
    rule: str
    """Which rule found the answer's place: hash, box, tag, phrase, last_number; cue, box, letter; last_line; none."""


def grade(response: str, gold: str, kind: str, *, truncated: bool = False) -> Grade:
    """Grade one response.

    Args:
        response: what the model wrote. If the prompt ended with an opening think tag, put that tag back in front:
            otherwise a trace that never ends looks like an answer.
        gold: the right answer.
        kind: `number`, `choice` or `label`, with an optional `:suffix` that is ignored.
        truncated: the token limit ended the response. Its last word may be cut in half and is dropped, and only an
            explicit marker counts as an answer.

    Raises:
        UserError: a kind that is unknown or not available, or a gold answer that is not of its kind.
    """
    kind = kind.partition(":")[0]
    wanted = canonical(gold, kind)
    text, cut = final_part(response, truncated)
    if text is None:
        return Grade(None, False, "think_unclosed", "none")
    if kind == "number":
        answer, rule = numbers.extract(text, explicit=cut)
    elif kind == "choice":
        answer, rule = words.choice(text, explicit=cut)
    else:
        answer, rule = words.label(text, gold, explicit=cut)
    if answer is None:
        return Grade(None, False, "truncated" if cut else "no_answer", rule)
    correct = answer == wanted
    return Grade(answer, correct, "correct" if correct else "wrong", rule)


@lru_cache(maxsize=65536)
def canonical(gold: str, kind: str) -> str:
    """A gold answer in the canonical form of its kind.

    Raises:
        UserError: a kind that is unknown or not available, or a gold answer that is not of its kind.
    """
    kind = kind.partition(":")[0]
    if kind not in KINDS:
        raise UserError(f"kind {kind!r} is not known; use one of {', '.join(KINDS)}")
    if kind == "latex":
        raise UserError("grading of kind 'latex' is not available yet; kinds number, choice and label are")
    if kind == "label":
        form: str | None = words.canonical_label(gold) or None
    else:
        form = numbers.exact(gold) if kind == "number" else words.canonical_letter(gold)
    if form is None:
        named = {"number": "a number", "choice": "an option letter from A to J", "label": "a label"}[kind]
        raise UserError(f"gold {gold!r} is not {named}")
    return form
