"""What state an element is in: the seal first, then the scheduler, then the attempts. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bridge.graph import Edge

State = Literal["waiting", "pending", "blocked", "running", "requeued", "done", "failed", "cancelled", "unknown"]

STUCK: tuple[State, ...] = ("blocked", "cancelled")

SILENT = "the scheduler does not answer"
GONE = "it is no longer in the queue, and nothing is known of its end"

_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"}
_REQUEUED = {"REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
LIVE = _RUNNING | _REQUEUED | {"PENDING"}
"""Words that only the queue can be believed on: accounting may be behind."""
_FAILED = {"FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "REVOKED"}
_OVER = _FAILED | {"CANCELLED", "COMPLETED"}

_EXPLAINED = {
    "exit 0:53": "exit 0:53: Slurm could not write the job's log; can the node write to the run's folder?",
    "JobLaunchFailure": "JobLaunchFailure: its script did not start or was killed; can the node write to the run?",
    "PartitionConfig": "PartitionConfig: no node of its partition is like that; `bridge-rl doctor` says more",
    "PartitionNodeLimit": "PartitionNodeLimit: more than its partition gives; `bridge-rl doctor` says more",
    "PartitionTimeLimit": "PartitionTimeLimit: longer than its partition allows; `bridge-rl doctor` says more",
    "BadConstraints": "BadConstraints: no node is like that; `bridge-rl doctor` says more",
    "JobHeldUser": "JobHeldUser: held; `scontrol release` lets it go",
    "launch failed requeued held": "launch failed requeued held: Slurm could not start it; `cancel` and `resume`",
}


@dataclass(frozen=True)
class Seen:
    """What the scheduler says of a job, in its own words."""

    state: str
    """Empty when it says nothing: the job is unknown to it, or it could not be asked."""
    reason: str = ""
    queued: bool | None = None
    """Whether the queue holds the job; None when the queue could not be asked."""


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
    open: bool | None = False
    """Whether the scheduler has it in hand, running or queued; None when that cannot be known now."""

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        del value["open"]
        return value


def word_of(state: str) -> str:
    """The state itself: `CANCELLED` of `CANCELLED by 1000`, or of a `CANCELLED+` that was cut short."""
    return state.partition(" ")[0].rstrip("+")


def reconciled(queue: Seen | None, accounting: Seen | None, silent: Mapping[str, str]) -> Seen:
    """One answer from the queue's word and accounting's on the same job.

    The queue knows what is alive and accounting what is over. A failure to ask either never becomes an end.

    Args:
        queue: None when the queue does not hold the job.
        accounting: None when accounting has no row of it.
        silent: `squeue` and `sacct` → why it could not be asked.
    """
    if queue is not None:
        return Seen(queue.state, queue.reason, queued=word_of(queue.state) not in _OVER)
    if "squeue" in silent:
        # Lost nodes, preemption and exit code 75 end an attempt but perhaps not the job: only the queue could tell.
        ended = (
            accounting
            and word_of(accounting.state) in _OVER - {"NODE_FAIL", "PREEMPTED"}
            and accounting.reason != "exit 75:0"
        )
        if accounting and ended:
            return Seen(accounting.state, accounting.reason, queued=False)
        return Seen("", f"{SILENT}: {silent['squeue']}", queued=None)
    if accounting is None:
        why = f"accounting does not answer: {silent['sacct']}" if "sacct" in silent else ""
        return Seen("", why, queued=False)
    if word_of(accounting.state) in LIVE:
        return Seen("FAILED", f"{accounting.state} in accounting, but no longer in the queue", queued=False)
    return Seen(accounting.state, accounting.reason, queued=False)


def scheduler_state(seen: Seen, last_end: Mapping[str, Any] | None) -> tuple[State, str]:
    """The state of an element that is not sealed, from the scheduler's words and the last attempt's end.

    Args:
        seen: what `reconciled` made of the scheduler's words.
        last_end: the `end` line of the job's last attempt, if that has ended.
    """
    ended = f": {last_end['reason']}" if last_end and last_end.get("reason") else ""
    word, shown = word_of(seen.state), _EXPLAINED.get(seen.reason, seen.reason)
    if not word:
        if seen.queued is None:
            return "unknown", shown
        if last_end and last_end.get("exit") == 75:
            return "failed", f"stopped early, saved, and was not requeued{ended}; `resume` goes on"
        if last_end:
            return "failed", f"exit code {last_end['exit']}{ended}"
        if seen.reason:  # accounting may answer later
            return "unknown", f"{GONE}; {shown}"
        return "failed", f"{GONE}: killed, or its node was lost"
    if word == "PENDING":
        if seen.reason == "DependencyNeverSatisfied":
            return "blocked", "its dependency can never be satisfied"
        if seen.reason == "Dependency":
            return "waiting", "PENDING (Dependency)"
        state: State = "requeued" if last_end else "pending"
        return state, (f"PENDING ({shown})" if seen.reason else "PENDING") + ended
    if word in _RUNNING:
        return "running", word
    if word in _REQUEUED:
        return "requeued", (f"{word} ({shown})" if seen.reason else word) + ended
    if word == "CANCELLED":
        return "cancelled", seen.state
    if word == "COMPLETED":
        return "failed", f"COMPLETED, but the artifact was never sealed{ended}"
    if word in _FAILED:
        return "failed", f"{word}{f' ({shown})' if seen.reason else ''}{ended}"
    return "unknown", seen.state


def with_parents(state: State, reason: str, parents: Sequence[tuple[str, ElementState]]) -> tuple[State, str]:
    """The same, corrected by what became of the elements that this one needs.

    An element whose parent failed is blocked, with the culprit; one whose parent was cancelled is cancelled.
    """
    if state in ("done", "running", "requeued"):
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
    """Elements that an earlier submission still has in hand → job id.

    Not those that can never start, and will leave the queue in a moment: what they wait for failed or was cancelled.
    """
    return {Edge(s.stage, s.element): s.job for s in states if s.open and s.job and s.state not in STUCK}
