"""A user's own task: a class in a Python file (docs/tasks.md)."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import bridge
from bridge.config.base import Settings
from bridge.config.problems import named, refuse, sentences
from bridge.config.tasks import OwnTask
from bridge.config.words import nearest
from bridge.errors import UserError
from bridge.tasks.base import Task
from bridge.tasks.grading import KINDS

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

    Raises UserError if the file is not the one of the launch, cannot be imported, or has no such class, and for every
    setting that the class does not know.
    """
    if settings.sha256 is None or settings.file is None:
        settings = resolve(settings)
    copied = Path(bridge.__file__).parent.parent / snapshot(settings)
    path = copied if copied.is_file() else Path(str(settings.file))
    code = content(path)
    if hashlib.sha256(code).hexdigest() != settings.sha256:
        raise UserError(f"{path}: was changed after the launch; launch the experiment again")
    cls = _class(settings, path)
    return cls(_settings(settings, cls))  # type: ignore[no-any-return]


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
        except Exception as error:  # whatever the user's file raises
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
