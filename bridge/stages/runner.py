"""What surrounds every stage program: inputs checked before, the result sealed and published after."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import sys
import time
import traceback
from pathlib import Path

import bridge
from bridge.artifacts import is_sealed, open_artifact, publish, read_seal, seal
from bridge.config.stages import STAGE_KINDS, StageSettings
from bridge.config.tasks import TaskSettings
from bridge.errors import UserError
from bridge.graph import Edge
from bridge.record import external_digest
from bridge.runs import Run, RunElement
from bridge.stages.exits import EXIT_FAILED, EXIT_REQUEUE, EXIT_SEALED
from bridge.stages.job import Job, StopEarlyError, StopFlag, limit_threads


def run_element(run_folder: str, stage: str, index: int) -> None:
    """Run one element of a run to its seal, and leave the process with the exit code of the contract.

    This is what the pickle of a submitted job refers to, by name and with plain strings, so that the Python inside
    a container need not be the one that submitted.
    """
    stop = StopFlag()
    stop.listen()
    run = Run(Path(run_folder))
    key = Edge(stage, index)
    if key not in run.elements:
        raise SystemExit(f"{run.id}: there is no element {stage}/{index}")
    element = run.elements[key]
    with run.lock(f"{stage}.{index}", f"running {element.name} of"):
        if is_sealed(run.artifact(key), element.fingerprint):
            shutil.rmtree(run.work(key), ignore_errors=True)
            raise SystemExit(EXIT_SEALED)
        code = _attempt(run, element, key, stop)
    raise SystemExit(code)


def _attempt(run: Run, element: RunElement, key: Edge, stop: StopFlag) -> int:
    """One attempt, with its log and its start and end on record."""
    attempt = 1 + max((line.get("attempt", 0) for line in run.attempts(key)), default=0)
    log = run.log(key, attempt)
    log.parent.mkdir(parents=True, exist_ok=True)
    _redirect(log)
    started = time.time()
    facts = {"attempt": attempt, "host": socket.gethostname(), "pid": os.getpid(), "job": _job_id()}
    run.note_attempt(key, {"event": "start", "time": started, **facts})
    code, reason = EXIT_FAILED, ""
    try:
        _work(run, element, key, stop)
        code = EXIT_SEALED
    except StopEarlyError as error:
        code, reason = EXIT_REQUEUE, str(error) or "asked to stop; saved"
        _say(reason)
    except UserError as error:
        reason = str(error)
        _say(f"error: {reason}")
    except Exception as error:  # the process ends here: whatever went wrong is put on record and shown
        reason = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    reason = " ".join(reason.split())[:500]
    run.note_attempt(key, {"event": "end", "time": time.time(), **facts, "exit": code, "reason": reason})
    return code


def _work(run: Run, element: RunElement, key: Edge, stop: StopFlag) -> None:
    """Inputs → stage program → seal → publish. Everything before `publish` may be killed at any moment."""
    _check_code(run)
    target, work = run.artifact(key), run.work(key)
    if target.exists():  # damaged, or not ours: nothing is ever lost, so it is moved aside
        aside = target.with_name(f".{key.element}.damaged-{time.time_ns()}")
        target.rename(aside)
        _say(f"{target}: was no whole artifact of this run; it is kept as {aside.name}")
    out, scratch = work / "out", work / "scratch"
    for folder in (out, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    os.environ["BRIDGE_PROGRESS"] = str(work / "progress.json")
    if not is_sealed(out, element.fingerprint):
        threads = int(os.environ.get("BRIDGE_CPUS") or os.cpu_count() or 1)
        limit_threads(threads)
        settings = _settings(element)
        job = Job(
            label=element.name,
            settings=settings,
            task=TaskSettings.model_validate(element.task, strict=False),
            inputs=_inputs(run, element),
            out=out,
            scratch=scratch,
            threads=threads,
            stop=stop,
        )
        summary = importlib.import_module(f"bridge.stages.{element.kind}").run(job)
        made_by = f"{run.id}/{element.name}"
        seal(out, element.output, element.fingerprint, made_by, summary)
    publish(out, target)
    shutil.rmtree(work, ignore_errors=True)
    _say(f"{element.name}: sealed")


def _settings(element: RunElement) -> StageSettings:
    return STAGE_KINDS[element.kind].model_validate(element.settings, strict=False)


def _inputs(run: Run, element: RunElement) -> dict[str, Path]:
    """Each input's folder, its seal and every file checked."""
    wanted = STAGE_KINDS[element.kind].input_kinds
    found = {}
    for field, source in element.inputs.items():
        if isinstance(source, Edge):
            folder = run.artifact(source)
            if open_artifact(folder, wanted[field]).fingerprint != run.elements[source].fingerprint:
                raise UserError(f"{folder}: is not the artifact of this run that {element.name} needs")
            found[field] = folder
        else:
            found[field] = Path(source.text)
            recorded = next(e["digest"] for e in run.record["externals"].values() if e["path"] == source.text)
            if external_digest(source.text, wanted[field], f"{element.name}: {field}")["digest"] != recorded:
                raise UserError(f"{source.text}: was changed after the launch; launch the experiment again")
            if read_seal(found[field]) is not None:
                open_artifact(found[field], wanted[field])
    return found


def _check_code(run: Run) -> None:
    """The code that runs must be the snapshot of this run, not whatever happens to be installed."""
    here, there = Path(bridge.__file__).resolve().parent, (run.folder / "code" / "bridge").resolve()
    if here != there:
        raise UserError(
            f"the code comes from {here}, not from the run's snapshot; start with PYTHONPATH={there.parent}"
        )


def _job_id() -> str | None:
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array and task:
        return f"{array}_{task}"
    return os.environ.get("SUBMITIT_LOCAL_JOB_ID")


def _redirect(log: Path) -> None:
    """Everything that this process and its children print goes to the attempt's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
