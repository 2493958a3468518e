"""YAML as people expect it: `5e-6` is a number, a key given twice is an error, every value has a line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from bridge.errors import UserError

Raw = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with exponents that need no dot, and without yes/no/on/off, dates, octal and base-60 numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rules if not tag.endswith((":float", ":bool", ":timestamp", ":int"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.inf|\.nan)$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?\d[\d_]*$"), list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(true|True|false|False)$"), list("tTfF"))


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Raw:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise yaml.MarkedYAMLError(problem=f"the key {key!r} is not text", problem_mark=key_node.start_mark)
        if key in seen:
            raise yaml.MarkedYAMLError(problem=f"the key {key!r} is given twice", problem_mark=key_node.start_mark)
        seen.add(key)
    return {str(loader.construct_object(key)): loader.construct_object(value, deep=True) for key, value in node.value}


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))


def read_mapping(path: Path) -> tuple[str, Raw]:
    """The text of a YAML file and the mapping that it holds.

    Raises UserError when the file cannot be read, is no YAML, or is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text") from None
    return text, parse_mapping(text, str(path))


def parse_mapping(text: str, name: str) -> Raw:
    """The mapping in a YAML text; `name` is the file, for messages."""
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise UserError(f"{where}: {error.problem or 'not valid YAML'}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise UserError(f"{name}: must be a mapping of keys to values, but is {type(value).__name__}")
    return value


def scalar(text: str) -> Any:
    """A value given on the command line, read as YAML: `3`, `1e-4`, `[0, 1]`, `{a: 1}`, `text`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError, ValueError):
        return text


def line_of(text: str, path: tuple[str | int, ...]) -> int | None:
    """The line (from 1) on which the value at `path` begins, or the deepest part of the path that is there."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError:
        return None
    line = None
    for part in path:
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == part), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line
