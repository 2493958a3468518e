"""The step checker: by hand for each fault, against the tests' own verifier, and on anything a model may write."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from igsm_cases import BRIDGE, DEMO, question
from solution_verifier import evaluate

from bridge.behaviors import writer
from bridge.config.stages import Behavior
from bridge.config.tasks import IgsmSettings
from bridge.errors import UserError
from bridge.tasks.grading import grade_rows
from bridge.tasks.igsm.solver import Reader, UnsolvableError
from bridge.tasks.igsm.steps import Fault, check_solution
from bridge.tasks.igsm.task import Igsm

MED = IgsmSettings(name="igsm", mode="med")

TEXT = """\
The number of each Tall Ship's Guest Cabin equals 2.
The number of each Tall Ship's Upper Cabin equals 3.
The number of each Swift Ship's Guest Cabin equals the difference of each Tall Ship's Guest Cabin and \
each Tall Ship's Cabin.
The number of each Swift Ship's Upper Cabin equals 4 times the sum of each Tall Ship's Cabin, \
each Tall Ship's Guest Cabin and each Swift Ship's Guest Cabin.
The number of each Tall Ship's Lower Cabin equals 5 more than each Swift Ship's Upper Cabin.
What is the number of each Swift Ship's Upper Cabin?"""
# Guest 2, upper 3, lower 5 + q, so the Tall Ship's total needs the question: the lower cabin is another ship's.
TEXT = TEXT.replace("each Tall Ship's Lower", "each Cargo Ship's Lower")

RIGHT = """\
<think>
Let us find one quantity after the other.
- We are told that each Tall Ship's Guest Cabin is 2. Call it a. So a = 2.
- Let us turn to each Tall Ship's Cabin. Call it t. But each Tall Ship's Upper Cabin is not known yet, so this has to \
wait.
- The text gives each Tall Ship's Upper Cabin: it is 3. Its letter is b. So b = 3.
- Next we look at each Tall Ship's Cabin. It already has the letter t. Then t = a + b = 2 + 3 = 5.
- Now each Swift Ship's Upper Cabin, written as q. This cannot be worked out before each Swift Ship's Guest Cabin, so \
we come back to it later.
- Let g stand for each Swift Ship's Guest Cabin. We know that it equals the difference of each Tall Ship's Guest Cabin \
and each Tall Ship's Cabin. Then g = a - t = 2 - 5 = -3.
- Let us turn to each Swift Ship's Upper Cabin. It already has the letter q. Then q = 4 * (t + a + g) \
= 4 * (5 + 2 + (-3)) = 4 * (7 + (-3)) = 4 * 4 = 16.
Hence the answer is 16.
</think>
<answer>
The final answer is \\boxed{16}.
</answer>"""


def test_the_right_solution() -> None:
    assert check_solution(TEXT, RIGHT) == (7, None, "", "")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("q = 4 * (t + a + g)", "q = 4 * (g + t + a)"),  # another order
        ("q = 4 * (t + a + g) = 4 * (5 + 2 + (-3))", "q = 4 * t + 4 * a + 4 * g = 4 * 5 + 4 * 2 + 4 * (-3)"),
        ("= 4 * (7 + (-3)) = 4 * 4 = 16", "= 16"),  # bigger steps
        (" = 2 + 3 = 5", " = 5"),
        ("4 * (5 + 2 + (-3))", "4 * (5 + 2 - 3)"),
        ("2 - 5 = -3", "2 - 5 = -(5 - 2) = -3"),
        ("- Let g", "- Let L stand for each Cargo Ship's Lower Cabin. We still lack each Swift Ship's Upper Cabin; let "
         "us go on elsewhere.\n- Let g"),  # a detour to what nobody needs
    ],
)  # fmt: skip
def test_other_right_solutions(old: str, new: str) -> None:
    assert RIGHT.count(old) >= 1
    assert check_solution(TEXT, RIGHT.replace(old, new)).fault is None


@pytest.mark.parametrize(
    ("old", "new", "steps", "fault"),
    [
        ("So a = 2.", "Hence a is 2.", 0, "unreadable"),
        ("Then t = a + b", "Then t = a + b)", 3, "unreadable"),
        ("each Tall Ship's Guest Cabin is 2", "each Tall Ship's Corner Cabin is 2", 0, "unknown"),
        ("it is 3. Its letter is b. So b", "it is 3. Its letter is a. So a", 2, "letter"),
        ("already has the letter t. Then t", "already has the letter s. Then s", 3, "letter"),
        ("- Next we look at each Tall Ship's Cabin. It already has the letter t. Then t",
         "- Now each Tall Ship's Cabin, written as s. Then s", 3, "letter"),
        ("Then t = a + b", "Then s = a + b", 3, "letter"),
        ("- Let g stand for each Swift Ship's Guest Cabin.", "- Let g stand for each Tall Ship's Cabin.", 5, "again"),
        ("the difference of each Tall Ship's Guest Cabin and each Tall Ship's Cabin.",
         "the sum of each Tall Ship's Guest Cabin and each Tall Ship's Cabin.", 5, "premise"),
        ("This cannot be worked out before each Swift Ship's Guest Cabin, so we come back to it later.",
         "Then q = 4 * (t + a + g) = 16.", 4, "order"),
        ("Then g = a - t = 2 - 5 = -3", "Then g = t - a = 5 - 2 = 3", 5, "formula"),
        ("Then g = a - t = 2 - 5", "Then g = a - b = 2 - 5", 5, "formula"),
        ("q = 4 * (t + a + g)", "q = 4 * t + a + g", 6, "formula"),
        ("q = 4 * (t + a + g) = 4 * (5 + 2 + (-3))", "q = 4 * (t + a + g) = 4 * (6 + 1 + (-3))", 6, "formula"),
        ("is 2. Call it a. So a = 2.", "is 3. Call it a. So a = 2.", 0, "arithmetic"),
        ("2 + 3 = 5.", "2 + 3 = 6.", 3, "arithmetic"),
        ("4 * (7 + (-3)) = 4 * 4", "4 * (7 + (-3)) = 4 * 5", 6, "arithmetic"),
        ("= 4 * 4 = 16.", "= 4 * 4.", 6, "arithmetic"),
        ("But each Tall Ship's Upper Cabin is not known yet", "But each Tall Ship's Guest Cabin is not known yet",
         1, "detour"),
        ("before each Swift Ship's Guest Cabin, so",
         "before each Swift Ship's Guest Cabin and each Tall Ship's Cabin, so", 4, "detour"),
        ("Hence the answer is 16.", "Hence the answer is 15.", 7, "end"),
        ("boxed{16}", "boxed{17}", 7, "end"),
    ],
)  # fmt: skip
def test_the_first_wrong_step_and_why(old: str, new: str, steps: int, fault: Fault) -> None:
    assert RIGHT.count(old) == 1
    found = check_solution(TEXT, RIGHT.replace(old, new))
    assert (found.steps, found.fault) == (steps, fault), found
    assert found.why


def test_a_solution_that_stops_early() -> None:
    steps = RIGHT.split("\n- ")
    for kept in range(1, len(steps)):
        found = check_solution(TEXT, "\n- ".join(steps[:kept]))
        assert (found.steps, found.fault) == (kept - 1, "end")
    assert check_solution(TEXT, RIGHT.partition("\nHence")[0]).fault == "end"
    cut = check_solution(TEXT, RIGHT[: RIGHT.index(" = 4 * (7")])
    assert (cut.steps, cut.fault) == (6, "unreadable")
    assert check_solution(TEXT, "").fault == "end"


def test_modulo() -> None:
    text = TEXT.replace("Cabin?", "Cabin, modulo 7?")
    response = RIGHT.replace("2 - 5 = -3", "2 - 5 = 4").replace("16", "2")
    response = response.replace("(-3)) = 4 * (7 + (-3)) = 4 * 4 =", "4) = 4 * (0 + 4) = 4 * 4 =")
    assert check_solution(text, response).fault is None
    assert check_solution(TEXT, response).fault == "arithmetic"
    assert check_solution(text, RIGHT).fault == "arithmetic"  # it ends with -3, not with 4


@pytest.mark.parametrize("task", [BRIDGE, DEMO, MED], ids=["bridge", "demo", "med"])
@pytest.mark.parametrize(
    "behavior", [Behavior(), Behavior(reflection=0.5, subgoal=True, analysis=3)], ids=["plain", "injected"]
)
def test_every_generated_solution_is_right(task: IgsmSettings, behavior: Behavior) -> None:
    for row in Igsm(task).rows("sft", 120, 4, writer(behavior, task.style)):
        found = check_solution(question(row), row.response or "")
        assert found.fault is None, found
        assert found.steps == (row.response or "").count("\n- ") + (row.response or "").startswith("- ")


def _name(body: str, place: int) -> str:
    """The quantity of the step around a place."""
    line = body[body.rindex("\n", 0, place) :]
    return re.search(r"each [A-Z]\w+ [A-Z]\w+'s [A-Z]\w+(?: [A-Z]\w+)?", line)[0]  # type: ignore[index]


@pytest.mark.parametrize("task", [BRIDGE, MED], ids=["bridge", "med"])
def test_a_changed_number_is_found_where_it_stands(task: IgsmSettings) -> None:
    """One number of a chain replaced by another, so that by the tests' own arithmetic the value is another one."""
    random = Random(0)
    behavior = Behavior(subgoal=True)
    for row in Igsm(task).rows("sft", 150, 6, writer(behavior, task.style)):
        response = row.response or ""
        body = response[: response.index("\nHence")]
        place = random.choice([m for m in re.finditer(r"(?<=[ (-])\d+(?=[ ).])", body) if " = " in body[: m.start()]])
        changed = response[: place.start()] + str(int(place[0]) + random.choice([1, 2, 10])) + response[place.end() :]
        first, last = body.rindex(" = ", 0, place.start()) + 3, re.compile(r" = |\.").search(changed, place.start())
        assert last
        reader = Reader(question(row))
        part = changed[first : last.start()]
        if not re.search("[A-Za-z]", part):
            value = evaluate(part, {})
            if (value % reader.modulus if reader.modulus else value) == reader.solve(_name(body, place.start())).value:
                continue  # 0 * 1 for 0 * 0
        found = check_solution(question(row), changed)
        assert found.fault is not None, changed
        assert found.steps == body[: place.start()].count("\n- ") - 1


@pytest.mark.parametrize("task", [BRIDGE, DEMO], ids=["bridge", "demo"])
def test_steps_in_another_order_are_right_or_told(task: IgsmSettings) -> None:
    """Two neighbouring steps swapped: right if and only if the second does not use the first."""
    random = Random(1)
    swaps = {True: 0, False: 0}
    for row in Igsm(task).rows("sft", 150, 8, writer(Behavior(), task.style)):
        response = row.response or ""
        lines = response.split("\n")
        steps = [number for number, line in enumerate(lines) if line.startswith("- ")]
        at = random.choice(steps[:-1])
        letter = re.findall(r"(?:Then|So) ([A-Za-z]) = ", lines[at])[0]
        formula = lines[at + 1].partition(" = ")[2]
        uses = letter in re.findall(r"\b[A-Za-z]\b", formula)
        lines[at], lines[at + 1] = lines[at + 1], lines[at]
        found = check_solution(question(row), "\n".join(lines))
        assert (found.fault == "order") == uses, found
        swaps[uses] += 1
    assert min(swaps.values()) >= 5


expressions = st.recursive(
    st.integers(0, 99).map(str) | st.sampled_from("ab"),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(" ".join),
        inner.map("({})".format),
        inner.map("(-{})".format),
    ),
    max_leaves=12,
)


@given(expressions)
def test_arithmetic_is_pythons(expression: str) -> None:
    from bridge.tasks.igsm.steps import _value

    letters = {"a": 5, "b": -7}
    assert _value(expression, letters) == evaluate(expression, letters)


@settings(max_examples=300)
@given(st.data())
def test_whatever_a_model_writes_gets_a_verdict(data: st.DataObject) -> None:
    """Pieces of the right solution, and rubbish, in any order: never an exception, never right without the whole."""
    pieces = [*re.split(r"( = |\. |\n)", RIGHT), "(" * 2000, "9" * 5000, "-" * 3000, "a = ", "\x00", "é"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces) | st.text(max_size=5), max_size=40)))
    found = check_solution(TEXT, text)
    assert found.fault is not None or "q = " in text


def test_graded_rows_say_the_first_wrong_step(tmp_path: Path) -> None:
    wrong = RIGHT.replace("2 + 3 = 5.", "2 + 3 = 6.")
    rows = [{"problem": TEXT, "response": text, "gold": 16, "kind": "number:igsm"} for text in (RIGHT, wrong)]
    rows += [{**rows[0], "kind": "number"}, {"response": RIGHT, "gold": 16, "kind": "number:igsm"}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    grade_rows(file, file)
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [row["correct"] for row in found] == [True] * 4  # the wrong step does not change the answer
    assert [(row.get("steps"), row.get("fault")) for row in found] == [(7, None), (3, "arithmetic")] + [
        (None, None)
    ] * 2
    assert found[1]["why"] == "6 is not 5"
    for problem, said in ((7, "must be text"), ("What is it?", "no iGSM problem")):
        file.write_text(json.dumps({**rows[0], "problem": problem}), encoding="utf-8")
        with pytest.raises(UserError, match=f"line 1: field 'problem' .*{said}"):
            grade_rows(file, tmp_path / "out.jsonl")


def test_a_problem_that_has_no_answer_is_no_solution_s_fault() -> None:
    with pytest.raises(UnsolvableError):
        check_solution("What is the number of each Tall Ship's Cabin?", RIGHT)


def test_the_value_of_a_formula_for_other_values_of_its_parents() -> None:
    reader = Reader(TEXT.replace("Cabin?", "Cabin, modulo 7?"))
    parents = ["each Tall Ship's Cabin", "each Tall Ship's Guest Cabin", "each Swift Ship's Guest Cabin"]
    assert reader.given("each Swift Ship's Upper Cabin", dict(zip(parents, [100, 20, 3], strict=True))) == 4 * 123
    assert reader.solve(reader.question).value == 16 % 7
