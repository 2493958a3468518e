"""From a model's response to the region that holds its answer: trace, run-on text, and markers.

Nothing here knows what an answer looks like; `numbers.py` and `words.py` read the regions.
A finder returns None where its marker does not occur, and "" where the last marker holds nothing: an empty or
unterminated marker is a missing answer, never a reason to go back to an earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

# Bounds that keep grading linear in the length of a degenerate response; no real answer comes near them.
MAX_CUES = 50
MAX_TAIL = 1000

_THINK = re.compile(r"<\s*(/?)\s*think(?:ing)?\s*>", re.IGNORECASE)
_RUN_ON = re.compile(r"\n[ \t*#_>]*(?:question|q|human|user|instruction)[ \t*_]*[0-9]*[ \t*_]*:", re.IGNORECASE)
_END = re.compile(r"<\|(?:endoftext|end_of_text|im_start|im_end|eot_id)\|>|</s>")
_FINISHED = re.compile(r".*[\s}>]", re.DOTALL)
_FORMAT = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.DOTALL)
_BRIDGE_FORMAT = re.compile(r"<think>.*?</think>\s*<answer>.*?</answer>$", re.DOTALL | re.MULTILINE)
_HASH = re.compile(r"#{4,}([^\n]*)")
_HEADING = re.compile(
    r"[\s*_]*(?:(?:step|part|case|problem|question|example|method|solution|option|section|note|check)\b"
    r"|[0-9]{1,2}[.)]\s+[A-Za-z*]|[A-Za-z][^0-9]*\Z)",
    re.IGNORECASE,
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
# Searched for in lower case; the first letter apart, so that the search can skip to it.
_CUE_WORD = re.compile(r"[arо答](?:(?<![a-z].)(?:nswer|ntwort|espuesta|éponse|isposta|esposta)(?![a-z])|твет|案|え)")
_CUE_VERB = re.compile(
    r"""
    [*_`"')\]]*
    (?:\s+(?:to|for|of|in)\b[^\n.:=]{0,80}?)?          # the answer to the second question is
    (?:,[^\n,.]{1,20},)?                               # the answer, then, is
    \s*(?:\b(?:is|was|are|equals|(?:would|will|should|must|has\ to)\ be|comes\ to|ist|es|est|è|é)\b(?!\s+not\b)
       |[:：=为是]|[ ][-–—][ ])
    [*_]*\s*[:=]?
    """,
    re.IGNORECASE | re.VERBOSE,
)
_LINE_END = re.compile(r"[*_ \t]*(?:\n|\Z)")
_DECORATION = re.compile(r"(?:[\s*_`$]|\\\[)*")


def format_reward(response: str, rule: Literal["strict", "bridge"] = "strict") -> float:
    """1.0 if the response has the form that is asked for, else 0.0.

    `strict`: one think block, optional white space, one answer block, and nothing else. `bridge`: it starts with a
    think block, optional white space and an answer block that ends its line; tags may recur, and lines may follow.
    BRIDGE's completions begin after a `<think>` that stands in the prompt: put it back before calling.
    """
    if rule == "bridge":
        return 1.0 if _BRIDGE_FORMAT.match(response) else 0.0
    lower = response.lower()
    once = all(lower.count(tag) == 1 for tag in ("<think>", "</think>", "<answer>", "</answer>"))
    return 1.0 if once and _FORMAT.fullmatch(response) else 0.0


def final_part(response: str, truncated: bool) -> tuple[str | None, bool]:
    """The text that may hold the answer, and whether its end was cut off by the token limit.

    Text after the last closing think tag counts; an opening one without a closing one means there is none (None).
    What follows a new "Question:" line, another turn or an end token is not about this question. An end that was cut
    off loses its last word, which may be half a number.
    """
    text, opened = response, False
    if "<" in response:
        tags = list(_THINK.finditer(response))
        closing = [tag for tag in tags if tag.group(1)]
        start = closing[-1].end() if closing else 0
        text = response[start:]
        opened = bool(tags) and not tags[-1].group(1)
    for stop in (_RUN_ON, _END) if "<" in text else (_RUN_ON,):
        run_on = next((m for m in stop.finditer(text) if text[: m.start()].strip()), None)
        if run_on:
            text, truncated = text[: run_on.start()], False
    if opened and _THINK.search(text):
        return None, truncated
    if truncated:
        finished = _FINISHED.match(text)
        text = finished.group() if finished else ""
    return text, truncated


def after_hashes(text: str) -> str | None:
    """The last `####` line that is no heading; of a bare `####`, the line below it."""
    if "####" not in text:
        return None
    for match in reversed(list(_HASH.finditer(text))[-MAX_CUES:]):
        tail, rest = match.group(1), text[match.end() :].strip()
        if rest and _HEADING.match(tail) and not next(after_cues(tail), ""):
            continue
        return tail if tail.strip() else rest.split("\n", 1)[0]
    return None


def in_box(text: str) -> str | None:
    r"""What the last `\boxed{...}` or `\fbox{...}` holds, braces balanced."""
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    openings = list(_BOX.finditer(text))
    if not openings:
        return None
    start = position = openings[-1].end()
    depth = 1
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:position].strip()
        position += 1
    return ""


def in_tag(text: str) -> str | None:
    """What the last `<answer>` block holds. Its end may be missing: generation often stops at the closing tag."""
    if "<" not in text:
        return None
    end = len(text)
    for tag in reversed(list(_TAG.finditer(text))):
        if not tag.group(1):
            return text[tag.end() : end].strip()
        end = tag.start()
    return None


def after_cues(text: str) -> Iterator[str]:
    """What follows "the answer is", "Answer:", "Final answer" and the like, last cue first: to the end of its line, or
    the next line where its own is empty."""
    lower = text.replace("\u0130", "I").lower()  # the one letter whose lower case is longer, which would shift places
    for word in reversed(list(_CUE_WORD.finditer(lower))[-MAX_CUES:]):
        verb = _CUE_VERB.match(text, word.end())
        start = verb.end() if verb else word.end()
        if verb is None:
            before = lower[lower.rfind("\n", 0, word.start()) + 1 : word.start()]
            heading = not before.strip("#*_ \t") and _LINE_END.match(text, start)
            if not heading and not before.endswith("final "):
                continue
        skipped = _DECORATION.match(text, start)
        start = skipped.end() if skipped else start
        yield text[start : start + MAX_TAIL].split("\n", 1)[0]
