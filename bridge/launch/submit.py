"""Launch, observe, cancel: the same three verbs for this machine and for Slurm."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import UserError, WorkFailedError
from bridge.graph import After, Array, Edge, arrays
from bridge.launch import local
from bridge.launch.states import ACTIVE, SILENT, ElementState, Seen, State, active_jobs, scheduler_state, with_parents
from bridge.runs import Run, RunElement

if TYPE_CHECKING:
    from bridge.config.profile import Profile


CLOSED = ("done", "failed", "cancelled")  # nothing of these is queued or running


def scripts(run_id: str, elements: Sequence[RunElement], planned: Sequence[Array], profile: Profile) -> dict[str, str]:
    """The sbatch script of each array. Pure: what `plan --scripts` shows is what `launch` submits."""
    from bridge.config.profile import allocation
    from bridge.config.stages import Resources
    from bridge.launch.script import sbatch_script

    by_key = {(e.stage, e.index): e for e in elements}
    found = {}
    for array in planned:
        first = by_key[array.stage, array.elements[0]]
        need = allocation(profile, first.kind, Resources(**first.settings["resources"]))
        found[array.name] = sbatch_script(run_id, array, need, profile, profile.python or sys.executable)
    return found


def launch(run: Run, profile: Profile, profile_name: str) -> dict[str, list[str]]:
    """Submit everything of a run that is neither sealed nor in hand; job ids by stage.

    Raises:
        UserError: another process is launching the run, or there is no cluster here.
        WorkFailedError: the scheduler refused; what this call had submitted before is cancelled again.
    """
    require_scheduler(profile, profile_name)
    with run.lock("launch", "launching"):
        states = observe(run)
        if all(s.state == "done" for s in states):
            return {}
        if profile.cluster == "local":
            return _launch_local(run, profile, states)
        return _launch_slurm(run, profile, states)


def require_scheduler(profile: Profile, name: str) -> None:
    """UserError when the scheduler, or what jobs import, is not there. Asked before a run is made."""
    if profile.cluster == "slurm":
        from bridge.launch import slurm

        slurm.require_slurm(profile, name)
    if profile.python is None:
        missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
        if missing:
            what = f"jobs would run {sys.executable}, which has no {' and no '.join(missing)}"
            remedy = "install bridge-rl with its extra `train` there, or name another `python` in the profile"
            raise UserError(f"profile {name}: {what}; {remedy}")
    elif profile.cluster == "local" and shutil.which(profile.python) is None:
        raise UserError(f"profile {name}: python: {profile.python} is no program that can be run")


def _note_launch(run: Run, profile: Profile) -> None:
    run.note_submission({"event": "launch", "time": time.time(), "profile": profile.model_dump(mode="json")})


def _launch_local(run: Run, profile: Profile, states: Sequence[ElementState]) -> dict[str, list[str]]:
    """Leave a note for the queue process that works on the run, or start one."""
    again = [s.stage for s in states if s.state != "done" and s.state not in ACTIVE]
    if not again:
        return {}
    with run.lock("note", "ending", wait=True):
        _note_launch(run, profile)
        alive = run.locked("local")
    process = local.queue_process(run) if alive else local.start(run, profile)
    return {stage: [str(process)] for stage in dict.fromkeys(again)}


def _launch_slurm(run: Run, profile: Profile, states: Sequence[ElementState]) -> dict[str, list[str]]:
    from bridge.launch import slurm

    for state in states:
        if state.state == "unknown" and state.reason.startswith(SILENT):
            raise WorkFailedError(f"{run.id}: {state.reason}; nothing was submitted, try again later")
    sealed = frozenset((s.stage, s.element) for s in states if s.state == "done")
    active = {(key.stage, key.element): job for key, job in active_jobs(states).items()}
    planned = arrays(run.parents(), sealed, active, profile.max_array)
    if not planned:
        return {}
    stale = [s.job for s in states if s.state == "blocked" and s.job]
    slurm.cancel(profile, [*stale, *slurm.unrecorded(run, profile)])
    _note_launch(run, profile)
    texts = scripts(run.id, list(run.elements.values()), planned, profile)
    submitted: dict[str, str] = {}  # array → job id
    try:
        for array in planned:
            _submit_array(run, array, texts[array.name], submitted, profile)
    except BaseException:  # whatever it was, Ctrl-C too: what was submitted must not run unseen
        _take_back(run, list(submitted.values()), profile)
        raise
    result: dict[str, list[str]] = {}
    for array in planned:
        result.setdefault(array.stage, []).append(submitted[array.name])
    return result


def _take_back(run: Run, jobs: Sequence[str], profile: Profile) -> None:
    """Cancel what a launch that is broken off had submitted, and say so; where that fails, say what goes on."""
    from bridge.launch import slurm

    try:
        slurm.cancel(profile, [*jobs, *slurm.unrecorded(run, profile)])
        said = "what it had submitted is cancelled"
    except WorkFailedError as error:
        said = f"it had submitted {', '.join(jobs) or 'nothing on record'}, which could not be cancelled ({error}); "
        said += f"`bridge-rl cancel {run.id}` does it later"
    sys.stderr.write(f"{run.id}: the launch was broken off; {said}\n")


def _submit_array(run: Run, array: Array, script: str, submitted: dict[str, str], profile: Profile) -> None:
    from bridge.launch import slurm

    wanted = dependency(array.after, submitted)
    jobs = slurm.submit(run, array, script, wanted, profile)
    submitted[array.name] = jobs[0].partition("_")[0]
    facts = {"stage": array.stage, "elements": list(array.elements), "jobs": jobs, "dependency": wanted}
    run.note_submission({"event": "submit", "time": time.time(), **facts})


def dependency(after: Iterable[After], submitted: dict[str, str]) -> str | None:
    """sbatch's `--dependency` for one array, such as `aftercorr:12,afterok:15`."""
    parts = []
    for edge in after:
        jobs = [submitted[edge.array]] if edge.array is not None else list(edge.jobs)
        parts.append(":".join([edge.kind, *jobs]))
    return ",".join(parts) or None


def observe(run: Run) -> list[ElementState]:
    """The state of every element, stages in the order of the graph.

    The scheduler is asked before the seals are read: what it says is over then is over, and an element that
    ends in between is simply done.
    """
    jobs: dict[Edge, str] = {}
    for line in run.submissions():
        for index, job in zip(line.get("elements", []), line.get("jobs", []), strict=False):
            jobs[Edge(line["stage"], index)] = job
    sealed, seen = run.sealed(), {}
    if len(sealed) < len(run.elements):
        seen = _ask_scheduler(run, {key: job for key, job in jobs.items() if key not in sealed})
        sealed = run.sealed()
    found: dict[Edge, ElementState] = {}
    for key, element in run.elements.items():
        parents = [(f"{p.stage}/{p.element}", found[p]) for p in element.parents]
        found[key] = _element_state(run, element, key in sealed, jobs.get(key), seen.get(key), parents)
    return list(found.values())


def _ask_scheduler(run: Run, open_jobs: Mapping[Edge, str]) -> dict[Edge, Seen]:
    profile = run.profile()
    if profile.cluster == "local":
        return local.look_up(run)
    from bridge.launch import slurm

    return slurm.look_up(profile, open_jobs)


def _element_state(
    run: Run,
    element: RunElement,
    sealed: bool,
    job: str | None,
    seen: Seen | None,
    parents: Sequence[tuple[str, ElementState]],
) -> ElementState:
    key = Edge(element.stage, element.index)
    attempts = run.attempts(key)
    count = max((line.get("attempt", 0) for line in attempts), default=0)
    artifact = str(run.artifact(key)) if sealed else None
    if sealed:
        return ElementState(*key, element.label, "done", "", job, count, artifact)
    last = attempts[-1] if attempts else {}
    ended = last if last.get("event") == "end" and last.get("job") == job else None
    state: State
    if job is None and seen is None:
        state, reason = "unknown", "was never submitted; `resume` does it"
    else:
        state, reason = scheduler_state(seen, ended)
        if state == "failed" and ended is None and (line := last_line(run.log(key, count))):
            reason += f"; its last line: {line}"
    state, reason = with_parents(state, reason, parents)
    return ElementState(*key, element.label, state, reason, job, count, artifact)


def last_line(log: Path) -> str:
    """The last line of a log that says anything, at most 300 characters of it."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def cancel(run: Run, elements: Sequence[RunElement]) -> list[RunElement]:
    """Cancel elements and everything that waits for them; what was still open among them.

    A launch that is under way is waited for, so that nothing is submitted behind the back of this call. Sealed
    artifacts stay. A later launch or resume submits the cancelled elements again.
    """
    chosen = {Edge(e.stage, e.index) for e in elements}
    for key, element in run.elements.items():
        if chosen & set(element.parents):
            chosen.add(key)
    with run.lock("launch", "launching", wait=True):
        with run.lock("note", "cancelling", wait=True):
            states = {Edge(s.stage, s.element): s for s in observe(run)}
            open_keys = [k for k in run.elements if k in chosen and states[k].state not in CLOSED]
            jobs = {key: job for key in open_keys if (job := states[key].job)}
            if open_keys:
                run.note_submission({"event": "cancel", "time": time.time(), "keys": [list(key) for key in open_keys]})
        profile = run.profile()
        if profile.cluster == "local":
            local.stop(run, jobs)
        else:
            from bridge.launch import slurm

            slurm.cancel(profile, [*jobs.values(), *slurm.unrecorded(run, profile)])
    return [run.elements[key] for key in open_keys]
