"""What every format is turned into: names, and tensors that can be read block by block in row-major order."""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from bridge.convert.dtypes import ITEMSIZE, Bytes
from bridge.errors import UserError

BLOCK = 4 << 20  # bytes handed over at a time
_SPAN = 16 << 20  # bytes: the longest stretch of a file that is read to pick elements out of it
_SHORT = 64 << 10  # bytes: below this one read costs less than two


class SourceFile:
    """One open file of a checkpoint. It is opened once, so deleting or replacing the path later does no harm."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: opening a pipe must not wait for a writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UserError(f"{path}: cannot be opened ({error.strerror}); check the path and its rights") from error
        self._stat = os.fstat(self._fd)
        self.size = self._stat.st_size
        if not stat.S_ISREG(self._stat.st_mode):
            self.close()
            raise UserError(f"{path}: is not a regular file; give the checkpoint file itself")

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from byte `offset`; UserError if the file ends before."""
        done = 0
        while done < len(buffer):
            try:
                got = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                reason = error.strerror or errno.errorcode.get(error.errno or 0, "read error")
                raise UserError(f"{self.path}: cannot be read ({reason}); check the disk or copy it again") from error
            if got == 0:
                raise UserError(f"{self.path}: ends at byte {offset + done}, too early; copy or save it again")
            done += got

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from byte `offset`."""
        buffer = bytearray(size)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def check_unchanged(self) -> None:
        """UserError if somebody wrote to the file since it was opened."""
        now = os.fstat(self._fd)
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise UserError(f"{self.path}: was changed while it was read; convert it again when its writer is done")

    def close(self) -> None:
        """Close the file; further reads fail."""
        os.close(self._fd)


class Tensor(Protocol):
    """A tensor of a checkpoint, wherever its bytes lie."""

    @property
    def dtype(self) -> str:
        """torch's name, such as `bfloat16`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions; `()` for a scalar."""

    @property
    def identity(self) -> Hashable:
        """Equal for two tensors only if they are the same bytes of the same file."""

    def blocks(self) -> Iterator[Bytes]:
        """The elements in row-major order as bytes, at most BLOCK at a time; a block is valid until the next one."""


def nbytes(tensor: Tensor) -> int:
    """Bytes of the tensor in its stored dtype."""
    return math.prod(tensor.shape) * ITEMSIZE[tensor.dtype]


@dataclass(frozen=True)
class StridedTensor:
    """A view of one storage in one file. Whoever makes it has checked that every element lies in the storage."""

    file: SourceFile
    start: int
    """Byte of the file where element (0, …, 0) lies."""
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Elements, not bytes, per step of each dimension; never negative."""

    @property
    def identity(self) -> Hashable:
        return (id(self.file), self.start, self.dtype, self.shape, self.stride)

    def blocks(self) -> Iterator[Bytes]:
        itemsize = ITEMSIZE[self.dtype]
        whole = _View(self.start, *_merged(self.shape, tuple(step * itemsize for step in self.stride)))
        buffer = np.empty(min(BLOCK, nbytes(self)), np.uint8)
        for view in _bands(whole, BLOCK // itemsize):
            block = buffer[: math.prod(view.shape) * itemsize]
            _gather(self.file, view, block.view(f"u{itemsize}").reshape(view.shape))
            yield block


@dataclass
class Source:
    """An opened checkpoint: names in their order, tensors, and what a user should know about it."""

    format: str
    path: Path
    tensors: dict[str, Tensor]
    files: list[SourceFile]
    wrapper: tuple[str, ...] = ()
    """Keys that lead from the top of the checkpoint to the weights."""
    step: int | None = None
    dropped: list[str] = field(default_factory=list)
    """Entries of the state dict that are not tensors."""
    warnings: list[str] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Where configuration and tokenizer are looked for first."""
        return self.path if self.path.is_dir() else self.path.parent

    def close(self) -> None:
        """Close every file."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True)
class _View:
    start: int
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    """Bytes per step of each dimension."""


def _merged(shape: tuple[int, ...], steps: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The same elements in the same order with as few dimensions as possible: a contiguous tensor becomes one run."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, step in zip(shape, steps, strict=True):
        if size == 1:
            continue
        if strides and strides[-1] == step * size:
            sizes[-1] *= size
            strides[-1] = step
        else:
            sizes.append(size)
            strides.append(step)
    return tuple(sizes), tuple(strides)


def _bands(view: _View, limit: int) -> Iterator[_View]:
    """Consecutive pieces, in row-major order, of at most `limit` elements."""
    total = math.prod(view.shape)
    if total == 0:
        return
    if total <= limit:
        yield view
        return
    inner = total // view.shape[0]
    rows = limit // inner
    for row in range(0, view.shape[0], max(rows, 1)):
        start = view.start + row * view.steps[0]
        if rows == 0:
            yield from _bands(_View(start, view.shape[1:], view.steps[1:]), limit)
        else:
            yield _View(start, (min(rows, view.shape[0] - row), *view.shape[1:]), view.steps)


def _gather(file: SourceFile, view: _View, out: NDArray[np.unsignedinteger]) -> None:
    """Read the elements of `view` into `out`, an array of the same shape.

    A stretch of the file is read in one piece if it is short or mostly wanted; else the dimension that reaches
    farthest is halved, so a transposed tensor costs one read per column of the band, not one per element.
    """
    itemsize = out.itemsize
    reach = [(size - 1) * step for size, step in zip(view.shape, view.steps, strict=True)]
    extent = sum(reach) + itemsize
    if extent == out.nbytes and view.steps == (itemsize,):
        file.read_into(out.data.cast("B"), view.start)
        return
    wanted = itemsize * math.prod(size for size, step in zip(view.shape, view.steps, strict=True) if step)
    if extent <= _SHORT or (extent <= _SPAN and wanted * 4 >= extent):
        stretch = np.empty(extent // itemsize, out.dtype)
        file.read_into(stretch.data.cast("B"), view.start)
        out[...] = as_strided(stretch, view.shape, view.steps)
        return
    axis = reach.index(max(reach))
    half = view.shape[axis] // 2
    for first, size in ((0, half), (half, view.shape[axis] - half)):
        piece = _View(view.start + first * view.steps[axis], _with(view.shape, axis, size), view.steps)
        _gather(file, piece, out[(slice(None),) * axis + (slice(first, first + size),)])


def _with(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])
