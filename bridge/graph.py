"""Experiment → graph → arrays. Pure: no file system, no clock, no scheduler; the same input gives the same output."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge.config.words import nearest
from bridge.errors import UserError

if TYPE_CHECKING:  # `status` needs edges and no schemas: it must answer at once
    from bridge.config.experiment import Experiment, Point
    from bridge.config.stages import StageSettings
    from bridge.config.tasks import TaskSettings

FORMAT = 1  # of the artifacts; a new number makes every fingerprint new
BASE = "base"  # the implicit stage that makes `$model` from scratch


class Edge(NamedTuple):
    """An input that is the artifact of another element; also the key of that element."""

    stage: str
    element: int


@dataclass(frozen=True)
class External:
    """An input from outside the experiment: a path or a hub name, as it was written."""

    text: str


@dataclass(frozen=True)
class Element:
    """One job: one stage at the points of the sweep that agree on everything that matters to it."""

    label: str
    """What tells it apart from its siblings: sweep values, and the model's name in an `eval`."""
    settings: StageSettings
    task: TaskSettings
    inputs: tuple[tuple[str, Edge | External], ...]

    def parents(self) -> Iterator[Edge]:
        return (source for _, source in self.inputs if isinstance(source, Edge))


@dataclass(frozen=True)
class StageNode:
    """A stage over all its elements."""

    name: str
    kind: str
    elements: tuple[Element, ...]


@dataclass(frozen=True)
class Graph:
    """All stages, each after the stages that it needs."""

    name: str
    stages: tuple[StageNode, ...]

    def stage(self, name: str) -> StageNode:
        for node in self.stages:
            if node.name == name:
                return node
        raise UserError(f"there is no stage {name!r}{nearest(name, [s.name for s in self.stages])}")

    def parents(self) -> dict[str, tuple[tuple[Edge, ...], ...]]:
        """The edges alone, as `arrays` wants them."""
        return {node.name: tuple(tuple(e.parents()) for e in node.elements) for node in self.stages}

    def all_elements(self) -> Iterator[tuple[str, int, Element]]:
        for node in self.stages:
            for index, element in enumerate(node.elements):
                yield node.name, index, element


def canonical(value: Any) -> str:
    """JSON with one spelling, for hashing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of a value, in hexadecimal."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


# ---- experiment → graph


def build(points: Sequence[Point], name: str) -> Graph:
    """The graph of an experiment.

    A stage gets one element for each combination of sweep values that changes its own settings or anything
    upstream of it; points that agree on these share the element. `name` is the file, for messages.

    Raises:
        UserError: an input names nothing, the wrong kind of artifact, or the inputs form a circle.
    """
    completed = [_with_implicit_stages(point.experiment, name) for point in points]
    order = _order(completed, name)
    varying = [key for key, _ in points[0].values if len({canonical(dict(p.values)[key]) for p in points}) > 1]
    placed: dict[tuple[str, int, int], int] = {}  # (stage, point, variant) → element
    nodes = []
    for stage in order:
        elements: dict[str, Element] = {}
        labels: dict[str, list[dict[str, Any]]] = {}
        index: dict[str, int] = {}
        most = max(len(_variants(stages[stage])) for stages in completed if stage in stages)
        for variant, (number, point) in itertools.product(range(most), enumerate(points)):
            if stage in completed[number] and variant < len(_variants(completed[number][stage])):
                element = _element(completed[number][stage], variant, number, placed, points[number], name)
                key = canonical(_identity(element))
                elements.setdefault(key, element)
                labels.setdefault(key, []).append(dict(point.values))
                placed[stage, number, variant] = index.setdefault(key, len(index))
        shown = [
            Element(_label(element, labels[key], varying), element.settings, element.task, element.inputs)
            for key, element in elements.items()
        ]
        nodes.append(StageNode(stage, shown[0].settings.kind, tuple(shown)))  # type: ignore[attr-defined]
    return Graph(points[0].experiment.name, tuple(nodes))


def _with_implicit_stages(experiment: Experiment, name: str) -> dict[str, StageSettings]:
    """The stages of one point with inputs checked, `base` added for `{init: …}`, and `convert_X` where needed."""
    from bridge.config.experiment import init_settings
    from bridge.config.stages import DataSettings

    stages: dict[str, StageSettings] = dict(experiment.stages)
    scratch = init_settings(experiment, name)
    if scratch is not None:
        if BASE in stages:
            raise UserError(f"{name}: stages.{BASE}: this name is kept for the model that `model.init` makes")
        source = stages.get(scratch.tokenizer)
        if isinstance(source, DataSettings) and not source.tokenizer:
            where = f"stages.{scratch.tokenizer}.tokenizer"
            raise UserError(f"{name}: {where}: must be true, because model.init.tokenizer names this stage")
        stages[BASE] = scratch
    for stage, settings in list(stages.items()):
        for field, wanted in settings.input_kinds.items():
            value = getattr(settings, field)
            if value is None:
                continue
            where = f"model.init.{field}" if stage == BASE else f"stages.{stage}.{field}"
            names = [value] if isinstance(value, str) else value
            found = [_source(n, wanted, stages, experiment, f"{name}: {where}") for n in names]
            stages[stage] = stages[stage].model_copy(update={field: found[0] if isinstance(value, str) else found})
    return stages


def _source(text: str, wanted: str, stages: dict[str, StageSettings], experiment: Experiment, where: str) -> str:
    """The name of the stage that serves an input, or the text itself for one from outside. Adds a convert stage."""
    from bridge.config.stages import ConvertSettings

    if text == "$model":
        if not isinstance(experiment.model, str):
            text = BASE
        elif wanted == "model":
            return experiment.model
    elif text.startswith("$"):
        raise UserError(f"{where}: {text!r} is unknown; the only name with a dollar sign is $model")
    if text not in stages:
        if is_external(text):
            return text
        raise UserError(
            f"{where}: there is no stage {text!r}{nearest(text, stages)} (a path holds a slash, such as ./{text})"
        )
    made = stages[text].output
    if made == wanted:
        return text
    if made == "checkpoint" and wanted == "model":
        convert = f"convert_{text}"
        existing = stages.get(convert)
        if existing is None:
            stages[convert] = ConvertSettings(kind="convert", checkpoint=text)
        elif not isinstance(existing, ConvertSettings) or existing.checkpoint != text:
            raise UserError(f"{where}: needs {text!r} converted, but the name {convert!r} is taken by another stage")
        return convert
    raise UserError(f"{where}: wants a {wanted}, but {text!r} makes a {made}")


def is_external(text: str) -> bool:
    """Whether an input is a path or hub name rather than the name of a stage."""
    return "/" in text or text.startswith((".", "~"))


def _variants(settings: StageSettings) -> list[dict[str, str]]:
    """The inputs of each element that one point gives: one, except where an input is a list of names."""
    single = {f: getattr(settings, f) for f in settings.input_kinds if isinstance(getattr(settings, f), str)}
    for field in settings.input_kinds:
        value = getattr(settings, field)
        if isinstance(value, list):
            return [{**single, field: name} for name in value]
    return [single]


def _order(completed: Sequence[Mapping[str, StageSettings]], name: str) -> list[str]:
    """The stages of all points so that each comes after its inputs; otherwise in the order of the file."""
    needs: dict[str, set[str]] = {}
    for stages in completed:
        for stage, settings in stages.items():
            texts = {text for variant in _variants(settings) for text in variant.values()}
            needs.setdefault(stage, set()).update(texts & set(stages))
    order: list[str] = []
    while len(order) < len(needs):
        ready = [stage for stage in needs if stage not in order and needs[stage] <= set(order)]
        if not ready:
            raise UserError(f"{name}: stages: the inputs form a circle: {' → '.join(_circle(needs, set(order)))}")
        order.append(ready[0])
    return order


def _circle(needs: Mapping[str, set[str]], placed: set[str]) -> list[str]:
    path = [next(stage for stage in needs if stage not in placed)]
    while True:
        following = min(needs[path[-1]] - placed)
        if following in path:
            return [*path[path.index(following) :], following]
        path.append(following)


def _element(
    settings: StageSettings,
    variant: int,
    point: int,
    placed: Mapping[tuple[str, int, int], int],
    at: Point,
    name: str,
) -> Element:
    chosen = _variants(settings)[variant]
    inputs: list[tuple[str, Edge | External]] = []
    for field, text in chosen.items():
        where = (text, point, 0)
        inputs.append((field, Edge(text, placed[where]) if where in placed else External(text)))
    update = {f: [v] if isinstance(getattr(settings, f), list) else v for f, v in chosen.items()}
    return Element("", settings.model_copy(update=update), at.experiment.task, tuple(inputs))


def _identity(element: Element) -> dict[str, Any]:
    """Everything that decides what an element computes, except its inputs' content."""
    settings = element.settings.model_dump(mode="json", exclude={"resources", *element.settings.input_kinds})
    inputs = {
        field: [source.stage, source.element] if isinstance(source, Edge) else source.text
        for field, source in element.inputs
    }
    return {"settings": settings, "task": element.task.identity(), "inputs": inputs}


def _label(element: Element, values: Sequence[Mapping[str, Any]], varying: Sequence[str]) -> str:
    """The sweep values that all points of this element share, of the keys that vary at all."""
    parts = []
    for key in varying:
        own = {canonical(v[key]) for v in values}
        if len(own) == 1:
            shown = values[0][key]
            parts.append(f"{key.rpartition('.')[2]}={shown if isinstance(shown, str) else canonical(shown)}")
    model = dict(element.inputs).get("model")
    if element.settings.output == "eval" and model is not None:
        parts.insert(0, model_name(model))
    return " ".join(parts)


def model_name(source: Edge | External) -> str:
    """The word for a model in tables: the stage that trained it, `base`, or the last part of its path."""
    if isinstance(source, External):
        return source.text.rstrip("/").rpartition("/")[2]
    return source.stage.removeprefix("convert_")


# ---- graph → fingerprints


def fingerprints(
    graph: Graph, code: str, externals: Mapping[str, str], images: Mapping[str, str]
) -> dict[tuple[str, int], str]:
    """The fingerprint of each element's artifact, from everything that makes it.

    Args:
        graph: the graph.
        code: digest of the code that the jobs run.
        externals: text of an external input → digest of its content.
        images: kind of a stage → digest of what its image is built from; only kinds that run in one.
    """
    found: dict[tuple[str, int], str] = {}
    kinds = {node.name: node.kind for node in graph.stages}
    for stage, index, element in graph.all_elements():
        identity = _identity(element)
        identity["inputs"] = {
            field: found[source.stage, source.element] if isinstance(source, Edge) else externals[source.text]
            for field, source in element.inputs
        }
        image = {"image": images[kinds[stage]]} if kinds[stage] in images else {}
        found[stage, index] = digest({**identity, **image, "format": FORMAT, "code": code})
    return found


# ---- graph → arrays


@dataclass(frozen=True)
class After:
    """A dependency of an array: on an array of this submission, or on one that was submitted earlier.

    `aftercorr`: task i waits for task i. `afterok`: every task waits for `tasks`, or for all where none is named.
    """

    kind: str
    array: str | None = None
    job: str | None = None
    tasks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Array:
    """One submission: task `tasks[i]` of the array is `elements[i]` of the stage."""

    name: str
    stage: str
    elements: tuple[int, ...]
    tasks: tuple[int, ...]
    after: tuple[After, ...]


class Place(NamedTuple):
    """Where an element that has to be waited for runs: a task of an array of this submission, or of an earlier job."""

    array: str | None
    job: str | None
    task: int

    @property
    def source(self) -> tuple[str | None, str | None]:
        return self.array, self.job


Parents = Mapping[str, Sequence[Sequence[Edge]]]  # stage, in order → for each element the elements that it needs


def arrays(
    parents: Parents,
    sealed: frozenset[tuple[str, int]] = frozenset(),
    active: Mapping[tuple[str, int], str] | None = None,
    max_array: int = 1001,
) -> list[Array]:
    """What has to be submitted, in order.

    An element waits for exactly the elements that it needs, never for a sibling of one. Elements whose parents are
    different tasks of one array form an array whose tasks have the numbers of their parents (`aftercorr`); elements
    that share a parent form an array that waits for that very task (`afterok`).

    Args:
        parents: the graph's edges.
        sealed: elements that are done: not submitted, and no edge leads to them.
        active: elements that an earlier submission has queued or running → their job id, such as `12_3`.
        max_array: the cluster's MaxArraySize: largest number of tasks of one array, and above every task's number.
    """
    active = active or {}
    where: dict[Edge, Place] = {}
    for key, job in active.items():
        root, _, own_task = job.partition("_")
        where[Edge(*key)] = Place(None, root, int(own_task or 0))
    tasks_of: dict[str, frozenset[int]] = {}
    result: list[Array] = []
    for stage, needs in parents.items():
        waits = {
            index: list(dict.fromkeys(where[edge] for edge in edges if edge in where))
            for index, edges in enumerate(needs)
            if (stage, index) not in sealed and (stage, index) not in active
        }
        chunks = list(_chunks(waits, max_array))
        for number, (members, tasks, matching) in enumerate(chunks):
            name = stage if len(chunks) == 1 else f"{stage}.{number}"
            after = [After("aftercorr", *source) for source in matching]
            others: dict[tuple[str | None, str | None], list[int]] = {}
            for place in waits[members[0]]:  # beside what matches task by task, all members wait for the same
                if place.source not in matching:
                    others.setdefault(place.source, []).append(place.task)
            for (array, earlier), wanted in others.items():
                whole = array is not None and tasks_of[array] == set(wanted)
                after.append(After("afterok", array, earlier, () if whole else tuple(sorted(wanted))))
            result.append(Array(name, stage, members, tasks, tuple(after)))
            tasks_of[name] = frozenset(tasks)
            where.update({Edge(stage, i): Place(name, None, task) for i, task in zip(members, tasks, strict=True)})
    return result


Chunk = tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[str | None, str | None], ...]]


def _chunks(waits: Mapping[int, Sequence[Place]], max_array: int) -> Iterator[Chunk]:
    """Elements that can be one array, their task numbers, and the arrays that they match task by task.

    Where several elements wait for one task, either they are dealt out to several arrays that match task by task, or
    each such crowd becomes an array that waits for that task: whichever makes fewer arrays.
    """
    crowds: dict[tuple[str | None, str | None], dict[int, list[int]]] = {}  # source → task → elements
    for index, places in waits.items():
        for place in places:
            crowds.setdefault(place.source, {}).setdefault(place.task, []).append(index)
    matched = {s for s, tasks in crowds.items() if max(map(len, tasks.values())) <= max(len(tasks) - 1, 1)}
    # An element that needs two tasks of one array cannot have the number of both.
    matched -= {s for places in waits.values() for s, n in Counter(p.source for p in places).items() if n > 1}
    groups: dict[Any, list[tuple[int, int | None]]] = {}
    for index, places in waits.items():
        task = next((place.task for place in places if place.source in matched), None)
        same = [place for place in places if place.source in matched and place.task == task]
        layers = tuple(crowds[place.source][place.task].index(index) for place in same)
        key = (tuple(place.source for place in same), layers, frozenset(places) - set(same))
        groups.setdefault(key, []).append((index, task))
    for (sources, *_), members in groups.items():
        for start in range(0, len(members), max_array):
            part = members[start : start + max_array]
            elements = tuple(index for index, _ in part)
            yield elements, tuple(n if task is None else task for n, (_, task) in enumerate(part)), sources


def ranges(numbers: Sequence[int]) -> str:
    """`0-2,5` for [0, 1, 2, 5]."""
    parts: list[str] = []
    for number in numbers:
        first, _, last = parts[-1].partition("-") if parts else ("", "", "")
        if parts and int(last or first) == number - 1:
            parts[-1] = f"{first}-{number}"
        else:
            parts.append(str(number))
    return ",".join(parts)
