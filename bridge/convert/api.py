"""Convert and inspect: the few functions that the command line and the `convert` stage use."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from bridge.artifacts import flush
from bridge.convert.companions import (
    CONFIG,
    TOKENIZER_CONFIG,
    Companions,
    adapter_companions,
    causal_class,
    config_warnings,
    find_companions,
    older_tokenizer,
    strangers,
    true_config,
)
from bridge.convert.formats import open_source
from bridge.convert.lora import PREFIX, has_adapter, is_adapter_name, merge
from bridge.convert.places import lexical, read_blocks, read_json
from bridge.convert.plan import (
    INDEX,
    OutputFile,
    check_dtype,
    decide_tie,
    index_json,
    main_dtype,
    place,
    tie_flag,
    vocabulary,
)
from bridge.convert.source import IncompleteError, Source, Tensor, nbytes
from bridge.convert.writer import same_bytes, write_bytes, write_file, write_json
from bridge.errors import UserError

MAX_SHARD_SIZE = 5 * 10**9

Progress = Callable[[int, int], None]
"""Told the bytes written so far and the bytes to write in all."""


@dataclass
class Report:
    """What a conversion did."""

    format: str
    tensors: int
    """Tensors written."""
    bytes: int
    """Bytes of tensors written."""
    files: int
    """Weight files written."""
    dtype: str
    """The float dtype of most bytes; `none` if there are no floats."""
    tied: list[str] = field(default_factory=list)
    """Output layers left out because they are the input embedding again."""
    dropped: list[str] = field(default_factory=list)
    """Entries of the state dict that were not written because they are no tensors."""
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The object that `bridge-rl convert --json` prints."""
        return asdict(self)


def convert(
    src: Path,
    out: Path,
    *,
    dtype: str = "auto",
    base: Path | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    progress: Progress | None = None,
) -> Report:
    """Convert the checkpoint `src` into the new model folder `out`.

    `dtype` is `auto` (keep what is stored) or the float type to cast to; `base` is a model folder whose config and
    tokenizer serve if the checkpoint has none near it; `max_shard_size` is in bytes per file. `out` appears by one
    rename when everything is on disk, so it is whole or absent. UserError if `out` exists, if the checkpoint is
    damaged, unsafe or of an unknown kind, or if the disk is full or read-only; then nothing is left behind.
    """
    with _published(out) as folder:
        return write_into(src, folder, dtype=dtype, base=base, max_shard_size=max_shard_size, progress=progress)


def write_into(
    src: Path,
    folder: Path,
    *,
    dtype: str = "auto",
    base: Path | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
    progress: Progress | None = None,
) -> Report:
    """Write the converted checkpoint into the existing empty `folder`; the caller publishes or removes it.

    Arguments and errors as in `convert`. Every file is on disk when this returns.
    """
    check_dtype(dtype)
    if not os.path.lexists(src):
        raise UserError(f"{src}: does not exist; check the path of the checkpoint")
    with as_user_errors(folder), open_source(src, dtype) as source, _base(source, base, dtype) as model:
        if source.format == "peft" and model is None:
            return _keep_adapter(source, folder, dtype, progress)
        companions = find_companions(source.folder, base, merged=model is not None)
        tensors = source.tensors
        if has_adapter(tensors) or model is not None:
            tensors = merge(source, model.tensors if model else None, companions.config, dtype)
        tie = decide_tie(tensors, companions.config, lambda a, b: same_bytes(tensors[a], tensors[b]))
        kept = {name: tensor for name, tensor in tensors.items() if tie.dropped is None or name != tie.dropped[0]}
        files = place(kept, dtype, max_shard_size)
        tokenizer = _tokenizer_config(companions)
        warnings = [*source.warnings, *_write_weights(folder, files, kept, progress)]
        _check_unchanged(source, model)
        written = main_dtype(kept, dtype)
        rows = vocabulary(kept)
        causal = causal_class(companions.config, kept)
        config = true_config(companions.config, written, tie.flag, rows, causal)
        _write_companions(folder, files, {CONFIG: config, **tokenizer}, companions)
        flush(folder)
        return _report(
            source,
            files,
            written,
            tied=[tie.dropped[0]] if tie.dropped else [],
            warnings=[
                *warnings,
                *config_warnings(companions.config, tie.flag, rows, causal),
                *strangers(companions.config, kept),
                *_warnings(source, companions),
            ],
        )


@contextmanager
def _base(source: Source, base: Path | None, dtype: str) -> Iterator[Source | None]:
    """The model that an adapter is merged into, opened; None where the checkpoint has its own weights."""
    alone = all(is_adapter_name(name) for name in source.tensors)
    if base is None or not (source.format == "peft" or alone):
        yield None
        return
    with open_source(base, dtype) as model:
        yield model


def _keep_adapter(source: Source, folder: Path, dtype: str, progress: Progress | None) -> Report:
    """An adapter as safetensors, with its configuration: what PEFT and vLLM load beside the base model."""
    companions = adapter_companions(source.folder)
    tokenizer = _tokenizer_config(companions)
    tensors = {PREFIX + name.removeprefix(PREFIX): tensor for name, tensor in source.tensors.items()}
    files = [replace(file, name="adapter_model.safetensors") for file in place(tensors, dtype, 1 << 62)]
    warnings = [*source.warnings, *_write_weights(folder, files, tensors, progress)]
    _check_unchanged(source)
    _write_companions(folder, files, tokenizer, companions)
    flush(folder)
    warnings.append("the adapter was kept as it is; name its base model (--base) to merge it")
    return _report(source, files, main_dtype(tensors, dtype), tied=[], warnings=warnings)


def _report(
    source: Source, files: list[OutputFile], dtype: str | None, *, tied: list[str], warnings: list[str]
) -> Report:
    return Report(
        format=source.format,
        tensors=sum(len(file.tensors) for file in files),
        bytes=sum(file.data for file in files),
        files=len(files),
        dtype=dtype or "none",
        tied=tied,
        dropped=source.dropped,
        warnings=warnings,
    )


def _check_unchanged(*sources: Source | None) -> None:
    for source in sources:
        for file in source.files if source else ():
            file.check_unchanged()


def inspect(path: Path) -> dict[str, Any]:
    """What the checkpoint at `path` holds, as JSON: format, ranks, step, files, tensors, dtypes, bytes, ties, config.

    Only the index of each file is read. Of an unfinished checkpoint there is only `missing`, a sentence that names what
    is not there; it is None for a whole one. UserError as in `convert`.
    """
    if not os.path.lexists(path):
        raise UserError(f"{path}: does not exist; check the path")
    try:
        with as_user_errors(path):
            source = open_source(path)
    except IncompleteError as error:
        return {"path": str(path), "missing": str(error)}
    with source:
        try:
            with as_user_errors(path):
                companions = find_companions(source.folder, None)
        except UserError:
            companions = None
        tensors = source.tensors
        return {
            "path": str(path),
            "format": source.format,
            "missing": None,
            "ranks": source.ranks,
            "step": source.step,
            "wrapper": list(source.wrapper),
            "files": [str(file.path) for file in source.files],
            "bytes": sum(nbytes(tensor) for tensor in tensors.values()),
            "dtypes": _bytes_by_dtype(tensors),
            "shared": _shared(tensors),
            "tie_word_embeddings": tie_flag(companions.config) if companions else None,
            "config": str(companions.files[CONFIG]) if companions else None,
            "dropped": source.dropped,
            "warnings": source.warnings,
            "tensors": [
                {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape)} for name, tensor in tensors.items()
            ],
        }


def _bytes_by_dtype(tensors: dict[str, Tensor]) -> dict[str, int]:
    held: dict[str, int] = {}
    for tensor in tensors.values():
        held[tensor.dtype] = held.get(tensor.dtype, 0) + nbytes(tensor)
    return held


def parse_size(text: str) -> int:
    """`5GB` → 5,000,000,000: decimal units as Hugging Face counts them, KB to TB, or plain bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    size = Decimal(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ") if match else 0
    if size < 1:
        raise UserError(f"size {text!r} is not understood; write it like 5GB or 500MB")
    return int(size)


def _shared(tensors: dict[str, Tensor]) -> list[list[str]]:
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.identity, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _write_weights(
    folder: Path, files: list[OutputFile], tensors: dict[str, Tensor], progress: Progress | None
) -> list[str]:
    _check_space(folder, files)
    total = sum(file.data for file in files)
    done = 0

    def written(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    overflowed: dict[str, int] = {}
    for file in files:
        overflowed |= write_file(folder / file.name, file, tensors, written)
    return [
        f"{name}: {count:,} finite values are too large for float16 and became infinite"
        for name, count in overflowed.items()
    ]


def _tokenizer_config(companions: Companions) -> dict[str, dict[str, Any]]:
    """The tokenizer's settings by file name if they must change; else nothing, and the file is copied as it is."""
    path = companions.files.get(TOKENIZER_CONFIG)
    told = read_json(path) if path is not None else {}
    older = older_tokenizer(told)
    return {TOKENIZER_CONFIG: older} if older != told else {}


def _write_companions(
    folder: Path, files: list[OutputFile], settings: Mapping[str, dict[str, Any]], companions: Companions
) -> None:
    if len(files) > 1:
        write_json(folder / INDEX, index_json(files))
    for name, value in settings.items():
        write_json(folder / name, value)
    for name, path in companions.files.items():
        if name not in settings:
            write_bytes(folder / name, read_blocks(path))


def _warnings(source: Source, companions: Companions) -> list[str]:
    home = lexical(source.folder)
    elsewhere: dict[Path, list[str]] = {}
    for name, path in companions.files.items():
        if path.parent not in (home, home / "huggingface"):
            elsewhere.setdefault(path.parent, []).append(name)
    warnings = [f"{', '.join(names)} taken from {place}" for place, names in elsewhere.items()]
    if not any("token" in name or name.endswith(".model") for name in companions.files):
        warnings.append("no tokenizer files were found; name a model folder that has them as the base (--base)")
    return warnings


def _check_space(folder: Path, files: list[OutputFile]) -> None:
    needed = sum(len(file.header) + file.data for file in files)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(f"{folder.parent}: the model needs {needed:,} bytes and {free:,} are free; make room first")


@contextmanager
def _published(out: Path) -> Iterator[Path]:
    """A new folder beside `out` that becomes `out` at the end, or vanishes if anything fails."""
    with as_user_errors(out):
        if os.path.lexists(out):
            raise UserError(f"{out}: exists already; remove it or name another output")
        if not out.parent.is_dir():
            raise UserError(f"{out.parent}: is no folder, so {out.name} cannot be made in it; make it first")
        _remove_leftovers(out)
        folder = out.with_name(f".{out.name}.tmp-{os.getpid()}")
        folder.mkdir()
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # a file system without locks: then nobody cleans up after anybody
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield folder
            folder.rename(out)
            flush(out.parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            os.close(handle)


def _remove_leftovers(out: Path) -> None:
    """Remove what killed conversions to `out` left: a live one holds the lock of its folder."""
    for folder in out.parent.glob(f".{_escaped(out.name)}.tmp-*"):
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)


def _escaped(name: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", name)


@contextmanager
def as_user_errors(target: Path) -> Iterator[None]:
    """Turn errors of the file system into a sentence; the checkpoint's own read errors are sentences already."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise UserError(f"{target}: something of that name is there already; name another output") from error
        remedy = "check its rights, " if error.errno in (errno.EACCES, errno.EPERM) else ""
        raise UserError(
            f"{error.filename or target.parent}: {error.strerror or error}; {remedy}nothing was written"
        ) from error
