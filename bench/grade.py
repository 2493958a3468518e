"""How many plain-number responses of GSM8K's length one core grades in a second of processor time; Math-Verify beside
us if installed.

Prints one JSON line. Usage: python bench/grade.py [rows per form]
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median

from bridge.tasks.grading import grade

BODY = (
    "The farm packs {a} crates in the morning and {b} crates in the afternoon.\n"
    "That is {a} + {b} = <<{a}+{b}={c}>>{c} crates on the first day.\n"
    "Each crate sells for $3, so the first day brings {c} * 3 = $<<{c}*3={d}>>{d}.\n"
    "On the second day nothing is sold, and the total stays as it was before.\n"
)
FORMS = {
    "hash": BODY + "#### {d}",
    "phrase": BODY + "The answer is {d}.",
    "box": BODY + "So the total is \\boxed{{{d}}}.",
    "tags": "<think>\n" + BODY + "</think>\n<answer>\nThe final answer is \\boxed{{{d}}}.\n</answer>",
    "last_number": BODY + "The farm earns {d} dollars.",
}


def responses(form: str, rows: int) -> list[tuple[str, str]]:
    numbers = ((a, a % 89 + 7) for a in range(11, 11 + rows))
    return [(FORMS[form].format(a=a, b=b, c=a + b, d=3 * (a + b)), str(3 * (a + b))) for a, b in numbers]


def ours(response: str, gold: str) -> bool:
    return grade(response, gold, "number").correct


def math_verify() -> Callable[[str, str], bool] | None:
    try:
        from math_verify import parse, verify
    except ImportError:
        return None
    return lambda response, gold: bool(verify(parse(gold), parse(response)))


def rate(grader: Callable[[str, str], bool], rows: list[tuple[str, str]]) -> float:
    start = time.process_time()
    right = sum(grader(response, gold) for response, gold in rows)
    seconds = time.process_time() - start
    if grader is ours and right != len(rows):
        raise SystemExit(f"{len(rows) - right} of {len(rows)} responses were graded wrong: the rate would mean nothing")
    return len(rows) / seconds


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    peer, result = math_verify(), {}
    for form in FORMS:
        rows = responses(form, count)
        rounds = [(rate(ours, rows), rate(peer, rows[:200]) if peer else None) for _ in range(5)]
        mine = median(r for r, _ in rounds)
        theirs = median(r for _, r in rounds if r is not None) if peer else None
        result[form] = {
            "characters": round(sum(len(r) for r, _ in rows) / len(rows)),
            "grades_per_second": round(mine),
            "math_verify_per_second": theirs and round(theirs),
            "ratio": theirs and round(mine / theirs, 1),
        }
    print(json.dumps({"bench": "grade", "slowest": min(r["grades_per_second"] for r in result.values()), **result}))


if __name__ == "__main__":
    main()
