"""Public data sets on disk: which files are which set, and their rows with the place of each for messages."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.artifacts import file_digest
from bridge.errors import UserError
from bridge.graph import digest

Pool = Literal["train", "dev", "test", "all"]
"""A set as the data's authors divided them; `all` where they did not."""
Record = tuple[str, object]
"""Where a row stands, and the row."""

FORMS = (".jsonl", ".parquet", ".json", ".csv", ".tsv", ".txt")
"""What can be read. Where a set lies in several forms, as MNLI's and SNLI's do, the first of these is taken."""
BATCH = 5_000  # rows of a Parquet file in memory

_POOLS: dict[str, Pool] = {
    "train": "train",
    "dev": "dev",
    "val": "dev",
    "valid": "dev",
    "validation": "dev",
    "test": "test",
}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")


def pools(root: Path, variants: Sequence[str] = (), chosen: str = "") -> dict[Pool, list[Path]]:
    """The files of each set below a folder, or of the one file that `root` is.

    The words of a file's path below `root` say what it holds: `train`, `dev` (`validation`), `test`, and which of the
    `variants` (`ARC-Easy/test-00000-of-00001.parquet`). A file that names no variant belongs to every one. Files that
    name no set are taken only if no file names one. Files of R³'s mixed form (`mix`) are no set of questions.

    Raises UserError where there is nothing that can be read.
    """
    below = [root] if root.is_file() else sorted(root.rglob("*"))
    files = [path for path in below if path.suffix in FORMS and path.is_file()]
    found: dict[Pool, list[Path]] = {}
    for path in files:
        inside = Path(path.name) if root.is_file() else path.relative_to(root)
        words = {word.lower() for word in _WORD.findall(str(inside.with_suffix("")))}
        hidden = any(part.startswith((".", "__MACOSX")) for part in inside.parts)
        if hidden or "mix" in words or (words & set(variants) and chosen not in words):
            continue
        pool: Pool = next((pool for word, pool in _POOLS.items() if word in words), "all")
        found.setdefault(pool, []).append(path)
    if len(found) > 1:
        found.pop("all", None)
    if not found:
        raise UserError(f"{root}: holds no data file ({', '.join(FORMS)})" + (f" of {chosen!r}" if chosen else ""))
    for pool, paths in found.items():
        form = min((path.suffix for path in paths), key=FORMS.index)
        found[pool] = [path for path in paths if path.suffix == form]
    return found


def files_digest(root: Path, found: dict[Pool, list[Path]]) -> str:
    """SHA-256 over the names and contents of the files, wherever they lie."""
    base = root.parent if root.is_file() else root
    paths = sorted(path for paths in found.values() for path in paths)
    return digest([[path.relative_to(base).as_posix(), file_digest(path)] for path in paths])


def records(file: Path) -> Iterator[Record]:
    """The rows of a file, whatever its form. Raises UserError naming the place of what cannot be read."""
    if file.suffix == ".jsonl":
        return jsonl_records(file)
    if file.suffix == ".parquet":
        return parquet_records(file)
    if file.suffix == ".json":
        return json_records(file)
    if file.suffix in (".csv", ".tsv"):
        return table_records(file)
    with file.open(encoding="utf-8-sig", errors="replace") as text:
        first = text.read(1)
    return json_records(file) if first == "{" else table_records(file)


def jsonl_records(file: Path) -> Iterator[Record]:
    """One JSON value a line."""
    # newline="\n": other line separators, such as U+2028, may stand inside a JSON string.
    with file.open(encoding="utf-8-sig", newline="\n") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{file}, line {number}"
                    try:
                        yield where, json.loads(line)
                    except (ValueError, RecursionError) as error:
                        raise UserError(f"{where}: not JSON ({error})") from None
        except UnicodeDecodeError:
            raise _not_text(file) from None


def json_records(file: Path) -> Iterator[Record]:
    """A list of rows, or one row."""
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError:
        raise _not_text(file) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{file}, line {error.lineno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({error})") from None
    if isinstance(value, list):
        yield from ((f"{file}, item {number}", row) for number, row in enumerate(value, 1))
    else:
        yield str(file), value


def parquet_records(file: Path) -> Iterator[Record]:
    """The rows of a Parquet file, some thousands at a time."""
    try:
        with pq.ParquetFile(file) as table:
            row = 0
            for batch in table.iter_batches(BATCH):
                for record in batch.to_pylist():
                    yield f"{file}, row {row}", record
                    row += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: cannot be read as Parquet ({error})") from None


def table_records(file: Path) -> Iterator[Record]:
    """The lines of a table with a header: commas and quotes in .csv, else tabs and no quotes."""
    commas = file.suffix == ".csv"
    with file.open(encoding="utf-8-sig", newline="" if commas else "\n") as lines:
        try:
            if commas:
                table = csv.reader(lines, strict=True)
                header = next(table, [])
                rows = ((table.line_num, row) for row in table)
            else:
                header = lines.readline().rstrip("\r\n").split("\t")
                rows = ((number, line.rstrip("\r\n").split("\t")) for number, line in enumerate(lines, 2))
            for number, row in rows:
                if row in ([], [""]):
                    continue
                if len(row) != len(header):
                    raise UserError(f"{file}, line {number}: has {len(row)} columns, but the header has {len(header)}")
                yield f"{file}, line {number}", dict(zip(header, row, strict=True))
        except UnicodeDecodeError:
            raise _not_text(file) from None
        except csv.Error as error:
            raise UserError(f"{file}, line {table.line_num}: not CSV ({error})") from None


def _not_text(file: Path) -> UserError:
    """Which line of a file is not UTF-8: text is decoded in blocks, whose errors do not know their line."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return UserError(f"{file}, line {number}: not UTF-8 text ({error.reason} at byte {error.start})")
    return UserError(f"{file}: not UTF-8 text")
