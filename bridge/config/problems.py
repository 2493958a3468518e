"""Turns what pydantic reports into sentences that name the file, the line, the field and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from bridge.config.words import nearest
from bridge.errors import UserError


def sentences(
    error: ValidationError,
    keys: Mapping[tuple[str | int, ...], Iterable[str]],
    kinds: Mapping[str, Iterable[str]] | None = None,
) -> list[tuple[list[str | int], str]]:
    """(path, sentence) for each problem. `keys` maps a path to the keys that may stand there, `kinds` a field that
    decides what the others may be (a stage's `kind`, a task's `name`) to what is known."""
    kinds = kinds or {}
    found = []
    for item in error.errors(include_url=False):
        path = [part for part in item["loc"] if part != "[key]"]
        kind = item["type"]
        if kind == "extra_forbidden":
            valid = keys.get(tuple(path[:-1]), ())
            text = f"unknown key{nearest(str(path[-1]), valid)}"
        elif kind == "missing":
            text = "is required"
        elif kind == "union_tag_invalid":
            path.append(field := _decides(item["ctx"]))
            text = f"unknown {field} {item['ctx']['tag']!r}{nearest(item['ctx']['tag'], kinds.get(field, ()))}"
        elif kind == "union_tag_not_found":
            path.append(field := _decides(item["ctx"]))
            text = f"is required; known: {', '.join(kinds.get(field, ()))}"
        elif kind == "value_error":
            text = str(item["ctx"]["error"])
        else:
            text = item["msg"][0].lower() + item["msg"][1:]
            if not isinstance(item["input"], dict | BaseModel):
                text += f", but it is {item['input']!r}"
        found.append((path, text))
    return found


def _decides(context: Mapping[str, Any]) -> str:
    """The field that a union looks at: pydantic says `'kind'`, or `_name()` where a function looks."""
    return str(context["discriminator"]).strip("'_()")


def named(path: Iterable[str | int], sentence: str) -> str:
    """`path.to.field: sentence`; a problem of the whole has no path."""
    words = ".".join(map(str, path))
    return f"{words}: {sentence}" if words else sentence


def refuse(name: str, problems: list[str]) -> UserError:
    """One error for all problems of a file."""
    if len(problems) == 1:
        return UserError(f"{name}: {problems[0]}" if not problems[0].startswith(name) else problems[0])
    return UserError(f"{name}: {len(problems)} problems\n" + "\n".join(f"  {p}" for p in problems))
