"""A user's own task: a class in a Python file (docs/tasks.md)."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import bridge
from bridge.config.base import Settings
from bridge.config.problems import named, refuse, sentences
from bridge.config.tasks import OwnTask
from bridge.config.words import nearest
from bridge.errors import UserError
from bridge.tasks.base import Example, Split, Task, Writer
from bridge.tasks.grading import KINDS, canonical

FOLDER = "own_tasks"
"""Beside the package in a run's code: where the files of own tasks lie."""


def resolve(settings: OwnTask) -> OwnTask:
    """The settings with the file's place and digest, after the class was loaded and accepted the other settings.

    Raises UserError naming the file.
    """
    path = Path(settings.name.rpartition(":")[0]).expanduser().absolute()
    digest = hashlib.sha256(content(path)).hexdigest()
    if settings.sha256 not in (None, digest):
        raise UserError(
            f"task {settings.name}: {path} is not the file that sha256 names; correct sha256 or leave it out"
        )
    found = settings.model_copy(update={"file": str(path), "sha256": digest})
    load(found)
    return found


def content(path: Path) -> bytes:
    """The bytes of a task file. Raises UserError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"task {path.name}: {path}: cannot be read: {error.strerror}") from None


def snapshot(settings: OwnTask) -> str:
    """Where the file lies in a run's code folder. Files of one name and different content do not meet there."""
    return f"{FOLDER}/{str(settings.sha256)[:16]}/{Path(settings.name.rpartition(':')[0]).name}"


def load(settings: OwnTask) -> Task:
    """The task that a class makes of the settings: of the run's copy of the file in a job, else of the file itself.

    Raises UserError if the file is not the one of the launch, cannot be imported, or has no such class, for every
    setting that the class does not know, and for whatever the class raises.
    """
    if settings.sha256 is None or settings.file is None:
        settings = resolve(settings)
    copied = Path(bridge.__file__).parent.parent / snapshot(settings)
    path = copied if copied.is_file() else Path(str(settings.file))
    code = content(path)
    if hashlib.sha256(code).hexdigest() != settings.sha256:
        raise UserError(f"{path}: was changed after the launch; launch the experiment again")
    with redirect_stdout(sys.stderr):  # what the file prints must not stand between our own results
        cls = _class(settings, path)
        values = _settings(settings, cls)
        try:
            task: Task = cls(values)
            facts = (task.answer_kind, task.response_prefix, task.worded, task.vocabulary)
        except (Exception, SystemExit) as error:
            raise _told(error, path, f"class {cls.__name__} cannot be used") from error
    if not (facts[0] in KINDS and isinstance(facts[1], str) and isinstance(facts[2], bool) and callable(facts[3])):
        raise UserError(f"{path}: class {cls.__name__} needs the fields of bridge.tasks.Task; name that as its base")
    return task


def rows(
    task: Task, name: str, split: Split, size: int | None, seed: int, writer: Writer | None, rejected: Counter[str]
) -> Iterator[Example]:
    """The rows of a user's task, each looked at: its code may do anything.

    Raises UserError for whatever it raises, for a row that is none, and for more rows than were asked for.
    """
    number = 0
    try:
        for row in task.rows(split, size, seed, writer, rejected):
            if number == size:
                raise UserError(f"task {name}: rows: gives more than the {size} rows asked for")
            if fault := _fault(row, task.answer_kind):
                raise UserError(f"task {name}: rows: row {number}: {fault}")
            yield row
            number += 1
    except (Exception, SystemExit) as error:
        if isinstance(error, UserError):
            raise
        path = Path(str(getattr(sys.modules.get(type(task).__module__), "__file__", name)))
        raise _told(error, path, f"rows: failed after {number} rows") from error


def _fault(row: object, kind: str) -> str:
    """What is wrong with something that should be a row; empty if nothing is."""
    if not isinstance(row, Example):
        return f"must be a bridge.tasks.Example, not {type(row).__name__}"
    turns = row.prompt if isinstance(row.prompt, list) else []
    texts = [turn.get(field) for turn in turns if isinstance(turn, dict) for field in ("role", "content")]
    if not turns or len(texts) != 2 * len(turns) or not all(isinstance(text, str) for text in texts):
        return "`prompt` must be a list of {role, content}, both text, and not empty"
    said: list[object] = [row.id, row.gold, "" if row.response is None else row.response]
    if not all(isinstance(text, str) for text in said):
        return "`id` and `gold` must be text, and `response` text or None"
    try:
        canonical(row.gold, kind)
    except UserError as error:
        return str(error)
    return ""


def _told(error: BaseException, path: Path, what: str) -> UserError:
    """An error of a user's code, with its line there."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f"{path}, line {lines[-1]}" if lines else str(path)
    return UserError(f"{where}: {what}: {type(error).__name__}: {error}")


def _class(settings: OwnTask, path: Path) -> Any:
    """The class that `FILE.py:CLASS` names."""
    wanted = settings.name.rpartition(":")[2]
    name = f"bridge_own_task_{settings.sha256}"
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pydantic look their module up here
        try:
            with _only_installed(path):
                spec.loader.exec_module(module)
        except (Exception, SystemExit) as error:  # whatever the user's file raises
            del sys.modules[name]
            raise UserError(
                f"{path}: cannot be imported: {type(error).__name__}: {error} (a task is one file, which imports only "
                "installed packages)"
            ) from error
    cls = getattr(module, wanted, None)
    if not isinstance(cls, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and value.__module__ == name]
        raise UserError(f"{path}: there is no class {wanted!r}{nearest(wanted, classes)}")
    if not (callable(getattr(cls, "rows", None)) and getattr(cls, "rows", None) is not Task.rows):
        raise UserError(f"{path}: class {wanted} needs a method `rows` (docs/tasks.md)")
    if getattr(cls, "answer_kind", None) not in KINDS:
        raise UserError(f"{path}: class {wanted} needs `answer_kind`, one of {', '.join(KINDS)}")
    return cls


@contextmanager
def _only_installed(path: Path) -> Iterator[None]:
    """A task that imports a file beside it would work here and not in a job, which has the one file."""
    before = sys.path[:]
    beside = {path.parent.resolve(), Path.cwd()}
    package = Path(bridge.__file__).parent.parent.resolve()
    sys.path[:] = [p for p in before if Path(p or ".").resolve() not in beside - {package}]
    try:
        yield
    finally:
        sys.path[:] = before


def _settings(settings: OwnTask, cls: Any) -> Settings:
    """The task's own settings, as the class's `Settings` understands them."""
    model = getattr(cls, "Settings", Settings)
    if not (isinstance(model, type) and issubclass(model, Settings)):
        raise UserError(f"{settings.file}: {cls.__name__}.Settings must be a class made from bridge.tasks.Settings")
    try:
        return model.model_validate(settings.model_extra or {})
    except ValidationError as error:
        problems = [named(("task", *path), said) for path, said in sentences(error, {(): model.model_fields})]
        raise refuse(f"task {settings.name}", problems) from None
