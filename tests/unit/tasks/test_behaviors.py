"""Worked solutions: arithmetic by hand, the rules of detours, rates, and what each behavior changes."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from igsm_cases import BRIDGE, DEMO, question
from solution_verifier import Verdict, WrongStepError, evaluate, operations, verify

from bridge.behaviors import phrases, solution, writer
from bridge.behaviors.arithmetic import rewrites
from bridge.config.stages import BEHAVIORS, Behavior
from bridge.config.tasks import IgsmSettings, Style
from bridge.tasks import Example, load_task
from bridge.tasks.dag import Node, Problem
from bridge.tasks.streams import stream

FIXED = Style(wording="fixed", letters="sequential", frame="plain")
INJECTED = BEHAVIORS["bridge"]


def solved(task: IgsmSettings, behavior: Behavior, size: int, seed: int = 11) -> list[Example]:
    return list(load_task(task).rows("sft", size, seed, writer(behavior, task.style)))


def verdicts(rows: list[Example], subgoal: bool) -> list[Verdict]:
    return [verify(question(row), row.response or "", subgoal) for row in rows]


# ---- arithmetic


@pytest.mark.parametrize(
    ("formula", "values", "chain"),
    [
        ("7", [], ["7"]),
        ("{}", [-2], ["-2"]),
        ("{} + {}", [5, -3], ["2"]),
        ("{} - {}", [5, -3], ["8"]),
        ("3 * {}", [-4], ["-12"]),
        ("{} + {} + {}", [1, 2, -3], ["3 + (-3)", "0"]),
        ("4 * ({} + {})", [5, -3], ["4 * 2", "8"]),
        ("4 * ({} + {} + {})", [5, 6, 7], ["4 * (11 + 7)", "4 * 18", "72"]),
        ("2 + ({} - {})", [3, 8], ["2 + (-5)", "-3"]),
        ("{} * {} + {} * {}", [2, -4, 3, 5], ["(-8) + 3 * 5", "(-8) + 15", "7"]),
        ("2 * ({} * {} - {})", [3, 4, 5], ["2 * (12 - 5)", "2 * 7", "14"]),
        ("{} - {} * 2", [10, 3], ["10 - 6", "4"]),
        ("({} + 1) * ({} - 1)", [2, 9], ["3 * (9 - 1)", "3 * 8", "24"]),
        ("2 * (3 + ({} - {}))", [7, 1], ["2 * (3 + 6)", "2 * 9", "18"]),
    ],
)
def test_rewrites_by_hand(formula: str, values: list[int], chain: list[str]) -> None:
    assert rewrites(formula, values) == chain


formulas = st.recursive(
    st.sampled_from(["{}", "3"]),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
    max_leaves=8,
).map(lambda text: text[1:-1] if text.startswith("(") else text)


@given(formula=formulas, values=st.lists(st.integers(-50, 50), min_size=8, max_size=8))
def test_each_rewrite_is_one_operation_and_changes_no_value(formula: str, values: list[int]) -> None:
    start = formula.format(*[f"({value})" for value in values])
    chain = rewrites(formula, values)
    assert chain[-1] == str(evaluate(start, {}))
    assert {evaluate(part, {}) for part in chain} == {int(chain[-1])}
    if operations(start):
        assert [operations(part) for part in chain] == list(range(operations(start) - 1, -1, -1))


@pytest.mark.parametrize("formula", ["{} / {}", "{}.5", "x + {}"])
def test_a_formula_that_cannot_be_rewritten_is_an_error(formula: str) -> None:
    with pytest.raises(ValueError, match="can be rewritten"):
        rewrites(formula, [1, 2])


# ---- a small graph by hand: a = 2, b = 3, s = a + b, d = b - s, q = 4 * (d + s + a), and a distractor x = 5 + s


HAND = Problem(
    text="",
    nodes=[
        Node("A", (), "2", 2, "2", 1),
        Node("B", (), "3", 3, "3", 1),
        Node("S", (0, 1), "{} + {}", 5, "", 2),
        Node("D", (1, 2), "{} - {}", -2, "the difference of B and S", 2),
        Node("Q", (3, 2, 0), "4 * ({} + {} + {})", 20, "4 times the sum of D, S and A", 4),
        Node("X", (2,), "5 + {}", 10, "5 more than S", 2),
    ],
    steps=[0, 1, 2, 3, 4],
    distractors=[5],
    ops=8,
)


def test_the_plain_solution_by_hand() -> None:
    assert solution(HAND, Behavior(), FIXED, stream()) == (
        "- A, call it a. Then a = 2.\n"
        "- B, call it b. Then b = 3.\n"
        "- S, call it c. Then c = a + b = 2 + 3 = 5.\n"
        "- D, call it d. Then d = b - c = 3 - 5 = -2.\n"
        "- Q, call it e. Then e = 4 * (d + c + a) = 4 * ((-2) + 5 + 2) = 20.\n"
        "#### 20"
    )


def test_subgoals_and_full_analysis_by_hand() -> None:
    """Level 4 restates every premise but those of constants; totals have none."""
    assert solution(HAND, Behavior(subgoal=True, analysis=4), FIXED, stream()) == (
        "- A, call it a. Then a = 2.\n"
        "- B, call it b. Then b = 3.\n"
        "- S, call it c. Then c = a + b = 2 + 3 = 5.\n"
        "- D, call it d. It equals the difference of B and S. Then d = b - c = 3 - 5 = -2.\n"
        "- Q, call it e. It equals 4 times the sum of D, S and A. "
        "Then e = 4 * (d + c + a) = 4 * ((-2) + 5 + 2) = 4 * (3 + 2) = 4 * 5 = 20.\n"
        "#### 20"
    )


def test_detours_by_hand() -> None:
    """With probability 1 a detour follows each success, so the order of the steps is decided by the stream alone."""
    draws = iter(
        [
            # after A: detour; not to the distractor; 4 quantities are left, the last is Q; named at once
            *(0.0, 0.9, 0.99, 0.0),
            # after that failure: B, opener and naming apart (constants draw nothing else)
            # after B: detour to the distractor; it is the only one; opener and naming apart
            *(0.0, 0.1, 0.0, 0.9),
            # after that failure: S, opener and naming apart
            0.9,
            # after S: a detour to the distractor, which can be computed now
            *(0.0, 0.1, 0.0),
            # that was a success: another detour, to Q again, which still fails
            *(0.0, 0.9, 0.99),
            # after that failure: D; then only Q is left
            0.9,
        ]
    )
    assert solution(HAND, Behavior(reflection=1.0), FIXED, lambda: next(draws)) == (
        "- A, call it a. Then a = 2.\n"
        "- Q, call it b. Not known yet: D and S.\n"
        "- B, call it c. Then c = 3.\n"
        "- X, call it d. Not known yet: S.\n"
        "- S, call it e. Then e = a + c = 2 + 3 = 5.\n"
        "- X, called d. Then d = 5 + e = 5 + 5 = 10.\n"
        "- Q, called b. Not known yet: D.\n"
        "- D, call it f. Then f = c - e = 3 - 5 = -2.\n"
        "- Q, called b. Then b = 4 * (f + e + a) = 4 * ((-2) + 5 + 2) = 20.\n"
        "#### 20"
    )
    assert next(draws, None) is None


def test_the_think_frame() -> None:
    style = Style(wording="fixed", letters="sequential")
    response = solution(HAND, Behavior(), style, stream())
    plain = solution(HAND, Behavior(), FIXED, stream())
    steps = plain.rpartition("\n")[0]
    assert re.fullmatch(
        r"<think>\n[^\n]+\n"
        + re.escape(steps)
        + r"\n[^\n]*\b20\.\n</think>\n<answer>\n[^\n]*\\boxed\{20\}\.\n</answer>",
        response,
    )
    assert response.startswith(load_task(BRIDGE).response_prefix)


# ---- many generated solutions


def test_plain_solutions_are_right_and_hold_only_what_is_needed() -> None:
    for task in (BRIDGE, DEMO):
        for verdict in verdicts(solved(task, Behavior(), 400), subgoal=False):
            assert verdict.failed == verdict.restated == verdict.useless == 0


def test_two_thousand_injected_solutions_keep_the_rules_and_the_rates_of_bridge() -> None:
    """The verifier holds the rules; the rates are those measured on BRIDGE's own generator (research brief 1.2)."""
    found = verdicts(solved(BRIDGE, INJECTED, 2000), subgoal=True)
    mean = {name: sum(getattr(v, name) for v in found) / len(found) for name in ("failed", "restated", "useless")}
    assert mean["failed"] == pytest.approx(0.83, abs=0.1)
    assert sum(v.failed > 0 for v in found) / len(found) == pytest.approx(0.57, abs=0.05)
    assert mean["restated"] == pytest.approx(3.8, abs=0.4)
    assert mean["useless"] == pytest.approx(0.09, abs=0.04)
    restated = sum((v.restated_by_inputs for v in found), Counter[int]())
    seen = sum((v.seen_by_inputs for v in found), Counter[int]())
    for count, share in ((1, 0.1), (2, 0.4), (3, 0.8), (4, 1.0)):
        assert restated[count] / seen[count] == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("reflection", [0.3, 1.0])
def test_many_detours_in_small_problems_keep_the_rules(reflection: float) -> None:
    rows = solved(DEMO, Behavior(reflection=reflection, subgoal=True, analysis=3), 600)
    assert sum(verdict.failed for verdict in verdicts(rows, subgoal=True)) > 150


@pytest.mark.parametrize(
    ("level", "shares"),
    [
        (0, [0, 0, 0, 0]),
        (1, [0, 0.1, 0.4, 0.8]),
        (2, [0.1, 0.4, 0.8, 1]),
        (3, [0.4, 0.8, 1, 1]),
        (4, [1, 1, 1, 1]),
    ],
)
def test_analysis_levels(level: int, shares: list[float]) -> None:
    found = verdicts(solved(BRIDGE, Behavior(analysis=level), 300), subgoal=False)
    restated = sum((v.restated_by_inputs for v in found), Counter[int]())
    seen = sum((v.seen_by_inputs for v in found), Counter[int]())
    assert [restated[count] / seen[count] for count in (1, 2, 3, 4)] == pytest.approx(shares, abs=0.07)


def test_letters_are_drawn_from_all_or_follow_the_alphabet() -> None:
    named = re.compile(r"(?:[Cc]all it|we call|letter is|We write|written as|Let) ([A-Za-z])\b")
    for row in solved(BRIDGE, INJECTED, 100):
        letters = named.findall(row.response or "")
        assert len(letters) == len(set(letters)) > 5
    assert len(set("".join("".join(named.findall(row.response or "")) for row in solved(BRIDGE, INJECTED, 100)))) == 52
    for row in solved(DEMO, INJECTED, 100):
        letters = named.findall(row.response or "")
        assert "".join(letters) == "abcdefghij"[: len(letters)]


def test_varied_wording_varies_and_fixed_wording_does_not() -> None:
    def shapes(rows: list[Example]) -> set[str]:
        lines = (line for row in rows for line in (row.response or "").split("\n") if line.startswith("- "))
        return {re.sub(r"each [A-Z]\w+ \w+'s \w+( [A-Z]\w+)?", "#", line).split("#")[0] for line in lines}

    assert len(shapes(solved(BRIDGE, INJECTED, 100))) >= 6
    assert shapes(solved(DEMO, INJECTED, 100)) == {"- "}


def test_phrases_hold_no_placeholders() -> None:
    for wording in ("varied", "fixed"):
        for frame in ("think", "plain"):
            style = Style.model_validate({"wording": wording, "frame": frame})
            assert all(phrase and not re.search(r"\{\d?\}", phrase) for phrase in phrases(style))


# ---- the verifier itself must be able to fail


@pytest.mark.parametrize(
    ("step", "old", "new"),
    [
        (3, "= 3 + 5 = 8", "= 3 + 5 = 9"),  # wrong result
        (3, "= 3 + 5 = 8", "= 8"),  # the numbers are missing
        (3, "c = b + a", "c = b - a"),  # not the formula
        (3, "c = b + a", "c = b + d"),  # unknown letter
        (3, "equals the sum", "equals the difference"),  # not the premise
        (3, ", called c", ", call it c"),  # named already
        (2, "call it b", "call it a"),  # the letter of something else
        (1, "each Glass Museum's East Hall", "each Folk Museum's East Hall"),  # not what is missing
        (1, " Not known yet: each Glass Museum's East Hall.", " Then c = 8."),  # computed from what is not known
    ],
)
def test_the_verifier_sees_wrong_steps(step: int, old: str, new: str) -> None:
    text = (
        "The number of each Folk Museum's East Hall equals 5.\n"
        "The number of each Glass Museum's East Hall equals 3.\n"
        "The number of each Folk Museum's West Hall equals the sum of each Glass Museum's East Hall and each "
        "Folk Museum's East Hall.\nWhat is the number of each Folk Museum's West Hall?"
    )
    steps = [
        "- each Folk Museum's East Hall, call it a. Then a = 5.",
        "- each Folk Museum's West Hall, call it c. Not known yet: each Glass Museum's East Hall.",
        "- each Glass Museum's East Hall, call it b. Then b = 3.",
        "- each Folk Museum's West Hall, called c. It equals the sum of each Glass Museum's East Hall and each "
        "Folk Museum's East Hall. Then c = b + a = 3 + 5 = 8.",
    ]
    assert verify(text, "\n".join(steps), subgoal=False).failed == 1
    assert old in steps[step]
    steps[step] = steps[step].replace(old, new)
    with pytest.raises((WrongStepError, KeyError)):
        verify(text, "\n".join(steps), subgoal=False)
