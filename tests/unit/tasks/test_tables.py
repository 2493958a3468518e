"""Datasets on disk: the two schemas, users' files, and what broken files are told."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bridge.errors import UserError
from bridge.tasks import Example
from bridge.tasks.tables import read_examples, write_table

USER = {"role": "user", "content": "What is 2 + 2?"}
SYSTEM = {"role": "system", "content": "Be careful."}
EXAMPLE = Example("0", [SYSTEM, USER], "work\n#### 4", "4", {"num_ops": 1, "final_answer": 4})


def jsonl(path: Path, *lines: str) -> Path:
    file = path / "mine.jsonl"
    file.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return file


def test_the_schema_of_sft_rows(tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"
    assert write_table([EXAMPLE], "sft", "igsm", file) == 1
    message = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    extra = pa.struct([("num_ops", pa.int64()), ("final_answer", pa.int64()), ("answer_with_mask", pa.string())])
    assert pq.read_schema(file) == pa.schema(
        [("data_source", pa.string()), ("message", message), ("extra_info", extra)]
    )
    assert pq.read_table(file).to_pylist() == [
        {
            "data_source": "igsm",
            "message": [SYSTEM, USER, {"role": "assistant", "content": "work\n#### 4"}],
            "extra_info": {"num_ops": 1, "final_answer": 4, "answer_with_mask": None},
        }
    ]
    assert read_examples(tmp_path) == [EXAMPLE]


@pytest.mark.parametrize("split", ["rl", "val", "test"])
def test_the_schema_of_rows_to_be_answered(tmp_path: Path, split: str) -> None:
    file = tmp_path / "data.parquet"
    write_table([EXAMPLE], split, "igsm", file)  # type: ignore[arg-type]
    message = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    assert pq.read_schema(file) == pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", message),
            ("ability", pa.string()),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.int64())])),
            ("extra_info", pa.struct([("num_ops", pa.int64()), ("answer", pa.string())])),
        ]
    )
    assert pq.read_table(file).to_pylist() == [
        {
            "data_source": "igsm",
            "prompt": [SYSTEM, USER],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": 4},
            "extra_info": {"num_ops": 1, "answer": "work\n#### 4"},
        }
    ]
    assert read_examples(file) == [EXAMPLE]


def test_rows_are_written_in_groups_and_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"
    rows = (Example(str(n), [USER], None, str(n), {"num_ops": 1, "final_answer": n}) for n in range(12_001))
    assert write_table(rows, "rl", "igsm", file) == 12_001
    assert pq.ParquetFile(file).num_row_groups == 3
    assert [row.gold for row in read_examples(file)] == [str(n) for n in range(12_001)]


def test_a_users_lines(tmp_path: Path) -> None:
    file = jsonl(
        tmp_path,
        json.dumps({"prompt": "1 + 1?", "gold": 2}),
        "",
        json.dumps({"prompt": [SYSTEM, USER], "response": "4", "gold": "4", "note": "ignored"}),
        # These separators end a line for str.splitlines, but not in a .jsonl file.
        '{"prompt": "a\u2028b\u0085c\u2029d?", "response": null}',
    )
    assert read_examples(file) == [
        Example("0", [{"role": "user", "content": "1 + 1?"}], None, "2"),
        Example("1", [SYSTEM, USER], "4", "4"),
        Example("2", [{"role": "user", "content": "a\u2028b\u0085c\u2029d?"}], None, ""),
    ]


def test_a_users_parquet(tmp_path: Path) -> None:
    file = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"prompt": ["1 + 1?"], "gold": ["2"]}), file)
    assert read_examples(file) == [Example("0", [{"role": "user", "content": "1 + 1?"}], None, "2")]


GOOD = json.dumps({"prompt": "1 + 1?", "gold": "2"})


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "must be an object"),
        ("{}", "`prompt`"),
        ('{"prompt": ""}', "`prompt`"),
        ('{"prompt": []}', "`prompt`"),
        ('{"prompt": [{"role": "robot", "content": "x"}]}', "`role`"),
        ('{"prompt": [{"role": "user", "content": null}]}', "`content`"),
        ('{"prompt": "x", "response": 3}', "`response`"),
        ('{"prompt": "x", "gold": [3]}', "`gold`"),
        ('{"prompt": "x", "gold": true}', "`gold`"),
        ('{"prompt": "x", "reward_model": {}}', "`ground_truth`"),
        ('{"prompt": "x", "reward_model": {"ground_truth": 1}, "extra_info": 7}', "`extra_info`"),
        ('{"message": [{"role": "user", "content": "x"}]}', "`message`"),
        ('{"message": [{"role": "assistant", "content": "x"}]}', "`message`"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    file = jsonl(tmp_path, GOOD, "", line)
    with pytest.raises(UserError, match=complaint) as error:
        read_examples(file)
    assert f"{file}, line 3: " in str(error.value)


def test_a_broken_row_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"prompt": ["1 + 1?", None], "gold": ["2", "3"]}), file)
    with pytest.raises(UserError, match=r"row 1: `prompt`"):
        read_examples(file)


def test_files_that_are_no_dataset(tmp_path: Path) -> None:
    missing = tmp_path / "missing.jsonl"
    empty = jsonl(tmp_path, "", " ")
    garbage = tmp_path / "garbage.parquet"
    garbage.write_bytes(b"PAR1 nothing of the kind PAR1")
    cut = tmp_path / "cut.parquet"
    write_table([EXAMPLE], "sft", "igsm", cut)
    cut.write_bytes(cut.read_bytes()[:-20])
    no_rows = tmp_path / "no_rows.parquet"
    write_table([], "rl", "igsm", no_rows)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes('{"prompt": "Stück?"}\n'.encode("latin-1"))
    text = tmp_path / "mine.txt"
    text.write_text(GOOD, encoding="utf-8")
    for file, complaint in [
        (missing, "no such file"),
        (tmp_path, "no such file"),
        (empty, "no rows"),
        (no_rows, "no rows"),
        (garbage, "Parquet"),
        (cut, "Parquet"),
        (latin, "UTF-8"),
        (text, ".jsonl"),
    ]:
        with pytest.raises(UserError, match=complaint) as error:
            read_examples(file)
        assert str(file) in str(error.value)
