"""Slurm through submitit: submit arrays, ask for states, cancel. submitit's habits are worked around here alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.core.core import Job
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from bridge.config.profile import Profile
from bridge.errors import UserError, WorkFailedError
from bridge.graph import Array, Edge
from bridge.launch.states import LIVE, NO_ANSWER, Seen
from bridge.runs import Run
from bridge.stages.runner import run_element


class ArrayExecutor(SlurmExecutor):
    """submitit's executor with our script, our environment, and per-job dependencies.

    What differs from submitit 1.5.4, and why: one element is an array too, so that all elements have ids of one form;
    the array keeps this class (submitit makes a plain SlurmExecutor, which loses every override); the id is read from
    `--parsable` output (submitit takes the first `job N` it sees, also from a banner); a dependency belongs to one
    submission (submitit's sticks to the executor); sbatch sees an explicit environment.
    """

    def __init__(self, folder: Path, script: str, code: Path, dependency: str | None, profile: Profile) -> None:
        super().__init__(folder)
        self.script = script
        self.code = code
        self.dependency = dependency
        self.profile = profile

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[Job[Any]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        pickles = []
        for delayed in delayed_submissions:
            path = self.folder / f"{uuid.uuid4().hex}.pkl"
            delayed.set_timeout(0, 0)  # requeueing is the script's business alone
            delayed.dump(path)
            pickles.append(path)
        first = self._submit_command(self._submitit_command_str)
        jobs: list[Job[Any]] = [
            SlurmJob(folder=self.folder, job_id=f"{first.job_id}_{task}", tasks=[0])
            for task in range(len(delayed_submissions))
        ]
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        words = ["sbatch", "--parsable", f"--chdir={self.code}"]
        if self.dependency:
            words.append(f"--dependency={self.dependency}")
        return ["env", "-i", *_environment(self.profile), *words, str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        text = string.decode() if isinstance(string, bytes) else string
        last = text.strip().rpartition("\n")[2]
        number = last.partition(";")[0]
        if not number.isdigit():
            raise WorkFailedError(f"sbatch printed no job id, but: {text.strip() or 'nothing'}")
        return number


def _environment(profile: Profile) -> list[str]:
    """The environment of every Slurm command, as NAME=VALUE: nothing of an enclosing job gets in."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "USER", "SLURM_CONF") if name in os.environ}
    if profile.slurm_conf:
        kept["SLURM_CONF"] = profile.slurm_conf
    return [f"{name}={value}" for name, value in kept.items()]


def require_slurm(profile: Profile, name: str) -> None:
    """UserError when there is no Slurm here, or its controller does not answer."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise UserError(f"profile {name}: this machine has no sbatch; run on a login node, or use --profile local")
    if profile.slurm_conf and not Path(profile.slurm_conf).is_file():
        raise UserError(f"profile {name}: slurm_conf {profile.slurm_conf} does not exist; is this the right machine?")
    try:
        call(profile, ["scontrol", "ping"])
    except WorkFailedError as error:
        raise UserError(f"profile {name}: the Slurm controller does not answer: {error}") from None


def submit(run: Run, array: Array, script: str, dependency: str | None, profile: Profile) -> list[str]:
    """Submit one array; the job id of each element, in order.

    Raises:
        WorkFailedError: sbatch refused; the message is sbatch's own.
    """
    executor = ArrayExecutor(run.folder / "scripts" / array.name, script, run.folder / "code", dependency, profile)
    (run.folder / "logs" / array.stage).mkdir(parents=True, exist_ok=True)  # without it the job dies with no word
    folder = str(run.folder)
    count = len(array.elements)
    try:
        jobs = executor.map_array(run_element, [folder] * count, [array.stage] * count, list(array.elements))
    except utils.FailedJobError as error:
        raise WorkFailedError(f"sbatch refused {array.name}: {' '.join(str(error).split())}") from None
    return [job.job_id for job in jobs]


def look_up(profile: Profile, jobs: Mapping[Edge, str]) -> dict[Edge, Seen]:
    """What the scheduler says of each element's job: one call of squeue and one of sacct, however many jobs.

    The queue knows what is alive, accounting what is over, so the queue's word counts more; either may be missing.
    When neither answers, no job is called anything but that.
    """
    if not jobs:
        return {}
    wanted = {job: key for key, job in jobs.items()}
    arrays = ",".join(sorted({job.partition("_")[0] for job in wanted}))
    found: dict[Edge, Seen] = {}
    queued: set[str] = set()
    failures = []
    for command in (
        ["sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode,JobName", "-j", arrays],
        ["squeue", "-h", "-r", "-t", "all", "-o", "%F_%K|%T|%r", "--me"],
    ):
        try:
            text = call(profile, command)
        except WorkFailedError as error:
            failures.append(str(error))
            continue
        for line in text.splitlines():
            job, state, reason, name = [*line.split("|"), "", "", ""][:4]
            if job not in wanted or name == "allocation":  # a row that accounting has not filled in yet
                continue
            if command[0] == "sacct":
                reason = "" if reason == "0:0" else f"exit {reason}"
            else:
                queued.add(job)
            found[wanted[job]] = Seen(state, "" if reason == "None" else reason)
    if len(failures) == 2:
        return {key: Seen(NO_ANSWER, failures[-1]) for key in jobs}
    if not any(failure.startswith("squeue") for failure in failures):
        for job, key in wanted.items():
            if key in found and job not in queued and found[key].state.split()[0] in LIVE:
                found[key] = Seen("FAILED", f"{found[key].state} in accounting, but no longer in the queue")
    return found


def unrecorded(run: Run, profile: Profile) -> list[str]:
    """Jobs of this run in the queue that no launch has on record: it was killed between sbatch and its note."""
    known = {job.partition("_")[0] for line in run.submissions() for job in line.get("jobs", [])}
    lines = call(profile, ["squeue", "-h", "-o", "%F|%j", "--me"]).splitlines()
    rows = [line.split("|", 1) for line in lines]
    return sorted({job for job, name in rows if name.startswith(f"{run.id}/") and job not in known})


def cancel(profile: Profile, jobs: Sequence[str]) -> None:
    """Cancel jobs; ids that are over already do not matter. The command is out of reach of Ctrl-C."""
    for start in range(0, len(jobs), 500):
        call(profile, ["scancel", "--quiet", *jobs[start : start + 500]])


def call(profile: Profile, command: Sequence[str]) -> str:
    """What a Slurm command prints; WorkFailedError with its own words when it fails."""
    environment = dict(word.split("=", 1) for word in _environment(profile))
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            start_new_session=True,  # Ctrl-C is for us: a half-sent scancel would help nobody
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise WorkFailedError(f"{command[0]}: {error}") from None
    if done.returncode != 0:
        raise WorkFailedError(f"{command[0]}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout
