"""The task of docs/tasks.md, as it stands there, through the whole chain; and what a run does with the file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from chain import bridge, bridge_json

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
EXPERIMENT = next(block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "name: countdown" in block)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The two files of the page, in a folder of their own."""
    (tmp_path / "my_tasks.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "countdown.yaml").write_text(EXPERIMENT, encoding="utf-8")
    return tmp_path


def plan(folder: Path, *words: str, check: int = 0) -> str:
    done = bridge("plan", "countdown.yaml", *words, runs=folder / "runs", cwd=folder, check=check)
    return done.stdout + done.stderr


def test_the_page_is_short_and_its_task_runs_through_the_chain(folder: Path) -> None:
    """The run is prepared, the file spoilt, and only then does the first stage run: jobs import the run's copy."""
    assert len(CODE.splitlines()) < 60
    run = Path(bridge("launch", "countdown.yaml", "--prepare", runs=folder / "runs", cwd=folder).stdout.strip())
    (folder / "my_tasks.py").write_text("raise RuntimeError('the wrong file')", encoding="utf-8")
    bridge("resume", run.name, "--wait", runs=folder / "runs")
    (copy,) = (run / "code" / "own_tasks").rglob("*.py")
    assert copy.read_text(encoding="utf-8") == CODE
    assert bridge_json("status", run.name, runs=folder / "runs")["state"] == "done"
    rows = pq.read_table(run / "stages/train_data/0/data.parquet").to_pylist()
    assert len(rows) == 200 and rows[0]["data_source"] == "my_tasks.py:Countdown"
    for row in rows:
        found = re.fullmatch(r"(\d+) - (\d+) \* (\d+)", row["message"][0]["content"])
        assert found is not None
        start, step, times = map(int, found.groups())
        assert row["extra_info"]["final_answer"] == str(start - step * times)
    scores = json.loads((run / "stages/eval/1/eval.json").read_text(encoding="utf-8"))
    assert "pass@1" in json.dumps(scores)


def identity(folder: Path) -> str:
    done = bridge("launch", "countdown.yaml", "--prepare", runs=folder / "runs", cwd=folder)
    return Path(done.stdout.strip()).name


def test_a_changed_file_is_another_run_and_a_moved_one_is_not(folder: Path, tmp_path: Path) -> None:
    first = identity(folder)
    other = tmp_path / "other"
    (other / "deep").mkdir(parents=True)
    (other / "deep" / "my_tasks.py").write_text(CODE, encoding="utf-8")
    text = EXPERIMENT.replace("my_tasks.py:", "deep/my_tasks.py:")
    (other / "countdown.yaml").write_text(text, encoding="utf-8")
    assert identity(other) == first
    (folder / "my_tasks.py").write_text(CODE + "# changed\n", encoding="utf-8")
    assert identity(folder) != first


MISTAKES: list[tuple[Any, str]] = [
    (("largest: 20", "largst: 20"), "task my_tasks.py:Countdown: task.largst: unknown key; did you mean 'largest'?"),
    (("largest: 20", "largest: many"), "task.largest: input should be a valid integer"),
    (("my_tasks.py:Countdown", "my_tasks.py:Countdwn"), "there is no class 'Countdwn'; did you mean 'Countdown'?"),
    (("my_tasks.py:Countdown", "her_tasks.py:Countdown"), "her_tasks.py: cannot be read: No such file or directory"),
    (("size: 200, ", ""), "stages.train_data.size: is required"),
]


@pytest.mark.parametrize(("change", "said"), MISTAKES)
def test_a_mistake_in_the_experiment_is_told_before_anything_runs(
    folder: Path, change: tuple[str, str], said: str
) -> None:
    (folder / "countdown.yaml").write_text(EXPERIMENT.replace(*change), encoding="utf-8")
    told = plan(folder, check=2)
    assert said in told and "countdown.yaml" in told and "Traceback" not in told
    assert not (folder / "runs").exists()


FILES = [
    ("import helpers\n" + CODE, "No module named 'helpers' (a task is one file"),
    (CODE.replace("def rows", "def row"), "class Countdown needs a method `rows`"),
    (CODE.replace('answer_kind = "number"', 'answer_kind = "numbre"'), "class Countdown needs `answer_kind`"),
    (CODE.replace("(Settings):", ":"), "Settings must be a class made from bridge.tasks.Settings"),
    ("def broken(:\n", "cannot be imported: SyntaxError"),
    ("raise SystemExit(0)\n", "cannot be imported: SystemExit"),
    (CODE.replace("self.settings = settings", "1 / 0"), "class Countdown cannot be used: ZeroDivisionError"),
    (CODE.replace("(Task)", ""), "class Countdown cannot be used: AttributeError"),
]


@pytest.mark.parametrize(("code", "said"), FILES)
def test_a_mistake_in_the_file_is_told_before_anything_runs(folder: Path, code: str, said: str) -> None:
    (folder / "helpers.py").write_text("", encoding="utf-8")
    (folder / "my_tasks.py").write_text(code, encoding="utf-8")
    told = plan(folder, check=2)
    assert said in told and "my_tasks.py" in told and "Traceback" not in told


def test_a_behavior_needs_a_task_that_words_its_solutions(folder: Path) -> None:
    words = ("data", "my_tasks.py:Countdown", "--split", "sft", "--size", "3", "-o", "x.parquet", "behavior=bridge")
    done = bridge(*words, runs=folder / "runs", cwd=folder, check=2)
    assert "leave `behavior` out" in done.stderr and not (folder / "x.parquet").exists()


def test_fewer_rows_than_asked_for_are_refused(folder: Path) -> None:
    words = ("data", "my_tasks.py:Countdown", "--split", "test", "--size", "500", "-o", "x.parquet", "largest=2")
    done = bridge(*words, runs=folder / "runs", cwd=folder, check=2)
    assert re.search(r"has \d+ rows for split test, not the 500 asked for; ask for fewer", done.stderr)
    assert sorted(path.name for path in folder.iterdir()) == ["countdown.yaml", "my_tasks.py"]


YIELD = "            yield Example("
NONSENSE = [
    (CODE.replace(YIELD, "            1 / 0\n" + YIELD), r"my_tasks\.py, line \d+: rows: failed after 0 rows: ZeroDiv"),
    (CODE.replace(YIELD, "            raise SystemExit(0)\n" + YIELD), "rows: failed after 0 rows: SystemExit"),
    (CODE.replace(YIELD, "            yield dict("), "row 0: must be a bridge.tasks.Example, not dict"),
    (CODE.replace("gold=str(path[-1])", "gold=path[-1]"), "row 0: `id` and `gold` must be text"),
    (CODE.replace("gold=str(path[-1])", 'gold="many"'), "row 0: gold 'many' is not a number"),
    (
        CODE.replace('prompt=[{"role": "user", "content": question}]', "prompt=question"),
        "row 0: `prompt` must be a list",
    ),
    (CODE.replace("if len(seen) == size:", "if False:"), "gives more than the 2 rows asked for"),
    (CODE.replace("yield Example", "Example"), "rows: failed after 0 rows: TypeError"),
]


@pytest.mark.parametrize(("code", "said"), NONSENSE)
def test_whatever_the_file_does_is_told_and_leaves_nothing(folder: Path, code: str, said: str) -> None:
    assert code != CODE
    (folder / "my_tasks.py").write_text(code, encoding="utf-8")
    words = ("data", "my_tasks.py:Countdown", "--split", "sft", "--size", "2", "-o", "x.parquet")
    done = bridge(*words, runs=folder / "runs", cwd=folder, check=2)
    assert re.search(said, done.stderr) and "Traceback" not in done.stderr and "fault of bridge-rl" not in done.stderr
    assert not list(folder.glob("x.parquet*"))


def test_what_the_file_prints_does_not_stand_between_results(folder: Path) -> None:
    noisy = CODE.replace(YIELD, "            print('row')\n" + YIELD) + "print('imported')\n"
    (folder / "my_tasks.py").write_text(noisy, encoding="utf-8")
    words = ("data", "my_tasks.py:Countdown", "--split", "sft", "--size", "2", "-o", "x.parquet", "--json")
    done = bridge(*words, runs=folder / "runs", cwd=folder)
    assert json.loads(done.stdout)["rows"] == 2 and "imported" in done.stderr and "row" in done.stderr


def test_the_data_command_takes_the_file(folder: Path) -> None:
    words = ("data", "my_tasks.py:Countdown", "--split", "test", "--size", "5", "-o", "x.parquet", "times=2", "--json")
    summary = json.loads(bridge(*words, runs=folder / "runs", cwd=folder).stdout)
    assert summary["rows"] == 5 and sum(summary["answers"].values()) == 5
    check = json.loads(bridge("data", "--check", "x.parquet", "--json", runs=folder / "runs", cwd=folder).stdout)
    assert check["ok"] and check["worked"] == 5
