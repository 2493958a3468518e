"""Sources made by `torch.save` with whole tensors: one file, or Hugging Face's `pytorch_model*.bin` set."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.convert.dtypes import CASTABLE
from bridge.convert.names import check_names, clean_names, find_weights
from bridge.convert.pickles import Object, Sharded, TensorRef
from bridge.convert.places import inside, read_json
from bridge.convert.source import IncompleteError, Source
from bridge.convert.torchfile import TorchFile, integer, read_torch
from bridge.errors import UserError

_NUMBERED = re.compile(r"(.*)-(\d{1,6})-of-(\d{1,6})(\.\w+)")


@dataclass
class _Part:
    """The weights of one file, under the names they have there."""

    content: TorchFile
    references: dict[str, TensorRef]
    dropped: list[str]
    wrapper: tuple[str, ...]


def open_file(path: Path) -> Source:
    """One torch.save file as a Source. The caller closes it; on an error it is closed here."""
    with Source("torch", path).opening() as source:
        _fill(source, [_read_part(source, path)])
    return source


def open_index(path: Path) -> Source:
    """The files that a `pytorch_model.bin.index.json` names, as one Source."""
    weight_map = read_weight_map(path)
    paths = {name: inside(path.parent, name) for name in dict.fromkeys(weight_map.values())}
    missing = [name for name, file in paths.items() if not file.exists()]
    if missing:
        raise IncompleteError(f"{path}: {len(missing)} of its {len(paths)} files are missing: {', '.join(missing[:5])}")
    with Source("hf-bin", path).opening() as source:
        parts = {name: _read_part(source, file) for name, file in paths.items()}
        for tensor, name in weight_map.items():
            if tensor not in parts[name].references:
                raise UserError(f"{paths[name]}: lacks the tensor {tensor[:120]!a} that the index promises")
        _fill(source, list(parts.values()))
    return source


def read_weight_map(path: Path) -> dict[str, str]:
    """Tensor name -> file name of a Hugging Face index; UserError if the file is none. Names are not checked."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(f, str) for f in weight_map.values()):
        raise UserError(f"{path}: its weight_map does not map tensor names to file names; copy it again")
    return weight_map


def tensors_of(state: dict[Any, Any], where: str) -> tuple[dict[str, TensorRef | Sharded], list[str]]:
    """The named tensors of a state dict, and the names of its other entries.

    UserError for a tensor that is sparse or packed, or whose name is no text.
    """
    references: dict[str, TensorRef | Sharded] = {}
    dropped = []
    for name, value in state.items():
        if isinstance(value, (TensorRef, Sharded)):
            if not isinstance(name, str):
                shown = name if isinstance(name, int) else type(name).__name__
                raise UserError(f"{where}: a tensor has the name {shown}, which is no text; save model.state_dict()")
            references[name] = value
        elif isinstance(value, Object) and value.kind.name.startswith("torch._utils._rebuild_"):
            kind = value.kind.name.removeprefix("torch._utils._rebuild_")
            raise UserError(f"{where}: {str(name)[:120]!a} is a {kind}, which safetensors cannot hold; save it dense")
        else:
            dropped.append(str(name)[:120] if isinstance(name, (str, int)) else type(name).__name__)
    return references, dropped


def unwritten_tensors(root: Any, wrapper: tuple[str, ...]) -> list[str]:
    """Warnings for tensors that are not written because they are no entries of the state dict under `wrapper`.

    Dicts and lists of them inside it, and floats of one dimension or more beside the keys that lead to it; counters
    and the states of random generators are neither.
    """
    beside: list[str] = []
    for key in wrapper:
        beside += [
            str(name)[:120]
            for name, value in root.items()
            if isinstance(value, (TensorRef, Sharded)) and value.shape and value.dtype in CASTABLE
        ]
        root = root[key]
    inner: dict[str, int] = {}
    counted: dict[int, int] = {}
    for name, value in root.items():
        if type(value) in (dict, list, tuple):
            if id(value) not in counted:  # one dict may stand under a million names
                items = value.values() if type(value) is dict else value
                counted[id(value)] = sum(isinstance(item, (TensorRef, Sharded)) for item in items)
            inner[str(name)[:120]] = counted[id(value)]
    warnings = [
        f"{name!a} beside the weights holds {count:,} tensors of its own, which were not written; if they belong to "
        "the model, save model.state_dict()"
        for name, count in inner.items()
        if count
    ]
    if beside:
        listed = ", ".join(ascii(name) for name in beside[:5])
        warnings.append(
            f"{len(beside):,} tensors beside the weights were not written ({listed}); if they belong to the model, "
            "save model.state_dict()"
        )
    return warnings


def parts_of(name: str) -> int:
    """How many files a model has of which one is called `name`: 2 for `model-00001-of-00002.safetensors`, else 1."""
    match = _NUMBERED.fullmatch(name)
    return int(match[3]) if match else 1


def refuse_part(folder: Path, names: list[str]) -> None:
    """IncompleteError unless files named N-of-COUNT, which have no index beside them, are all there."""
    matches = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    for stem, count, end in sorted({(match[1], match[3], match[4]) for match in matches}):
        held = {int(match[2]) for match in matches if (match[1], match[3], match[4]) == (stem, count, end)}
        lacks = int(count) - len(held)
        if lacks > 0:
            absent = next(number for number in range(1, int(count) + 1) if number not in held)
            name = f"{stem}-{absent:0{len(count)}d}-of-{count}{end}"
            raise IncompleteError(f"{folder}: {lacks} of its {int(count)} files are missing: {name}, and the index")


def step_of(root: Any) -> int | None:
    """The training step that a saved dict names."""
    return integer(root, "step", "global_step", "global_steps", "iteration", "iter_num") if type(root) is dict else None


def _read_part(source: Source, path: Path) -> _Part:
    content = read_torch(source.add(path))
    wrapper, state = find_weights(content.root, str(path))
    found, dropped = tensors_of(state, str(path))
    references = {name: value for name, value in found.items() if isinstance(value, TensorRef)}
    if len(references) < len(found):
        raise UserError(
            f"{path}: is one shard of a distributed (FSDP, DTensor) checkpoint; give the folder that holds all"
        )
    source.step = step_of(content.root)
    source.warnings += unwritten_tensors(content.root, wrapper)
    return _Part(content, references, dropped, wrapper)


def _fill(source: Source, parts: list[_Part]) -> None:
    """Give the source the tensors of all parts, under their clean names."""
    where = str(source.path)
    names = [name for part in parts for name in part.references]
    doubled = next((name for name, count in Counter(names).items() if count > 1), None)
    if doubled is not None:
        raise UserError(f"{where}: the tensor {doubled[:120]!a} is in two of its files; remove one of them")
    clean = clean_names(names, where)
    check_names(clean.values(), where)
    for part in parts:
        for name, reference in part.references.items():
            source.tensors[clean[name]] = part.content.tensor(clean[name], reference)
        source.dropped += part.dropped
        source.wrapper = part.wrapper
