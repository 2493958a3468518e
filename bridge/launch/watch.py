"""Waiting for a run: bars on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from bridge.graph import Edge
from bridge.launch.states import STUCK, ElementState
from bridge.launch.submit import observe
from bridge.progress import duration
from bridge.runs import Run

LINE_EVERY = 10.0  # seconds between two progress lines of one element in a log
# Seconds for which a state that nobody can explain may be a passing failure, and in which Slurm takes jobs out of its
# queue that can never start.
PATIENCE = 30.0


def wait(run: Run) -> list[ElementState]:
    """Show a run until nothing of it is queued or running; the last states.

    While the scheduler does not answer, nothing is known to be over, and the wait goes on.
    """
    slow = run.profile().cluster == "slurm"
    interval, puzzled_since = (1.0 if slow else 0.25), None
    with _display() as show:
        while True:
            states = observe(run)
            show(run, states)
            if all(s.open is False or s.state in STUCK for s in states):
                if not any(s.open or s.state == "unknown" for s in states):
                    return states
                puzzled_since = puzzled_since or time.monotonic()
                if time.monotonic() - puzzled_since > PATIENCE:
                    return states
            else:
                puzzled_since = None
            time.sleep(interval)
            if slow:
                interval = min(interval * 1.2, 15.0)


@contextmanager
def _display() -> Iterator[Any]:
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield _Bars(bars)


class _Bars:
    """One bar for each element that has begun."""

    def __init__(self, bars: Progress) -> None:
        self.bars = bars
        self.tasks: dict[tuple[str, int], TaskID] = {}

    def __call__(self, run: Run, states: Sequence[ElementState]) -> None:
        for state in states:
            key = (state.stage, state.element)
            if (
                key not in self.tasks
                and state.state in ("pending", "waiting", "unknown", "done")
                and not state.attempts
            ):
                continue
            name = escape(f"{state.stage}/{state.element} {state.label}".strip())
            if key not in self.tasks:
                self.tasks[key] = self.bars.add_task(name, total=None, note="")
            task = self.tasks[key]
            if state.state == "running":
                facts = run.progress(Edge(*key))
                self.bars.update(
                    task, total=facts.get("total"), completed=facts.get("done", 0), note=escape(note(facts))
                )
            elif state.state == "done":
                total = self.bars.tasks[task].total or 1
                self.bars.update(task, total=total, completed=total, note="sealed")
                self.bars.stop_task(task)
            else:
                self.bars.update(task, note=escape(f"{state.state} {state.reason}"[:100]))


class _Lines:
    """A line when a state changes, and now and then a line of progress."""

    def __init__(self) -> None:
        self.last: dict[tuple[str, int], str] = {}
        self.said: dict[tuple[str, int], float] = {}

    def __call__(self, run: Run, states: Sequence[ElementState]) -> None:
        now = time.monotonic()
        for state in states:
            key = (state.stage, state.element)
            name = f"{state.stage}/{state.element}"
            if self.last.get(key) != state.state:
                if state.state not in ("waiting", "pending"):
                    label = f"  {state.label}" if state.label else ""
                    reason = f"  {state.reason}" if state.state not in ("running", "done") and state.reason else ""
                    self._say(f"{name}: {state.state}{label}{reason}")
                self.last[key], self.said[key] = state.state, now
            elif state.state == "running" and now - self.said[key] >= LINE_EVERY:
                facts = run.progress(Edge(*key))
                if facts:
                    self._say(f"{name}: {facts['done']}/{facts['total'] or '?'} {note(facts)}")
                self.said[key] = now

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
        sys.stderr.flush()


def note(facts: dict[str, Any]) -> str:
    """Rate, time left and values of a running stage, for people."""
    if not facts:
        return "starting"
    left = f", {duration(facts['left'])} left" if facts.get("left") is not None else ""
    return f"{facts['unit']}, {facts['rate']:.3g}/s{left}  {facts.get('note', '')}".rstrip()
