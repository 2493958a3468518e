"""What a stage program is given, and how it says that it stops early."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from bridge.config.stages import StageSettings
from bridge.config.tasks import TaskSettings

SIGNALS = (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)
"""What announces the end of a job: the scheduler's warning, preemption or cancel, and Ctrl-C."""


class StopEarlyError(Exception):
    """The stage saved its state and wants to be started again (exit code 75)."""


class StopFlag:
    """Set by the signals that announce the end of a job; a stage looks at it between two steps.

    The handler only sets a flag, so it may run twice and at any moment.
    """

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Catch the signals from now on."""
        for number in SIGNALS:
            signal.signal(number, self._set)
        signal.signal(signal.SIGCONT, signal.SIG_DFL)  # comes with TERM; submitit would write a line about it

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def limit_threads(threads: int) -> None:
    """Tell OpenMP, before torch is imported, how many threads to use and not to spin for long while they wait.

    Spinning threads starve each other where cores are shared with other processes: an SFT step of the demo took four
    times as long.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@dataclass(frozen=True)
class Job:
    """One element of one stage: everything that the stage program needs to know.

    A stage writes its result into `out` and whatever it needs for resuming into `scratch`. Both survive a
    kill. When the program returns, `out` is sealed and published, and `scratch` is thrown away.
    """

    label: str
    """`STAGE/ELEMENT`, for messages."""
    settings: StageSettings
    task: TaskSettings
    inputs: Mapping[str, Path]
    """Input field → folder of the artifact (or a path, or a hub name as it was written)."""
    out: Path
    scratch: Path
    threads: int
    stop: StopFlag = field(default_factory=StopFlag)
