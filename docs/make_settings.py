"""Writes docs/settings.md from the settings classes, so that every setting is documented where it is defined.

.venv/bin/python docs/make_settings.py
"""

from __future__ import annotations

from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from bridge.config.experiment import Experiment
from bridge.config.images import Base, Built, Image, Lock
from bridge.config.profile import Allocation, Profile
from bridge.config.stages import STAGE_KINDS, Behavior, Resources, StageSettings, Starts
from bridge.config.tasks import TASKS, OwnTask, Style

HEAD = """\
# Every setting

This page is made from the code by `.venv/bin/python docs/make_settings.py`; a test holds that it is current.

An experiment file is YAML. An unknown key or a wrong type is refused with the line, the field and the nearest valid
name. On the command line every setting is reachable by its path: `stages.sft.lr=1e-5`, `task.ops=[15,20]`, `seed=1`.
The same paths are the keys of `sweep`.
"""


WORDS = {str: "text", bool: "true or false", int: "whole number", float: "number", type(None): "nothing", Any: "any"}


def type_name(annotation: Any) -> str:
    """A type as people read it."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        names = [type_name(argument) for argument in arguments]
        return " or ".join(dict.fromkeys(names))
    if origin is list:
        return f"list of {type_name(arguments[0])}"
    if origin is tuple:
        return f"{len(arguments)} × {type_name(arguments[0])}"
    if origin is dict:
        return f"mapping of {type_name(arguments[0])} to {type_name(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, StageSettings):
        return "stage"
    return WORDS.get(annotation, "mapping")


def table(model: type[BaseModel], leave_out: frozenset[str] = frozenset()) -> str:
    """The fields of a settings class as a Markdown table."""
    rows = ["| setting | type | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in model.model_fields.items():
        if name in leave_out:
            continue
        default = "required" if field.default is PydanticUndefined else f"`{field.default!r}`"
        if isinstance(field.default, BaseModel):
            default = "see below"
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        rows.append(f"| `{name}` | {type_name(field.annotation)} | {default} | {meaning} |")
    return "\n".join(rows)


def section(title: str, model: type[BaseModel], level: int = 2, leave_out: frozenset[str] = frozenset()) -> str:
    """A heading, the class's own words, and its table."""
    words = " ".join((model.__doc__ or "").split())
    return f"{'#' * level} {title}\n\n{words}\n\n{table(model, leave_out)}\n"


def page() -> str:
    """The whole page."""
    parts = [HEAD, section("The experiment", Experiment)]
    for kind, model in STAGE_KINDS.items():
        parts.append(section(f"Stage `{kind}`", model, leave_out=frozenset({"kind"})))
    parts += [
        section("`resources` of a stage", Resources),
        section("`behavior` of a data stage", Behavior),
        section("`starts` of an rl stage", Starts),
        *(section(f"Task `{name}`", model, leave_out=frozenset({"name"})) for name, model in TASKS.items()),
        section("`style` of the task `igsm`", Style),
        section("A task of yours", OwnTask),
        section("A profile (`slurm/*.yaml`)", Profile),
        section("`defaults` and `stages.KIND` of a profile", Allocation),
        section("An image (`containers/images.yaml`, `images.NAME`)", Image),
        section("`base` of an image", Base),
        section("`lock` and `flash_attn` of an image", Lock),
        section("One entry of `built` of an image", Built),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    Path(__file__).with_name("settings.md").write_text(page(), encoding="utf-8")
