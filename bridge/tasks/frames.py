"""What stands around a question and around the steps of a solution."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bridge.config.tasks import Style

SYSTEM = (
    "You solve problems with care. First you work the problem out, then you give the answer. The work stands between "
    "<think> and </think>, the answer between <answer> and </answer>, like this:\n"
    "<think>\nyour work\n</think>\n<answer>\nyour answer\n</answer>"
)

_PREFIX = "<think>\n"
_INTRODUCTION = "Let us find one quantity after the other.\n"
_CONCLUSION = "\nHence the answer is "
_ANSWERED = "\n<answer>\nThe final answer is \\boxed{"
_ANSWER = f".\n</think>{_ANSWERED}"
_END = "}.\n</answer>"
_PLAIN_ANSWER = "\n#### "

Message = dict[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""


def prompt(style: Style, question: str) -> list[Message]:
    """The turns before the response."""
    return turns(style.frame, question)


def response_prefix(style: Style) -> str:
    """The text that every response starts with; sampling starts after it."""
    return prefix(style.frame)


def response(style: Style, steps: Sequence[str], answer: str) -> str:
    """The whole response: one line for each step, then the answer."""
    lines = "\n".join([f"- {step}" for step in steps])
    if style.frame == "plain":
        return f"{lines}{_PLAIN_ANSWER}{answer}"
    return f"{_PREFIX}{_INTRODUCTION}{lines}{_CONCLUSION}{answer}{_ANSWER}{answer}{_END}"


def turns(frame: str, question: str) -> list[Message]:
    """The turns before a response in a frame."""
    user = {"role": "user", "content": question}
    return [{"role": "system", "content": SYSTEM}, user] if frame == "think" else [user]


def prefix(frame: str) -> str:
    """The text that every response in a frame starts with; sampling starts after it."""
    return _PREFIX if frame == "think" else ""


def worked(frame: str, work: str, answer: str) -> str | None:
    """A response of work in any words and an answer. Without work, frame `think` has no response."""
    if frame == "plain":
        return f"{work}{_PLAIN_ANSWER}{answer}" if work else f"{_PLAIN_ANSWER.lstrip()}{answer}"
    return f"{_PREFIX}{work}\n</think>{_ANSWERED}{answer}{_END}" if work else None


_ENDS = [
    re.compile(re.escape(before.rpartition("\n")[2]) + r"(?P<answer>.*?)" + re.escape(after.partition("\n")[0]))
    for before, after in ((_CONCLUSION, _ANSWER), (_ANSWER, _END), (_PLAIN_ANSWER, ""))
]
_TAGS = {"<think>", "</think>", "<answer>", "</answer>", _INTRODUCTION.strip()}


def taken_apart(text: str) -> tuple[list[str], list[str]]:
    """The steps of a response and the answers that it gives: what `response` was made of, in either frame.

    A line that is none of the frame's is a step too.
    """
    steps: list[str] = []
    answers: list[str] = []
    for line in text.split("\n"):
        found = next(filter(None, (end.fullmatch(line) for end in _ENDS)), None)
        if found:
            answers.append(found["answer"])
        elif line and line not in _TAGS:
            steps.append(line.removeprefix("- "))
    return steps, answers


def phrases(style: Style) -> list[str]:
    """Pieces of the frame that a tokenizer made for the task should not cut. Each step ends with a full stop."""
    bullet = "- "
    if style.frame == "plain":
        return [bullet, f".\n{bullet}", f".{_PLAIN_ANSWER}"]
    return [SYSTEM, _PREFIX, _INTRODUCTION + bullet, f".\n{bullet}", f".{_CONCLUSION}", _ANSWER, _END]
