"""What counts as the same answer, where people disagree."""

from __future__ import annotations

from typing import Literal

from bridge.config.base import Settings


class Grading(Settings):
    """What counts as the right answer, where people disagree (docs/grading.md)."""

    percent: Literal["ignore", "hundredth"] = "ignore"
    """`ignore`: 35% is 35. `hundredth`: 35% is 0.35. Of numbers only."""
    units: Literal["ignore", "match"] = "ignore"
    """`ignore`: 10 m is 10 cm. `match`: where the right answer and the response both name a unit or a currency, it has
    to be the same one, spelled alike. Of numbers only."""
    rounding: Literal["exact", "gold"] = "exact"
    """`exact`: 0.333 is not 1/3. `gold`: whatever rounds to the right answer at its number of decimals is right. Of
    numbers only."""
    ties: Literal["share", "lose"] = "share"
    """What a vote is worth in which t answers tie for most votes, the right one among them: 1/t, or nothing."""
