"""The experiment file: schema, overrides from the command line, points of the sweep. No file is read here."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, ValidationError

from bridge.config.base import Settings, matching
from bridge.config.problems import named, refuse, sentences
from bridge.config.stages import STAGE_KINDS, InitSettings, Seed, Stage
from bridge.config.tasks import TASKS, OwnTask, TaskSettings
from bridge.config.words import nearest
from bridge.config.yaml import Raw, line_of, scalar
from bridge.errors import UserError

NAME = matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", "letters, digits, dots, dashes and underscores")
STAGE_NAME = matching(r"[a-z][a-z0-9_]{0,63}", "small letters, digits and underscores")


class FromScratch(Settings):
    """A model that starts from random weights."""

    init: dict[str, Any]
    """The settings of the `init` stage (docs/settings.md)."""


class Experiment(Settings):
    """One point of the sweep of an experiment file, every setting in its place."""

    name: Annotated[str, AfterValidator(NAME)]
    """Names the run's folder."""
    model: str | FromScratch
    """The starting model: a hub name, a local folder, or `{init: {…}}`. Stages refer to it as `$model`."""
    task: TaskSettings
    """Where the problems come from."""
    image: str | None = None
    """The image that the stages run in, from `containers/images.yaml`. Without it they run in the environment of the
    profile's `python`."""
    seed: Seed = 0
    """Seeds every stage that draws at random, except the problems themselves (they have a seed of their own)."""
    sweep: dict[str, list[Any]] = {}
    """Setting path → values. Every combination is one point."""
    stages: Annotated[dict[Annotated[str, AfterValidator(STAGE_NAME)], Stage], Field(min_length=1)]
    """Name → settings of each stage. Inputs name other stages; the order does not matter."""


KINDS: dict[str, Iterable[str]] = {"kind": STAGE_KINDS, "name": [*TASKS, "FILE.py:CLASS"]}
"""Field that decides what the others may be → what is known."""


@dataclass(frozen=True)
class Point:
    """One combination of the sweep."""

    values: tuple[tuple[str, Any], ...]
    """(path, value) of each sweep key, in the order of the file."""
    experiment: Experiment


def parse_overrides(words: Iterable[str]) -> list[tuple[str, Any]]:
    """`key=value` words of the command line; the value is read as YAML."""
    pairs = []
    for word in words:
        path, equals, value = word.partition("=")
        if not equals or not path:
            raise UserError(f"{word!r} is no setting: write it as path=value, such as stages.sft.lr=1e-5")
        pairs.append((path, scalar(value)))
    return pairs


def points(raw: Raw, overrides: Sequence[tuple[str, Any]], name: str, text: str = "") -> list[Point]:
    """All points of an experiment, in the order of the sweep (the last key varies fastest).

    Args:
        raw: the file as a mapping.
        overrides: (path, value) pairs, applied in order before the sweep.
        name: the file, for messages; `text` its content, for line numbers.

    Raises:
        UserError: naming every field that is wrong.
    """
    raw = with_overrides(raw, overrides, name)
    sweep = raw.get("sweep") or {}
    if not isinstance(sweep, dict) or not all(isinstance(v, list) and v for v in sweep.values()):
        raise UserError(f"{name}: sweep: must map setting paths to non-empty lists, such as `seed: [0, 1, 2]`")
    for path, _ in overrides:
        if path in sweep:
            raise UserError(f"{name}: the override {path}: the sweep sets this too; override sweep, or leave it out")
    raw.pop("sweep", None)
    found = []
    for combination in itertools.product(*sweep.values()):
        values = tuple(zip(sweep, combination, strict=True))
        point = copy.deepcopy(raw)
        for path, value in values:
            if path.split(".")[0] in ("name", "sweep", "image"):
                raise UserError(f"{name}: sweep: {path!r} cannot be swept over; sweep over settings")
            _set(point, path, copy.deepcopy(value), f"{name}: sweep over {path!r}")
        found.append(Point(values, _validate(point, name, text)))
    return found


def with_overrides(raw: Raw, overrides: Sequence[tuple[str, Any]], name: str) -> Raw:
    """A copy of the file's mapping with the overrides of the command line applied, in order."""
    raw = copy.deepcopy(raw)
    for path, value in overrides:
        _set(raw, path, value, f"{name}: the override {path}")
    return raw


def _set(raw: Raw, path: str, value: Any, what: str) -> None:
    """Put `value` at a dotted path. A stage must be there already; so must whatever is not a mapping of settings."""
    parts = path.split(".")
    node: Any = raw
    for depth, part in enumerate(parts[:-1]):
        if not isinstance(node, dict):
            raise UserError(f"{what}: {'.'.join(parts[:depth])} has no settings below it")
        if parts[:depth] == ["stages"] and part not in node:
            raise UserError(f"{what}: there is no stage {part!r}{nearest(part, node)}")
        if depth == 0 and part not in Experiment.model_fields:
            raise UserError(f"{what}: there is no setting {part!r}{nearest(part, Experiment.model_fields)}")
        node = node.setdefault(part, {})
    if not isinstance(node, dict):
        raise UserError(f"{what}: {'.'.join(parts[:-1])} has no settings below it")
    if parts[:-1] == ["stages"]:
        raise UserError(f"{what}: a whole stage cannot be set; name one of its settings")
    if len(parts) == 1 and parts[0] not in Experiment.model_fields:
        raise UserError(f"{what}: there is no setting {parts[0]!r}{nearest(parts[0], Experiment.model_fields)}")
    node[parts[-1]] = value


def _validate(raw: Raw, name: str, text: str) -> Experiment:
    seeded = _with_seed(raw)
    try:
        return Experiment.model_validate(seeded)
    except ValidationError as error:
        problems = []
        for path, sentence in sentences(error, _valid_keys(raw), KINDS):
            shown = _without_tags(path, raw)
            line = line_of(text, tuple(shown)) if text else None
            where = f"{name}:{line}" if line else name
            problems.append(f"{where}: {named(shown, sentence)}")
        raise refuse(name, list(dict.fromkeys(problems))) from None


def _with_seed(raw: Raw) -> Raw:
    """Give the experiment's seed to each stage that has one and does not set it. Data keep their own seed."""
    stages, seed = raw.get("stages"), raw.get("seed")
    if type(seed) is not int or not isinstance(stages, dict):
        return raw
    seeded = {
        name: {"seed": seed, **stage}
        if isinstance(stage, dict) and stage.get("kind") in ("init", "sft", "rl", "eval")
        else stage
        for name, stage in stages.items()
    }
    return {**raw, "stages": seeded}


def _without_tags(path: list[str | int], raw: Raw) -> list[str | int]:
    """pydantic puts the discriminator's value into the path of a stage or task, and a class's name into that of a
    union."""
    if path[:1] == ["stages"] and len(path) > 2 and path[2] in STAGE_KINDS:
        return path[:2] + path[3:]
    if path[:1] == ["task"] and len(path) > 1 and path[1] in (*TASKS, "own"):
        return path[:1] + path[2:]
    if path[:1] == ["model"] and len(path) > 1 and path[1] in ("str", "FromScratch"):
        return path[:1] + path[2:]
    return path


def _valid_keys(raw: Mapping[str, Any]) -> dict[tuple[str | int, ...], Iterable[str]]:
    """The keys that may stand at each path of this experiment, for `did you mean`."""

    def below(path: tuple[str | int, ...], model: type[BaseModel]) -> None:
        keys[path] = model.model_fields
        for field, info in model.model_fields.items():
            annotation = info.annotation
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                below((*path, field), annotation)

    keys: dict[tuple[str | int, ...], Iterable[str]] = {}
    below((), Experiment)
    tasks: dict[str, type[BaseModel]] = {**TASKS, "own": OwnTask}
    for name, task in tasks.items():
        below(("task", name), task)
    stages = raw.get("stages")
    for name, stage in (stages if isinstance(stages, dict) else {}).items():
        kind = stage.get("kind") if isinstance(stage, dict) else None
        if kind in STAGE_KINDS:
            below(("stages", name, kind), STAGE_KINDS[kind])
    return keys


def init_settings(experiment: Experiment, name: str) -> InitSettings | None:
    """The settings of the implicit `init` stage, when the model starts from scratch."""
    if isinstance(experiment.model, str):
        return None
    try:
        return InitSettings.model_validate({"seed": experiment.seed, **experiment.model.init, "kind": "init"})
    except ValidationError as error:
        problems = [
            named(("model", "init", *path), sentence)
            for path, sentence in sentences(error, {(): InitSettings.model_fields})
        ]
        raise refuse(name, problems) from None
