"""What a scheduler's words mean for an element."""

from __future__ import annotations

import pytest

from bridge.launch.states import GONE, ElementState, Seen, reconciled, run_state, scheduler_state, with_parents


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
        ("PREEMPTED", "", "failed"),  # Slurm did not start it again
        ("PENDING", "a reason of 2031", "pending"),
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
    found, why = scheduler_state(Seen(word, reason, queued=True), None)
    assert found == state
    if state not in ("waiting", "blocked"):
        assert word.split()[0].rstrip("+") in why  # the scheduler's own word is in the reason


def test_the_stages_own_words_are_quoted() -> None:
    state, reason = scheduler_state(Seen("FAILED", "exit 1:0"), {"exit": 1, "reason": "OSError: disk full"})
    assert (state, reason) == ("failed", "FAILED (exit 1:0): OSError: disk full")


def test_a_job_that_the_scheduler_forgot() -> None:
    gone = reconciled(None, None, {})
    assert gone == Seen("", "", queued=False)
    assert scheduler_state(gone, {"exit": 1, "reason": "boom"}) == ("failed", "exit code 1: boom")
    assert scheduler_state(gone, None) == ("failed", f"{GONE}: killed, or its node was lost")
    assert scheduler_state(gone, {"exit": 75, "reason": "saved"})[0] == "failed"


def test_a_requeued_job_that_waits_says_why_it_stopped() -> None:
    seen = Seen("PENDING", "BeginTime", queued=True)
    assert scheduler_state(seen, {"exit": 75, "reason": "saved"}) == ("requeued", "PENDING (BeginTime): saved")


@pytest.mark.parametrize(
    ("queue", "accounting", "silent", "state", "queued"),
    [
        # both answer: the queue counts for what is alive
        (Seen("RUNNING"), Seen("RUNNING"), "", "running", True),
        (Seen("PENDING", "BeginTime"), Seen("NODE_FAIL"), "", "pending", True),  # lost, and waiting for another node
        (Seen("COMPLETED"), Seen("RUNNING"), "", "failed", False),  # accounting is behind; and nothing is sealed
        (None, Seen("TIMEOUT"), "", "failed", False),
        (None, Seen("RUNNING"), "", "failed", False),  # the controller lost it
        (Seen("SOMETHING_NEW"), None, "", "unknown", True),
        (None, Seen("SOMETHING_NEW"), "", "unknown", False),
        # the controller is silent: an end that may be no end decides nothing
        (None, Seen("RUNNING"), "squeue", "unknown", None),
        (None, Seen("NODE_FAIL"), "squeue", "unknown", None),
        (None, Seen("PREEMPTED"), "squeue", "unknown", None),
        (None, Seen("FAILED", "exit 75:0"), "squeue", "unknown", None),
        (None, Seen("FAILED", "exit 1:0"), "squeue", "failed", False),
        (None, Seen("CANCELLED by 1000"), "squeue", "cancelled", False),
        (None, None, "squeue", "unknown", None),
        # accounting is silent
        (Seen("RUNNING"), None, "sacct", "running", True),
        (None, None, "sacct", "unknown", False),
        (None, None, "squeue sacct", "unknown", None),
    ],
)
def test_queue_and_accounting_together(
    queue: Seen | None, accounting: Seen | None, silent: str, state: str, queued: bool | None
) -> None:
    seen = reconciled(queue, accounting, dict.fromkeys(silent.split(), "timed out"))
    assert (scheduler_state(seen, None)[0], seen.queued) == (state, queued)


def test_a_scheduler_that_does_not_answer_decides_nothing() -> None:
    seen = reconciled(None, None, {"squeue": "squeue: timed out"})
    assert scheduler_state(seen, {"exit": 1}) == ("unknown", "the scheduler does not answer: squeue: timed out")


def element(state: str, reason: str = "") -> ElementState:
    return ElementState("s", 0, "", state, reason, None, 0, None)  # type: ignore[arg-type]


def test_a_child_of_a_failed_parent_is_blocked_and_names_the_culprit() -> None:
    state, reason = with_parents("cancelled", "CANCELLED", [("sft/2", element("failed", "OUT_OF_MEMORY"))])
    assert (state, reason) == ("blocked", "sft/2 failed: OUT_OF_MEMORY")
    again = with_parents("waiting", "", [("convert_sft/2", element("blocked", reason))])
    assert again == ("blocked", "sft/2 failed: OUT_OF_MEMORY")  # the first culprit, not the one in between


def test_a_child_of_a_cancelled_parent_is_cancelled() -> None:
    assert with_parents("blocked", "x", [("sft/0", element("cancelled"))]) == ("cancelled", "sft/0 was cancelled")


@pytest.mark.parametrize("state", ["done", "running", "requeued"])
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
