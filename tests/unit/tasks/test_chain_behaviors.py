"""Behaviors in GSM8K's solutions: the graph of calculator marks, and that what is injected is true."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.behaviors import writer
from bridge.behaviors.chain import MISSING, RESTATED, TRIED, chain_solution
from bridge.config.stages import BEHAVIORS, Behavior
from bridge.config.tasks import Style
from bridge.tasks.chain import Chain, decimal, fold, numbers, plain, rewritten, tokens_of
from bridge.tasks.streams import stream

REAL = Path("/work/shared/data/gsm8k/train.jsonl")
QUESTION = "Ann has 6 boxes of 8 pens. She gives 10 pens to each of 3 friends. Bo has 5 pens. How many have both now?"
LINES = (
    "Ann has 6*8 = <<6*8=48>>48 pens.",
    "She gives away 10*3 = <<10*3=30>>30 pens.",
    "She keeps 48-30 = <<48-30=18>>18 pens.",
    "Together they have 18+5 = <<18+5=23>>23 pens.",
)
CHAIN = Chain(QUESTION, LINES, marks=False)
ALWAYS = Behavior(reflection=1.0)


def told(behavior: Behavior, chain: Chain = CHAIN, seed: int = 0) -> list[str]:
    return chain_solution(chain, behavior, stream(seed)).split("\n")


def test_the_graph() -> None:
    assert [step.parents for step in CHAIN.steps()] == [(-1, -1), (-1, -1), (0, 1), (2, -1)]
    assert [step.line for step in CHAIN.steps()] == [0, 1, 2, 3]


def test_a_number_of_the_question_is_no_dependency() -> None:
    """3 is both a result and a number of the text: which is meant cannot be known, so nothing is claimed."""
    chain = Chain("There are 3 cups and 1 more.", ("It is <<1+2=3>>3.", "So <<3+1=4>>4."), marks=False)
    assert [step.parents for step in chain.steps()] == [(-1, -1), (-1, -1)]


def test_marks_that_cannot_be_read_are_left_alone() -> None:
    chain = Chain("?", ("x is <<x+1=2>>2", "<<50%*2=1>>1", "<<1+1=two>>2", "<<1+1=2>>2"), marks=True)
    assert [(step.line, step.value) for step in chain.steps()] == [(3, 2)]
    assert told(BEHAVIORS["bridge"], chain) == list(chain.lines)


def test_vanilla_is_the_solution_without_marks() -> None:
    assert told(Behavior()) == [plain(line) for line in LINES]
    assert told(Behavior(), CHAIN._replace(marks=True)) == list(LINES)
    write = writer(Behavior(), Style())
    assert write(CHAIN, stream(0)) == "\n".join(map(plain, LINES))


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("a 10+5*4 = <<10+5*4=30>>30 b", "a 10+5*4 = 10 + 20 = 30 b"),
        ("a (2+3)*4=$<<(2+3)*4=20>>20.", "a (2+3)*4= 5 * 4 = $20."),
        ("1+2+3+4 = <<1+2+3+4=10>>10", "1+2+3+4 = 3 + 3 + 4 = 6 + 4 = 10"),
        ("$<<1/2*16=8>>8 by 1/2*16 = $<<1/2*16=8>>8", "$8 by 1/2*16 = 0.5 * 16 = $8"),
        ("5-8+1 = <<5-8+1=-2>>-2", "5-8+1 = (-3) + 1 = -2"),
        ("6*8 = <<6*8=48>>48", "6*8 = 48"),  # one operation
        ("1/3*3 = <<1/3*3=1>>1", "1/3*3 = 1"),  # 1/3 is no short decimal
        ("2*3+1 = <<2*3+1=8>>8", "2*3+1 = 8"),  # the mark is wrong
        ("that is <<2*3+1=7>>7", "that is 7"),  # no equation before it
    ],
)
def test_subgoals_one_operation_at_a_time(line: str, wanted: str) -> None:
    assert told(Behavior(subgoal=True), Chain("?", (line,), marks=False)) == [wanted]


EXPRESSIONS = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map("".join) | inner.map(lambda e: f"({e}+1)"),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_every_rewrite_has_the_same_value(expression: str) -> None:
    """Against Python's own arithmetic on exact fractions."""
    try:
        value = Fraction(eval(re.sub(r"\d+", r"Fraction(\g<0>)", expression), {"Fraction": Fraction}))
    except ZeroDivisionError:
        assert rewritten(expression, Fraction(0)) == []
        return
    for shown in rewritten(expression, value):
        exact = re.sub(r"\d+(?:\.\d+)?", lambda number: f"Fraction('{number[0]}')", shown)
        assert eval(exact, {"Fraction": Fraction}) == value


@given(st.text(alphabet="0123456789.+-*/() x%", max_size=20))
def test_no_text_upsets_the_reader(text: str) -> None:
    tokens = tokens_of(text)
    while tokens is not None and len(tokens) > 1:
        folded = fold(tokens)
        assert folded is None or len(folded) < len(tokens)
        tokens = folded
    assert rewritten(text, Fraction(1)) is not None
    numbers(text)


@pytest.mark.parametrize(
    ("value", "shown"),
    [("5", "5"), ("1/2", "0.5"), ("-3", "(-3)"), ("1/3", None), ("1/1000000", "0.000001"), ("1/10000000", None),
     ("123456789", "123456789"), ("-1/4", "(-0.25)"), ("0", "0")],
)  # fmt: skip
def test_decimals(value: str, shown: str | None) -> None:
    assert decimal(Fraction(value)) == shown


def test_the_sentence_that_gives_a_number_is_restated_once() -> None:
    lines = told(Behavior(analysis=4))
    said = [line for line in lines if line not in map(plain, LINES)]
    heads = [head.format("") for head in RESTATED]
    assert [next(line.removeprefix(head) for head in heads if line.startswith(head)) for line in said] == [
        "Ann has 6 boxes of 8 pens.", "She gives 10 pens to each of 3 friends.", "Bo has 5 pens.",
    ]  # fmt: skip


def test_a_failed_attempt_names_what_is_missing() -> None:
    """Before line 2, 48 - 30 is tried while 30 is unknown; 18 + 5 lacks what itself lacks something."""
    for seed in range(20):
        lines = told(ALWAYS, seed=seed)
        assert [line for line in lines if line in map(plain, LINES)] == [plain(line) for line in LINES]
        # before line 3 nothing is left to try but 18+5, which lacks 18 = 48-30
        assert len(lines) == 6 and lines.index(plain(LINES[1])) == 2 and lines.index(plain(LINES[2])) == 4
        assert "48-?" in lines[1] and "10*3" in lines[1] and "30" not in lines[1]
        assert "?+5" in lines[3] and "48-30" in lines[3] and "18" not in lines[3]


ATTEMPT = re.compile("|".join(re.escape(words).replace(r"\{0\}", "(.+?)") for words in TRIED))
LACK = re.compile("|".join(re.escape(words).replace(r"\{0\}", "(.+?)") + "$" for words in MISSING))


@pytest.mark.skipif(not REAL.is_file(), reason="GSM8K's files are not here")
def test_on_the_real_solutions() -> None:
    """Original lines stay, in order; no attempt holds a number before it is known; the last line is the last."""
    attempts = restated = expanded = 0
    rows = [json.loads(line) for line in REAL.read_bytes().split(b"\n")[:3000]]
    for number, row in enumerate(rows):
        lines = row["answer"].rpartition("\n####")[0].split("\n")
        chain = Chain(row["question"], tuple(lines), marks=False)
        behavior = Behavior(reflection=0.5, analysis=2)
        found = told(behavior, chain, number)
        assert found == told(behavior, chain, number)
        originals = [plain(line) for line in lines]
        at = 0
        for line in found:
            if at < len(originals) and line == originals[at]:
                at += 1
                continue
            restatement = next((line[len(h) :] for h in (r.format("") for r in RESTATED) if line.startswith(h)), None)
            if restatement is not None:
                assert restatement in row["question"]
                restated += 1
                continue
            attempts += 1
            assert 0 < at < len(originals) - 1
            tried, lacked = ATTEMPT.match(line), LACK.search(line)
            assert tried and lacked and "?" in line
            known = {*numbers(row["question"]), *(n for earlier in originals[:at] for n in numbers(earlier))}
            assert set(numbers(line)) <= known, (line, originals)
        assert at == len(originals)
        longer = told(Behavior(subgoal=True), chain, number)
        expanded += sum(a != b for a, b in zip(longer, originals, strict=True))
    assert attempts > 300 and restated > 1000 and expanded > 300
