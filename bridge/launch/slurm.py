"""Slurm through submitit: submit arrays, ask for states, cancel. submitit's habits are worked around here alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.core.core import Job
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from bridge.config.profile import MAX_ARRAY, Profile
from bridge.errors import UserError, WorkFailedError
from bridge.graph import Array, Edge
from bridge.launch.script import sbatch_options
from bridge.launch.states import Seen, reconciled
from bridge.runs import Run
from bridge.stages.runner import run_element

TIMEOUT = 60  # seconds for one Slurm command
NO_ACCOUNTING = "accounting storage is disabled"  # in what sacct says on a cluster that has none


class ArrayExecutor(SlurmExecutor):
    """submitit's executor with our script, our environment, and per-job dependencies.

    What differs from submitit 1.5.4, and why: one element is an array too, so that all elements have ids of one form;
    the array keeps this class (submitit makes a plain SlurmExecutor, which loses every override); the id is read from
    `--parsable` output (submitit takes the first `job N` it sees, also from a banner); a dependency belongs to one
    submission (submitit's sticks to the executor); sbatch sees an explicit environment; tasks may have any numbers;
    and no part of a path is taken for a pattern.
    """

    def __init__(self, run: Run, array: Array, script: str, options: Sequence[str], profile: Profile) -> None:
        super().__init__(run.folder / "scripts" / array.name)
        self.run, self.array, self.script, self.options, self.profile = run, array, script, options, profile

    def _internal_process_submissions(self, delayed_submissions: list[utils.DelayedSubmission]) -> list[Job[Any]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        pickles = []
        for delayed in delayed_submissions:
            path = self.folder / f"{uuid.uuid4().hex}.pkl"
            delayed.set_timeout(0, 0)  # requeueing is the script's business alone
            delayed.dump(path)
            pickles.append(path)
        first = self._submit_command(self._submitit_command_str)
        jobs: list[Job[Any]] = []
        for task, path in zip(self.array.tasks, pickles, strict=True):
            jobs.append(SlurmJob(folder=self.folder, job_id=f"{first.job_id}_{task}", tasks=[0]))
            path.rename(self.folder / f"{jobs[-1].job_id}_submitted.pkl")
        return jobs

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # sbatch hands on all it has (--export=ALL), so it gets no more than a job may have. Variables are unset by
        # name: a secret must not stand on a command line, where everybody can read it.
        kept = {*_environment(self.profile), *self.profile.secrets}
        unset = [word for name in os.environ if name not in kept for word in ("-u", name)]
        conf = [f"SLURM_CONF={self.profile.slurm_conf}"] if self.profile.slurm_conf else []
        return ["env", *unset, *conf, "sbatch", *self.options, str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        text = string.decode() if isinstance(string, bytes) else string
        last = text.strip().rpartition("\n")[2]
        number = last.partition(";")[0]
        if not number.isdigit():
            raise WorkFailedError(f"sbatch printed no job id, but: {text.strip() or 'nothing'}")
        return number


def _environment(profile: Profile) -> dict[str, str]:
    """The environment of every Slurm command, and with it of jobs: nothing of an enclosing job or the shell gets in."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "USER", "LOGNAME", "SLURM_CONF") if name in os.environ}
    if profile.slurm_conf:
        kept["SLURM_CONF"] = profile.slurm_conf
    return kept


def require_slurm(profile: Profile, name: str) -> None:
    """UserError when there is no Slurm here, or its controller does not answer."""
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise UserError(f"profile {name}: this machine has no sbatch; run on a login node, or use --profile local")
    if profile.slurm_conf and not Path(profile.slurm_conf).is_file():
        raise UserError(f"profile {name}: slurm_conf {profile.slurm_conf} does not exist; is this the right machine?")
    try:
        config = call(profile, ["scontrol", "show", "config"])
    except WorkFailedError as error:
        raise UserError(f"profile {name}: the Slurm controller does not answer: {error}") from None
    limit = max_array_size(config)
    if limit is not None and profile.max_array is not None and profile.max_array > limit:
        what = f"max_array is {profile.max_array}, but this cluster's MaxArraySize is {limit}"
        raise UserError(f"profile {name}: {what}; write `max_array: {limit}` into the profile")
    require_secrets(profile, name)


def array_limit(profile: Profile) -> int:
    """How many tasks an array may have: what the profile says, else what the cluster does."""
    if profile.max_array is not None:
        return profile.max_array
    return max_array_size(call(profile, ["scontrol", "show", "config"])) or MAX_ARRAY


def max_array_size(config: str) -> int | None:
    """MaxArraySize in what `scontrol show config` prints."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)$", config, re.MULTILINE)
    return int(found[1]) if found else None


def require_secrets(profile: Profile, name: str) -> None:
    missing = [variable for variable in profile.secrets if variable not in os.environ]
    if missing:
        raise UserError(
            f"profile {name}: secrets: {', '.join(missing)} is not set in this shell; export it, then launch"
        )
    if profile.secrets_file is not None:
        path = Path(profile.secrets_file)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise UserError(f"profile {name}: secrets_file: {path}: {error.strerror}") from None
        if mode & 0o077:
            raise UserError(f"profile {name}: secrets_file: {path} can be read by others; run: chmod 600 {path}")


def submit(run: Run, array: Array, script: str, dependency: str | None, profile: Profile) -> list[str]:
    """Submit one array; the job id of each element, in order.

    Raises:
        WorkFailedError: sbatch refused; the message is sbatch's own.
    """
    executor = ArrayExecutor(run, array, script, sbatch_options(str(run.folder), array, dependency), profile)
    (run.folder / "logs" / array.stage).mkdir(parents=True, exist_ok=True)  # without it the job dies with no word
    folder = str(run.folder)
    count = len(array.elements)
    try:
        jobs = executor.map_array(run_element, [folder] * count, [array.stage] * count, list(array.elements))
    except utils.FailedJobError as error:
        raise WorkFailedError(f"sbatch refused {array.name}: {' '.join(str(error).split())}") from None
    return [job.job_id for job in jobs]


def release(profile: Profile, jobs: Sequence[str]) -> None:
    """Let go of arrays that were submitted on hold."""
    call(profile, ["scontrol", "release", ",".join(jobs)])


def look_up(run: Run, profile: Profile, jobs: Mapping[Edge, str]) -> dict[Edge, Seen]:
    """What the scheduler says of each element's job: one call of squeue and one of sacct, however many jobs.

    A cluster that lost its state gives numbers out again, so a row counts only if it bears the run's name (or none of
    ours: a job that was started by hand), and in the queue also its folder.
    """
    if not jobs:
        return {}
    wanted = {job: key for key, job in jobs.items()}
    arrays = sorted({job.partition("_")[0] for job in wanted})
    queue: dict[Edge, Seen] = {}
    accounting: dict[Edge, Seen] = {}
    silent: dict[str, str] = {}
    # Accounting is asked first: what it calls alive and the queue then does not hold has ended without its knowing.
    # A single job that is gone is an error to squeue; of several it shows those that are there.
    ids = ",".join(arrays if len(arrays) > 1 else arrays * 2)
    for found, command in (
        (accounting, ["sacct", "-X", "-n", "-P", "-o", "JobID,State,ExitCode,JobName", "-j", ids]),
        (queue, ["squeue", "-h", "-r", "-t", "all", "-o", "%F_%K|%T|%r|%j|%Z", "-j", ids]),
    ):
        try:
            text = call(profile, command)
        except WorkFailedError as error:
            if NO_ACCOUNTING not in str(error):
                silent[command[0]] = str(error)
            continue
        for line in text.splitlines():
            job, state, reason, name, folder = [*line.split("|", 4), "", "", "", ""][:5]
            if job not in wanted or name == "allocation":  # a row that accounting has not filled in yet
                continue
            if "/" in name and not _is_ours(run, name, folder):
                continue
            if command[0] == "sacct":
                reason = "" if reason == "0:0" else f"exit {reason}"
            found[wanted[job]] = Seen(state, "" if reason == "None" else reason)
    return {key: reconciled(queue.get(key), accounting.get(key), silent) for key in jobs}


def _is_ours(run: Run, name: str, folder: str) -> bool:
    """Whether a job is one of this run: by its name, and by its folder where that is known.

    The same experiment in another runs folder is another run with the same name.
    """
    return name.startswith(f"{run.id}/") and folder in ("", f"{run.folder}/code".partition("\n")[0])


def queued(run: Run, profile: Profile) -> dict[str, bool]:
    """The arrays of this run that are in the queue, on record or not → whether all that is left of one is pending."""
    found: dict[str, bool] = {}
    for line in call(profile, ["squeue", "-h", "-o", "%F|%T|%j|%Z", "--me"]).splitlines():
        job, state, name, folder = [*line.split("|", 3), "", "", ""][:4]
        if folder and _is_ours(run, name, folder):
            found[job] = found.get(job, True) and state == "PENDING"
    return found


def unrecorded(run: Run, profile: Profile) -> list[str]:
    """Jobs of this run in the queue that no launch has on record: it was killed between sbatch and its note."""
    known = {job.partition("_")[0] for line in run.submissions() for job in line.get("jobs", [])}
    return sorted(queued(run, profile).keys() - known)


def cancel(profile: Profile, jobs: Sequence[str]) -> None:
    """Cancel jobs; ids that are over already do not matter. The command is out of reach of Ctrl-C."""
    for start in range(0, len(jobs), 500):
        call(profile, ["scancel", "--quiet", *jobs[start : start + 500]])


def call(profile: Profile, command: Sequence[str], seconds: float = TIMEOUT) -> str:
    """What a Slurm command prints; WorkFailedError with its own words when it fails."""
    try:
        done = subprocess.run(
            command,
            env=_environment(profile),
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            start_new_session=True,  # Ctrl-C is for us: a half-sent scancel would help nobody
        )
    except subprocess.TimeoutExpired:
        raise WorkFailedError(f"{command[0]}: no answer within {seconds:.0f} s") from None
    except OSError as error:
        raise WorkFailedError(f"{command[0]}: {error}") from None
    if done.returncode != 0:
        raise WorkFailedError(f"{command[0]}: {' '.join(done.stderr.split()) or f'exit code {done.returncode}'}")
    return done.stdout
