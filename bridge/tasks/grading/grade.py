"""One response, one verdict."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache
from reprlib import repr as brief
from typing import Literal, NamedTuple, get_args

from bridge.config.grading import Grading
from bridge.errors import UserError
from bridge.tasks.grading import latex, numbers, words
from bridge.tasks.grading.numbers import Number
from bridge.tasks.grading.response import final_part

Reason = Literal["correct", "wrong", "no_answer", "truncated", "think_unclosed", "grader_error"]
KINDS = ("number", "choice", "label", "latex")
REASONS: tuple[Reason, ...] = get_args(Reason)
POLICY = Grading()


class Grade(NamedTuple):
    """The verdict on one response."""

    answer: str | None
    """The answer in canonical form ("72", "-3/4", "C", "yes"): equal answers are equal strings, and one that counts as
    the right answer is written like it. None: there is none, or no verdict on it."""
    correct: bool
    reason: Reason
    rule: str
    """Which rule found the answer's place: hash, box, tag, phrase, last_number; cue, box, letter, text; last_line;
    none."""


class Response(NamedTuple):
    """A response and what it is graded against; see `grade`."""

    text: str
    gold: str
    truncated: bool = False
    options: Sequence[str] = ()


def grade(
    response: str,
    gold: str,
    kind: str,
    *,
    truncated: bool = False,
    options: Sequence[str] = (),
    policy: Grading = POLICY,
    deadline: float = float("inf"),
) -> Grade:
    """Grade one response.

    Args:
        response: what the model wrote. If the prompt ended with an opening think tag, put that tag back in front:
            otherwise a trace that never ends looks like an answer.
        gold: the right answer.
        kind: `number`, `choice`, `label` or `latex`, with an optional `:suffix` that is ignored.
        truncated: the token limit ended the response. Its last word may be cut in half and is dropped, and only an
            explicit marker counts as an answer.
        options: the texts of the options A, B, C … of a choice. An answer may then be the text of one.
        policy: what counts as the same answer, where people disagree.
        deadline: the `time.monotonic()` after which a LaTeX comparison is given up (grader_error).

    Raises:
        UserError: a kind that is unknown or not available, or a gold answer that is not of its kind.
    """
    kind = kind.partition(":")[0]
    wanted = canonical(gold, kind) if policy is POLICY else canonical(gold, kind, policy)  # hashing one takes a while
    text, cut = final_part(response, truncated)
    if text is None:
        return Grade(None, False, "think_unclosed", "none")
    if kind == "number":
        number, rule = numbers.extract(text, explicit=cut)
        answer = None if number is None else _compared(number, gold, wanted, policy)
    elif kind == "choice":
        answer, rule = words.choice(text, cut, tuple(options))
    elif kind == "label":
        answer, rule = words.label(text, gold, explicit=cut)
    else:
        found, rule = latex.extract(text)
        try:
            answer = None if found is None else latex.compared(found, gold, deadline)
        except latex.UndecidedError:
            return Grade(None, False, "grader_error", rule)
    if answer is None:
        return Grade(None, False, "truncated" if cut else "no_answer", rule)
    correct = answer == wanted
    return Grade(answer, correct, "correct" if correct else "wrong", rule)


def grade_all(
    responses: Iterable[Response], kind: str, *, policy: Grading = POLICY, seconds: float = float("inf")
) -> list[Grade]:
    """Grade responses in order within `seconds` together.

    Only a LaTeX comparison can take long. One that is not over by then is a `grader_error`; everything else is graded
    all the same. Raises as `grade`.
    """
    deadline = time.monotonic() + seconds
    return [
        grade(r.text, r.gold, kind, truncated=r.truncated, options=r.options, policy=policy, deadline=deadline)
        for r in responses
    ]


@lru_cache(maxsize=65536)
def canonical(gold: str, kind: str, policy: Grading = POLICY) -> str:
    """A gold answer in the canonical form of its kind.

    Raises:
        UserError: a kind that is unknown or not available, or a gold answer that is not of its kind.
    """
    kind = kind.partition(":")[0]
    if kind not in KINDS:
        raise UserError(f"kind {kind!r} is not known; use one of {', '.join(KINDS)}")
    form: str | None
    if kind == "number":
        number = _gold_number(gold)
        form = None if number is None else str(_size(number, policy))
    elif kind == "choice":
        form = words.canonical_letter(gold)
    elif kind == "label":
        form = words.canonical_label(gold) or None
    else:
        latex.require()
        form = latex.canonical(gold) or None
    if form is None:
        named = {
            "number": "a number",
            "choice": "an option letter from A to J",
            "label": "a label",
            "latex": "a formula",
        }
        raise UserError(f"gold {brief(gold)} is not {named[kind]}")
    return form


@lru_cache(maxsize=65536)
def _gold_number(gold: str) -> Number | None:
    return numbers.exact(gold)


def _size(number: Number, policy: Grading) -> Fraction:
    return number.value / 100 if policy.percent == "hundredth" and number.percent else number.value


def _compared(number: Number, gold: str, wanted: str, policy: Grading) -> str:
    """The canonical form of an answer: `wanted` if and only if it counts as the right one."""
    if policy is POLICY or policy == POLICY:
        return str(number.value)
    right = _gold_number(gold)
    assert right is not None, "canonical has read it"
    size, target = _size(number, policy), Fraction(wanted)
    same = size == target
    if policy.rounding == "gold" and right.decimals is not None:
        decimals = right.decimals + 2 * (right.percent and policy.percent == "hundredth")
        same = abs(size - target) * 2 * 10**decimals <= 1
    if not same:
        return str(size)
    other_unit = policy.units == "match" and right.unit and number.unit and right.unit != number.unit
    return f"{size} {number.unit}" if other_unit else wanted
