"""`bridge-rl data`: what it writes and says, and what `--check` finds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from igsm_cases import DEMO
from public_rows import gsm8k, nli, task, write_json, write_jsonl

from bridge import cli
from bridge.config.stages import DataSettings
from bridge.stages.data import write_split
from bridge.stages.datacheck import check


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "gsm" / "train.jsonl", [gsm8k(n) for n in range(60)])
    write_jsonl(tmp_path / "gsm" / "test.jsonl", [gsm8k(n) for n in (100, 101, 100)])
    return tmp_path / "gsm"


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """The command line in this process: (exit code, standard output, standard error)."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bridge-rl", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        return int(left.value.code or 0), said.out, said.err

    yield call


def test_all_rows_of_a_split_and_their_summary(bridge: Any, data: Path, tmp_path: Path) -> None:
    file = tmp_path / "test.parquet"
    code, out, _ = bridge("data", "gsm8k", "--split", "test", "-o", file, f"path={data}", "--json")
    summary = json.loads(out)
    assert code == 0 and file.is_file()
    assert (summary["rows"], summary["rejected"], summary["answers"]) == (2, {"duplicate": 1}, {"203": 1, "205": 1})
    assert summary["task"]["path"] == str(data) and len(summary["task"]["sha256"]) == 64
    code, _, err = bridge("data", "gsm8k", "--split", "sft", "-o", tmp_path / "sft.parquet", f"path={data}")
    assert code == 0
    assert "rows; rejected: none\nmost common answers: " in err


def test_lengths_by_a_tokenizer(bridge: Any, data: Path, tmp_path: Path) -> None:
    """One token for each byte, and one at the end of each turn."""
    pytest.importorskip("transformers")
    from bridge.tasks.tokenizer import build_tokenizer

    build_tokenizer([], tmp_path / "tokenizer")
    words = ("data", "gsm8k", "--split", "test", "-o", tmp_path / "t.parquet", f"path={data}", 'instruction=""')
    _, out, _ = bridge(*words, "--tokenizer", tmp_path / "tokenizer", "--json")
    tokens = json.loads(out)["tokens"]
    assert tokens["prompt"]["max"] == len(gsm8k(100)["question"].encode()) + 1
    assert tokens["response"]["max"] == len("Bob has 100*2=200 pens.\nCem has 200+3=203 pens.\n#### 203") + 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gsm8k", "--split", "test", "-o", "x.csv"), "must end in .parquet, or in .json for R³'s form"),
        (("gsm8k", "--split", "tset", "-o", "x.parquet"), "split: input should be 'sft', 'rl', 'val' or 'test'"),
        (("gsm8k", "--split", "test", "-o", "x.parquet", "pth=y"), "unknown key; did you mean 'path'?"),
        (("gsm8k", "--split", "test", "-o", "x.parquet", "--size", "9"), "has 2 rows for split test"),
        (("igsm", "--split", "test", "-o", "x.parquet"), "size: is required"),
        (("igsm", "--split", "sft", "--size", "2", "-o", "x.json"), "only rows of a public data set have R³'s form"),
        (("gsm8k", "--split", "test"), "give TASK, --split and --output, or --check FILE"),
        (("gsm9k", "--split", "test", "-o", "x.parquet"), "there is no task 'gsm9k'; did you mean 'gsm8k'?"),
        (("--check", "nothing.parquet"), "nothing.parquet: no such file"),
    ],
)
def test_a_mistake_leaves_nothing(
    bridge: Any, data: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(data.parent)
    more = (f"path={data}",) if words[0] == "gsm8k" else ()
    code, out, err = bridge("data", *words, *more)
    assert code == 2 and said in err and not out
    assert sorted(path.name for path in data.parent.iterdir()) == ["gsm"]


def test_a_broken_row_leaves_no_file(bridge: Any, data: Path, tmp_path: Path) -> None:
    write_jsonl(data / "test.jsonl", [gsm8k(n) for n in range(20)] + [{"question": "x"}])
    code, _, err = bridge("data", "gsm8k", "--split", "test", "-o", tmp_path / "x.parquet", f"path={data}")
    assert code == 2 and f"{data / 'test.jsonl'}, line 21: `answer`" in err
    assert not list(tmp_path.glob("x.parquet*"))


# ---- --check


def written(data: Path, split: str, **settings: Any) -> Path:
    file = data.parent / f"{split}.parquet"
    write_split(task("gsm8k", data, **settings), DataSettings(kind="data", split=split), file)  # type: ignore[arg-type]
    return file


def test_what_we_write_is_sound(data: Path, tmp_path: Path) -> None:
    files = {split: written(data, split) for split in ("sft", "rl", "test")}
    found = check(files["sft"], [files["rl"], files["test"]])
    assert found["ok"] and found["problems"] == {} and set(found["overlap"].values()) == {0}
    assert found["worked"] == found["rows"] > 20 and found["answer_kind"] == "number"
    igsm = tmp_path / "igsm.parquet"
    write_split(DEMO, DataSettings(kind="data", split="sft", size=30), igsm)
    found = check(igsm, [])
    assert found["ok"] and (found["rows"], found["solved"], found["worked"]) == (30, 30, 30)


def test_shared_splits_overlap(data: Path) -> None:
    sft, rl = written(data, "sft", rl_share="all"), written(data, "rl", rl_share="all")
    found = check(sft, [rl])
    assert not found["ok"] and found["overlap"] == {str(rl): found["rows"]}
    assert found["problems"] == {"overlap": found["rows"]} and len(found["named"]) == 20


def test_each_fault_is_named_with_its_row(bridge: Any, tmp_path: Path) -> None:
    good = {"prompt": "2 + 2?", "response": "4\n#### 4", "gold": "4"}
    file = write_jsonl(
        tmp_path / "mine.jsonl",
        [
            good,
            {"prompt": "3 + 2?", "response": "6\n#### 6", "gold": "5"},
            {"prompt": "2  + 2?", "gold": "4"},
            {"prompt": "4 + 2?"},
            {"gold": "7"},
            {"prompt": "5 + 5?", "response": "hm", "gold": 10},
        ],
    )
    code, out, _ = bridge("data", "--check", file, "--json")
    found = json.loads(out)
    assert code == 1
    assert found["problems"] == {"duplicate": 1, "gold": 1, "schema": 1, "solution": 2}
    assert found["named"] == [
        f"{file}, line 2: the worked solution answers 6, not 5",
        f"{file}, line 3: asks the same as {file}, line 1",
        f"{file}, line 4: has no right answer",
        f"{file}, line 5: `prompt` must be text or a list of messages, and not empty",
        f"{file}, line 6: the worked solution answers nothing, not 10",
    ]
    code, _, err = bridge("data", "--check", file)
    assert code == 1 and err.endswith("problems: 1 duplicate, 1 gold, 1 schema, 2 solution\n")


def test_the_solver_disagrees_with_a_forged_answer(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = tmp_path / "igsm.parquet"
    write_split(DEMO, DataSettings(kind="data", split="test", size=5), file)
    table = pq.read_table(file)
    rows = table.to_pylist()
    rows[3]["reward_model"]["ground_truth"] += 1
    pq.write_table(pa.Table.from_pylist(rows, table.schema), file)
    found = check(file, [])
    assert found["problems"] == {"solution": 1, "solver": 1}
    assert all(f"{file}, row 3: " in line for line in found["named"])


def test_labels_and_r3s_files_are_checked_too(tmp_path: Path) -> None:
    rows = [{"instruction": f"Premise {n}?", "input": "", "output": f"Because {n}. ### no"} for n in range(3)]
    found = check(write_json(tmp_path / "mnli_train.json", rows), [])
    assert found["ok"] and (found["answer_kind"], found["worked"]) == ("label", 3)
    write_jsonl(tmp_path / "d" / "test.jsonl", [nli(n) for n in range(6)])
    file = tmp_path / "nli.parquet"
    write_split(task("snli", tmp_path / "d"), DataSettings(kind="data", split="test"), file)
    found = check(file, [])
    assert found["ok"] and found["answers"] == {"yes": 2, "it is not possible to tell": 2, "no": 2}


def test_an_empty_file_is_not_sound(bridge: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    code, _, err = bridge("data", "--check", tmp_path / "empty.jsonl")
    assert code == 1 and "empty.jsonl: has no rows" in err


def test_what_cannot_be_read_to_the_end_is_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "cut.jsonl"
    file.write_text(json.dumps({"prompt": "2 + 2?", "gold": "4"}) + '\n{"prompt": "3', encoding="utf-8")
    found = check(file, [])
    assert not found["ok"] and "line 2: not JSON" in found["named"][0]


def test_the_stage_pairs_vanilla_and_injected_gsm8k_row_by_row(data: Path, tmp_path: Path) -> None:
    from bridge.config.stages import BEHAVIORS, Behavior
    from bridge.stages.data import run
    from bridge.stages.job import Job
    from bridge.tasks.tables import read_examples

    found = {}
    for name, behavior in (("vanilla", Behavior()), ("bridge", BEHAVIORS["bridge"])):
        settings = DataSettings(kind="data", split="sft", behavior=behavior, tokenizer=True)
        out = tmp_path / name
        summary = run(Job("data/0", settings, task("gsm8k", data), {}, out, out, threads=1))
        assert summary["rows"] == len(read_examples(out)) and "ops" not in summary
        assert sorted(path.name for path in out.iterdir()) == ["data.parquet", "dataset.json", "tokenizer"]
        found[name] = read_examples(out)
    for one, other in zip(found["vanilla"], found["bridge"], strict=True):
        assert (one.id, one.prompt, one.gold) == (other.id, other.prompt, other.gold)
        assert one.response is not None and other.response is not None
        assert set(one.response.split("\n")) <= set(other.response.split("\n"))
    assert found["vanilla"] != found["bridge"]


def test_the_same_command_twice_at_once_and_after_a_kill(tmp_path: Path) -> None:
    """One writes the file, the other says why it does not; what a killed one left is no hindrance."""
    words = ["igsm", "--split", "sft", "--size", "300", "ops=[3,5]", "-o", "d.parquet"]
    mine = tmp_path / "d.parquet.tmp"
    mine.write_text("a file of the user's", encoding="utf-8")
    command = [sys.executable, "-m", "bridge", "data", *words]
    killed = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while not (tmp_path / ".d.parquet.work").exists() and killed.poll() is None:
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    (tmp_path / "d.parquet").unlink(missing_ok=True)  # where it was quicker than the kill
    both = [
        subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate()[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    (refusal,) = (text for process, text in zip(both, said, strict=True) if process.returncode == 2)
    assert "another process is making it right now; try again later" in refusal or "exists already" in refusal
    assert pq.read_table(tmp_path / "d.parquet").num_rows == 300
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.parquet", "d.parquet.tmp"]
    assert mine.read_text(encoding="utf-8") == "a file of the user's"
