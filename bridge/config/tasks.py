"""The settings of each task. The problems themselves come from `bridge.tasks`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, TypeAdapter, model_validator

from bridge.config.base import Settings, matching

Range = Annotated[tuple[int, int], Field(strict=False)]
Digest = Annotated[str, AfterValidator(matching(r"[0-9a-f]{64}", "64 hexadecimal digits"))]
Ecosystem = Literal["harbor", "museum", "farm", "station"]


class Style(Settings):
    """How worked solutions are worded. The small choices help a model of a million weights or less."""

    wording: Literal["varied", "fixed"] = "varied"
    """Several phrasings for each kind of sentence, or always the same short one."""
    letters: Literal["random", "sequential"] = "random"
    """Quantities get letters at random, or a, b, c … in the order in which they are named."""
    frame: Literal["think", "plain"] = "think"
    """A system turn, think and answer tags and a boxed answer; or only the steps and a line `#### V`."""


class AnyTask(Settings):
    """What every task's settings have."""

    name: str
    """Which task."""

    def identity(self) -> dict[str, Any]:
        """What decides the problems, for fingerprints."""
        return self.model_dump(mode="json")


_ORIGINAL = {"modulus": 23, "literals": (0, 22), "max_answer_share": 1.0}
IGSM_MODES: dict[str, dict[str, Any]] = {
    "bridge": {},
    "med": {**_ORIGINAL, "ops": (3, 15), "max_instances": 20},
    "hard": {**_ORIGINAL, "ops": (3, 21), "max_instances": 28},
}
"""Mode → the settings whose defaults it changes."""


class IgsmSettings(AnyTask):
    """iGSM: synthetic grade-school mathematics with an exact operation count (docs/igsm.md)."""

    name: Literal["igsm"]
    mode: Literal["bridge", "med", "hard"] = "bridge"
    """As BRIDGE uses it; or the original at medium or hard difficulty, whose defaults of `modulus`, `ops`, `literals`,
    `max_instances` and `max_answer_share` are others (docs/igsm.md)."""
    modulus: Annotated[int, Field(ge=2)] | None = None
    """Count modulo this number. Then `max_answer`, `bound` and `negative` say nothing."""
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

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_mode(cls, raw: Any) -> Any:
        if isinstance(raw, Mapping):
            mode = raw.get("mode", "bridge")
            return {**(IGSM_MODES.get(mode, {}) if isinstance(mode, str) else {}), **raw}
        return raw

    @model_validator(mode="after")
    def _ranges(self) -> IgsmSettings:
        limits = {"ops": (1, 40), "literals": (0, 1000), "depth": (2, 4), "width": (1, self.names)}
        for field, (low, high) in limits.items():
            first, last = getattr(self, field)
            if not low <= first <= last <= high:
                raise ValueError(f"{field} must be two numbers between {low} and {high}, the smaller one first")
        if self.literals[1] < 2:
            raise ValueError("the largest of literals must be at least 2")
        if self.modulus and self.literals[1] >= self.modulus:
            raise ValueError("the largest of literals must be smaller than modulus")
        if self.width[0] * (self.depth[0] - 1) > self.max_instances:
            raise ValueError("max_instances is too small: each item that is not of the last category holds something")
        return self


class FileTask(AnyTask):
    """A task whose problems are those of a public data set (docs/tasks.md)."""

    path: Annotated[str, Field(min_length=1)]
    """A file or folder in one of the data set's public forms, or the name of its copy on the hub (OWNER/NAME)."""
    sha256: Digest | None = None
    """Digest of the data. The launch fills it in; written down, it pins the data: other files are refused."""
    rl_share: Annotated[float, Field(gt=0, lt=1)] | Literal["all"] = 0.5
    """Part of the training questions that go to `rl` and not to `sft`; `all`: both get all of them (ReFT and R³)."""
    val_share: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Part of the training questions that go to `val`, where the data have no development set of their own."""
    test_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Part of all questions that goes to `test`, where the data have no test set of their own."""
    instruction: str = ""
    """Stands after each question in frame `plain`; "" leaves it out."""
    frame: Literal["plain", "think"] = "plain"
    """A response is the work and a line `#### ANSWER`; or a system turn, think and answer tags and a boxed answer."""

    def identity(self) -> dict[str, Any]:
        """Where the data lie does not matter once their digest is known."""
        return self.model_dump(mode="json", exclude={"path"} if self.sha256 else None)


WORKED = "Work it out step by step. End with a line of its own: four hash signs and the answer, such as #### 42"
CHOSEN = "Answer with the letter of the right option, on a line of its own after four hash signs, such as #### B"
LABELLED = "Answer yes, no, or it is not possible to tell, on a line of its own after four hash signs, such as #### no"


class Gsm8kSettings(FileTask):
    """GSM8K: grade-school mathematics in words, with worked solutions."""

    name: Literal["gsm8k"]
    path: Annotated[str, Field(min_length=1)] = "openai/gsm8k"
    """A file or folder (`train.jsonl`, `test.jsonl`, Parquet, R³'s JSON), or the name of its copy on the hub."""
    calculator: bool = False
    """Keep the calculator marks `<<48/2=24>>` of the worked solutions."""
    instruction: str = WORKED
    """Stands after each question in frame `plain`; "" leaves it out."""


class SvampSettings(FileTask):
    """SVAMP: short problems of one or two operations; the worked solution is the equation."""

    name: Literal["svamp"]
    path: Annotated[str, Field(min_length=1)] = "ChilleD/SVAMP"
    """A file or folder (`SVAMP.json`, Parquet, R³'s JSON), or the name of its copy on the hub."""
    instruction: str = WORKED
    """Stands after each question in frame `plain`; "" leaves it out."""


class ArcSettings(FileTask):
    """ARC: science questions with three to five options."""

    name: Literal["arc"]
    path: Annotated[str, Field(min_length=1)] = "allenai/ai2_arc"
    """A file or folder (`ARC-Challenge-Train.jsonl` …, Parquet), or the name of its copy on the hub."""
    level: Literal["challenge", "easy"] = "challenge"
    """Which of the two sets."""
    instruction: str = CHOSEN
    """Stands after each question in frame `plain`; "" leaves it out."""


class MnliSettings(FileTask):
    """MNLI: does a premise entail a hypothesis? Its development set, whose labels are public, is the test set here."""

    name: Literal["mnli"]
    path: Annotated[str, Field(min_length=1)] = "nyu-mll/multi_nli"
    """A file or folder (`multinli_1.0_train.jsonl` …, the .txt or .tsv form, Parquet, R³'s JSON), or a hub name."""
    genres: Literal["matched", "mismatched"] = "matched"
    """Which development set: genres that occur in the training set, or others."""
    instruction: str = LABELLED
    """Stands after each question in frame `plain`; "" leaves it out."""


class SnliSettings(FileTask):
    """SNLI: the same question as MNLI, about captions of photographs."""

    name: Literal["snli"]
    path: Annotated[str, Field(min_length=1)] = "stanfordnlp/snli"
    """A file or folder (`snli_1.0_train.jsonl` …, the .txt form, Parquet, R³'s JSON), or a hub name."""
    instruction: str = LABELLED
    """Stands after each question in frame `plain`; "" leaves it out."""


class RaceSettings(FileTask):
    """RACE: questions with four options about a passage, from English examinations."""

    name: Literal["race"]
    path: Annotated[str, Field(min_length=1)] = "ehovy/race"
    """A file or folder (`train/high/*.txt` …, Parquet, R³'s JSON), or the name of its copy on the hub."""
    level: Literal["high", "middle"] = "high"
    """Which school's examinations."""
    instruction: str = CHOSEN
    """Stands after each question in frame `plain`; "" leaves it out."""


OWN = r"(?:.*/)?[A-Za-z_][A-Za-z0-9_]*\.py:[A-Za-z_][A-Za-z0-9_]*"


class OwnTask(AnyTask):
    """A task of yours: a class in a Python file (docs/tasks.md). Its other settings are those that the class names."""

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, AfterValidator(matching(OWN, "FILE.py:CLASS"))]
    """`FILE.py:CLASS`; the file's path is relative to the folder in which you launch."""
    sha256: Digest | None = None
    """Digest of the file. The launch fills it in."""
    file: str | None = None
    """Where the file lay at the launch, which fills it in. Jobs import the copy that is in the run."""

    def identity(self) -> dict[str, Any]:
        return {**self.model_dump(mode="json", exclude={"file"}), "name": self.name.rpartition("/")[2]}


TASKS: dict[str, type[AnyTask]] = {
    "igsm": IgsmSettings,
    "gsm8k": Gsm8kSettings,
    "svamp": SvampSettings,
    "arc": ArcSettings,
    "mnli": MnliSettings,
    "snli": SnliSettings,
    "race": RaceSettings,
}


def _name(value: Any) -> str | None:
    name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
    return "own" if isinstance(name, str) and re.fullmatch(OWN, name) else name


TaskSettings = Annotated[
    Annotated[IgsmSettings, Tag("igsm")]
    | Annotated[Gsm8kSettings, Tag("gsm8k")]
    | Annotated[SvampSettings, Tag("svamp")]
    | Annotated[ArcSettings, Tag("arc")]
    | Annotated[MnliSettings, Tag("mnli")]
    | Annotated[SnliSettings, Tag("snli")]
    | Annotated[RaceSettings, Tag("race")]
    | Annotated[OwnTask, Tag("own")],
    Discriminator(_name),
]
_ADAPTER: TypeAdapter[TaskSettings] = TypeAdapter(TaskSettings)


def parse_task(value: Any, *, strict: bool | None = None) -> TaskSettings:
    """The settings of a task from a mapping; `strict=False` for one that came from JSON. Raises ValidationError."""
    return _ADAPTER.validate_python(value, strict=strict)
