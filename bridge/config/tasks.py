"""The settings of each task. The problems themselves come from `bridge.tasks`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bridge.config.base import Settings

Range = Annotated[tuple[int, int], Field(strict=False)]


class IgsmSettings(Settings):
    """iGSM as BRIDGE uses it: synthetic grade-school mathematics with an exact operation count (docs/igsm.md)."""

    name: Literal["igsm"]
    ops: Range = (15, 20)
    """Smallest and largest number of operations."""
    max_literal: Annotated[int, Field(ge=1)] = 9
    """Literals in the premises run from 0 to this."""
    max_answer: Annotated[int, Field(ge=1)] = 1000
    """Answers stay below this in absolute value."""


TaskSettings = IgsmSettings
