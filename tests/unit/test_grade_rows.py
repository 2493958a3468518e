"""`bridge-rl grade`: files in, files out, nothing half-written."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bridge.config.grading import Grading
from bridge.errors import UserError
from bridge.tasks.grading import grade_rows

ROWS = [
    {"id": 3, "response": "#### 7", "gold": "7", "kind": "number:plain", "note": {"a": [1, None]}},
    {"response": "one line\u2028#### 8\x0b\x85", "gold": 8, "kind": "number"},
    {"response": "The answer is C.", "gold": "B", "kind": "choice", "answer": "old", "correct": True},
    {"response": "### neutral", "gold": "yes", "kind": "label"},
    {"response": "#### 12", "gold": "12", "kind": "number", "truncated": True},
    {"response": "lone surrogate \ud800", "gold": "1", "kind": "number"},
]


def write(path: Path, rows: list[dict[str, object]], ascii_only: bool = True) -> Path:
    path.write_text("".join(json.dumps(r, ensure_ascii=ascii_only) + "\n" for r in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def test_rows_keep_their_order_and_fields(tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    steps: list[int] = []
    summary = grade_rows(source, target, steps.append)
    verdicts = [("7", True, "correct"), ("8", True, "correct"), ("C", False, "wrong")]
    verdicts += [("it is not possible to tell", False, "wrong"), (None, False, "truncated"), (None, False, "no_answer")]
    expected = [
        {**row, "answer": answer, "correct": correct, "reason": reason}
        for row, (answer, correct, reason) in zip(ROWS, verdicts, strict=True)
    ]
    assert read(target) == expected
    assert summary == (6, 2, {"correct": 2, "wrong": 2, "truncated": 1, "no_answer": 1})
    assert sum(steps) == source.stat().st_size
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["in.jsonl", "out.jsonl"]


def test_options_and_policy_are_heeded(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"response": "The answer is iron", "gold": "B", "kind": "choice", "options": ["wood", "iron"]},
        {"response": "#### 35%", "gold": 0.35, "kind": "number"},
        {"response": "#### x+1", "gold": "1+x", "kind": "latex"},
    ]
    target = tmp_path / "out.jsonl"
    summary = grade_rows(write(tmp_path / "in.jsonl", rows), target, policy=Grading(percent="hundredth"))
    assert summary == (3, 3, {"correct": 3})
    assert [row["answer"] for row in read(target)] == ["B", "7/20", "1+x"]


def test_unicode_line_separators_do_not_split_rows(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [ROWS[1]], ascii_only=False)
    assert "\u2028" in source.read_text(encoding="utf-8")
    assert grade_rows(source, tmp_path / "out.jsonl").rows == 1


def test_a_file_can_be_graded_in_place_again_and_again(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS[:3])
    grade_rows(path, path)
    once = path.read_bytes()
    grade_rows(path, path)
    assert path.read_bytes() == once


def test_an_empty_file_and_blank_lines(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"")
    assert grade_rows(source, tmp_path / "out.jsonl").rows == 0
    source.write_bytes(b'\xef\xbb\xbf{"response": "7", "gold": "7", "kind": "number"}\r\n \n')
    assert grade_rows(source, tmp_path / "out.jsonl") == (1, 1, {"correct": 1})


GOOD = b'{"response": "7", "gold": "7", "kind": "number"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"response": "7", "gold": "7"', "line 3 is not JSON"),
        (b'{"response": "\xff", "gold": "7", "kind": "number"}', "line 3 is not JSON in UTF-8"),
        (b"[" * 100_000, "line 3 is not JSON"),
        (b"[1]", "line 3 is not an object"),
        (b'{"gold": "7", "kind": "number"}', "line 3: field 'response' is missing"),
        (b'{"response": null, "gold": "7", "kind": "number"}', "line 3: field 'response' must be text, not null"),
        (b'{"response": "7", "gold": true, "kind": "number"}', "line 3: field 'gold' must be text or a number"),
        (b'{"response": "7", "gold": "x", "kind": "number"}', "line 3: gold 'x' is not a number"),
        (b'{"response": "7", "gold": "7", "kind": 5}', "line 3: field 'kind' must be text"),
        (b'{"response": "7", "gold": "7", "kind": "sum"}', "line 3: kind 'sum' is not known"),
        (b'{"response": "7", "gold": "", "kind": "latex:x"}', "line 3: gold '' is not a formula"),
        (b'{"response": "7", "gold": "A", "kind": "choice", "options": "x"}', "line 3: field 'options'"),
        (b'{"response": "7", "gold": "7", "kind": "number", "truncated": "no"}', "line 3: field 'truncated'"),
    ],
)
def test_a_broken_row_is_named_and_nothing_is_written(tmp_path: Path, line: bytes, message: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(GOOD + GOOD + line + b"\n" + GOOD)
    target.write_bytes(b"before")
    with pytest.raises(UserError, match=message) as caught:
        grade_rows(source, target)
    assert "in.jsonl" in str(caught.value)
    assert target.read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 2


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", ROWS[:1])
    with pytest.raises(UserError, match=r"absent\.jsonl cannot be read"):
        grade_rows(tmp_path / "absent.jsonl", tmp_path / "out.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        grade_rows(tmp_path, tmp_path / "out.jsonl")
    with pytest.raises(UserError, match="is a folder"):
        grade_rows(source, tmp_path)
    with pytest.raises(UserError, match=r"out\.jsonl cannot be written"):
        grade_rows(source, tmp_path / "nowhere" / "out.jsonl")
    with pytest.raises(UserError, match="cannot be written"):
        grade_rows(source, source / "out.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """A file-size limit stands in for the full disk: the kernel refuses the write in the same way."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(GOOD * 20_000)
    program = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from bridge.errors import UserError; from bridge.tasks.grading import grade_rows\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: grade_rows(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "except UserError as error: sys.exit(f'refused: {error}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program, source, target], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "refused:" in done.stderr
    assert "out.jsonl cannot be written" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_kill_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(GOOD * 60_000)
    target.write_bytes(b"before")
    program = "import sys; from pathlib import Path; from bridge.tasks.grading import grade_rows\n"
    program += "grade_rows(Path(sys.argv[1]), Path(sys.argv[2]))"
    process = subprocess.Popen([sys.executable, "-c", program, source, target])
    deadline = time.monotonic() + 60
    while not any(p.suffix == ".tmp" and p.stat().st_size for p in tmp_path.iterdir()):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert target.read_bytes() == b"before"
    assert grade_rows(source, target).rows == 60_000
    assert len(read(target)) == 60_000
