"""What a run can do without: training checkpoints whose model is sealed, and what killed jobs left behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.artifacts import open_artifact, prunable, prune, read_seal
from bridge.errors import UserError, WorkFailedError
from bridge.graph import Edge
from bridge.launch.submit import observe
from bridge.runs import Run


@dataclass(frozen=True)
class Removable:
    """A file of a sealed checkpoint, or the work folder of a sealed element."""

    element: Edge
    path: Path
    bytes: int


def removable(run: Run) -> list[Removable]:
    """What can be made again from what stays. Nothing is changed.

    A checkpoint without a consumer is a result of its own and stays.

    Raises:
        UserError: something of the run is queued or running.
        WorkFailedError: the scheduler does not answer, so nobody knows.
    """
    _refuse_while_open(run)
    sealed, consumers = run.sealed(), _consumers(run)
    found = []
    for key in run.elements:
        if key in sealed and (work := run.work(key)).is_dir() and not work.is_symlink():
            found.append(Removable(key, work, size(work)))
    for key in run.elements:  # last: their record needs a little room on a disk that may be full
        seal = read_seal(run.artifact(key)) if key in sealed else None
        if seal and consumers.get(key) and sealed.issuperset(consumers[key]):
            files = [path for name in prunable(seal) if (path := run.artifact(key) / name).is_file()]
            found += [Removable(key, path, size(path)) for path in files]
    return found


def remove(run: Run, items: Sequence[Removable]) -> None:
    """Remove what `removable` found, unless something has changed since.

    Raises:
        UserError: the run was launched meanwhile, or what was made of a checkpoint is damaged; nothing is removed.
        WorkFailedError: a file could not be removed; the run is in order all the same.
    """
    if not items:
        return
    with run.lock("launch", "launching or pruning"):
        if not set(items) <= set(removable(run)):
            raise UserError(f"{run.id}: changed while prune was asking; call it again")
        folders = [item for item in items if item.path == run.work(item.element)]
        checkpoints = dict.fromkeys(item.element for item in items if item not in folders)
        for key in checkpoints:
            for consumer in _consumers(run)[key]:
                open_artifact(run.artifact(consumer), run.elements[consumer].output)
        try:
            for item in folders:
                shutil.rmtree(item.path)
            for key in checkpoints:
                if seal := read_seal(run.artifact(key)):
                    prune(run.artifact(key), seal)
        except OSError as error:
            raise WorkFailedError(f"{run.id}: prune stopped: {error.filename}: {error.strerror}") from None


def _consumers(run: Run) -> dict[Edge, list[Edge]]:
    """For each element those that need it directly."""
    found: dict[Edge, list[Edge]] = {}
    for key, element in run.elements.items():
        for parent in element.parents:
            found.setdefault(parent, []).append(key)
    return found


def _refuse_while_open(run: Run) -> None:
    for state in observe(run):
        name = f"{state.stage}/{state.element}"
        if state.open or run.locked(f"{state.stage}.{state.element}"):
            raise UserError(
                f"{run.id}: {name} is queued or running; wait for its end, or stop it with `bridge-rl cancel {run.id}`"
            )
        if state.open is None:
            raise WorkFailedError(f"{run.id}: {state.reason}; nothing was removed, try again later")


def to_json(run: Run, items: Sequence[Removable]) -> dict[str, Any]:
    """What was removed, as `prune --json` prints it."""
    removed = [{"path": str(item.path), "bytes": item.bytes} for item in items]
    return {"run": run.id, "removed": removed, "bytes": sum(item.bytes for item in items)}


def listing(run: Run, items: Sequence[Removable]) -> str:
    """Each item with its size, then the sum, for people."""
    lines = [f"{size_text(item.bytes):>9}  {item.path.relative_to(run.folder)}" for item in items]
    total = sum(item.bytes for item in items)
    return "\n".join([*lines, f"{size_text(total):>9}  in all"])


def size(path: Path) -> int:
    """Bytes in a file, or in all files of a folder; what vanishes meanwhile counts nothing."""
    if not path.is_dir():
        return path.stat().st_size
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += (Path(folder) / name).lstat().st_size
            except OSError:
                continue
    return total


def size_text(count: int) -> str:
    """Bytes as people write them: `3.1 GB`, decimal units."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
