"""Launch, observe, cancel: the same three verbs for this machine and for Slurm."""

from __future__ import annotations

import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import UserError, WorkFailedError
from bridge.graph import After, Array, Edge, arrays
from bridge.launch import local
from bridge.launch.container import PYTHON
from bridge.launch.script import is_root, sbatch_script
from bridge.launch.states import STUCK, ElementState, Seen, State, active_jobs, scheduler_state, with_parents
from bridge.progress import duration
from bridge.runs import Run, RunElement
from bridge.stages.exits import EXIT_REQUEUE

if TYPE_CHECKING:
    from bridge.config.profile import Profile
    from bridge.launch.container import Image


class ParentDoneError(Exception):
    """An element that new jobs were just tied to is sealed by now."""


OUT_OF_MEMORY = re.compile(r"oom.kill event|exceeded memory limit")  # Slurm's words, of 21.08 to 24.11
PATIENCE = 90.0  # seconds for which a launch waits for jobs that are just ending
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FULL = 1 << 20  # bytes free, below which a disk counts as full
# What srun, Python and Apptainer add to every job: another line says more.
MEANINGLESS = (
    "INFO:    ",
    "srun: error:",
    "srun: Terminating",
    "srun: Job step aborted",
    "srun: launch/slurm:",
    "Force Terminated",
)


def scripts(
    run_id: str,
    elements: Sequence[RunElement],
    planned: Sequence[Array],
    profile: Profile,
    image: Image | None,
) -> dict[str, str]:
    """The sbatch script of each array. Pure: what `plan --scripts` shows is what `launch` submits."""
    from bridge.config.profile import allocation
    from bridge.config.stages import Resources

    by_key = {(e.stage, e.index): e for e in elements}
    found = {}
    for array in planned:
        first = by_key[array.stage, array.elements[0]]
        need = allocation(profile, first.kind, Resources(**first.settings["resources"]))
        inside = image if need.runtime != "none" else None
        python = PYTHON if inside else profile.python or sys.executable
        found[array.name] = sbatch_script(run_id, array, need, profile, python, first.kind, inside)
    return found


def launch(run: Run, profile: Profile, profile_name: str, image: Image | None = None) -> dict[str, list[str]]:
    """Submit everything of a run that is neither sealed nor in hand; job ids by stage. `image`: what stages run in.

    Raises:
        UserError: another process is launching the run, or there is no cluster here.
        WorkFailedError: the scheduler refused; what this call had submitted before is cancelled again.
    """
    from bridge.config.profile import allocation
    from bridge.config.stages import Resources

    runtimes = {allocation(profile, element.kind, Resources()).runtime for element in run.elements.values()}
    require_scheduler(profile, profile_name, image is not None and "none" not in runtimes)
    with run.lock("launch", "launching"):
        states = observe(run)
        if all(s.state == "done" for s in states):
            return {}
        if profile.cluster == "local":
            return _launch_local(run, profile, states)
        return _launch_slurm(run, profile, states, image)


def require_scheduler(profile: Profile, name: str, in_image: bool) -> None:
    """UserError when the scheduler, or what jobs import, is not there. Asked before a run is made."""
    if profile.cluster == "slurm":
        from bridge.launch import slurm

        slurm.require_slurm(profile, name)
    if in_image:
        return
    if profile.python is None:
        missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
        if missing:
            what = f"jobs would run {sys.executable}, which has no {' and no '.join(missing)}"
            remedy = "install bridge-rl with its extra `train` there, or name another `python` in the profile"
            raise UserError(f"profile {name}: {what}; {remedy}")
    elif profile.cluster == "local" and shutil.which(profile.python) is None:
        raise UserError(f"profile {name}: python: {profile.python} is no program that can be run")


def _note_launch(run: Run, profile: Profile, image: Image | None = None) -> None:
    facts = {"image": {"place": image.place, "sha256": image.sha256}} if image else {}
    run.note_submission({"event": "launch", "time": time.time(), "profile": profile.model_dump(mode="json"), **facts})


def _launch_local(run: Run, profile: Profile, states: Sequence[ElementState]) -> dict[str, list[str]]:
    """Leave a note for the queue process that works on the run, or start one."""
    again = [s.stage for s in states if s.state != "done" and (not s.open or s.state in STUCK)]
    if not again:
        return {}
    with run.lock("note", "ending", wait=True):
        _note_launch(run, profile)
        alive = run.locked("local")
    process = local.queue_process(run) if alive else local.start(run, profile)
    return {stage: [str(process)] for stage in dict.fromkeys(again)}


def _launch_slurm(
    run: Run, profile: Profile, states: Sequence[ElementState], image: Image | None
) -> dict[str, list[str]]:
    if _drop_broken_off(run, profile):
        states = observe(run)
    while True:
        try:
            return _submit(run, profile, _settled(run, states), image)
        except ParentDoneError:  # in the moment of submission: the children that are left need no edge any more
            states = observe(run)


def _settled(run: Run, states: Sequence[ElementState]) -> Sequence[ElementState]:
    """The states once nothing unsealed is just ending: whether that ends for good or comes back is not known before.

    Raises:
        WorkFailedError: something is still ending after PATIENCE.
    """
    deadline = time.monotonic() + PATIENCE
    while ending := [s for s in states if s.state == "running" and s.reason.startswith("COMPLETING")]:
        if time.monotonic() > deadline:
            what = f"{ending[0].stage}/{ending[0].element} is still ending (job {ending[0].job})"
            raise WorkFailedError(f"{run.id}: {what}; nothing was submitted, try again later")
        time.sleep(1.0)
        states = observe(run)
    return states


def _submit(run: Run, profile: Profile, states: Sequence[ElementState], image: Image | None) -> dict[str, list[str]]:
    from bridge.launch import slurm

    _require_known(run, states)
    sealed = frozenset((s.stage, s.element) for s in states if s.state == "done")
    active = {(key.stage, key.element): job for key, job in active_jobs(states).items()}
    planned = arrays(run.parents(), sealed, active, slurm.array_limit(profile))
    if not planned:
        return {}
    stale = [s.job for s in states if s.state in STUCK and s.open and s.job]
    slurm.cancel(profile, [*stale, *slurm.unrecorded(run, profile)])
    _note_launch(run, profile, image)
    texts = scripts(run.id, list(run.elements.values()), planned, profile, image)
    submitted: dict[str, str] = {}  # array → job id
    try:
        for array in planned:
            _submit_array(run, array, texts[array.name], submitted, profile)
        _require_parents(run, planned, states)
        slurm.release(profile, [submitted[array.name] for array in planned if is_root(array)])
        run.note_submission({"event": "release", "time": time.time()})
    except ParentDoneError:
        slurm.cancel(profile, list(submitted.values()))
        raise
    except BaseException:  # whatever it was, Ctrl-C too: what was submitted must not run unseen
        _take_back(run, list(submitted.values()), profile)
        raise
    result: dict[str, list[str]] = {}
    for array in planned:
        result.setdefault(array.stage, []).append(submitted[array.name])
    return result


def _drop_broken_off(run: Run, profile: Profile) -> bool:
    """Cancel what a launch had submitted that was killed before it let go of it; whether there was such a launch."""
    from bridge.launch import slurm

    held = broken_off(run)
    if held:
        waiting = slurm.queued(run, profile)
        slurm.cancel(profile, sorted(job for job in held if waiting.get(job)))  # not what was let go of by hand
    return bool(held)


def broken_off(run: Run) -> frozenset[str]:
    """Arrays of a last launch that did not come to its end: they are held, or wait for such."""
    held: list[str] = []
    for line in run.submissions():
        if line["event"] in ("launch", "release"):
            held.clear()
        elif line["event"] == "submit" and line.get("held") is not None:
            held.append(line["jobs"][0].partition("_")[0])
    return frozenset(held)


def _require_known(run: Run, states: Sequence[ElementState]) -> None:
    """Nothing is submitted while an element might still be running: it would run twice."""
    for state in states:
        if state.open is None:
            raise WorkFailedError(f"{run.id}: {state.reason}; nothing was submitted, try again later")


def _require_parents(run: Run, planned: Sequence[Array], before: Sequence[ElementState]) -> None:
    """Look again at jobs of earlier launches that new ones were tied to: one that is over by now ties nothing.

    sbatch takes any job number as a dependency, and lets the child start when it does not know the number.

    Raises:
        ParentDoneError: a parent has ended well.
        WorkFailedError: a parent failed or was cancelled, with its reason.
    """
    earlier = {after.job for array in planned for after in array.after if after.job}
    if not earlier:
        return
    watched = {(s.stage, s.element) for s in before if s.open and s.job and s.job.partition("_")[0] in earlier}
    for state in _settled(run, observe(run)):
        if (state.stage, state.element) in watched and state.state == "done":
            raise ParentDoneError
        if (state.stage, state.element) in watched and not state.open:
            what = f"{state.stage}/{state.element}, which others wait for, {state.state}: {state.reason}"
            raise WorkFailedError(f"{run.id}: {what}; `bridge-rl resume {run.id}` submits it too")


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
    with _uninterrupted():
        jobs = slurm.submit(run, array, script, wanted, profile)
        submitted[array.name] = jobs[0].partition("_")[0]
        facts = {"stage": array.stage, "elements": list(array.elements), "jobs": jobs, "dependency": wanted}
        run.note_submission({"event": "submit", "time": time.time(), **facts, "held": is_root(array)})


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """What would interrupt the block does so at its end: an sbatch that is left alone submits a job nobody knows of."""
    arrived: list[int] = []
    handled = [n for n in INTERRUPTS if signal.getsignal(n) is signal.default_int_handler]
    if threading.current_thread() is not threading.main_thread():
        handled = []  # signals are the main thread's alone
    for number in handled:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.default_int_handler)
        if arrived:  # also where it made sbatch fail, which a terminal's Ctrl-C reaches too
            raise KeyboardInterrupt


def dependency(after: Iterable[After], submitted: Mapping[str, str]) -> str | None:
    """sbatch's `--dependency` for one array, such as `aftercorr:12,afterok:15_0:15_2`."""
    parts = []
    for edge in after:
        number = submitted[edge.array] if edge.array is not None else edge.job
        parts.append(":".join([edge.kind, *([f"{number}_{task}" for task in edge.tasks] or [str(number)])]))
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
    sealed, seen, profile = run.sealed(), {}, None
    if len(sealed) < len(run.elements):
        profile = run.profile()
        jobs |= {key: job for key in run.elements.keys() - sealed - jobs.keys() if (job := _unlaunched_job(run, key))}
        seen = _ask_scheduler(run, profile, {key: job for key, job in jobs.items() if key not in sealed})
        sealed = run.sealed()
    found: dict[Edge, ElementState] = {}
    for key, element in run.elements.items():
        parents = [(f"{p.stage}/{p.element}", found[p]) for p in element.parents]
        found[key] = _element_state(run, profile, element, key in sealed, jobs.get(key), seen.get(key), parents)
    return list(found.values())


def _unlaunched_job(run: Run, key: Edge) -> str | None:
    """The job of an element that was started by hand, with plain sbatch."""
    attempts = run.attempts(key)
    job = attempts[-1].get("job") if attempts else None
    return job if job and "_" in job else None


def _ask_scheduler(run: Run, profile: Profile, open_jobs: Mapping[Edge, str]) -> dict[Edge, Seen]:
    if profile.cluster == "local":
        return local.look_up(run)
    from bridge.launch import slurm

    return slurm.look_up(run, profile, open_jobs)


def _element_state(
    run: Run,
    profile: Profile | None,
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
    if sealed or profile is None:
        return ElementState(*key, element.label, "done", "", job, count, artifact)
    last = attempts[-1] if attempts else {}
    ended = last if last.get("event") == "end" and last.get("job") == job else None
    state: State
    if seen is None:
        state, reason = "unknown", "was never submitted; `resume` does it"
    else:
        state, reason = scheduler_state(seen, ended)
        stopped = ended is not None and ended["exit"] == EXIT_REQUEUE
        if state == "failed" and (ended is None or stopped):
            reason = "; ".join([reason, *last_words(run, key, job, last)])
        if state == "failed" and stopped and seen.state:
            reason += "; it was not started again: `resume` goes on"
        if "JobHeldUser" in reason and job and job.partition("_")[0] in broken_off(run):
            reason = "the launch was broken off before it let the jobs go; `resume` launches again"
        elif state == "running" and (quiet := quiet_for(run, profile, element, last)):
            reason = f"{reason}, but no progress for {quiet}"
    if state != "failed" or last.get("job") != job:  # what has begun had its parents
        state, reason = with_parents(state, reason, parents)
    alive = seen is not None and seen.queued
    return ElementState(*key, element.label, state, reason, job, count, artifact, alive)


def quiet_for(run: Run, profile: Profile, element: RunElement, last: Mapping[str, Any]) -> str | None:
    """How long a running element has made no progress, if that is longer than its setting `quiet`."""
    from bridge.config.profile import QUIET, allocation
    from bridge.config.stages import Resources, seconds

    need = allocation(profile, element.kind, Resources(**element.settings["resources"]))
    said = run.progress(Edge(element.stage, element.index)).get("time", 0.0)
    silence = time.time() - max(said, last.get("time", time.time()))
    return duration(silence) if silence > seconds(need.quiet or QUIET) else None


def last_words(run: Run, key: Edge, job: str | None, last: Mapping[str, Any]) -> list[str]:
    """What is known of an end that the stage could not write down: Slurm's own line, the stage's last, the disk."""
    found = []
    if job and (line := last_line(run.host_log(key, job), only="slurmstepd")):
        found.append(f"out of memory: {line}" if OUT_OF_MEMORY.search(line) else line)
    began = last.get("job") == job and last.get("event") == "start"  # and did not end by itself
    if began and (line := last_line(run.log(key, last["attempt"]))):
        found.append(f"its last line: {line}")
    elif job and (line := last_line(run.host_log(key, job))) and line not in found:
        found.append(f"the job's last line: {line}")
    if shutil.disk_usage(run.folder).free < FULL:
        found.append(f"the disk of {run.folder} is full")
    return found


def last_line(log: Path, only: str = "") -> str:
    """The last line of a log that says anything (and holds `only`), at most 300 characters of it."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 8192))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    said = (line.strip() for line in reversed(lines) if only in line)
    return next((line[:300] for line in said if line and not any(word in line for word in MEANINGLESS)), "")


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
            # A queue that is just being started on this machine has not said a word of what it will run.
            open_keys = [
                k for k in run.elements if k in chosen and (states[k].open is not False or states[k].state == "unknown")
            ]
            jobs = {key: job for key in open_keys if (job := states[key].job)}
            if open_keys:
                run.note_submission({"event": "cancel", "time": time.time(), "keys": [list(key) for key in open_keys]})
        profile = run.profile()
        if profile.cluster == "local":
            local.stop(run, jobs)
        else:
            from bridge.launch import slurm

            everything = len(chosen) == len(run.elements)  # also what somebody requeued of an element that is sealed
            others = slurm.queued(run, profile) if everything else slurm.unrecorded(run, profile)
            try:
                slurm.cancel(profile, sorted({*jobs.values(), *others}))
            except WorkFailedError as error:
                raise WorkFailedError(f"{run.id}: nothing is known to be cancelled; try again: {error}") from None
    return [run.elements[key] for key in open_keys]
