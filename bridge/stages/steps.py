"""Models of a training that is still running: its checkpoints are converted as they are saved.

A process of its own does it, at the lowest priority, so a slow disk or a fault of it never stops a step:

    python -m bridge.stages.steps CHECKPOINTS OUT EVERY     # `end` on standard input: do what is left, then leave
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bridge.convert import convert
from bridge.errors import UserError

LOOK_EVERY = 0.5  # seconds
END = b"end\n"


class Steps:
    """The models of every `every` steps, `OUT/step-N` made of `CHECKPOINTS/step-N.pt`.

    The training asks `wanted` before it deletes a checkpoint. Once a conversion has failed nothing is wanted any more,
    so that checkpoints do not fill a disk; the training goes on, and the log says why.
    """

    def __init__(self, checkpoints: Path, out: Path, every: int) -> None:
        self.checkpoints, self.out, self.every = checkpoints, out, every
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, step: int) -> None:
        """Begin, at a training of which `step` steps are done; models of later steps are of a past that was lost."""
        if not self.every:
            return
        self.out.mkdir(exist_ok=True)
        _sweep(self.out)
        for folder in self.out.glob("step-*"):
            if number(folder) > step:
                shutil.rmtree(folder)
        command = [sys.executable, "-m", "bridge.stages.steps", str(self.checkpoints), str(self.out), str(self.every)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def wanted(self, path: Path) -> bool:
        """Whether the model of this checkpoint is still to be made."""
        alive = self._process is not None and self._process.poll() is None
        return alive and number(path) % self.every == 0 and not (self.out / path.stem).exists()

    def finish(self) -> list[int]:
        """Wait until every checkpoint that is left is converted; the steps of all models."""
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError):  # it has failed, and the log says why
                self._process.communicate(END)
            _sweep(self.out)
        return sorted(number(folder) for folder in self.out.glob("step-*"))

    def stop(self) -> None:
        """End at once. What was not made is made after the next start."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@contextmanager
def kept_steps(checkpoints: Path, out: Path, every: int) -> Iterator[Steps]:
    """The follower of a training, ended in any case. It does nothing where `every` is 0."""
    steps = Steps(checkpoints, out, every)
    try:
        yield steps
    finally:
        steps.stop()


def number(path: Path) -> int:
    """The step of `step-N.pt` or `step-N`."""
    return int(path.stem.removeprefix("step-"))


def _sweep(out: Path) -> None:
    """Remove what killed conversions left: it must not be sealed."""
    for folder in out.glob(".*"):
        shutil.rmtree(folder, ignore_errors=True)


def work(checkpoints: Path, out: Path, every: int, control: int) -> None:
    """Convert until `end` is read from the descriptor `control`, or until its other side is gone.

    The kernel closes it when the training dies, however that happens, so no follower is left behind.
    """
    ended = False
    while True:
        for path in sorted(checkpoints.glob("step-*.pt")):
            if number(path) % every == 0 and not (out / path.stem).exists():
                convert(path, out / path.stem)
                sys.stderr.write(f"step {number(path)}: its model is in {out / path.stem}\n")
        if ended:
            return
        if select.select([control], [], [], LOOK_EVERY)[0]:
            ended = os.read(control, len(END)) == END
            if not ended:
                return


def main() -> None:
    """The process."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):  # meant for the training, which ends this process
        signal.signal(signum, signal.SIG_IGN)
    os.nice(19)
    checkpoints, out, every = sys.argv[1:]
    try:
        work(Path(checkpoints), Path(out), int(every), sys.stdin.fileno())
    except (UserError, OSError) as error:
        sys.stderr.write(f"no more models of single steps are made: {error}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
