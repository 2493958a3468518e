"""Training checkpoints: files from which a run goes on bit for bit.

They hold plain containers, numbers, strings and tensors only, so `torch.load(weights_only=True)` reads them.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bridge.artifacts import flush

KEEP = 2  # a torn newest file still leaves one to go back to


def write_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` so that `path` is at every moment absent or whole: temporary name, fsync, rename, fsync."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    flush(path.parent)


def save_step(
    folder: Path, step: int, state: dict[str, Any], wanted: Callable[[Path], bool] = lambda path: False
) -> None:
    """Write `step-N.pt` into `folder` and delete all but the newest files and those that are still `wanted`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(step_file(folder, step), state)
    for old in _newest_first(folder)[KEEP:]:
        if not wanted(old):
            old.unlink()


def step_file(folder: Path, step: int) -> Path:
    """Where the state after `step` steps is."""
    return folder / f"step-{step:08d}.pt"


def latest(folder: Path) -> dict[str, Any] | None:
    """The state in the newest whole file of `folder`; None when there is none. Damaged files are deleted."""
    for path in _newest_first(folder):
        state = read_checkpoint(path)
        if state is not None:
            return state
        path.unlink()
    return None


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """The state in `path`, or None when it is torn or damaged.

    torch does not compare the archive's checksums while reading, so they are checked first.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:
                return None
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, zipfile.BadZipFile, pickle.UnpicklingError):
        return None
    return state


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"), reverse=True)
