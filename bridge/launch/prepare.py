"""From files on disk to a request: the only reading that happens before a launch."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

import bridge
from bridge.config.experiment import Point, parse_overrides, points, with_overrides
from bridge.config.images import Image, read_images
from bridge.config.problems import named, refuse, sentences
from bridge.config.profile import Allocation, Profile, Runtime, allocation, processes
from bridge.config.stages import STAGE_KINDS, DataSettings, Resources, RlSettings, SftSettings, seconds
from bridge.config.tasks import FileTask, OwnTask, TaskSettings
from bridge.config.words import nearest
from bridge.config.yaml import read_mapping
from bridge.errors import UserError
from bridge.graph import External, Graph, build
from bridge.launch.container import Image as ImageHere
from bridge.launch.runtime import as_recorded, binds_of, image_of, require_fit, runtimes
from bridge.record import Request, code_digest, create, external_digests, places
from bridge.runs import RECORD, Json, Run
from bridge.tasks import own, resolve_task


@dataclass(frozen=True)
class Plan:
    """A request that was checked, and the profile to run it with."""

    request: Request
    profile: Profile
    runtimes: Mapping[str, Runtime] = dataclasses.field(default_factory=dict)
    """Kind of a stage → what starts its image; only kinds that run in one."""

    @property
    def all_in_image(self) -> bool:
        """Whether no stage runs in the environment of `python`."""
        return all(node.kind in self.runtimes for node in self.graph.stages)

    @property
    def graph(self) -> Graph:
        return self.request.graph


def shipped(kind: str, name: str) -> Path | None:
    """A file that comes with the package: `jobs/demo.yaml`, `slurm/local.yaml`. Inside a wheel, or in the checkout."""
    package = Path(bridge.__file__).parent
    for root in (package / "_shipped", package.parent):
        path = root / kind / name
        if path.is_file():
            return path
    return None


def prepare(experiment: Path, overrides: Sequence[str], profile_name: str) -> Plan:
    """Read, check and resolve everything that a run is made of. Changes nothing.

    Raises:
        UserError: naming the file, the field and the remedy.
    """
    text, raw = read_mapping(experiment)
    name = str(experiment)
    pairs = parse_overrides(overrides)
    combinations = _resolved(points(raw, pairs, name, text), name)
    graph = build(combinations, name)
    _check_sizes(graph, name)
    experiment_as_run = with_overrides(raw, pairs, name)
    profile = load_profile(profile_name)
    _check_resources(graph, profile, profile_name)
    image = combinations[0].experiment.image
    in_image = runtimes(graph, profile, image, profile_name)
    built_from = declared_image(image, name) if image else None
    externals = external_digests(graph) | _task_data(combinations)
    _check_data_files(graph, externals)
    request = Request(
        graph=graph,
        text=text,
        source=str(experiment.absolute()),
        experiment=experiment_as_run,
        overrides=overrides,
        profile_name=Path(profile_name).stem,
        profile=profile.model_dump(mode="json"),
        externals=externals,
        code=code_digest(),
        files=_task_files(combinations),
        image={"name": image, **built_from.model_dump(mode="json", exclude={"built"})}
        if built_from and in_image
        else None,
        images=dict.fromkeys(in_image, built_from.mark) if built_from else {},
    )
    return Plan(request, profile, in_image)


def make_run(plan: Plan, runs: Path) -> tuple[Run, ImageHere | None]:
    """The run of a plan, made if it is not there, and the image that its stages run in.

    Raises:
        UserError: the image is not here, or is not what it should be.
        WorkFailedError: it does not start.
    """
    request, recorded = plan.request, None
    image = image_of(request.image, plan.profile, request.externals)
    if image:
        require_fit(image, plan.runtimes)
        needs = [allocation(plan.profile, kind, Resources()) for kind in plan.runtimes]
        bound = [str(runs), *image.binds, *image.binds.values(), *(need.scratch for need in needs if need.scratch)]
        if wrong := [path for path in bound if set(":,") & set(path)]:
            raise UserError(
                f"{wrong[0]}: stages in an image need a path without colon and comma: runtimes read these in binds"
            )
    if image and request.image and not (runs / request.run_id / RECORD).is_file():
        names = [request.image[key]["name"] for key in ("lock", "flash_attn")]
        locks = [path for name in names if (path := shipped("containers/locks", f"{name}.txt"))]
        recorded = as_recorded(image, next(iter(plan.runtimes.values())), request.image, locks)
    run = create(request, runs, recorded)
    # The same content under another path is the same run, and its stages read the path on record.
    return run, image and replace(image, binds=binds_of(run.record["externals"]))


def declared_image(image: str, experiment: str) -> Image:
    """What an image is built from: `containers/images.yaml` here, else the one that comes with the package.

    Raises:
        UserError: it has no image of that name.
    """
    here = Path("containers") / "images.yaml"
    path = here if here.is_file() else shipped("containers", "images.yaml")
    known = read_images(path) if path else {}
    if image not in known:
        raise UserError(f"{experiment}: image: {path} has no image {image!r}{nearest(image, known)}")
    return known[image]


def _resolved(found: Sequence[Point], name: str) -> list[Point]:
    """The points with their tasks' data or files found, and digested."""
    known: dict[str, TaskSettings] = {}
    resolved = []
    for point in found:
        key = point.experiment.task.model_dump_json()
        try:
            known[key] = known.get(key) or resolve_task(point.experiment.task)
        except UserError as error:
            raise UserError(f"{name}: {error}") from None
        resolved.append(Point(point.values, point.experiment.model_copy(update={"task": known[key]})))
    return resolved


def _task_data(found: Sequence[Point]) -> dict[str, Json]:
    """The public data of the tasks as the record names what comes from outside; images are given these places too."""
    tasks = [point.experiment.task for point in found]
    return {
        f"task {task.name}: {task.path}": {
            "path": task.path,
            "digest": task.sha256,
            "binds": places(Path(task.path)),
        }
        for task in tasks
        if isinstance(task, FileTask)
    }


def _task_files(found: Sequence[Point]) -> dict[str, bytes]:
    """The files of the user's own tasks: name in the run's code folder → content, which is what was digested."""
    files = {}
    for task in (point.experiment.task for point in found):
        if isinstance(task, OwnTask):
            content = own.content(Path(str(task.file)))
            if hashlib.sha256(content).hexdigest() != task.sha256:
                raise UserError(f"{task.file}: was changed during the launch; launch again")
            files[own.snapshot(task)] = content
    return files


def _check_sizes(graph: Graph, name: str) -> None:
    """A data stage without `size`, of a task that may have no end."""
    for node in graph.stages:
        for element in node.elements:
            settings, task = element.settings, element.task
            if isinstance(settings, DataSettings) and settings.size is None and not isinstance(task, FileTask):
                raise UserError(f"{name}: stages.{node.name}.size: is required: only public data sets have an end")


def _check_resources(graph: Graph, profile: Profile, name: str) -> None:
    """What a stage cannot use, and a stage that is told to stop as soon as it starts and would be requeued for ever."""
    for node in graph.stages:
        for element in node.elements:
            need = allocation(profile, node.kind, element.settings.resources)
            several = (need.nodes or 1) * processes(node.kind, need)
            if several > 1 and node.kind != "sft":
                what = "runs in one process on one node; only `sft` takes `processes` and `nodes`"
                raise UserError(f"profile {name}: the stage {node.name!r} of kind {node.kind} {what}")
            if profile.cluster == "local" and (need.nodes or 1) > 1:
                raise UserError(
                    f"profile {name}: the stage {node.name!r} wants {need.nodes} nodes; this machine is one"
                )
            if profile.cluster == "slurm" and need.time is not None and seconds(need.time) <= profile.warn:
                raise UserError(
                    f"profile {name}: the stage {node.name!r} has a limit of {need.time}, but is told to save and stop "
                    f"{profile.warn} s before it; raise the limit, or lower `warn` in the profile"
                )


def _check_data_files(graph: Graph, externals: Mapping[str, Json]) -> None:
    """Read the rows of a user's own files now, so that an empty one or a broken row is told before anything runs."""
    from bridge.tasks.tables import read_examples

    for stage, _, element in graph.all_elements():
        for field, source in element.inputs:
            if isinstance(source, External) and source.text.endswith((".json", ".jsonl", ".parquet")):
                settings = element.settings
                whole = isinstance(settings, SftSettings) or (isinstance(settings, RlSettings) and settings.starts)
                wanted = (["response"] if whole else []) + ([] if isinstance(settings, SftSettings) else ["gold"])
                path = externals[source.text]["path"]
                for number, row in enumerate(read_examples(Path(path)), 1):
                    where = f"stages.{stage}.{field}: {path}: row {number}"
                    for name in wanted:
                        if not getattr(row, name):
                            raise UserError(f"{where} has no {name}")
                    if whole and row.start:
                        raise UserError(f"{where} begins inside its worked solution (R³'s mixed form); give whole ones")


def load_profile(name: str) -> Profile:
    """A profile by path, or by name: `slurm/NAME.yaml` here, else the one that comes with the package."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        path = Path(name).expanduser()
    else:
        here = Path("slurm") / f"{name}.yaml"
        found = here if here.is_file() else shipped("slurm", f"{name}.yaml")
        if found is None:
            home = shipped("slurm", "local.yaml")
            known = {p.stem for folder in (Path("slurm"), home.parent if home else None) if folder
                     for p in folder.glob("*.yaml")}  # fmt: skip
            raise UserError(
                f"there is no profile {name!r}{nearest(name, known)} (or name a file: --profile ./mine.yaml)"
            )
        path = found
    _, raw = read_mapping(path)
    try:
        profile = Profile.model_validate(raw)
    except ValidationError as error:
        keys: dict[tuple[str | int, ...], Iterable[str]] = {
            (): Profile.model_fields,
            ("defaults",): Allocation.model_fields,
            **{("stages", kind): Allocation.model_fields for kind in STAGE_KINDS},
        }
        problems = [named(where, sentence) for where, sentence in sentences(error, keys)]
        raise refuse(str(path), problems) from None
    for kind in profile.stages:
        if kind not in STAGE_KINDS:
            raise UserError(f"{path}: stages.{kind}: there is no such kind of stage{nearest(kind, STAGE_KINDS)}")
    return profile
