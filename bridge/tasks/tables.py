"""Datasets on disk: Parquet in BRIDGE's two schemas, and users' own files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bridge.errors import UserError
from bridge.tasks.base import Example, Split
from bridge.tasks.files import records
from bridge.tasks.frames import Message
from bridge.tasks.r3 import is_r3, parse

KINDS = "a folder with data.parquet, a .parquet, a .jsonl, or a .json file of R³"
FACTS = b"bridge"  # key of the file metadata
ROWS_AT_ONCE = 5_000  # rows in memory, and in one row group

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
SFT_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("message", _MESSAGES),
        (
            "extra_info",
            pa.struct([("num_ops", pa.int64()), ("final_answer", pa.int64()), ("answer_with_mask", pa.string())]),
        ),
    ]
)
RL_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.int64())])),
        ("extra_info", pa.struct([("num_ops", pa.int64()), ("answer", pa.string())])),
    ]
)


# Of the other tasks: answers are text (a letter, a label, a number of any form).
TEXT_SFT_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("message", _MESSAGES),
        ("extra_info", pa.struct([("id", pa.string()), ("final_answer", pa.string())])),
    ]
)
TEXT_RL_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        ("extra_info", pa.struct([("id", pa.string()), ("answer", pa.string())])),
    ]
)


def write_table(
    rows: Iterable[Example], split: Split, source: str, path: Path, facts: Mapping[str, str] | None = None
) -> int:
    """Write rows with the schema of their split, a few thousand at a time; returns their number.

    `facts` about all rows (how responses begin, how answers compare) travel in the file's metadata.
    """
    if source == "igsm":
        schema, record = (SFT_SCHEMA, _sft_record) if split == "sft" else (RL_SCHEMA, _rl_record)
    else:
        schema, record = (TEXT_SFT_SCHEMA, _text_sft) if split == "sft" else (TEXT_RL_SCHEMA, _text_rl)
    schema = schema.with_metadata({FACTS: json.dumps(dict(facts or {}))})
    count = 0
    iterator = iter(rows)
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        while batch := [record(row, source) for row in islice(iterator, ROWS_AT_ONCE)]:
            writer.write_table(pa.Table.from_pylist(batch, schema))
            count += len(batch)
    return count


def _sft_record(row: Example, source: str) -> dict[str, object]:
    return {
        "data_source": source,
        "message": [*row.prompt, {"role": "assistant", "content": row.response}],
        "extra_info": {"num_ops": row.extra["num_ops"], "final_answer": int(row.gold), "answer_with_mask": None},
    }


def _rl_record(row: Example, source: str) -> dict[str, object]:
    return {
        "data_source": source,
        "prompt": row.prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": int(row.gold)},
        "extra_info": {"num_ops": row.extra["num_ops"], "answer": row.response},
    }


def _text_sft(row: Example, source: str) -> dict[str, object]:
    if row.response is None:
        raise UserError(f"row {row.id}: has no worked solution, which split sft is made of")
    return {
        "data_source": source,
        "message": [*row.prompt, {"role": "assistant", "content": row.response}],
        "extra_info": {"id": row.id, "final_answer": row.gold},
    }


def _text_rl(row: Example, source: str) -> dict[str, object]:
    return {
        "data_source": source,
        "prompt": row.prompt,
        "ability": "math" if source in ("gsm8k", "svamp") else "reasoning",
        "reward_model": {"style": "rule", "ground_truth": row.gold},
        "extra_info": {"id": row.id, "answer": row.response},
    }


def read_facts(path: Path) -> dict[str, str]:
    """What `write_table` was told about all rows of a dataset; empty for a file that it did not write."""
    file = path / "data.parquet" if path.is_dir() else path
    if file.suffix != ".parquet":
        return {}
    try:
        metadata = pq.read_schema(file).metadata or {}
        value: dict[str, str] = json.loads(metadata.get(FACTS, b"{}"))
    except (OSError, ValueError, pa.ArrowInvalid):
        return {}
    return value


def read_examples(path: Path) -> list[Example]:
    """The rows of a dataset artifact (a folder with data.parquet), of a `.parquet`, a `.jsonl` or R³'s `.json` file.

    A line of a user's `.jsonl` is `{"prompt": text or messages, "response": text, "gold": text}`, the last two
    optional; a `.parquet` file may have these columns too. Raises UserError naming the row and the field.
    """
    examples = []
    for _, row in rows_of(path):
        if isinstance(row, UserError):
            raise row
        examples.append(row)
    if not examples:
        raise UserError(f"{path}: the dataset has no rows")
    return examples


def rows_of(path: Path) -> Iterator[tuple[str, Example | UserError]]:
    """(where, row) of everything in a dataset, with what is wrong in the place of a broken row.

    Nothing follows what cannot be read at all. Raises UserError for what is no dataset.
    """
    file = path / "data.parquet" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"{file}: no such file; a dataset is {KINDS}")
    if file.suffix not in (".jsonl", ".parquet", ".json"):
        raise UserError(f"{file}: a dataset is {KINDS}")
    try:
        for index, (where, record) in enumerate(records(file)):
            try:
                yield where, _example(where, str(index), record)
            except UserError as error:
                yield where, error
    except UserError as error:
        yield str(file), error


def _example(where: str, index: str, record: object) -> Example:
    """One row of any of the known shapes."""
    if not isinstance(record, Mapping):
        raise UserError(f"{where}: a row must be an object with at least `prompt`")
    if "message" in record:
        messages = _messages(where, "message", record["message"])
        if messages[-1]["role"] != "assistant" or len(messages) < 2:
            raise UserError(f"{where}: `message` must be a prompt and then an assistant turn")
        extra = _extra(where, record)
        gold = extra.get("final_answer")
        index = str(extra.get("id") or index)
        return Example(
            index,
            messages[:-1],
            messages[-1]["content"],
            "" if gold is None else str(gold),
            _known(extra) if "num_ops" in extra else {},
        )
    if is_r3(record):
        row = parse(where, record)
        response = None if row.rest is None else f"{row.rest}\n#### {row.gold}"
        return Example(
            row.id or index, [{"role": "user", "content": row.question}], response, row.gold, start=row.start or ""
        )
    prompt = _messages(where, "prompt", record.get("prompt"))
    if "reward_model" in record:
        reward, extra = record["reward_model"], _extra(where, record)
        if not isinstance(reward, Mapping) or reward.get("ground_truth") is None:
            raise UserError(f"{where}: `reward_model` has no `ground_truth`")
        gold = reward["ground_truth"]
        known = _known({**extra, "final_answer": gold}) if "num_ops" in extra else {}
        index = str(extra.get("id") or index)
        return Example(index, prompt, _text(where, "extra_info.answer", extra.get("answer")), str(gold), known)
    response = _text(where, "response", record.get("response"))
    gold = record.get("gold")
    if isinstance(gold, bool) or not isinstance(gold, str | int | float | None):
        raise UserError(f"{where}: `gold` must be text or a number")
    return Example(index, prompt, response, "" if gold is None else str(gold))


def _messages(where: str, field: str, value: Any) -> list[Message]:
    if isinstance(value, str) and value.strip():
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: `{field}` must be text or a list of messages, and not empty")
    for message in value:
        if not (
            isinstance(message, Mapping)
            and message.get("role") in ("system", "user", "assistant")
            and isinstance(message.get("content"), str)
        ):
            raise UserError(
                f"{where}: each message of `{field}` needs `role` (system, user or assistant) and `content` (text)"
            )
    return [{"role": message["role"], "content": message["content"]} for message in value]


def _text(where: str, field: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise UserError(f"{where}: `{field}` must be text")
    return value


def _extra(where: str, record: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = record.get("extra_info")
    if extra is not None and not isinstance(extra, Mapping):
        raise UserError(f"{where}: `extra_info` must be an object")
    return extra or {}


def _known(extra: Mapping[str, Any]) -> dict[str, object]:
    return {name: extra[name] for name in ("num_ops", "final_answer") if extra.get(name) is not None}
