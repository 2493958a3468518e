"""The steps that a trainer left in a folder, newest first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from bridge.convert.places import read_small
from bridge.errors import UserError

_STEP = re.compile(
    r"(?:global_?step_?|checkpoint[-_]|step[-_]?|epoch[-_]?|ckpt[-_]?|iter[-_]?)(\d{1,12})(?:\.(?:pt|pth|ckpt))?"
)
_TRACKER = "latest_checkpointed_iteration.txt"


def number(name: str) -> int | None:
    """The step that a file or folder name stands for, such as `global_step_40` or `step-00000040.pt`."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def steps(folder: Path, names: Iterable[str]) -> list[Path]:
    """The steps in `folder`, newest first, up to the one that verl's tracker says is finished.

    Where the tracker is absent or torn (its writer truncates it first) every step counts.
    """
    found = {name: step for name in names if (step := number(name)) is not None}
    last = _tracked(folder)
    counted = {name: step for name, step in found.items() if last is None or step <= last}
    return [folder / name for name in sorted(counted, key=lambda name: (-counted[name], name))]


def _tracked(folder: Path) -> int | None:
    try:
        text = read_small(folder / _TRACKER, 32).decode("ascii").strip()
    except (UserError, ValueError):
        return None
    return int(text) if text.isdecimal() else None
