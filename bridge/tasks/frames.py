"""What stands around a question and around the steps of a solution."""

from __future__ import annotations

from collections.abc import Sequence

from bridge.config.tasks import Style

SYSTEM = (
    "You solve problems with care. First you work the problem out, then you give the answer. The work stands between "
    "<think> and </think>, the answer between <answer> and </answer>, like this:\n"
    "<think>\nyour work\n</think>\n<answer>\nyour answer\n</answer>"
)

Message = dict[str, str]
"""{"role": "system" | "user" | "assistant", "content": text}"""


def prompt(style: Style, question: str) -> list[Message]:
    """The turns before the response."""
    user = {"role": "user", "content": question}
    return [{"role": "system", "content": SYSTEM}, user] if style.frame == "think" else [user]


def response_prefix(style: Style) -> str:
    """The text that every response starts with; sampling starts after it."""
    return "<think>\n" if style.frame == "think" else ""


def response(style: Style, steps: Sequence[str], answer: str) -> str:
    """The whole response: one line for each step, then the answer."""
    lines = "\n".join(f"- {step}" for step in steps)
    if style.frame == "plain":
        return f"{lines}\n#### {answer}"
    return (
        f"<think>\nLet us find one quantity after the other.\n{lines}\nHence the answer is {answer}.\n</think>\n"
        f"<answer>\nThe final answer is \\boxed{{{answer}}}.\n</answer>"
    )


def phrases(style: Style) -> list[str]:
    """What a tokenizer made for the plain frame should not cut."""
    return [".\n- ", "- ", ".\n#### "] if style.frame == "plain" else []
