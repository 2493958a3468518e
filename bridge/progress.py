"""Progress of long work: a bar on a terminal, plain lines in a log file, and a small file that others can read."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress

T = TypeVar("T")

LINE_EVERY = 10.0  # seconds between two lines of a log
FILE_EVERY = 0.5  # seconds between two writes of the progress file


def duration(seconds: float) -> str:
    """Seconds as people write them: `42s`, `3m05s`, `2h10m`."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


@dataclass
class Meter:
    """Counts units of work and knows the rate and the time left."""

    label: str
    total: int | None
    """None: not known beforehand."""
    unit: str
    done: int = 0
    first: int = 0
    """How many were done when this process began: a resumed job does not count them in its rate."""
    started: float = field(default_factory=time.monotonic)
    note: str = ""

    def advance(self, amount: int = 1, **values: float) -> None:
        """Count `amount` more units; `values` are shown beside the bar, such as `loss=0.31`."""
        self.done += amount
        if values:
            self.note = " ".join(f"{name} {value:.4g}" for name, value in values.items())

    def counted(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each counted as one unit when the next one is asked for."""
        for item in items:
            yield item
            self.advance()

    @property
    def rate(self) -> float:
        """Units per second since this process began."""
        return (self.done - self.first) / max(time.monotonic() - self.started, 1e-9)

    @property
    def left(self) -> float | None:
        """Seconds until the end at the present rate; None before the first unit, and where there is no known total."""
        return (self.total - self.done) / self.rate if self.total is not None and self.done > self.first else None

    def line(self) -> str:
        """One line for a log."""
        left = "" if self.left is None else f", {duration(self.left)} left"
        note = f"  {self.note}" if self.note else ""
        count = self.done if self.total is None else f"{self.done}/{self.total}"
        return f"{self.label}: {count} {self.unit}, {self.rate:.3g}/s{left}{note}"


class _Shown(Meter):
    """A meter that shows itself; `progress` makes it."""

    def show(self, bar: Progress | None, file: Path | None) -> None:
        self._bar, self._file = bar, file
        self._task = bar.add_task(self.label, total=self.total, completed=self.done, note="") if bar else None
        self._line_at = self._file_at = 0.0
        self._emit(force=True)

    def advance(self, amount: int = 1, **values: float) -> None:
        super().advance(amount, **values)
        self._emit(force=self.total is not None and self.done >= self.total)

    def finish(self) -> None:
        """Say once more how far it came, where nobody knew that this was the end."""
        if self.total is None:
            self._emit(force=True)

    def _emit(self, force: bool = False) -> None:
        now = time.monotonic()
        if self._bar is not None and self._task is not None:
            note = f"{self.rate:.3g} {self.unit}/s {self.note}"
            self._bar.update(self._task, completed=self.done, note=note)
        elif self.done > self.first and (force or now - self._line_at >= LINE_EVERY):
            self._line_at = now
            sys.stderr.write(self.line() + "\n")
            sys.stderr.flush()
        if self._file is not None and (force or now - self._file_at >= FILE_EVERY):
            self._file_at = now
            _replace(self._file, {**self.snapshot(), "time": time.time()})

    def snapshot(self) -> dict[str, object]:
        return {
            "done": self.done,
            "total": self.total,
            "unit": self.unit,
            "rate": self.rate,
            "left": self.left,
            "note": self.note,
        }


def _replace(path: Path, value: dict[str, object]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value), encoding="utf-8")
    temporary.replace(path)


@contextmanager
def progress(label: str, total: int | None, unit: str, done: int = 0) -> Iterator[Meter]:
    """Show the progress of `total` units of work (None: nobody knows how many), of which `done` were done before.

    On a terminal this is a bar with rate and time left; elsewhere a plain line every ten seconds. Where the
    environment names a file in BRIDGE_PROGRESS, the same facts are kept there for whoever watches the job.
    """
    meter = _Shown(label, total, unit, done=done, first=done)
    file = Path(os.environ["BRIDGE_PROGRESS"]) if os.environ.get("BRIDGE_PROGRESS") else None
    if not sys.stderr.isatty():
        meter.show(None, file)
        yield meter
        meter.finish()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        meter.show(bar, file)
        yield meter
        meter.finish()
