"""What a scheduler's words mean for an element."""

from __future__ import annotations

import pytest

from bridge.launch.states import NO_ANSWER, ElementState, Seen, run_state, scheduler_state, with_parents


@pytest.mark.parametrize(
    ("word", "reason", "state"),
    [
        ("PENDING", "Priority", "pending"),
        ("PENDING", "Resources", "pending"),
        ("PENDING", "Dependency", "waiting"),
        ("PENDING", "DependencyNeverSatisfied", "blocked"),
        ("RUNNING", "", "running"),
        ("COMPLETING", "", "running"),
        ("CONFIGURING", "", "running"),
        ("SUSPENDED", "", "running"),
        ("RESIZING", "", "running"),
        ("REQUEUED", "", "requeued"),
        ("PREEMPTED", "", "requeued"),
        ("CANCELLED by 1000", "", "cancelled"),
        ("CANCELLED+", "", "cancelled"),
        ("FAILED", "exit 1:0", "failed"),
        ("TIMEOUT", "", "failed"),
        ("OUT_OF_MEMORY", "", "failed"),
        ("NODE_FAIL", "", "failed"),
        ("COMPLETED", "", "failed"),  # over, yet nothing is sealed
        ("SOMETHING_NEW", "", "unknown"),
    ],
)
def test_the_schedulers_word_and_what_we_make_of_it(word: str, reason: str, state: str) -> None:
    found, why = scheduler_state(Seen(word, reason), None)
    assert found == state
    if state not in ("waiting", "blocked"):
        assert word.split()[0].rstrip("+") in why  # the scheduler's own word is in the reason


def test_the_stages_own_words_are_quoted() -> None:
    state, reason = scheduler_state(Seen("FAILED", "exit 1:0"), {"exit": 1, "reason": "OSError: disk full"})
    assert (state, reason) == ("failed", "FAILED (exit 1:0): OSError: disk full")


def test_a_job_that_the_scheduler_forgot() -> None:
    assert scheduler_state(None, {"exit": 1, "reason": "boom"}) == ("failed", "exit code 1: boom")
    assert scheduler_state(None, None)[0] == "unknown"
    assert scheduler_state(None, {"exit": 75, "reason": "saved"})[0] == "unknown"


def test_a_scheduler_that_does_not_answer_decides_nothing() -> None:
    state, reason = scheduler_state(Seen(NO_ANSWER, "squeue: timed out"), {"exit": 1})
    assert (state, reason) == ("unknown", "the scheduler does not answer: squeue: timed out")


def element(state: str, reason: str = "") -> ElementState:
    return ElementState("s", 0, "", state, reason, None, 0, None)  # type: ignore[arg-type]


def test_a_child_of_a_failed_parent_is_blocked_and_names_the_culprit() -> None:
    state, reason = with_parents("cancelled", "CANCELLED", [("sft/2", element("failed", "OUT_OF_MEMORY"))])
    assert (state, reason) == ("blocked", "sft/2 failed: OUT_OF_MEMORY")
    again = with_parents("waiting", "", [("convert_sft/2", element("blocked", reason))])
    assert again == ("blocked", "sft/2 failed: OUT_OF_MEMORY")  # the first culprit, not the one in between


def test_a_child_of_a_cancelled_parent_is_cancelled() -> None:
    assert with_parents("blocked", "x", [("sft/0", element("cancelled"))]) == ("cancelled", "sft/0 was cancelled")


@pytest.mark.parametrize("state", ["done", "failed", "running"])
def test_what_has_begun_is_not_judged_by_its_parents(state: str) -> None:
    assert with_parents(state, "r", [("a/0", element("failed"))]) == (state, "r")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("states", "word"),
    [
        (["done", "done"], "done"),
        (["done", "failed", "blocked"], "failed"),
        (["failed", "running"], "running"),
        (["done", "waiting"], "waiting"),
        (["done", "cancelled"], "cancelled"),
        (["done", "unknown"], "unknown"),
    ],
)
def test_one_word_for_a_run(states: list[str], word: str) -> None:
    assert run_state([element(s) for s in states]) == word
