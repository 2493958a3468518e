"""The process that compares formulas: a line `[gold, answer]` in, `true`, `false` or `null` (undecided) out.

It limits itself through the kernel. SIGPROF keeps its default action, so processor time that is used up ends the
process even in the middle of a C call; the parent sees the end of the pipe. Memory is refused beyond its limit, which
Math-Verify takes for "not equal"; towers of powers meet the other limit long before. It also ends when the parent does.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

DIGITS = 60  # significant digits of a numeric comparison, where an exact one does not decide


def equal(gold: str, answer: str) -> bool:
    """Whether two formulas are equal; False where one of them is none."""
    from math_verify import verify

    right, given = parsed(gold), parsed(answer)
    if not right or not given:
        return False
    a, b = right[0], given[0]
    if getattr(a, "is_Rational", False) and getattr(b, "is_Rational", False):
        return bool(a == b)
    return bool(
        verify(
            right,
            given,
            float_rounding=DIGITS,
            numeric_precision=DIGITS,
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )


def parsed(formula: str) -> list[Any]:
    """Math-Verify's reading of one formula, without its guesses."""
    from math_verify import LatexExtractionConfig, parse

    found: list[Any] = parse(
        f"\\boxed{{{formula}}}",
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found


def main() -> None:
    seconds, memory = float(sys.argv[1]), int(sys.argv[2])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the parser prints; only verdicts may go to the parent
    logging.disable(logging.CRITICAL)
    equal("\\frac{x}{2}", "x/2")  # imports and builds everything before the limits count
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        verdict: bool | None
        try:
            verdict = equal(gold, answer)
        except Exception:
            verdict = None
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), file=replies, flush=True)


if __name__ == "__main__":
    main()
