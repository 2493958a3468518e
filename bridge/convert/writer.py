"""Write planned safetensors files block by block: memory does not grow with the model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bridge.convert.dtypes import Bytes, cast, infinities
from bridge.convert.plan import OutputFile
from bridge.convert.source import Tensor

Count = Callable[[int], None]


def write_file(path: Path, planned: OutputFile, tensors: Mapping[str, Tensor], written: Count) -> dict[str, int]:
    """Write one file and force it to disk; `written` is told the bytes of each block.

    Returns tensor name -> how many of its finite values became infinite, for those where the cast did that.
    """
    overflowed = {}
    with path.open("xb", buffering=0) as out:
        _write(out.fileno(), planned.header)
        for place in planned.tensors:
            tensor, lost = tensors[place.name], 0
            for block in tensor.blocks():
                turned = cast(block, tensor.dtype, place.dtype)
                if place.dtype == "float16" != tensor.dtype:
                    lost += infinities(turned, place.dtype) - infinities(block, tensor.dtype)
                _write(out.fileno(), turned)
                written(turned.size)
            if lost:
                overflowed[place.name] = lost
        os.fsync(out.fileno())
    return overflowed


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as Hugging Face does and force it to disk."""
    write_bytes(path, [(json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")])


def write_bytes(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a new file and force it to disk."""
    with path.open("xb", buffering=0) as out:
        for block in blocks:
            _write(out.fileno(), block)
        os.fsync(out.fileno())


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes; reads no further than the first difference."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return a.identity == b.identity or all(
        left.tobytes() == right.tobytes() for left, right in zip(a.blocks(), b.blocks(), strict=True)
    )


def _write(handle: int, data: bytes | Bytes) -> None:
    view = memoryview(data) if isinstance(data, bytes) else data.data
    while len(view):
        view = view[os.write(handle, view) :]
