"""Single steps from the command line, outside of a run: the same stage programs, the same files."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from bridge.artifacts import publish, read_seal, seal
from bridge.config.base import Settings
from bridge.config.experiment import parse_overrides
from bridge.config.grading import Grading
from bridge.config.problems import named, refuse, sentences
from bridge.config.stages import DataSettings, EvalSettings
from bridge.config.tasks import OWN, TASKS, FileTask, IgsmSettings, OwnTask, TaskSettings
from bridge.config.words import nearest
from bridge.errors import UserError
from bridge.graph import digest
from bridge.record import code_digest, external_digest
from bridge.runs import user_path
from bridge.stages.job import Job, StopEarlyError, StopFlag, limit_threads
from bridge.tasks import resolve_task

Json = dict[str, Any]
DATA_SETTINGS = ("behavior", "solution_orders", "premise_orders")
"""The settings of a data stage that `bridge-rl data` takes as KEY=VALUE beside the task's."""
S = TypeVar("S", bound=Settings)


def task_settings(name: str, pairs: Sequence[tuple[str, Any]]) -> TaskSettings:
    """A task by name, with (path, value) settings, its data or file found."""
    model = OwnTask if re.fullmatch(OWN, name) else TASKS.get(name)
    if model is None:
        raise UserError(f"there is no task {name!r}{nearest(name, [*TASKS, 'FILE.py:CLASS'])}")
    return resolve_task(_validated(model, {"name": name}, pairs, f"task {name}"))  # type: ignore[arg-type]


def _validated(model: type[S], raw: Json, pairs: Sequence[tuple[str, Any]], what: str) -> S:
    raw = dict(raw)
    for path, value in pairs:
        node = raw
        *parents, last = path.split(".")
        for part in parents:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UserError(f"{what}: {path}: {part} has no settings below it")
        node[last] = value
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        problems = [named(path, sentence) for path, sentence in sentences(error, {(): model.model_fields})]
        raise refuse(what, problems) from None


# ---- data


def write_data(
    task: str, split: str, size: int | None, seed: int, output: Path, tokenizer: str | None, settings: Sequence[str]
) -> Json:
    """`bridge-rl data`: write one split of a task to a file; its description."""
    from bridge.progress import progress
    from bridge.stages.data import write_split
    from bridge.stages.datacheck import Lengths

    pairs = parse_overrides(settings)
    own = [(path, value) for path, value in pairs if path.split(".")[0] in DATA_SETTINGS]
    raw = {"kind": "data", "split": split, "size": size, "seed": seed}
    data = _validated(DataSettings, raw, own, f"data {task}")
    if output.suffix not in (".parquet", ".json"):
        raise UserError(f"{output}: the output must end in .parquet, or in .json for R³'s form")
    _require_new(output)
    if not output.parent.is_dir():
        raise UserError(f"{output.parent}: there is no such folder")
    chosen = task_settings(task, [pair for pair in pairs if pair not in own])
    lengths = Lengths(tokenizer) if tokenizer else None
    look = lengths.add if lengths else lambda row: None
    with _work_folder(output, "data") as work:
        try:
            _require_new(output)  # again: another process may just have made it
            made = work / "out" / output.name
            # a task of the user's may print, and standard output is for the summary
            with progress("data", size, "rows") as meter, redirect_stdout(sys.stderr):
                summary = write_split(chosen, data, made, meter.advance, look, len(os.sched_getaffinity(0)))
            made.rename(output)
        finally:
            shutil.rmtree(work)
    return summary | ({"tokens": lengths.summary()} if lengths else {})


def _require_new(output: Path) -> None:
    if output.exists():
        raise UserError(f"{output}: exists already; choose another name or remove it")


def describe_data(summary: Json, output: Path) -> str:
    """The summary for people."""
    rejected = ", ".join(f"{count} {why}" for why, count in summary["rejected"].items()) or "none"
    shown = list(summary["answers"].items())[:8]
    answers = ", ".join(f"{answer} ({count})" for answer, count in shown)
    lines = [
        f"{output}: {summary['rows']} rows; rejected: {rejected}",
        f"most common answers: {answers}{', …' if len(summary['answers']) > len(shown) else ''}",
    ]
    for part, found in summary.get("tokens", {}).items():
        lines.append(f"{part}: {' '.join(f'{name} {value}' for name, value in found.items())} tokens")
    return "\n".join(lines)


# ---- eval


def evaluate(model: str, task: str, output: Path, samples: int, limit: int | None, settings: Sequence[str]) -> Json:
    """`bridge-rl eval`: sample, grade and score a model; what its eval.json holds.

    The work lies in a sibling of `output` until it is sealed, so the same command again goes on where it stopped.
    """
    chosen, of_task = _eval_settings(model, task, samples, limit, settings)
    source = external_digest(model if "/" in model else f"./{model}", "model", "MODEL")
    data = external_digest(task, "dataset", "--task") if _is_file(task) else None
    parts = [source["digest"], data and data["digest"], of_task.identity(), chosen.model_dump(mode="json")]
    fingerprint = digest([*parts, code_digest()])
    output = user_path(str(output)).absolute()
    found = read_seal(output)
    if found is None or found.fingerprint != fingerprint:
        if output.exists():
            raise UserError(f"{output}: exists already and holds something else; choose another folder")
        inputs = {"model": Path(source["path"])} | ({"data": Path(data["path"])} if data else {})
        with _work_folder(output, fingerprint) as work:
            try:
                _run_eval(work, chosen, of_task, inputs, fingerprint)
            except UserError:
                if not any((work / "scratch").iterdir()):  # refused before anything was sampled: leave nothing
                    shutil.rmtree(work)
                raise
            publish(work / "out", output)
            shutil.rmtree(work)
    result: Json = json.loads((output / "eval.json").read_text(encoding="utf-8"))
    return result


def _is_file(task: str) -> bool:
    return not re.fullmatch(OWN, task) and ("/" in task or task.endswith((".parquet", ".jsonl", ".json")))


def _eval_settings(
    model: str, task: str, samples: int, limit: int | None, settings: Sequence[str]
) -> tuple[EvalSettings, TaskSettings]:
    pairs = parse_overrides(settings)
    of_task = [(path.removeprefix("task."), value) for path, value in pairs if path.startswith("task.")]
    rest = [(path, value) for path, value in pairs if not path.startswith("task.")]
    if _is_file(task) and of_task:
        raise UserError(f"task.{of_task[0][0]}: --task is a dataset, whose problems are what they are; leave this out")
    raw: Json = {"kind": "eval", "model": model, "data": task, "samples": samples}
    if limit is not None:
        raw["limit"] = limit
    chosen = _validated(EvalSettings, raw, rest, "eval")
    return chosen, IgsmSettings(name="igsm") if _is_file(task) else task_settings(task, of_task)


@contextmanager
def _work_folder(output: Path, fingerprint: str) -> Iterator[Path]:
    """The folder in which `output` is made; what another request left there is thrown away. Held by one process."""
    work = output.with_name(f".{output.name}.work")
    try:
        work.mkdir(exist_ok=True)
        with (work / "lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"{output}: another process is making it right now; try again later") from None
            mark = work / "fingerprint"
            if not mark.is_file() or mark.read_text(encoding="utf-8") != fingerprint:
                for name in ("out", "scratch", "data"):
                    shutil.rmtree(work / name, ignore_errors=True)
            for name in ("out", "scratch"):
                (work / name).mkdir(exist_ok=True)
            mark.write_text(fingerprint, encoding="utf-8")
            yield work
    except OSError as error:
        raise UserError(f"{output}: cannot be written: {error.strerror}") from None


def _run_eval(work: Path, chosen: EvalSettings, task: TaskSettings, inputs: Json, fingerprint: str) -> None:
    threads = int(os.environ.get("BRIDGE_CPUS") or os.cpu_count() or 1)
    limit_threads(threads)
    from bridge.stages import eval as stage

    inputs.setdefault("data", work / "data")
    if inputs["data"] == work / "data":
        _test_split(work / "data", task, None if isinstance(task, FileTask) else chosen.limit or 500)
    stop = StopFlag()
    stop.listen()
    try:
        summary = stage.run(Job("eval", chosen, task, inputs, work / "out", work / "scratch", threads, stop))
    except StopEarlyError:
        raise KeyboardInterrupt from None
    seal(work / "out", "eval", fingerprint, "bridge-rl eval", summary)


def _test_split(folder: Path, task: TaskSettings, size: int | None) -> None:
    from bridge.stages import data

    if not (folder / "dataset.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        settings = DataSettings(kind="data", split="test", size=size)
        data.run(Job("data", settings, task, {}, folder, folder, 1))


# ---- grade, convert, inspect


def grade_file(source: Path, output: Path, settings: Sequence[str]) -> Json:
    """`bridge-rl grade`: grade the rows of a file; what is counted, and the policy that was in force."""
    from bridge.progress import progress
    from bridge.tasks.grading import grade_rows

    policy = _validated(Grading, {}, parse_overrides(settings), "grade")
    if not output.name or output.is_dir():
        raise UserError(f"{str(output)!r}: the output must be a file name, such as graded.jsonl")
    if output.exists() and source.exists() and output.samefile(source):
        raise UserError(f"{output}: is the input, which would be lost; choose another name")
    with progress("grade", source.stat().st_size if source.is_file() else 0, "bytes") as meter:
        summary = grade_rows(source, output, meter.advance, policy)
    return {**summary._asdict(), "grading": policy.model_dump(mode="json")}


def describe_grades(summary: Json, output: Path) -> str:
    """The summary in one line."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in summary["reasons"].items())
    return f"{output}: {summary['rows']} rows, {summary['correct']} correct ({reasons or 'the input was empty'})"


def audit_file(source: Path, output: Path, url: str, model: str, key_env: str | None, limit: int | None) -> Json:
    """`bridge-rl audit`: a judge's verdicts on the rows that were graded wrong or no_answer; what is counted."""
    from bridge.progress import progress
    from bridge.tasks.grading.audit import Judge, audit, audited

    if not url.startswith(("http://", "https://")):
        raise UserError(f"--judge {url}: must be the base URL of an API, such as http://localhost:8000/v1")
    if key_env is not None and not os.environ.get(key_env):
        raise UserError(f"--key-env {key_env}: this variable is not set; export it with the key of the endpoint")
    if not output.parent.is_dir():
        raise UserError(f"{output.parent}: there is no such folder")
    if not source.exists():
        raise UserError(f"{source}: there is no such file; name a graded file or an evaluation")
    total = sum(1 for _ in islice(audited(source), limit))
    judge = Judge(url, model, os.environ[key_env] if key_env else None)
    with progress("audit", total, "rows") as meter:
        return audit(source, output, judge, limit, meter.advance)


def describe_audit(summary: Json, output: Path) -> str:
    """The summary in one line."""
    parts = [
        f"{counts.get('right', 0)} of {sum(counts.values())} graded {reason} are right"
        for reason, counts in summary["verdicts"].items()
    ]
    return f"{output}: in the view of {summary['judge']}, {' and '.join(parts)}"
