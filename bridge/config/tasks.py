"""The settings of each task. The problems themselves come from `bridge.tasks`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bridge.config.base import Settings

Range = Annotated[tuple[int, int], Field(strict=False)]
Ecosystem = Literal["harbor", "museum", "farm", "station"]


class Style(Settings):
    """How worked solutions are worded. The small choices help a model of a million weights or less."""

    wording: Literal["varied", "fixed"] = "varied"
    """Several phrasings for each kind of sentence, or always the same short one."""
    letters: Literal["random", "sequential"] = "random"
    """Quantities get letters at random, or a, b, c … in the order in which they are named."""
    frame: Literal["think", "plain"] = "think"
    """A system turn, think and answer tags and a boxed answer; or only the steps and a line `#### V`."""


class IgsmSettings(Settings):
    """iGSM as BRIDGE uses it: synthetic grade-school mathematics with an exact operation count (docs/igsm.md)."""

    name: Literal["igsm"]
    ops: Range = (15, 20)
    """Smallest and largest number of operations."""
    ops_draw: Literal["low", "uniform"] = "low"
    """How the number is drawn: the smaller of two uniform draws (as BRIDGE), or one uniform draw."""
    literals: Range = (0, 9)
    """Smallest and largest number in the premises. "K more than" has K ≥ 1 and "K times" has K ≥ 2 all the same."""
    max_answer: Annotated[int, Field(ge=2)] = 1000
    """Answers stay below this in absolute value."""
    bound: Literal["answer", "all"] = "answer"
    """Whether `max_answer` and `negative` hold for the answer only or for every quantity."""
    negative: bool = True
    """Whether values below zero are allowed."""
    max_answer_share: Annotated[float, Field(gt=0, le=1)] = 0.1
    """No answer takes a larger share of a split than this (give or take one row)."""
    depth: Range = (2, 4)
    """Smallest and largest number of categories, such as harbor > ship > cabin."""
    width: Range = (2, 4)
    """Smallest and largest number of items in a category."""
    max_instances: Annotated[int, Field(ge=1)] = 20
    """Most "number of each X's Y" quantities in a problem, distractors included."""
    distractors: Annotated[int, Field(ge=0)] | None = None
    """Most premises that the answer does not need; without it, all that the structure has room for."""
    ecosystems: Annotated[list[Ecosystem], Field(min_length=1)] | None = None
    """Which families of names are used; without it, all of them."""
    names: Annotated[int, Field(ge=2, le=6)] = 6
    """How many of the six names of each category are used."""
    split_by: Literal["structure", "numbers"] = "structure"
    """What decides the split: the dependency graph alone, or with its numbers (needed where few graphs exist)."""
    style: Style = Style()
    """How prompts and worked solutions are worded."""

    @model_validator(mode="after")
    def _ranges(self) -> IgsmSettings:
        limits = {"ops": (1, 40), "literals": (0, 1000), "depth": (2, 4), "width": (1, self.names)}
        for field, (low, high) in limits.items():
            first, last = getattr(self, field)
            if not low <= first <= last <= high:
                raise ValueError(f"{field} must be two numbers between {low} and {high}, the smaller one first")
        if self.literals[1] < 2:
            raise ValueError("the largest of literals must be at least 2")
        if self.width[0] * (self.depth[0] - 1) > self.max_instances:
            raise ValueError("max_instances is too small: each item that is not of the last category holds something")
        return self


TaskSettings = IgsmSettings
