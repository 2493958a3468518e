"""What state an element is in: the seal first, then the scheduler, then the attempts. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bridge.graph import Edge

State = Literal["waiting", "pending", "blocked", "running", "requeued", "done", "failed", "cancelled", "unknown"]
FINAL: frozenset[State] = frozenset(("blocked", "done", "failed", "cancelled"))
ACTIVE: frozenset[State] = frozenset(("waiting", "pending", "running", "requeued"))

SILENT = "the scheduler does not answer"
NO_ANSWER = "NO_ANSWER"  # our own word: the scheduler could not be asked

_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
_REQUEUED = {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "PREEMPTED"}
LIVE = _RUNNING | _REQUEUED | {"PENDING"}
"""Words that only the queue can be believed on: accounting may be behind."""
_FAILED = {"FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "REVOKED"}


@dataclass(frozen=True)
class Seen:
    """What the scheduler says of a job, in its own words."""

    state: str
    reason: str = ""


@dataclass(frozen=True)
class ElementState:
    """One line of `status`."""

    stage: str
    element: int
    label: str
    state: State
    reason: str
    job: str | None
    attempts: int
    artifact: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def scheduler_state(seen: Seen | None, last_end: Mapping[str, Any] | None) -> tuple[State, str]:
    """The state of an element that is not sealed, from the scheduler's words and the last attempt's end.

    Args:
        seen: None when the scheduler does not know the job.
        last_end: the `end` line of the last attempt, if it has ended.
    """
    ended = f": {last_end['reason']}" if last_end and last_end.get("reason") else ""
    if seen is None:
        if last_end and last_end.get("exit") not in (0, 75):
            return "failed", f"exit code {last_end['exit']}{ended}"
        return "unknown", "the scheduler does not know the job; `resume` submits it again"
    if seen.state == NO_ANSWER:
        return "unknown", f"{SILENT}: {seen.reason}"
    word = seen.state.split(" ")[0].rstrip("+")  # `CANCELLED by 1000`
    if word == "PENDING":
        if seen.reason == "DependencyNeverSatisfied":
            return "blocked", "its dependency can never be satisfied"
        if seen.reason == "Dependency":
            return "waiting", "PENDING (Dependency)"
        return "pending", f"PENDING ({seen.reason})" if seen.reason else "PENDING"
    if word in _RUNNING:
        return "running", word
    if word in _REQUEUED:
        return "requeued", word
    if word == "CANCELLED":
        return "cancelled", seen.state
    if word == "COMPLETED":
        return "failed", f"COMPLETED, but the artifact was never sealed{ended}"
    if word == "FAILED" and not seen.reason and last_end:
        return "failed", f"exit code {last_end['exit']}{ended}"
    if word in _FAILED:
        return "failed", f"{word}{f' ({seen.reason})' if seen.reason else ''}{ended}"
    return "unknown", seen.state


def with_parents(state: State, reason: str, parents: Sequence[tuple[str, ElementState]]) -> tuple[State, str]:
    """The same, corrected by what became of the elements that this one needs.

    An element whose parent failed is blocked, with the culprit; one whose parent was cancelled is cancelled.
    """
    if state in ("done", "failed", "running"):
        return state, reason
    for wanted, shown in (("failed", "failed"), ("blocked", ""), ("cancelled", "was cancelled")):
        for name, parent in parents:
            if parent.state == wanted:
                if wanted == "cancelled":
                    return "cancelled", f"{name} {shown}"
                culprit = parent.reason if wanted == "blocked" else f"{name} {shown}: {parent.reason}"
                return "blocked", culprit
    return state, reason


def run_state(states: Sequence[ElementState]) -> str:
    """One word for a run: `done` only if everything is; what is still going on before what went wrong."""
    words = {s.state for s in states}
    if words <= {"done"}:
        return "done"
    for word in ("running", "requeued", "pending", "waiting", "failed", "blocked", "cancelled"):
        if word in words:
            return word
    return "unknown"


def active_jobs(states: Sequence[ElementState]) -> dict[Edge, str]:
    """Elements that an earlier submission still has in hand → job id."""
    return {Edge(s.stage, s.element): s.job for s in states if s.state in ACTIVE and s.job}
