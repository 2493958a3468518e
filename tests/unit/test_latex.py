"""LaTeX answers: which are equal, and that no answer can hang, break or outlive the grader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge.tasks.grading import Response, grade, grade_all, latex

EQUAL = [
    # fractions, roots, powers
    (r"\boxed{\frac12}", r"\frac{1}{2}"),
    (r"\boxed{\tfrac{1}{2}}", "0.5"),
    (r"\boxed{-3\frac{1}{2}}", r"-\frac{7}{2}"),
    (r"\boxed{\sqrt{2}/2}", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{2\sqrt3}", r"\sqrt{12}"),
    (r"\boxed{\sqrt[3]{8}}", "2"),
    (r"\boxed{\frac{1}{3^{79}}}", "3^{-79}"),
    (r"\boxed{2^{10}}", "1024"),
    (r"\boxed{5!}", "120"),
    (r"\boxed{\binom{5}{2}}", "10"),
    (r"\boxed{\log_2 8}", "3"),
    (r"\boxed{\sum_{i=1}^{3} i}", "6"),
    (r"\boxed{3 \times 10^{4}}", "30000"),
    (r"\boxed{3+4i}", "4i+3"),
    (r"\boxed{2+\frac{1}{\mathrm{e}}}", r"\frac{1}{e}+2"),
    # algebra
    (r"\boxed{x^2+2x+1}", "(x+1)^2"),
    (r"\boxed{\frac{a+b}{c}}", r"\frac{a}{c}+\frac{b}{c}"),
    (r"\boxed{2x - y + 1 = 0}", "y=2x+1"),
    (r"\boxed{2x+1}", "y=2x+1"),
    (r"\boxed{x \le 3}", r"x\leq 3"),
    # sets, points, intervals, matrices
    (r"\boxed{\left(1,\,2\right)}", "(1,2)"),
    (r"\boxed{\{1,2\}}", r"\{2,1\}"),
    (r"\boxed{343, 125}", r"125 \text{ and } 343"),
    (r"\boxed{x=2 \text{ or } x=3}", "2,3"),
    (r"\boxed{\pm 2}", "2,-2"),
    (r"\boxed{\emptyset}", r"\varnothing"),
    (r"\boxed{x \in [1,2]}", "[1,2]"),
    (r"\boxed{(-\infty,1)\cup(2,\infty)}", r"(-\infty, 1) \cup (2, \infty)"),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    # units, wrappers, words
    (r"\boxed{7\text{ square units}}", "7"),
    (r"\boxed{9/4\ \text{cm}}", r"\frac94"),
    (r"\boxed{5\text{ million}}", "5000000"),
    (r"\boxed{\$1{,}234}", "1234"),
    (r"\boxed{5\%}", "5"),
    (r"\boxed{90\degree}", r"90^\circ"),
    (r"\boxed{\mathbf{42}}", "42"),
    (r"\boxed{Tuesday}", r"\text{Tuesday}"),
    (r"\boxed{\text{(C)}}", "C"),
    (r"\boxed{3:00}", "3:00"),
    # where it stands
    (r"The answer is $\frac{3}{4}$.", "0.75"),
    (r"The answer is \( x+1 \).", "1+x"),
    (r"#### $x+1$", "1+x"),
    (r"<answer>$x+1$</answer>", "1+x"),
    (r"Final Answer: The final answer is $\boxed{x}$. I hope it is correct.", "x"),
    (r"\boxed{3}</think> \boxed{4}", "4"),
    ("\\boxed{\n\\boxed{42}\n}", "42"),
]

DIFFERENT = [
    (r"\boxed{2\sqrt3}", "2"),
    (r"\boxed{3.14}", r"\pi"),
    (r"\boxed{1.41421356}", r"\sqrt2"),
    (r"\boxed{0.3333333333333333}", r"\frac13"),
    (r"\boxed{1+10^{-40}}", "1"),
    (r"\boxed{\frac{1}{10^{40}}}", "0"),
    (r"\boxed{3 \frac12}", r"\frac{3}{2}"),
    (r"\boxed{x^2+2x}", "(x+1)^2"),
    (r"\boxed{y=2x+1}", "y=2x+2"),
    (r"\boxed{5a}", "5"),
    (r"\boxed{5}", "5a"),
    (r"\boxed{-x}", "x"),
    (r"\boxed{3-4i}", "3+4i"),
    (r"\boxed{x>3}", "x<3"),
    (r"\boxed{(2,1)}", "(1,2)"),
    (r"\boxed{[1,2)}", "(1,2]"),
    (r"\boxed{2}", r"\pm 2"),
    (r"\boxed{343}", r"125 \text{ and } 343"),
    (r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\boxed{0.05}", r"5\%"),
    (r"\boxed{50\%}", r"\frac{1}{2}"),
    (r"\boxed{12,34}", "1234"),
    (r"\boxed{\text{Monday}}", r"\text{Tuesday}"),
    (r"\boxed{2:04}", "1:02"),
    (r"\boxed{\frac{1}{0}}", "5"),
    ("I would say 42.", "42"),
    (r"<think>\boxed{3}</think> so", "3"),
    (r"\boxed{7}, hence \boxed{", "7"),
]


@pytest.mark.parametrize(("response", "gold"), EQUAL)
def test_equal_formulas(response: str, gold: str) -> None:
    assert grade(response, gold, "latex").correct


@pytest.mark.parametrize(("response", "gold"), DIFFERENT)
def test_different_formulas(response: str, gold: str) -> None:
    result = grade(response, gold, "latex")
    assert not result.correct
    assert result.reason in ("wrong", "no_answer")


def test_answers_that_count_as_equal_are_the_same_string() -> None:
    """A vote counts answers as strings."""
    same = [grade(rf"\boxed{{{form}}}", "(x+1)^2", "latex").answer for form in ("x^2+2x+1", "(1+x)^2", "(x + 1)^2")]
    assert same == ["(x+1)^2"] * 3
    assert grade(r"\boxed{\dfrac{2}{4}}", "7", "latex").answer == "1/2"


@pytest.mark.parametrize("tower", ["9^{9^{9^{9}}}", "10^{10^{10}}", "(10^9)!"])
@pytest.mark.timeout(120)
def test_a_formula_that_cannot_be_computed_is_a_grader_error_and_the_grader_lives(tower: str) -> None:
    before = processor_seconds()
    result = grade(rf"\boxed{{{tower}}}", "x+1", "latex")
    assert (result.answer, result.correct, result.reason) == (None, False, "grader_error")
    assert processor_seconds() - before < latex.CPU_SECONDS + 5  # the limit, and one start
    assert grade(rf"\boxed{{{tower}}}", "x+1", "latex").reason == "grader_error"  # remembered, not tried again
    assert grade(r"\boxed{1+x}", "x+1", "latex").correct


@pytest.mark.parametrize(
    "unit", ["(", "{", "x^", "\\frac{", "\\left(", "1,", "\\text{", "9^{", "$", "\\\\", "\\boxed{"]
)
@pytest.mark.timeout(60)
def test_degenerate_formulas_are_decided_or_given_up(unit: str) -> None:
    for response in (rf"\boxed{{{unit * 150}1}}", f"#### {unit * 150}", rf"\boxed{{{unit * 20_000}}}"):
        assert grade(response, "x+1", "latex").reason in ("wrong", "no_answer", "grader_error")
    assert grade(r"\boxed{1+x}", "x+1", "latex").correct


def processor_seconds() -> float:
    times = os.times()
    return times.children_user + times.children_system


def test_memory_is_limited() -> None:
    assert grade(r"\boxed{m+x}", "x+m", "latex").correct  # new, so that the worker has surely started
    process = latex._Comparer.of_this_process().process
    assert process is not None
    limits = Path("/proc", str(process.pid), "limits").read_text(encoding="ascii")
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert latex.MEMORY < int(line.split()[3]) < latex.MEMORY + (1 << 30)


def test_a_batch_keeps_to_its_time_and_grades_the_rest() -> None:
    assert grade(r"\boxed{t+x}", "x+t", "latex").correct  # the worker runs
    towers = [Response(rf"\boxed{{{n}^{{9^{{9^{{9}}}}}}}}", "x+1") for n in range(10, 30)]
    started = time.monotonic()
    grades = grade_all([*towers, Response(r"\boxed{5}", "5"), Response(r"\boxed{x+2}", "x+3")], "latex", seconds=3.0)
    assert time.monotonic() - started < 3 + 5
    assert [g.reason for g in grades] == ["grader_error"] * 20 + ["correct", "grader_error"]
    assert grade(r"\boxed{2+x}", "x+2", "latex").correct


def test_a_worker_that_dies_costs_one_verdict() -> None:
    assert grade(r"\boxed{d+x}", "x+d", "latex").correct
    process = latex._Comparer.of_this_process().process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert grade(r"\boxed{y+x}", "x+y", "latex").reason in ("correct", "grader_error")
    assert grade(r"\boxed{z+x}", "x+z", "latex").correct


def test_a_fork_gets_a_worker_of_its_own() -> None:
    assert grade(r"\boxed{1+x}", "x+1", "latex").correct
    child = os.fork()
    if child == 0:
        os._exit(0 if grade(r"\boxed{a+x}", "x+a", "latex").correct else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert grade(r"\boxed{b+x}", "x+b", "latex").correct


def test_the_worker_ends_with_its_parent() -> None:
    code = (
        "from bridge.tasks.grading import grade, latex\n"
        "assert grade(r'\\boxed{1+x}', 'x+1', 'latex').correct\n"
        "print(latex._Comparer.of_this_process().process.pid, flush=True)\n"
        "import time; time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = Path("/proc", parent.stdout.readline().strip())
    assert worker.exists()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while worker.exists() and "Z" not in worker.joinpath("stat").read_text(encoding="utf-8").split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
