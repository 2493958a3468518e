"""Convert the checkpoints of a training that is still running, each as soon as it is whole."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from bridge.artifacts import SEAL
from bridge.convert.api import Report
from bridge.convert.source import IncompleteError
from bridge.convert.steps import number, steps
from bridge.errors import UserError

QUIET = 5.0  # seconds for which no file of a checkpoint may have changed
LOOK = 1.0  # seconds between two looks

Look = Mapping[str, tuple[tuple[str, int, int], ...]]
"""Step -> (path, size, change time in nanoseconds) of each of its files."""


@dataclass
class Followed:
    """What came of following a folder."""

    converted: dict[str, Report] = field(default_factory=dict)
    """Step -> its report, in the order of conversion. What earlier followers converted is not among them."""
    refused: dict[str, str] = field(default_factory=dict)
    """Step -> why it cannot be converted."""

    def to_json(self) -> dict[str, Any]:
        """The object that `bridge-rl convert --follow --json` prints."""
        return {
            "converted": {name: report.to_json() for name, report in self.converted.items()},
            "refused": dict(self.refused),
        }


def follow(folder: Path, out: Path, convert: Callable[[Path, Path], Report], *, until: int | None = None) -> Followed:
    """Convert every step in `folder` into a folder of its own in `out`, as it appears.

    `convert(src, out)` does one conversion and publishes it by a rename, so a killed follower leaves nothing half and
    the next one goes on where it stopped: what is in `out` is done. A step is taken when its format says that it is
    whole and none of its files has changed for QUIET seconds. A step that is refused is reported and tried again only
    if it changes. The end: step `until` is done; or `folder` was sealed, or is gone, and nothing is left to do. On
    SIGTERM and SIGINT KeyboardInterrupt is raised.

    UserError if `folder` does not exist or `out` cannot be made.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder; name the one in which the training saves its checkpoints")
    if out.is_dir() and out.samefile(folder):
        raise UserError(
            f"{out}: is the folder that is followed, where every step is there already; name another output"
        )
    try:
        out.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: cannot be made ({error.strerror}); make its parent first") from error
    result = Followed()
    seen: dict[str, tuple[tuple[Any, ...], float]] = {}
    refused: dict[str, tuple[Any, ...]] = {}
    with _terminated_like_interrupted():
        while True:
            over = not folder.is_dir() or (folder / SEAL).exists()  # asked before the look, so the last step is seen
            look, now = _look(folder), time.monotonic()
            seen = {name: since(seen.get(name), state, now) for name, state in look.items()}
            open_steps = [
                name for name in look if not (out / _target(name)).exists() and refused.get(name) != look[name]
            ]
            for name in open_steps:
                if now - seen[name][1] >= QUIET:
                    try:
                        result.converted[name] = convert(folder / name, out / _target(name))
                        result.refused.pop(name, None)
                    except UserError as error:
                        if isinstance(error, IncompleteError) and not over:
                            continue  # its writer is slow or dead: a later look decides
                        if (folder / name).exists() and not (out / _target(name)).exists():
                            refused[name], result.refused[name] = look[name], str(error)
            left = [name for name in open_steps if name not in result.converted and name not in result.refused]
            if (over and not left) or (until is not None and _reached(out, look, until)):
                return result
            time.sleep(LOOK)


def since(
    before: tuple[tuple[Any, ...], float] | None, state: tuple[Any, ...], now: float
) -> tuple[tuple[Any, ...], float]:
    """(state, when it was first seen so): unchanged files keep their time."""
    return before if before is not None and before[0] == state else (state, now)


def _look(folder: Path) -> Look:
    try:
        found = steps(folder, [entry.name for entry in folder.iterdir()])
        return {path.name: _files(path) for path in reversed(found)}
    except OSError:  # the folder was moved away in between
        return {}


def _files(path: Path) -> tuple[tuple[str, int, int], ...]:
    found = []
    paths = [path] if path.is_file() else sorted(Path(top) / n for top, _, names in os.walk(path) for n in names)
    for file in paths:
        try:
            facts = file.stat()
        except OSError:
            continue
        found.append((str(file), facts.st_size, facts.st_mtime_ns))
    return tuple(found)


def _target(name: str) -> str:
    return name if "." not in name else name.rpartition(".")[0]


def _reached(out: Path, look: Look, until: int) -> bool:
    return any((number(name) or 0) >= until and (out / _target(name)).exists() for name in look)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
