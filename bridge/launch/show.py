"""What people and programs are shown: plans, states, logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from bridge.errors import UserError
from bridge.graph import Array, Edge, arrays, ranges
from bridge.launch.prune import size_text
from bridge.launch.runtime import image_of, last_image
from bridge.launch.script import sbatch_options
from bridge.launch.states import STUCK, ElementState, run_state
from bridge.launch.submit import dependency, observe, scripts
from bridge.launch.watch import note
from bridge.record import recorded_elements
from bridge.runs import Run, RunElement

if TYPE_CHECKING:
    from bridge.launch.prepare import Plan

Json = dict[str, Any]

COLOURS = {"done": "green", "running": "cyan", "failed": "red", "blocked": "red", "cancelled": "yellow"}


def console() -> Console:
    """Standard output, as wide as it needs when nobody looks at it."""
    return Console() if sys.stdout.isatty() else Console(width=240)


# ---- plan


def _planned(plan: Plan, runs: Path) -> tuple[frozenset[Edge], list[Array]]:
    from bridge.config.profile import MAX_ARRAY

    folder = runs / plan.request.run_id
    sealed = Run(folder).sealed() if (folder / "run.json").is_file() else frozenset()
    return sealed, arrays(plan.graph.parents(), sealed, max_array=plan.profile.max_array or MAX_ARRAY)


def overview(plan: Plan, runs: Path) -> Json:
    """The graph as `plan --json` prints it."""
    sealed, planned = _planned(plan, runs)
    stage_of = {array.name: array.stage for array in planned}
    jobs = []
    for node in plan.graph.stages:
        own = [array for array in planned if array.stage == node.name]
        after = {(stage_of[a.array], a.kind): None for array in own for a in array.after if a.array}
        jobs.append(
            {
                "stage": node.name,
                "kind": node.kind,
                "elements": len(node.elements),
                "arrays": [ranges(array.elements) for array in own],
                "after": [{"stage": stage, "type": kind} for stage, kind in after],
                "sealed": sum(key.stage == node.name for key in sealed),
            }
        )
    image = plan.request.image and plan.request.image["name"]
    return {"experiment": plan.graph.name, "run": plan.request.run_id, "image": image, "jobs": jobs}


def scripts_text(plan: Plan, runs: Path) -> str:
    """Every script, each after a comment with the sbatch options that are not in it."""
    if plan.profile.cluster != "slurm":
        raise UserError(f"profile {plan.request.profile_name}: runs on this machine and needs no sbatch scripts")
    _, planned = _planned(plan, runs)
    image = image_of(plan.request.image, plan.profile, plan.request.externals)
    texts = scripts(plan.request.run_id, recorded_elements(plan.request), planned, plan.profile, image)
    names = {array.name: f"<{array.name}>" for array in planned}
    parts = []
    for array in planned:
        options = sbatch_options("RUN", array, dependency(array.after, names))
        parts.append(f"### sbatch {' '.join(options)}   # {array.name}\n{texts[array.name]}")
    return "\n".join(parts)


def print_overview(value: Json) -> None:
    table = Table(title=f"{value['experiment']}: run {value['run']}", title_justify="left")
    for column in ("stage", "kind", "elements", "arrays", "after", "sealed"):
        table.add_column(column, justify="right" if column in ("elements", "sealed") else "left")
    for job in value["jobs"]:
        after = ", ".join(f"{a['type']} {a['stage']}" for a in job["after"])
        table.add_row(
            job["stage"], job["kind"], str(job["elements"]), " ".join(job["arrays"]), after, str(job["sealed"])
        )
    console().print(table)


# ---- status


def run_summary(run: Run) -> Json:
    """One run in one line; a damaged record hides no other run."""
    try:
        states = observe(run)
    except UserError as error:
        return {
            "run": run.id,
            "state": "damaged",
            "done": 0,
            "elements": 0,
            "created": str(error),
            "dir": str(run.folder),
        }
    return {
        "run": run.id,
        "state": run_state(states),
        "done": sum(s.state == "done" for s in states),
        "elements": len(states),
        "created": run.record["created"],
        "dir": str(run.folder),
    }


def names(elements: Sequence[RunElement]) -> str:
    """`sft/0-99, eval/3`: many elements in few words."""
    stages: dict[str, list[int]] = {}
    for element in elements:
        stages.setdefault(element.stage, []).append(element.index)
    return ", ".join(f"{stage}/{ranges(numbers)}" for stage, numbers in stages.items())


def status(run: Run) -> Json:
    """A run as `status --json` prints it."""
    return _as_json(run, observe(run))


def _as_json(run: Run, states: Sequence[ElementState]) -> Json:
    return {
        "run": run.id,
        "state": run_state(states),
        "image": last_image(run),
        "elements": [s.to_json() for s in states],
    }


def print_runs(summaries: Sequence[Json], runs: Path) -> None:
    if not summaries:
        console().print(f"no runs in {runs}", markup=False)
        return
    table = Table()
    for column in ("run", "state", "done", "size", "created"):
        table.add_column(column)
    for item in summaries:
        done, size = f"{item['done']}/{item['elements']}", size_text(item["bytes"])
        table.add_row(item["run"], _coloured(item["state"]), done, size, item["created"])
    console().print(table)


def print_status(value: Json) -> None:
    console().print(_status_table(value))
    if value["image"]:
        console().print(image_line(value["image"]), markup=False)


def image_line(image: Json) -> str:
    """The image of a run in one line, with the versions inside that matter most."""
    packages = (image.get("inside") or {}).get("packages", {})
    shown = [f"{name} {packages[name]}" for name in ("torch", "vllm", "transformers", "deepspeed") if name in packages]
    known = f"SHA-256 {image['sha256'][:12]}…" if image.get("sha256") else image.get("place", "")
    lock = f"lock {image['lock']['name']}"
    return f"image {image['name']}: {', '.join([known, lock, *shown])}"


def _status_table(value: Json, run: Run | None = None) -> Table:
    table = Table(title=f"{value['run']}: {value['state']}", title_justify="left")
    for column in ("stage", "state", "attempts", "job", "what", "reason"):
        table.add_column(column, overflow="fold")
    for item in value["elements"]:
        reason = item["reason"]
        if run is not None and item["state"] == "running":
            facts = run.progress(Edge(item["stage"], item["element"]))
            shown = f"{facts.get('done', 0)}/{facts.get('total') or '?'} {note(facts)}"
            reason = shown if reason in ("", "RUNNING") else f"{reason}; {shown}"
        table.add_row(
            f"{item['stage']}/{item['element']}",
            _coloured(item["state"]),
            str(item["attempts"]),
            item["job"] or "",
            escape(item["label"]),
            escape(reason),
        )
    return table


def watch_status(run: Run) -> None:
    """Redraw the status in place until the run is over."""
    with Live(console=Console(), auto_refresh=False) as live:
        while True:
            states = observe(run)
            live.update(_status_table(_as_json(run, states), run), refresh=True)
            if all(s.open is False or s.state in STUCK for s in states):
                return
            time.sleep(2.0)


def _coloured(state: str) -> str:
    colour = COLOURS.get(state)
    return f"[{colour}]{state}[/]" if colour else state


# ---- logs


def print_logs(run: Run, where: str, attempt: int | None, follow: bool) -> None:
    """Copy the log of an attempt to standard output; all elements of a stage one after the other.

    What other nodes printed than the first comes last, as it is usually nothing.
    """
    for element in run.find(where):
        key = Edge(element.stage, element.index)
        last = max((line.get("attempt", 0) for line in run.attempts(key)), default=0)
        if attempt is not None and attempt > last:
            raise UserError(f"{run.id}: {element.name} has had {last} attempts, there is no number {attempt}")
        if last == 0 and not follow:
            hosts = _host_logs(run, key)
            if not hosts:
                raise UserError(f"{run.id}: {element.name} has not started, so there is no log yet")
            sys.stdout.write(hosts)
            continue
        if "/" not in where:
            sys.stdout.write(f"==> {element.name} <==\n")
        shown = _copy(run, key, attempt or max(last, 1), follow)
        for node, log in run.node_logs(key, shown).items():
            if text := log.read_text(encoding="utf-8", errors="replace"):
                sys.stdout.write(f"==> {element.name} on node {node} <==\n{text}")


def _copy(run: Run, key: Edge, attempt: int, follow: bool) -> int:
    """Copy the log of an attempt, and of those after it when following; the number of the last."""
    log, position = run.log(key, attempt), 0
    sys.stdout.flush()  # what follows goes past its buffer
    while True:
        going_on = follow and _state_of(run, key).open is not False  # asked first: what is written until then is read
        if log.is_file():
            with log.open("rb") as file:
                file.seek(position)
                position += sys.stdout.buffer.write(file.read())
            sys.stdout.buffer.flush()
        if run.log(key, attempt + 1).is_file() and follow:
            attempt += 1
            log, position = run.log(key, attempt), 0
        elif not going_on:
            return attempt
        else:
            time.sleep(1.0)


def _state_of(run: Run, key: Edge) -> ElementState:
    return next(s for s in observe(run) if (s.stage, s.element) == key)


def _host_logs(run: Run, key: Edge) -> str:
    """What the scheduler's side of an element printed, for a job that died before the stage began."""
    job = next((s.job for s in observe(run) if (s.stage, s.element) == key), None)
    found = [run.host_log(key, job)] if job and run.host_log(key, job).is_file() else []
    found += (run.folder / "scripts").glob(f"*/{job}_0_log.out")
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in found)
