"""Decisions of a conversion, made before any data moves: output dtype, ties, files and byte offsets. All pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bridge.convert.dtypes import CASTABLE, ITEMSIZE, SAFETENSORS, TARGETS
from bridge.convert.source import Tensor
from bridge.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library

_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "shared.weight")


@dataclass(frozen=True)
class Placed:
    """A tensor's place in an output file: `begin` and `end` are bytes from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class OutputFile:
    """One safetensors file: its name, its header with the length prefix, and the tensors that follow back to back."""

    name: str
    header: bytes
    tensors: tuple[Placed, ...]

    @property
    def data(self) -> int:
        """Bytes after the header."""
        return self.tensors[-1].end if self.tensors else 0


@dataclass(frozen=True)
class Tie:
    """What is to be done about an output layer that may be the input embedding again."""

    dropped: tuple[str, str] | None = None
    """(the head that is left out, the embedding that stands for it)."""
    flag: bool | None = None
    """The value that the config's `tie_word_embeddings` must get; None leaves it as it is."""


def output_dtype(stored: str, wanted: str) -> str:
    """The dtype a tensor is written in: floats of 16 to 64 bits follow `wanted`, everything else stays."""
    return wanted if wanted != "auto" and stored in CASTABLE else stored


def check_dtype(wanted: str) -> None:
    """UserError unless `wanted` is `auto` or a float type that loaders know."""
    if wanted not in ("auto", *TARGETS):
        raise UserError(f"dtype {wanted!r} is unknown; use auto, {', '.join(TARGETS)}")


def main_dtype(tensors: Mapping[str, Tensor], wanted: str) -> str | None:
    """The float dtype that most bytes of the output have: what the config must say. None without floats."""
    held: dict[str, int] = {}
    for tensor in tensors.values():
        dtype = output_dtype(tensor.dtype, wanted)
        if dtype in CASTABLE:
            held[dtype] = held.get(dtype, 0) + math.prod(tensor.shape) * ITEMSIZE[dtype]
    return max(held, key=lambda dtype: held[dtype], default=None)


def decide_tie(tensors: Mapping[str, Tensor], config: Mapping[str, Any], equal: Callable[[str, str], bool]) -> Tie:
    """Whether the head is left out as a copy of the embedding, and whether the config's flag is true.

    The head goes only if the config says tied and the bytes are `equal`. If they differ both stay and the flag
    becomes false: loaders that trust the flag would lose the head in silence. A config without the flag leaves the
    choice to the model's class, so equal tensors both stay, and different ones get an explicit false.
    """
    heads = [name for name in tensors if name.endswith(_HEADS)]
    if len(heads) != 1:
        return Tie()
    head = heads[0]
    embeddings = [name for name in tensors if name.endswith(_EMBEDDINGS) and tensors[name].shape == tensors[head].shape]
    tied = tie_flag(config)
    if tied is False or not any(name.endswith(_EMBEDDINGS) for name in tensors):
        return Tie()
    same = next((name for name in embeddings if equal(head, name)), None)
    if same is None:
        return Tie(flag=False)
    return Tie(dropped=(head, same)) if tied else Tie()


def tie_flag(config: Mapping[str, Any]) -> bool | None:
    """`tie_word_embeddings` of the config, or of its `text_config` in composite models; None where neither has it."""
    inner = config.get("text_config")
    for place in (config, inner if isinstance(inner, dict) else {}):
        if isinstance(place.get("tie_word_embeddings"), bool):
            return bool(place["tie_word_embeddings"])
    return None


def vocabulary(tensors: Mapping[str, Tensor]) -> int | None:
    """Rows of the input embedding; None if there is none, or if several differ."""
    rows = {
        tensor.shape[0]
        for name, tensor in tensors.items()
        if name.endswith(_EMBEDDINGS) and len(tensor.shape) == 2 and tensor.dtype in CASTABLE
    }
    return rows.pop() if len(rows) == 1 else None


def place(tensors: Mapping[str, Tensor], wanted: str, max_shard_size: int) -> list[OutputFile]:
    """Lay the tensors out in files of at most `max_shard_size` bytes of data, in their order.

    A tensor above the limit gets a file of its own. In a file the widest element types come first, which keeps every
    tensor aligned to its element. Format: https://github.com/huggingface/safetensors#format.
    """
    if max_shard_size < 1:
        raise UserError(f"max shard size {max_shard_size} is no positive number of bytes")
    for name, tensor in tensors.items():
        # Loaders multiply sizes in 64 bits from the left, so a zero at the end does not save them.
        if math.prod(max(size, 1) for size in tensor.shape) * ITEMSIZE[tensor.dtype] >= 1 << 63:
            raise UserError(f"{name[:120]!a} has a shape that overflows 64 bits; refused as hostile")
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        size = math.prod(tensor.shape) * ITEMSIZE[output_dtype(tensor.dtype, wanted)]
        if shards[-1] and used + size > max_shard_size:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    return [
        _output_file(file, {name: tensors[name] for name in shard}, wanted)
        for file, shard in zip(names, shards, strict=True)
    ]


def index_json(files: list[OutputFile]) -> dict[str, Any]:
    """The content of `model.safetensors.index.json`."""
    return {
        "metadata": {"total_size": sum(file.data for file in files)},
        "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
    }


def _output_file(file: str, tensors: Mapping[str, Tensor], wanted: str) -> OutputFile:
    dtypes = {name: output_dtype(tensor.dtype, wanted) for name, tensor in tensors.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    placed, at = [], 0
    for name in sorted(tensors, key=lambda name: -ITEMSIZE[dtypes[name]]):
        shape, dtype = tensors[name].shape, dtypes[name]
        end = at + math.prod(shape) * ITEMSIZE[dtype]
        header[name] = {"dtype": SAFETENSORS[dtype], "shape": list(shape), "data_offsets": [at, end]}
        placed.append(Placed(name, dtype, shape, at, end))
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER:
        raise UserError(f"the header of {file} would have {len(text):,} bytes; use a smaller max shard size")
    return OutputFile(file, len(text).to_bytes(8, "little") + text, tuple(placed))
