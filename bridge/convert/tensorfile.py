"""safetensors files and folders as sources: checked whole before a byte is taken.

Format: https://github.com/huggingface/safetensors#format. The data must be covered exactly, without hole or overlap.
"""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from bridge.convert.dtypes import ITEMSIZE, SAFETENSORS
from bridge.convert.names import check_names, clean_names
from bridge.convert.pickles import MAX_RANK
from bridge.convert.places import inside
from bridge.convert.plain import read_weight_map, refuse_part
from bridge.convert.plan import INDEX, MAX_HEADER
from bridge.convert.source import IncompleteError, Source, SourceFile, StridedTensor
from bridge.errors import UserError

_MOST_VALUES = 4_000_000  # of 500,000 tensors and more

_TORCH = {name: dtype for dtype, name in SAFETENSORS.items()}


def open_tensor_file(path: Path) -> Source:
    """One safetensors file as a Source."""
    return _open(path, {path.name: path}, None)


def open_tensor_folder(folder: Path) -> Source:
    """A folder of safetensors files, with an index if there are several.

    IncompleteError if files that the index names are missing; UserError if index and files do not agree.
    """
    index = inside(folder, INDEX)
    if not os.path.lexists(index):  # a link whose target is missing is no absent index
        names = sorted(path.name for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_"))
        numbered = [name for name in names if "-of-" in name]
        if len(names) > 1 and len(numbered) < len(names):
            raise UserError(
                f"{folder}: holds {', '.join(names[:5])} and no index that says which count; name one of them"
            )
        if any(re.match(r"shard-\d{5}-", name) for name in names):
            raise _distributed(folder)
        refuse_part(folder, names)
        return _open(folder, {name: inside(folder, name) for name in names}, None)
    weight_map = read_weight_map(index)
    files = {name: inside(folder, name) for name in dict.fromkeys(weight_map.values())}
    missing = [name for name, path in files.items() if not path.exists()]
    if missing:
        raise IncompleteError(
            f"{folder}: {len(missing)} of its {len(files)} files are missing: {', '.join(missing[:5])}"
        )
    return _open(folder, files, weight_map)


def _open(where: Path, files: dict[str, Path], weight_map: dict[str, str] | None) -> Source:
    with Source("safetensors", where).opening() as source:
        home: dict[str, str] = {}
        tensors: dict[str, StridedTensor] = {}
        for name, path in files.items():
            for tensor, value in read_header(source.add(path)).items():
                if tensor in home:
                    raise UserError(f"{path}: {tensor[:120]!a} is in {home[tensor]} too; remove the stale file")
                home[tensor], tensors[tensor] = name, value
        if weight_map is not None and home != weight_map:
            odd = next(name for name in {**home, **weight_map} if home.get(name) != weight_map.get(name))
            raise UserError(
                f"{where}: the index and the files do not agree about {odd[:120]!a}; write the folder again"
            )
        clean = clean_names(tensors, str(where))
        check_names(clean.values(), str(where))
        source.tensors = {clean[name]: tensor for name, tensor in tensors.items()}
    return source


def read_header(file: SourceFile) -> dict[str, StridedTensor]:
    """The tensors of a safetensors file; UserError if the header lies or the file is not covered by it exactly."""
    size = int.from_bytes(file.read(0, 8), "little") if file.size >= 8 else 0
    if not 2 <= size <= MAX_HEADER:
        raise UserError(f"{file.path}: is no safetensors file: its header would have {size:,} bytes")
    if 8 + size > file.size:
        raise IncompleteError(f"{file.path}: ends within its header; copy it again")
    text = file.read(8, size)
    # Empty lists take twenty times as much memory as text.
    if text.count(b",") > _MOST_VALUES:
        raise UserError(f"{file.path}: its header has more than {_MOST_VALUES:,} values; no model needs that")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file.path}: its header is no valid JSON ({str(error)[:80]}); copy it again") from error
    if not isinstance(header, dict):
        raise UserError(f"{file.path}: its header is no JSON object; copy it again")
    metadata = header.pop("__metadata__", None)
    if isinstance(metadata, dict) and "DCP_SHARDING_INFO" in metadata:
        raise _distributed(file.path)
    spans: list[tuple[int, int]] = []
    tensors = {}
    for name, facts in header.items():
        dtype, shape, (begin, end) = _facts(file, name, facts)
        if end - begin != math.prod(shape) * ITEMSIZE[dtype]:
            raise UserError(f"{file.path}: {name[:120]!a} has {end - begin:,} bytes, which is not what its shape needs")
        spans.append((begin, end))
        stride = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        tensors[name] = StridedTensor(file, 8 + size + begin, dtype, shape, stride)
    at = 0
    for begin, end in sorted(spans):
        if begin != at:
            raise UserError(f"{file.path}: its tensors overlap or leave a hole at byte {at:,}; copy it again")
        at = end
    if 8 + size + at > file.size:
        raise IncompleteError(
            f"{file.path}: has {file.size:,} of {8 + size + at:,} bytes; it was cut off, copy it again"
        )
    if 8 + size + at < file.size:
        raise UserError(f"{file.path}: has {file.size - 8 - size - at:,} bytes that belong to no tensor; copy it again")
    return tensors


def _distributed(path: Path) -> UserError:
    # Each file says where its parts begin, but none how large the tensors are: a missing last rank would go unseen.
    return UserError(
        f"{path}: holds one rank's parts of tensors and not their whole shapes, as torch's HuggingFaceStorageWriter "
        "saves them; save with enable_consolidation=True, which joins them"
    )


def _facts(file: SourceFile, name: str, facts: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    facts = facts if isinstance(facts, dict) else {}
    shape, span, dtype = facts.get("shape"), facts.get("data_offsets"), facts.get("dtype")
    lists = isinstance(shape, list) and isinstance(span, list) and len(shape) <= MAX_RANK and len(span) == 2
    if not lists or any(
        type(number) is not int or not 0 <= number < 1 << 63 for number in [*(shape or []), *(span or [])]
    ):
        raise UserError(f"{file.path}: {name[:120]!a} is not described as safetensors does it; copy it again")
    if not isinstance(dtype, str) or dtype not in _TORCH:
        raise UserError(f"{file.path}: {name[:120]!a} is of the type {str(dtype)[:20]!a}, which is not known here")
    return _TORCH[dtype], tuple(shape or []), (span[0], span[1]) if span else (0, 0)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name occurs twice")
    return found
