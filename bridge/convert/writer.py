"""Write planned safetensors files block by block: memory does not grow with the model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import numpy as np

from bridge.convert.dtypes import ITEMSIZE, Bytes, cast, infinities
from bridge.convert.plan import OutputFile
from bridge.convert.source import BLOCK, Tensor, blocks, boxes

Count = Callable[[int], None]

_Block = tuple[str, str, str, int, tuple[int, ...], tuple[int, ...]]


WORKERS = min(4, os.cpu_count() or 1)


def write_file(path: Path, planned: OutputFile, tensors: Mapping[str, Tensor], written: Count) -> dict[str, int]:
    """Write one file and force it to disk; `written` is told the bytes of each block.

    Every block has its place, so WORKERS threads read, cast and write at once; each holds one block at a time.
    Returns tensor name -> how many of its finite values became infinite, for those where the cast did that.
    """
    overflowed: dict[str, int] = {}
    lock = Lock()
    with path.open("xb", buffering=0) as out:
        handle = out.fileno()
        _write(handle, planned.header, 0)
        blocks = _blocks(planned, tensors)
        failed: list[BaseException] = []

        def work() -> None:
            buffer = np.empty(BLOCK, np.uint8)
            try:
                while not failed:
                    with lock:
                        block = next(blocks, None)
                    if block is None:
                        return
                    name, source, target, at, origin, sizes = block
                    itemsize = ITEMSIZE[source]
                    raw = buffer[: math.prod(sizes) * itemsize]
                    tensors[name].read(origin, raw.view(f"u{itemsize}").reshape(sizes))
                    turned = cast(raw, source, target)
                    _write(handle, turned, at)
                    lost = infinities(turned, target) if target == "float16" != source else 0
                    lost -= infinities(raw, source) if lost else 0
                    with lock:
                        written(turned.size)
                        if lost:
                            overflowed[name] = overflowed.get(name, 0) + lost
            except BaseException as error:
                failed.append(error)

        threads = [Thread(target=work, daemon=True) for _ in range(WORKERS)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C or a stop signal: no thread may write on after the folder is gone
            failed.append(error)
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        if failed:
            raise failed[0]
        os.fsync(handle)
    return overflowed


def _blocks(planned: OutputFile, tensors: Mapping[str, Tensor]) -> Iterator[_Block]:
    """(name, dtype, written dtype, byte in the file, origin, sizes) of every block, in the order of the file."""
    for place in planned.tensors:
        dtype = tensors[place.name].dtype
        at = len(planned.header) + place.begin
        # Blocks are sized by the wider of the two types: memory does not grow when bytes do.
        for origin, sizes in boxes(place.shape, BLOCK // max(ITEMSIZE[dtype], ITEMSIZE[place.dtype])):
            yield place.name, dtype, place.dtype, at, origin, sizes
            at += math.prod(sizes) * ITEMSIZE[place.dtype]


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file as Hugging Face does and force it to disk."""
    write_bytes(path, [(json.dumps(value, indent=2) + "\n").encode("utf-8")])


def write_bytes(path: Path, blocks: Iterable[bytes]) -> None:
    """Write a new file and force it to disk."""
    with path.open("xb", buffering=0) as out:
        at = 0
        for block in blocks:
            _write(out.fileno(), block, at)
            at += len(block)
        os.fsync(out.fileno())


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes; reads no further than the first difference."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return a.identity == b.identity or all(
        left.tobytes() == right.tobytes() for left, right in zip(blocks(a), blocks(b), strict=True)
    )


def _write(handle: int, data: bytes | Bytes, at: int) -> None:
    view = memoryview(data) if isinstance(data, bytes) else data.data
    while len(view):
        count = os.pwrite(handle, view, at)
        view, at = view[count:], at + count
