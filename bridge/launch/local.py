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
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.errors import UserError, WorkFailedError
from bridge.graph import Edge
from bridge.launch.states import Seen
from bridge.runs import Run, RunElement
from bridge.stages.exits import EXIT_REQUEUE

if TYPE_CHECKING:
    from submitit.core.core import Job

    from bridge.config.profile import Allocation, Profile

NO_WORD = "the process ended without a word: killed, or its disk was full"
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
    run.note_submission({"event": "queue", "time": time.time(), "pid": process.pid})
    while process.poll() is None and not run.locked("local"):
        time.sleep(0.02)
    if process.poll() not in (None, 0):
        raise UserError(f"{log}: the local executor did not start; the reason is there")
    return process.pid


def queue_process(run: Run) -> int:
    """The process that was started last to work through the run."""
    return next((int(line["pid"]) for line in reversed(run.submissions()) if line["event"] == "queue"), 0)


class Queue:
    """Runs everything of a run that is not sealed, in the order of its graph."""

    def __init__(self, run: Run, profile: Profile) -> None:
        self.run, self.profile = run, profile
        self.cores = profile.cpus or os.cpu_count() or 1
        self.running: dict[Edge, Job[None]] = {}
        self.used: dict[Edge, int] = {}
        self.over: set[Edge] = set()
        """Elements that failed or were cancelled since the last launch."""
        self.launches = _launches(run)

    def work(self, ending: ExitStack) -> None:
        """Work until nothing is left that can run.

        A launch that finds this process alive only leaves its note, so the process may end only while no note can be
        written: `ending` then holds the lock for notes, and is closed after the `local` lock is free.
        """
        while True:
            self.collect()
            self.heed_launches()
            with self.run.lock("note", "starting", wait=True):  # a cancel falls before this or sees what was started
                self.over |= cancelled(self.run)
                self.start_what_is_ready()
            if not self.running and not self.strangers():
                ending.enter_context(self.run.lock("note", "ending", wait=True))
                if _launches(self.run) == self.launches:
                    return
                ending.close()
            time.sleep(POLL)

    def strangers(self) -> bool:
        """Whether an element is being run by somebody else, such as the jobs of a queue process that was killed."""
        return any(self.run.locked(f"{key.stage}.{key.element}") for key in self.run.elements)

    def collect(self) -> None:
        """Take note of what has ended. It ended before any launch that `heed_launches` sees next."""
        for key, job in list(self.running.items()):
            if job.done():
                del self.running[key], self.used[key]
                if key not in self.run.sealed() and not _wants_again(self.run, key):
                    self.over.add(key)

    def heed_launches(self) -> None:
        """A new launch gives failed and cancelled elements another try."""
        launches = _launches(self.run)
        if launches != self.launches:
            self.launches = launches
            self.over.clear()

    def start_what_is_ready(self) -> None:
        """Start elements whose inputs are sealed, as far as cores allow."""
        from bridge.config.profile import allocation
        from bridge.config.stages import Resources

        sealed = self.run.sealed()
        for key, element in self.run.elements.items():
            if key in sealed or key in self.running or key in self.over or not set(element.parents) <= sealed:
                continue
            if self.run.locked(f"{key.stage}.{key.element}"):
                continue
            need = allocation(self.profile, element.kind, Resources(**element.settings["resources"]))
            cpus = min(need.cpus or 1, self.cores)
            if sum(self.used.values()) + cpus > self.cores:
                return  # what comes later in the graph does not overtake: a small job would keep a large one waiting
            self.running[key] = _submit(self.run, element, need, self.profile, cpus)
            self.used[key] = cpus


def _submit(run: Run, element: RunElement, need: Allocation, profile: Profile, cpus: int) -> Job[None]:
    from submitit.local.local import LocalExecutor

    from bridge.config.profile import processes
    from bridge.launch.script import minutes
    from bridge.stages.runner import run_element

    # The queue and its jobs work in RUN/code. By this name of it no part of the run's path is taken for a pattern.
    folder = Path("/proc/self/cwd/../scripts") / element.stage
    folder.mkdir(parents=True, exist_ok=True)
    variables = {"BRIDGE_CPUS": str(cpus), **need.env}
    if (together := processes(element.kind, need)) > 1:
        variables["BRIDGE_PROCESSES"] = str(together)
    executor = LocalExecutor(folder, python=_command(variables))
    executor.update_parameters(
        timeout_min=minutes(need.time) if need.time else FOREVER,
        gpus_per_node=need.gpus or 0,
        signal_delay_s=profile.warn,
        stderr_to_stdout=True,
    )
    job: Job[None] = executor.submit(run_element, str(run.folder), element.stage, element.index)
    facts = {"stage": element.stage, "elements": [element.index], "jobs": [job.job_id]}
    run.note_submission({"event": "submit", "time": time.time(), **facts})
    return job


def _launches(run: Run) -> int:
    return sum(line["event"] == "launch" for line in run.submissions())


def _command(variables: Mapping[str, str]) -> str:
    """How submitit starts Python. It splits the text like a shell and starts no shell."""
    return shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable])


def _wants_again(run: Run, key: Edge) -> bool:
    attempts = run.attempts(key)
    return bool(attempts) and attempts[-1].get("exit") == EXIT_REQUEUE


def cancelled(run: Run) -> set[Edge]:
    """Elements that were cancelled since the last launch."""
    found: set[Edge] = set()
    for line in run.submissions():
        if line["event"] == "cancel":
            found |= {Edge(stage, index) for stage, index in line["keys"]}
        elif line["event"] == "launch":
            found.clear()
    return found


def look_up(run: Run) -> dict[Edge, Seen]:
    """The state of every element that is not sealed, in Slurm's words, so that one set of rules reads both."""
    alive, sealed, stopped = run.locked("local"), run.sealed(), cancelled(run)
    ever, lately = _jobs(run)
    found = {}
    for key, element in run.elements.items():
        attempts = run.attempts(key)
        last = attempts[-1] if attempts else {}
        if key in sealed:
            continue
        if key in ever and _is_running(run, key, ever[key]):
            found[key] = Seen("RUNNING", queued=True)
        elif key in stopped:
            found[key] = Seen("CANCELLED by the user", queued=False)
        elif last.get("exit") == EXIT_REQUEUE and not alive:
            found[key] = Seen("CANCELLED: stopped early and saved", queued=False)
        elif last.get("exit") == EXIT_REQUEUE:
            found[key] = Seen("REQUEUED", queued=True)
        elif key in lately:
            found[key] = Seen("" if last.get("event") == "end" else "FAILED", NO_WORD, queued=False)
        elif alive:
            why = "Resources" if set(element.parents) <= sealed else "Dependency"
            found[key] = Seen("PENDING", why, queued=True)
    return found


def _jobs(run: Run) -> tuple[dict[Edge, str], dict[Edge, str]]:
    """The last job of each element: of all launches, and of the last launch only."""
    ever: dict[Edge, str] = {}
    lately: dict[Edge, str] = {}
    for line in run.submissions():
        if line["event"] == "launch":
            lately.clear()
        for index, job in zip(line.get("elements", []), line.get("jobs", []), strict=False):
            ever[Edge(line["stage"], index)] = lately[Edge(line["stage"], index)] = job
    return ever, lately


def _is_running(run: Run, key: Edge, job: str) -> bool:
    """The element's lock is held by the process that runs it; before that, submitit's process is alive."""
    if run.locked(f"{key.stage}.{key.element}"):
        return True
    last = next(reversed(run.attempts(key)), {})
    if last.get("event") == "end" and last.get("job") == job:  # submitit's process outlives the stage for a moment
        return False
    return _is_ours(int(job), run)


def stop(run: Run, jobs: Mapping[Edge, str]) -> None:
    """End the processes of elements that were cancelled, and wait until they are gone.

    Raises:
        WorkFailedError: a process is still there after it was killed.
    """
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
    left = ", ".join(f"{key.stage}/{key.element}" for key, job in jobs.items() if _is_running(run, key, job))
    if left:
        raise WorkFailedError(
            f"{run.id}: {left} could not be stopped; look for its process, whose number is in attempts/"
        )


def _processes(run: Run, key: Edge, job: str) -> list[int]:
    """submitit's process of the element and the one that runs the stage."""
    attempts = run.attempts(key)
    stage = [int(attempts[-1]["pid"])] if attempts and attempts[-1].get("event") == "start" else []
    return [process for process in (*stage, int(job)) if _is_ours(process, run)]


def _is_ours(process: int, run: Run) -> bool:
    """Whether a process is one of submitit's that works in this run's folder: its number may be a stranger's by now."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
        return b"submitit" in command and Path(f"/proc/{process}/cwd").samefile(run.folder / "code")
    except OSError:
        return False


def main(folder: str) -> None:
    """Work through a run; a second process for the same run ends at once."""
    run = Run(Path(folder))
    with ExitStack() as ending, run.lock("local", "working through"):
        Queue(run, run.profile()).work(ending)


if __name__ == "__main__":
    main(sys.argv[1])
