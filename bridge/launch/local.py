"""This machine through submitit's local executor: stages in order, elements side by side up to a number of cores.

Slurm keeps a queue for us; here a small process of our own does (`python -m bridge.launch.local RUN`). It starts an
element as soon as everything that it needs is sealed, and ends when nothing is left that can run. It holds the run's
`local` lock for as long as it lives, so there is never a second one.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import UserError
from bridge.graph import Edge
from bridge.launch.states import Seen
from bridge.runs import Run, RunElement
from bridge.stages.exits import EXIT_REQUEUE

if TYPE_CHECKING:
    from bridge.config.profile import Profile

POLL = 0.1  # seconds between two looks at the running elements
GRACE = 10.0  # seconds between asking a process to stop and killing it
FOREVER = 60 * 24 * 365  # minutes


def start(run: Run, profile: Profile) -> int:
    """Start the process that works through the run in the background; its process id."""
    log = run.folder / "logs" / "local.log"
    code = run.folder / "code"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "SUBMITIT_"))}
    environment |= {"PYTHONPATH": str(code), **profile.env}
    with log.open("ab") as file:
        process = subprocess.Popen(
            [profile.python or sys.executable, "-m", "bridge.launch.local", str(run.folder)],
            cwd=code,  # `-m` puts the current folder first: the run's own code is what is imported
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C in the launching terminal is not for it
        )
    while process.poll() is None and not run.locked("local"):
        time.sleep(0.02)
    if process.poll() not in (None, 0):
        raise UserError(f"{log}: the local executor did not start; the reason is there")
    return process.pid


def work_through(run: Run, profile: Profile) -> None:
    """Run everything of a run that is not sealed, in the order of its graph."""
    from submitit.core.core import Job
    from submitit.local.local import LocalExecutor

    from bridge.config.profile import allocation
    from bridge.config.stages import Resources
    from bridge.launch.script import minutes
    from bridge.stages.runner import run_element

    cores = profile.cpus or os.cpu_count() or 1
    running: dict[Edge, Job[None]] = {}
    used: dict[Edge, int] = {}
    over: set[Edge] = set()  # failed in this process, or cancelled
    while True:
        for key, job in list(running.items()):
            if job.done():
                del running[key], used[key]
                if key not in run.sealed() and not _wants_again(run, key):
                    over.add(key)
        sealed = run.sealed()
        over |= cancelled(run)
        for key, element in run.elements.items():
            if key in sealed or key in running or key in over or not set(element.parents) <= sealed:
                continue
            need = allocation(profile, element.kind, Resources(**element.settings["resources"]))
            cpus = min(need.cpus or 1, cores)
            if sum(used.values()) + cpus > cores:
                break  # what comes later in the graph does not overtake: a small job would keep a large one waiting
            executor = LocalExecutor(run.folder / "scripts" / element.stage, python=_command(cpus))
            executor.update_parameters(
                timeout_min=minutes(need.time) if need.time else FOREVER,
                gpus_per_node=need.gpus or 0,
                signal_delay_s=profile.warn,
                stderr_to_stdout=True,
            )
            running[key] = executor.submit(run_element, str(run.folder), element.stage, element.index)
            used[key] = cpus
            run.note_submission(_submission(element, running[key].job_id))
        if not running:
            return
        time.sleep(POLL)


def _command(cpus: int) -> str:
    """How submitit starts Python. It splits the text like a shell and starts no shell."""
    return f"env BRIDGE_CPUS={cpus} {shlex.quote(sys.executable)}"


def _submission(element: RunElement, job: str) -> dict[str, object]:
    return {
        "event": "submit",
        "time": time.time(),
        "stage": element.stage,
        "elements": [element.index],
        "jobs": [job],
    }


def _wants_again(run: Run, key: Edge) -> bool:
    attempts = run.attempts(key)
    return bool(attempts) and attempts[-1].get("exit") == EXIT_REQUEUE


def cancelled(run: Run) -> set[Edge]:
    """Elements that were cancelled after they were last submitted or asked for."""
    found: set[Edge] = set()
    for line in run.submissions():
        keys = {Edge(line["stage"], index) for index in line.get("elements", [])} if "stage" in line else set()
        if line["event"] == "cancel":
            found |= {Edge(stage, index) for stage, index in line["keys"]}
        elif line["event"] == "launch":
            found.clear()
        else:
            found -= keys
    return found


def look_up(run: Run) -> dict[Edge, Seen]:
    """The state of every element that is not sealed, in Slurm's words, so that one set of rules reads both."""
    alive, sealed, stopped = run.locked("local"), run.sealed(), cancelled(run)
    jobs = _jobs_of_last_launch(run)
    found = {}
    for key, element in run.elements.items():
        attempts = run.attempts(key)
        last = attempts[-1] if attempts else {}
        if key in sealed:
            continue
        if key in stopped:
            found[key] = Seen("CANCELLED", "by the user")
        elif key in jobs and _is_running(run, key, jobs[key]):
            found[key] = Seen("RUNNING")
        elif last.get("exit") == EXIT_REQUEUE and not alive:
            found[key] = Seen("CANCELLED", "stopped early and saved")
        elif last.get("exit") == EXIT_REQUEUE:
            found[key] = Seen("REQUEUED")
        elif key in jobs:
            found[key] = Seen("FAILED", "" if last.get("event") == "end" else "the process was killed")
        elif alive:
            found[key] = Seen("PENDING", "Resources" if set(element.parents) <= sealed else "Dependency")
    return found


def _jobs_of_last_launch(run: Run) -> dict[Edge, str]:
    jobs: dict[Edge, str] = {}
    for line in run.submissions():
        if line["event"] == "launch":
            jobs.clear()
        for index, job in zip(line.get("elements", []), line.get("jobs", []), strict=False):
            jobs[Edge(line["stage"], index)] = job
    return jobs


def _is_running(run: Run, key: Edge, job: str) -> bool:
    """The element's lock is held by the process that runs it; before that, submitit's process is alive."""
    if run.locked(f"{key.stage}.{key.element}"):
        return True
    try:
        command = Path(f"/proc/{job}/cmdline").read_bytes()
    except OSError:
        return False
    return b"submitit" in command and str(run.folder).encode() in command


def stop(run: Run, jobs: Mapping[Edge, str]) -> None:
    """End the processes of elements that were cancelled, and wait until they are gone."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for key, job in jobs.items():
            for process in _processes(run, key, job):
                try:
                    os.kill(process, number)
                except ProcessLookupError:
                    continue
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline:
            if not any(_is_running(run, key, job) for key, job in jobs.items()):
                return
            time.sleep(POLL)


def _processes(run: Run, key: Edge, job: str) -> list[int]:
    """submitit's process of the element and the one that runs the stage."""
    attempts = run.attempts(key)
    stage = [int(attempts[-1]["pid"])] if attempts and attempts[-1].get("event") == "start" else []
    return [process for process in (*stage, int(job)) if _is_ours(process, run)]


def _is_ours(process: int, run: Run) -> bool:
    try:
        return str(run.folder).encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def main(folder: str) -> None:
    """Work through a run; a second process for the same run ends at once."""
    run = Run(Path(folder))
    with run.lock("local", "working through"):
        work_through(run, run.profile())


if __name__ == "__main__":
    main(sys.argv[1])
