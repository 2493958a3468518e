"""What every format is turned into: names, and tensors that can be read block by block in row-major order."""

from __future__ import annotations

import errno
import math
import os
import resource
import stat
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from bridge.convert.dtypes import ITEMSIZE, SAFETENSORS, Bytes
from bridge.errors import UserError


class IncompleteError(UserError):
    """The checkpoint lacks a file or the end of one: its writer died or is still at work."""


BLOCK = 4 << 20  # bytes handed over at a time
_SPAN = 16 << 20  # bytes: the longest stretch of a file that is read to pick elements out of it
_SHORT = 64 << 10  # bytes: below this one read costs less than two


Elements = NDArray[np.unsignedinteger]


class SourceFile:
    """One open file of a checkpoint. It is opened once, so deleting or replacing the path later does no harm."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = _open(path)
        except OSError as error:
            remedy = "raise ulimit -n" if error.errno == errno.EMFILE else "check the path and its rights"
            raise UserError(f"{path}: cannot be opened ({error.strerror}); {remedy}") from error
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
                raise IncompleteError(f"{self.path}: ends at byte {offset + done}, too early; copy or save it again")
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

    def window(self, offset: int, size: int) -> SourceFile:
        """Bytes `offset` to `offset + size` as a file of their own, open as long as this one is."""
        return _Window(self, offset, size)


class _Window(SourceFile):
    def __init__(self, whole: SourceFile, offset: int, size: int) -> None:
        self.path, self.size = whole.path, size
        self._whole, self._offset = whole, offset

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if offset + len(buffer) > self.size:
            raise UserError(f"{self.path}: a part of it ends too early; copy or save it again")
        self._whole.read_into(buffer, self._offset + offset)

    def check_unchanged(self) -> None:
        self._whole.check_unchanged()

    def close(self) -> None:
        """The whole file is closed by its owner."""


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

    def read(self, origin: tuple[int, ...], out: Elements) -> None:
        """Fill `out` with the box of its shape that begins at `origin`: one of `boxes(shape)`.

        `out` is contiguous and of unsigned integers as wide as an element. Threads may read at the same time.
        """


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

    def read(self, origin: tuple[int, ...], out: Elements) -> None:
        """Fill `out` with the box of its shape at `origin`; here any box and any layout of `out` will do."""
        itemsize = ITEMSIZE[self.dtype]
        start = self.start + itemsize * sum(at * step for at, step in zip(origin, self.stride, strict=True))
        if out.size:
            # A dimension of one element may have any step; numpy takes none beyond 63 bits.
            steps = (step * itemsize if size > 1 else 0 for size, step in zip(out.shape, self.stride, strict=True))
            _gather(self.file, _View(start, out.shape, tuple(steps)), out)


@dataclass(frozen=True)
class Piece:
    """A part of a larger tensor, and where its first element lies in that."""

    origin: tuple[int, ...]
    tensor: StridedTensor


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor in pieces: shards of ranks, chunks, or slices of flat buffers. `joined` makes it."""

    dtype: str
    shape: tuple[int, ...]
    layout: tuple[int, ...]
    """The sizes in which pieces are placed: `shape` itself, or one dimension of as many elements."""
    pieces: tuple[Piece, ...]

    @property
    def identity(self) -> Hashable:
        return (self.shape, *((piece.origin, piece.tensor.identity) for piece in self.pieces))

    def read(self, origin: tuple[int, ...], out: Elements) -> None:
        if self.layout != self.shape:
            origin, out = (_flat_index(self.shape, origin),), out.reshape(-1)
        for piece in self.pieces:
            spans = [
                (max(at, begin), min(at + size, begin + extent))
                for at, size, begin, extent in zip(origin, out.shape, piece.origin, piece.tensor.shape, strict=True)
            ]
            if all(low < high for low, high in spans):
                within = tuple(slice(low - at, high - at) for (low, high), at in zip(spans, origin, strict=True))
                first = tuple(low - at for (low, _), at in zip(spans, piece.origin, strict=True))
                piece.tensor.read(first, out[within] if within else out)


def joined(
    where: str, name: str, dtype: str, shape: tuple[int, ...], pieces: Iterable[Piece], *, flat: bool = False
) -> JoinedTensor:
    """The tensor that `pieces` make up; with `flat` they are slices of its row-major elements.

    Pieces at one place are replicas, of which the first is taken. UserError, which names the tensor and `where` it
    comes from, unless safetensors has the dtype and the pieces fill the shape exactly: no gap, no overlap, nothing
    outside.
    """
    if dtype not in SAFETENSORS:
        raise UserError(f"{where}: {name[:120]!a} is of dtype {dtype[:40]}, which safetensors cannot hold")
    layout = (math.prod(shape),) if flat else shape
    placed: dict[tuple[int, ...], Piece] = {}
    for piece in pieces:
        if piece.tensor.dtype != dtype:
            raise UserError(f"{where}: {name[:120]!a} is {dtype} but a part of it is {piece.tensor.dtype}")
        first = placed.setdefault(piece.origin, piece) if 0 not in piece.tensor.shape else piece
        if first.tensor.shape != piece.tensor.shape:
            raise UserError(f"{where}: two parts of {name[:120]!a} at one place differ in size; save it again")
    if not _fills(layout, {origin: piece.tensor.shape for origin, piece in placed.items()}):
        raise UserError(
            f"{where}: the parts of {name[:120]!a} do not fill its shape {list(shape)}; a rank's file is missing "
            "or of another save"
        )
    return JoinedTensor(dtype, shape, layout, tuple(placed[origin] for origin in sorted(placed)))


def boxes(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(origin, sizes) of consecutive boxes of at most `limit` elements: each is a run of the row-major order."""
    if 0 in shape:
        return
    if not shape:
        yield (), ()
        return
    # The outermost dimension of which whole rows fit is cut; those before it are walked through one by one.
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= limit)
    inner = shape[axis + 1 :]
    rows = limit // math.prod(inner)
    for outer in product(*map(range, shape[:axis])):
        for row in range(0, shape[axis], rows):
            yield (*outer, row, *(0 for _ in inner)), (*(1 for _ in outer), min(rows, shape[axis] - row), *inner)


def blocks(tensor: Tensor) -> Iterator[Bytes]:
    """The elements in row-major order as bytes, at most BLOCK at a time; a block is valid until the next one."""
    itemsize = ITEMSIZE[tensor.dtype]
    buffer = np.empty(min(BLOCK, nbytes(tensor)), np.uint8)
    for origin, sizes in boxes(tensor.shape, BLOCK // itemsize):
        block = buffer[: math.prod(sizes) * itemsize]
        tensor.read(origin, block.view(f"u{itemsize}").reshape(sizes))
        yield block


@dataclass
class Source:
    """An opened checkpoint: names in their order, tensors, and what a user should know about it."""

    format: str
    path: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: list[SourceFile] = field(default_factory=list)
    ranks: int = 1
    """Processes that wrote it."""
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

    def add(self, path: Path) -> SourceFile:
        """Open one more file, which is closed with the source."""
        file = SourceFile(path)
        self.files.append(file)
        return file

    @contextmanager
    def opening(self) -> Iterator[Source]:
        """The source while its reader fills it: on an error its files are closed."""
        try:
            yield self
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close every file."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _open(path: Path) -> int:
    # O_NONBLOCK: opening a pipe must not wait for a writer.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags)
    except OSError as error:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if error.errno != errno.EMFILE or soft == hard:
            raise
    # All ranks' files are open at once, and the usual soft limit is 1,024; a process may raise it to the hard one.
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.open(path, flags)


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


def _flat_index(shape: tuple[int, ...], origin: tuple[int, ...]) -> int:
    index = 0
    for size, at in zip(shape, origin, strict=True):
        index = index * size + at
    return index


def _fills(shape: tuple[int, ...], parts: Mapping[tuple[int, ...], tuple[int, ...]]) -> bool:
    """Whether boxes (origin -> sizes, none empty) fill `shape` as a grid: every trainer cuts along whole dimensions."""
    if 0 in shape:
        return not parts
    cuts = [sorted({origin[axis] for origin in parts}) for axis in range(len(shape))]
    if math.prod(map(len, cuts)) != len(parts) or any(cut[:1] != [0] for cut in cuts):
        return False
    nexts = [dict(zip(cut, [*cut[1:], size], strict=True)) for cut, size in zip(cuts, shape, strict=True)]
    return all(
        nexts[axis][at] == at + size
        for origin, sizes in parts.items()
        for axis, (at, size) in enumerate(zip(origin, sizes, strict=True))
    )


def _gather(file: SourceFile, view: _View, out: Elements) -> None:
    """Read the elements of `view` into `out`, an array of the same shape.

    A stretch of the file is read in one piece if it is short or mostly wanted; else the dimension that reaches
    farthest is halved, so a transposed tensor costs one read per column of the band, not one per element.
    """
    itemsize = out.itemsize
    if out.flags.c_contiguous and _merged(view.shape, view.steps) in (((), ()), ((out.size,), (itemsize,))):
        file.read_into(out.reshape(-1).view(np.uint8).data, view.start)
        return
    reach = [(size - 1) * step for size, step in zip(view.shape, view.steps, strict=True)]
    extent = sum(reach) + itemsize
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
