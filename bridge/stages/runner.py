"""What surrounds every stage program: inputs checked before, the result sealed and published after."""

from __future__ import annotations

import importlib
import os
import shutil
import socket
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import bridge
from bridge.artifacts import is_sealed, open_artifact, publish, read_seal, seal
from bridge.config.profile import allocation
from bridge.config.stages import STAGE_KINDS, Resources, StageSettings
from bridge.config.tasks import parse_task
from bridge.errors import UserError, WorkFailedError
from bridge.graph import Edge
from bridge.record import external_digest
from bridge.runs import BusyError, Run, RunElement
from bridge.stages.exits import EXIT_FAILED, EXIT_REQUEUE, EXIT_SEALED
from bridge.stages.job import Job, StopEarlyError, StopFlag, limit_threads
from bridge.stages.limits import Watchdog, exhausted, spent

if TYPE_CHECKING:
    from bridge.stages.torchrun import Team

TURN_EVERY = 1.0  # seconds between two looks at whether another attempt has ended


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
    if _node() > 0:
        _follow(run, element, key, stop)
        raise SystemExit(EXIT_SEALED)
    with ExitStack() as turn:
        if not _take_turn(run, element, stop, turn):
            raise SystemExit(EXIT_REQUEUE)
        if is_sealed(run.artifact(key), element.fingerprint):
            shutil.rmtree(run.work(key), ignore_errors=True)
            raise SystemExit(EXIT_SEALED)
        code = _attempt(run, element, key, stop)
    raise SystemExit(code)


def _take_turn(run: Run, element: RunElement, stop: StopFlag, turn: ExitStack) -> bool:
    """Wait until no other process works on the element; False when asked to stop before that.

    Slurm starts a job again when its node is lost to it, but the node may be alive, and the first attempt go on.
    """
    told = False
    while not stop.requested:
        try:
            turn.enter_context(run.lock(f"{element.stage}.{element.index}", f"running {element.name} of"))
            return True
        except BusyError:
            if not told:
                _say(f"{element.name}: an earlier attempt is still running somewhere; waiting for its end")
            told = True
            time.sleep(TURN_EVERY)
    return False


def _attempt(run: Run, element: RunElement, key: Edge, stop: StopFlag) -> int:
    """One attempt, with its log and its start and end on record."""
    attempt = 1 + max((line.get("attempt", 0) for line in run.attempts(key)), default=0)
    log = run.log(key, attempt)
    log.parent.mkdir(parents=True, exist_ok=True)
    _redirect(log)
    started = time.time()
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    facts = {"attempt": attempt, "host": host, "pid": os.getpid(), "job": _job_id()}
    need = allocation(run.profile(), element.kind, Resources(**element.settings["resources"]))
    before = spent(run, key, _job_id())
    run.note_attempt(key, {"event": "start", "time": started, **facts})

    def note_end(code: int, reason: str) -> None:
        said = " ".join(reason.split())[:500]
        run.note_attempt(key, {"event": "end", "time": time.time(), **facts, "exit": code, "reason": said})

    code, reason = EXIT_FAILED, ""
    try:
        if why := exhausted(before, need):
            raise WorkFailedError(f"{element.name} is not started again: {why}")
        progress = run.work(key) / "progress.json"
        Watchdog(progress, sum(before), need, stop, lambda why: note_end(EXIT_FAILED, why)).start()
        _work(run, element, key, stop)
        code = EXIT_SEALED
    except StopEarlyError as error:
        code, reason = EXIT_REQUEUE, str(error) or "asked to stop; saved"
        if why := exhausted([*before, time.time() - started], need):
            code, reason = EXIT_FAILED, f"{reason}; not started again: {why}"
        _say(reason)
    except (UserError, WorkFailedError) as error:
        reason = str(error)
        _say(f"error: {reason}")
    except Exception as error:  # the process ends here: whatever went wrong is put on record and shown
        reason = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    note_end(code, reason)
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
        threads = _threads()
        limit_threads(threads)
        team = _lead(work, stop)
        settings = _settings(element)
        job = Job(
            label=element.name,
            settings=settings,
            task=parse_task(element.task, strict=False),
            inputs=_inputs(run, element),
            out=out,
            scratch=scratch,
            threads=threads,
            stop=stop,
        )
        if team is None:
            summary = importlib.import_module(f"bridge.stages.{element.kind}").run(job)
        else:
            summary = team.run(job, run.log(key, run.attempts(key)[-1]["attempt"]))
        made_by = f"{run.id}/{element.name}"
        seal(out, element.output, element.fingerprint, made_by, summary)
    publish(out, target)
    shutil.rmtree(work, ignore_errors=True)
    _say(f"{element.name}: sealed")


def _count(name: str) -> int:
    return int(os.environ.get(name) or 1)


def _node() -> int:
    """Which node of the element this runner is on. The one on node 0 is in charge; it alone records and seals."""
    return int(os.environ.get("SLURM_NODEID") or 0) if _count("BRIDGE_NODES") > 1 else 0


def _threads() -> int:
    """Threads of each process: the node's cores, shared out."""
    cores = int(os.environ.get("BRIDGE_CPUS") or os.cpu_count() or 1)
    return max(cores // _count("BRIDGE_PROCESSES"), 1)


def _lead(work: Path, stop: StopFlag) -> Team | None:
    """The processes that work on the element together, with this runner in charge; None where it works alone.

    They come together before anything can end this attempt: when it ends, the other nodes see it and leave.
    """
    nodes, processes = _count("BRIDGE_NODES"), _count("BRIDGE_PROCESSES")
    if nodes * processes == 1:
        return None
    _quieten_torch()
    from bridge.stages.torchrun import lead

    return lead(nodes, processes, work, stop)


def _follow(run: Run, element: RunElement, key: Edge, stop: StopFlag) -> None:
    """Start the workers of a node other than node 0, and stay until node 0's runner ends, which knows how it went.

    So this runner takes no lock, records nothing and always succeeds.
    """
    limit_threads(_threads())
    _quieten_torch()
    from bridge.stages.torchrun import Shape, follow

    shape = Shape(_count("BRIDGE_NODES"), _node(), _count("BRIDGE_PROCESSES"))
    follow(shape, run.work(key), stop, lambda: is_sealed(run.artifact(key), element.fingerprint), _redirect)


def _quieten_torch() -> None:
    """A closed connection is how processes learn that the work is over, and no reason for a page of C++ frames."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


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
