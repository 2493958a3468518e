"""How often and how long one submission of an element may run, and how long it may make no progress."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from bridge.config.profile import Allocation
from bridge.config.stages import seconds
from bridge.graph import Edge
from bridge.progress import duration
from bridge.runs import Run
from bridge.stages.job import StopFlag

LOOK_EVERY = 1.0  # seconds


def spent(run: Run, key: Edge, job: str | None) -> list[float]:
    """Seconds of each attempt so far of the present submission.

    Slurm keeps a job's id when it starts it again; on this machine every start has a new one, and what counts are the
    attempts since the last launch. An attempt that was killed lasted until the last line of its log.
    """
    launched = max((line["time"] for line in run.submissions() if line["event"] == "launch"), default=0.0)
    attempts = run.attempts(key)
    ends = {line["attempt"]: line["time"] for line in attempts if line["event"] == "end"}
    found = []
    for line in attempts:
        ours = line.get("job") == job if job and "_" in job else line["time"] >= launched
        if line["event"] == "start" and ours:
            found.append(
                max(ends.get(line["attempt"], _last_written(run.log(key, line["attempt"]))) - line["time"], 0.0)
            )
    return found


def _last_written(log: Path) -> float:
    try:
        return log.stat().st_mtime
    except OSError:
        return 0.0


def exhausted(attempts: Sequence[float], need: Allocation) -> str | None:
    """Why there may be no further attempt after these, or None."""
    if need.max_attempts is not None and len(attempts) >= need.max_attempts:
        return f"it was started {len(attempts)} times, and max_attempts is {need.max_attempts}; `resume` starts anew"
    if need.max_total_time is not None and sum(attempts) >= seconds(need.max_total_time):
        took = duration(sum(attempts))
        return f"its attempts took {took}, and max_total_time is {need.max_total_time}; `resume` starts anew"
    return None


class Watchdog(threading.Thread):
    """Asks the stage to stop when the time of all attempts is used up, and ends a stage that makes no progress.

    A stage that hangs cannot be asked: `give_up` is told why, and the process ends with what it started.
    """

    def __init__(self, progress: Path, before: float, need: Allocation, stop: StopFlag, give_up: Callable[[str], None]):
        super().__init__(daemon=True)
        self.progress, self.stop, self.give_up = progress, stop, give_up
        self.left = seconds(need.max_total_time) - before if need.max_total_time else None
        self.max_quiet = seconds(need.max_quiet) if need.max_quiet else None

    def run(self) -> None:
        took = silence = 0.0
        last, written = time.monotonic(), 0.0
        while self.left is not None or self.max_quiet is not None:
            time.sleep(LOOK_EVERY)
            now, news = time.monotonic(), _last_written(self.progress)
            step = min(now - last, 2 * LOOK_EVERY)  # a job that Slurm suspended does not age
            took, silence = took + step, silence + step if news == written else 0.0
            last, written = now, news
            if self.left is not None and took > self.left:
                self.stop.requested = True
            if self.max_quiet is not None and silence > self.max_quiet:
                sys.stderr.write("no progress; every thread stands here:\n")
                faulthandler.dump_traceback(all_threads=True)
                self.give_up(f"made no progress for {duration(silence)}, longer than its max_quiet")
                end_children(os.getpid())
                os._exit(1)


def end_children(process: int) -> None:
    """Kill everything that a process has started, and what that has started."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        if parent == process:
            child = int(status.parent.name)
            end_children(child)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
