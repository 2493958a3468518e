"""Public data sets: every form is read, broken rows are named, splits never share a question, and gold grades right."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from public_rows import (
    arc,
    arc_hub,
    gsm8k,
    nli,
    nli_hub,
    race,
    svamp,
    task,
    write_json,
    write_jsonl,
    write_parquet,
)

from bridge.config.tasks import FileTask, parse_task
from bridge.errors import UserError
from bridge.tasks import Example, Split, load_task
from bridge.tasks.files import FORMS, pools, records
from bridge.tasks.grading import grade

SPLITS: tuple[Split, ...] = ("sft", "rl", "val", "test")
REAL = Path("/work/shared/data/gsm8k")


def rows(found: FileTask, split: Split, size: int | None = None, seed: int = 0) -> list[Example]:
    return list(load_task(found).rows(split, size, seed))


def asked(found: FileTask, split: Split, **more: Any) -> list[str]:
    return [row.prompt[-1]["content"] for row in rows(found, split, **more)]


# ---- what each task makes of its rows


def test_gsm8k(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "test.jsonl", [gsm8k(4)])
    (row,) = rows(task("gsm8k", tmp_path), "test")
    assert row.prompt[0]["content"].startswith("Ann has 4 pens.\u2028Bob has twice as many.")
    assert row.prompt[0]["content"].endswith("\n\nWork it out step by step. End with a line of its own: four hash "
                                             "signs and the answer, such as #### 42")  # fmt: skip
    assert row.response == "Bob has 4*2=8 pens.\nCem has 8+3=11 pens.\n#### 11"
    assert (row.gold, row.id) == ("11", "test-0")
    (marked,) = rows(task("gsm8k", tmp_path, calculator=True, instruction=""), "test")
    assert marked.response == "Bob has 4*2=<<4*2=8>>8 pens.\nCem has 8+3=<<8+3=11>>11 pens.\n#### 11"
    assert marked.prompt[0]["content"] == gsm8k(4)["question"]
    (thought,) = rows(task("gsm8k", tmp_path, frame="think"), "test")
    assert [turn["role"] for turn in thought.prompt] == ["system", "user"]
    assert thought.response == (
        "<think>\nBob has 4*2=8 pens.\nCem has 8+3=11 pens.\n</think>\n"
        "<answer>\nThe final answer is \\boxed{11}.\n</answer>"
    )


@pytest.mark.parametrize(
    ("equation", "answer", "work"),
    [
        ("( 8.0 - 3.0 )", 5.0, "8 - 3 = 5"),
        ("( ( 8.0 - 3.0 ) * 2.0 )", 10.0, "((8 - 3) * 2) = (5 * 2) = 10"),
        ("( 10.0 / 4.0 )", "2.5", "10 / 4 = 2.5"),
        ("( 1.0 / 3.0 )", "0.33", None),
        ("( 8.0 - 3.0 )", 6.0, None),
        ("x = 8", 8, None),
    ],
)
def test_svamp(tmp_path: Path, equation: str, answer: object, work: str | None) -> None:
    write_json(tmp_path / "SVAMP.json", [{**svamp(9), "Equation": equation, "Answer": answer}])
    found = task("svamp", tmp_path, test_share=0.999999)
    (row,) = rows(found, "test")
    assert row.prompt[0]["content"].startswith("Dee had 9.0 cups and broke 2.0 of them, How many cups are left?")
    assert row.id == "chal-9"
    number = str(answer).removesuffix(".0")
    assert grade(f"#### {row.gold}", number, "number").correct
    assert row.response == (f"{work}\n#### {row.gold}" if work else f"#### {row.gold}")


@pytest.mark.parametrize(
    ("labels", "key", "letter"), [("ABCD", 2, "C"), ("1234", 3, "D"), ("ABC", 0, "A"), ("12345", 4, "E")]
)
def test_arc(tmp_path: Path, labels: str, key: int, letter: str) -> None:
    write_jsonl(tmp_path / "ARC-Challenge" / "ARC-Challenge-Test.jsonl", [arc(3, labels, key)])
    write_jsonl(tmp_path / "ARC-Easy" / "ARC-Easy-Test.jsonl", [arc(70)])
    (row,) = rows(task("arc", tmp_path), "test")
    lines = row.prompt[0]["content"].split("\n")
    assert lines[0] == f"Which thing is {3 + key}?"
    assert lines[1 : 1 + len(labels)] == [f"{'ABCDE'[place]}. thing {3 + place}" for place in range(len(labels))]
    assert (row.gold, row.response, row.id) == (letter, f"#### {letter}", "Q3")
    assert rows(task("arc", tmp_path, level="easy"), "test")[0].id == "Q70"


def test_nli_labels_are_in_r3s_words_and_disagreement_is_counted(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "multinli_1.0_dev_matched.jsonl", [nli(0), nli(1), nli(2), nli(3, "-")])
    write_jsonl(tmp_path / "multinli_1.0_dev_mismatched.jsonl", [nli(7)])
    write_jsonl(tmp_path / "multinli_1.0_train.jsonl", [nli(n, "-") for n in range(9)] + [nli(50)])
    rejected: Counter[str] = Counter()
    found = task("mnli", tmp_path)
    test = list(load_task(found).rows("test", None, 0, None, rejected))
    assert [row.gold for row in test] == ["yes", "it is not possible to tell", "no"]
    assert rejected == {"no_label": 1}
    assert (
        test[0]
        .prompt[0]["content"]
        .startswith('Premise: 0 dogs\u2028run.\nHypothesis: "0 animals" move.\nDoes the premise entail the hypothesis?')
    )
    assert [row.id for row in rows(task("mnli", tmp_path, genres="mismatched"), "test")] == ["7x"]


def test_race_passages_become_a_row_a_question(tmp_path: Path) -> None:
    for split, number in (("train", 1), ("dev", 2), ("test", 3)):
        write_json(tmp_path / "RACE" / split / "high" / f"{number}.txt", race(number))
        write_json(tmp_path / "RACE" / split / "middle" / f"{number}.txt", race(number + 10, 1))
    found = task("race", tmp_path / "RACE")
    test = rows(found, "test")
    assert [row.id for row in test] == ["high3.txt-0", "high3.txt-1"]
    assert (
        test[1]
        .prompt[0]["content"]
        .startswith(
            "Passage: Passage 3.\nIt has two lines.\n\nQuestion: What is 3 and 1?\nA. one\nB. two\nC. three\nD. 3-1\n"
        )
    )
    assert test[1].gold == "D"
    assert len(rows(found, "val")) == 2
    assert len(rows(task("race", tmp_path / "RACE", level="middle"), "test")) == 1


# ---- forms


def hub_forms(folder: Path) -> dict[str, tuple[str, Path, int]]:
    """Name of a form → task, where its data lie, and how many test rows there are. As the hub lays its files out."""
    write_parquet(folder / "g" / "main" / "test-00000-of-00001.parquet", [gsm8k(n) for n in range(5)])
    write_parquet(folder / "g" / "socratic" / "test-00000-of-00001.parquet", [gsm8k(n) for n in range(90, 99)])
    for split in ("train", "test"):
        write_parquet(folder / "s" / "data" / f"{split}-00000-of-00001-0a1b2c3d.parquet", [svamp(n) for n in range(9)])
    write_parquet(folder / "a" / "ARC-Challenge" / "test-00000-of-00001.parquet", [arc_hub(n) for n in range(6)])
    write_parquet(folder / "a" / "ARC-Easy" / "test-00000-of-00001.parquet", [arc_hub(n) for n in range(50, 70)])
    write_parquet(folder / "m" / "data" / "validation_matched-00000-of-00001.parquet", [nli_hub(n) for n in range(7)])
    write_parquet(folder / "m" / "data" / "validation_mismatched-00000-of-00001.parquet", [nli_hub(60)])
    unlabelled = {**nli_hub(9), "label": -1}
    write_parquet(
        folder / "n" / "plain_text" / "test-00000-of-00001.parquet", [unlabelled, *(nli_hub(n) for n in range(8))]
    )
    for part in range(2):
        one = [
            {"example_id": f"h{n}", "article": f"P{n}", "question": "Why?", "options": list("wxyz"), "answer": "B"}
            for n in range(part * 3, part * 3 + 3)
        ]
        write_parquet(folder / "r" / "high" / f"test-0000{part}-of-00002.parquet", one)
    return {
        "gsm8k": ("gsm8k", folder / "g", 5),
        "svamp": ("svamp", folder / "s", 9),
        "arc": ("arc", folder / "a", 6),
        "mnli": ("mnli", folder / "m", 7),
        "snli": ("snli", folder / "n", 8),
        "race": ("race", folder / "r", 6),
    }


@pytest.mark.parametrize("form", ["gsm8k", "svamp", "arc", "mnli", "snli", "race"])
def test_the_hubs_forms_are_read_and_every_answer_grades_right(tmp_path: Path, form: str) -> None:
    name, path, count = hub_forms(tmp_path)[form]
    for frame in ("plain", "think"):
        found = task(name, path, frame=frame)
        source = load_task(found)
        test = rows(found, "test")
        assert len(test) == count
        for row in test:
            if row.response is not None:
                assert row.response.startswith(source.response_prefix)
                assert grade(row.response, row.gold, source.answer_kind).correct, row.response
            else:
                assert frame == "think" and name in ("arc", "mnli", "snli", "race")


@pytest.mark.parametrize("suffix", [".tsv", ".txt"])
def test_nli_tables_have_tabs_and_no_quotes(tmp_path: Path, suffix: str) -> None:
    lines = ["index\tgold_label\tsentence1\tsentence2"]
    lines += ['0\tneutral\tA "dog\u2028runs.\tAn "animal" moves.', "1\t-\ta\tb", "2\tcontradiction\tc\td"]
    (tmp_path / f"dev_matched{suffix}").write_text("\r\n".join(lines) + "\r\n", encoding="utf-8")
    test = rows(task("mnli", tmp_path), "test")
    assert [row.gold for row in test] == ["it is not possible to tell", "no"]
    assert 'Premise: A "dog\u2028runs.\nHypothesis: An "animal" moves.' in test[0].prompt[0]["content"]


def test_csv_has_quotes_and_lines_inside_them(tmp_path: Path) -> None:
    with (tmp_path / "test.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, ["question", "answer"])
        table.writeheader()
        table.writerows(gsm8k(n) for n in range(3))
    assert [row.gold for row in rows(task("gsm8k", tmp_path), "test")] == ["3", "5", "7"]


def test_of_several_forms_of_one_set_one_is_read(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "snli_1.0" / "snli_1.0_test.jsonl", [nli(1), nli(2)])
    (tmp_path / "snli_1.0" / "snli_1.0_test.txt").write_text("gold_label\tsentence1\tsentence2\n", encoding="utf-8")
    (tmp_path / "snli_1.0" / "README.txt").write_text("nothing", encoding="utf-8")
    (tmp_path / "snli_1.0" / "._snli_1.0_test.jsonl").write_bytes(b"\x00\x05\x16\x07")
    found = task("snli", tmp_path)
    rejected: Counter[str] = Counter()
    assert len(list(load_task(found).rows("test", None, 0, None, rejected))) == 2 and not rejected


# ---- broken files

BROKEN: list[tuple[str, str, Any, str]] = [
    ("gsm8k", "test.jsonl", {"question": "How many?"}, "line 2: `answer` must be text"),
    ("gsm8k", "test.jsonl", {"question": "How many?", "answer": "Three."}, "line 2: `answer` must end with"),
    ("gsm8k", "test.jsonl", {"question": " ", "answer": "#### 3"}, "line 2: `question`"),
    ("gsm8k", "test.jsonl", {"question": "How?", "answer": "#### many"}, "line 2: the answer 'many' is not a number"),
    ("gsm8k", "test.jsonl", {"question": "How?", "answer_value": "x"}, "line 2: the answer 'x' is not a number"),
    ("gsm8k", "test.jsonl", ["x"], "line 2: a row must be an object"),
    ("svamp", "test.jsonl", {**svamp(1), "Answer": "many"}, "line 2: the answer 'many' is not a number"),
    ("svamp", "test.jsonl", {**svamp(1), "Answer": None}, "line 2: the answer must be a number"),
    ("svamp", "test.jsonl", {**svamp(1), "Body": 3}, "line 2: `Body` must be text"),
    ("arc", "test.jsonl", {**arc(1), "answerKey": "F"}, "line 2: `answerKey` must be one of the labels"),
    ("arc", "test.jsonl", {"id": "x", "question": "Why?", "choices": "A, B"}, "line 2: `choices`"),
    ("arc", "test.jsonl", {**arc(1, "AA", 0)}, "line 2: `answerKey`"),
    ("arc", "test.jsonl", arc(1, "A", 0), "line 2: the options must be two to ten"),
    ("arc", "test.jsonl", {k: v for k, v in arc(1).items() if k != "answerKey"}, "line 2: `answerKey` is missing"),
    ("mnli", "dev.jsonl", {k: v for k, v in nli(1).items() if k != "gold_label"}, "line 2: `label` (`gold_label`"),
    ("mnli", "dev.jsonl", {"question": "Why?", "answer": "#### 1"}, "line 2: `label` (`gold_label`"),
    ("race", "test.jsonl", {"instruction": "Which?", "output": "### AB"}, "line 2: the answer must be a letter"),
    ("snli", "test.jsonl", {**nli_hub(1), "label": "x" * 10_000_000}, "line 2: the label must be"),
    ("mnli", "dev.jsonl", nli(1, "maybe"), "line 2: the label must be entailment"),
    ("mnli", "dev.jsonl", {**nli(1), "sentence2": ""}, "line 2: `sentence2` must be text"),
    ("snli", "test.jsonl", {**nli_hub(1), "label": 7}, "line 2: the label must be"),
    ("snli", "test.jsonl", {**nli_hub(1), "label": True}, "line 2: the label must be"),
    ("race", "test.jsonl", {**race(1), "answers": ["A"]}, "line 2: `questions`, `options` and `answers`"),
    ("race", "test.jsonl", {**race(1), "answers": ["A", "E"]}, "line 2, question 1: the answer must be the letter"),
    ("race", "test.jsonl", {**race(1), "options": ["abcd", "abcd"]}, "line 2, question 0: `options`"),
]  # fmt: skip
GOOD = {"gsm8k": gsm8k(1), "svamp": svamp(5), "arc": arc(5), "mnli": nli(5), "snli": nli(5), "race": race(5)}


@pytest.mark.parametrize(("name", "file", "row", "said"), BROKEN)
def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path, name: str, file: str, row: Any, said: str) -> None:
    path = write_jsonl(tmp_path / file, [GOOD[name], row])
    with pytest.raises(UserError) as caught:
        rows(task(name, tmp_path), "test")
    assert f"{path}, {said}" in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("test.jsonl", b'{"question": "a"', "line 1: not JSON"),
        ("test.jsonl", b"\xff\xfe", "line 1: not UTF-8"),
        ("test.jsonl", b'{"question": "a", "answer": "#### 1"}\n\n{"question": "\xff"}', "line 3: not UTF-8"),
        ("test.json", b'[\n"\xe2\x80\xa8\xff"]', "line 2: not UTF-8"),
        ("test.csv", b"question,answer\n\xff,1\n", "line 2: not UTF-8"),
        ("test.json", b'[\n{"question": "a"},\n{"answer": }]', "line 3: not JSON"),
        ("test.json", b"[" * 100_000, "not JSON"),
        ("test.parquet", b"PAR1 no PAR1", "Parquet"),
        ("test.tsv", b"question\tanswer\na\t#### 1\nc\n", "line 3: has 1 columns, but the header has 2"),
        ("test.csv", b'question,answer\na,"b\n', "line 2: not CSV"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, file: str, content: bytes, said: str) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(UserError) as caught:
        rows(task("gsm8k", tmp_path), "test")
    assert str(tmp_path / file) in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("file", ["test.jsonl", "test.json", "test.csv"])
def test_a_byte_order_mark_and_the_line_ends_of_windows_change_nothing(tmp_path: Path, file: str) -> None:
    row = gsm8k(1)
    content = {
        "test.jsonl": json.dumps(row) + "\r\n",
        "test.json": json.dumps([row], indent=1).replace("\n", "\r\n"),
        "test.csv": f'question,answer\r\n{row["question"]},"{row["answer"]}"\r\n',
    }[file]
    (tmp_path / file).write_bytes(b"\xef\xbb\xbf" + content.encode())
    (found,) = rows(task("gsm8k", tmp_path), "test")
    assert found.extra["question"] == row["question"] and found.gold == "5"


def test_a_path_without_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text("test", encoding="utf-8")
    (tmp_path / "train.jsonl").mkdir()
    (tmp_path / "test.jsonl.gz").write_bytes(b"\x1f\x8b")
    for path, said in (
        (tmp_path, "holds no data file"),
        (tmp_path / "test.jsonl.gz", "holds no data file"),
        (tmp_path / "x", "no such file or folder"),
    ):
        with pytest.raises(UserError, match=said):
            task("gsm8k", path)
    write_jsonl(tmp_path / "test.jsonl", [gsm8k(1)])
    with pytest.raises(UserError, match=r"no rows for split 'sft' in 1 test file$"):
        rows(task("gsm8k", tmp_path), "sft")
    (tmp_path / "empty").mkdir()
    for name in ("some.jsonl", "more.jsonl"):
        write_jsonl(tmp_path / "empty" / name, [])
    with pytest.raises(UserError, match=r"no rows for split 'sft' in 2 files$"):
        rows(task("gsm8k", tmp_path / "empty"), "sft")
    with pytest.raises(UserError, match=r"size 2: .* has 1 rows for split test; ask for fewer"):
        rows(task("gsm8k", tmp_path), "test", size=2)


def test_changed_data_are_refused_and_their_place_does_not_matter(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_jsonl(tmp_path / folder / "test.jsonl", [gsm8k(1)])
    one, other = task("gsm8k", tmp_path / "a"), task("gsm8k", tmp_path / "b")
    assert one.path != other.path and one.identity() == other.identity()
    write_jsonl(tmp_path / "a" / "test.jsonl", [gsm8k(2)])
    with pytest.raises(UserError, match="not those of the launch"):
        rows(one, "test")
    assert task("gsm8k", tmp_path / "a").identity() != one.identity()
    with pytest.raises(UserError, match="not those that sha256 names"):
        task("gsm8k", tmp_path / "a", sha256=str(one.sha256))


# ---- splits


def overlapping(tmp_path: Path) -> Path:
    """200 training questions, of which two are in the test set and two are there twice, once with other white space."""
    train = [gsm8k(n) for n in range(200)]
    again = {**gsm8k(9), "question": gsm8k(9)["question"].replace(" ", "  ")}
    write_jsonl(tmp_path / "train.jsonl", [*train, again, gsm8k(10)])
    write_jsonl(tmp_path / "test.jsonl", [gsm8k(n) for n in (5, 6, 500)])
    return tmp_path


def test_splits_never_share_a_question(tmp_path: Path) -> None:
    found = task("gsm8k", overlapping(tmp_path), val_share=0.2)
    rejected: Counter[str] = Counter()
    source = load_task(found)
    parts = {split: [r.extra["question"] for r in source.rows(split, None, 0, None, rejected)] for split in SPLITS}
    questions = [question for part in parts.values() for question in part]
    assert len(set(questions)) == len(questions) == 201
    assert rejected == {"in_test": 2, "duplicate": 2}
    assert len(parts["test"]) == 3 and all(len(parts[split]) > 20 for split in ("sft", "rl", "val"))
    # the seed changes what is drawn, and never which split a question is in
    assert {split: sorted(asked(found, split, seed=7)) for split in SPLITS} == {
        split: sorted(asked(found, split)) for split in SPLITS
    }
    shared = task("gsm8k", tmp_path, val_share=0.2, rl_share="all")
    assert asked(shared, "sft") == asked(shared, "rl")
    assert set(asked(shared, "sft")) == set(asked(found, "sft")) | set(asked(found, "rl"))
    assert asked(shared, "val") == asked(found, "val")


@settings(max_examples=25, deadline=None)
@given(small=st.integers(1, 60), more=st.integers(0, 20), seed=st.integers(0, 3))
def test_a_size_draws_a_part_of_a_larger_one_in_the_order_of_the_data(
    tmp_path_factory: pytest.TempPathFactory, small: int, more: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "test.jsonl", [gsm8k(n) for n in range(80)])
    found = task("gsm8k", folder)
    few, many = asked(found, "test", size=small, seed=seed), asked(found, "test", size=small + more, seed=seed)
    everything = asked(found, "test")
    assert len(few) == small and set(few) <= set(many)
    assert few == [question for question in everything if question in set(few)]


def test_data_without_sets_of_their_own_are_shared_out(tmp_path: Path) -> None:
    write_json(tmp_path / "SVAMP.json", [svamp(n) for n in range(1000)])
    found = task("svamp", tmp_path, test_share=0.3, val_share=0.1)
    parts = {split: asked(found, split) for split in SPLITS}
    assert sum(map(len, parts.values())) == 1000 == len({q for part in parts.values() for q in part})
    assert 250 < len(parts["test"]) < 350 and 40 < len(parts["val"]) < 110
    assert {
        split: asked(task("svamp", tmp_path / "SVAMP.json", test_share=0.3, val_share=0.1), split) for split in SPLITS
    } == parts


def test_a_development_set_is_the_val_split_and_holds_no_training_question(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "snli_1.0_train.jsonl", [nli(n) for n in range(40)])
    write_jsonl(tmp_path / "snli_1.0_dev.jsonl", [nli(n) for n in (1, 100, 101)])
    write_jsonl(tmp_path / "snli_1.0_test.jsonl", [nli(n) for n in (2, 100, 200)])
    found = task("snli", tmp_path, rl_share="all")
    assert [row.id for row in rows(found, "test")] == ["2x", "100x", "200x"]
    assert [row.id for row in rows(found, "val")] == ["1x", "101x"]
    assert [row.id for row in rows(found, "sft")] == [f"{n}x" for n in range(40) if n not in (1, 2)]


WORDS: list[tuple[str, tuple[str, ...], str, dict[str, list[str]]]] = [
    ("raceHigh_test.json raceHigh_train_example.json raceHigh_mix_example.json", ("high", "middle"), "high",
     {"test": ["raceHigh_test.json"], "train": ["raceHigh_train_example.json"]}),
    ("train.jsonl train_socratic.jsonl", ("main", "socratic"), "main", {"train": ["train.jsonl"]}),
    ("data.jsonl train.jsonl", (), "", {"train": ["train.jsonl"]}),
    ("data.jsonl more.jsonl contest.parquet", (), "", {"all": ["data.jsonl", "more.jsonl"]}),
]  # fmt: skip


@pytest.mark.parametrize(("names", "variants", "chosen", "wanted"), WORDS)
def test_files_are_told_apart_by_the_words_of_their_names(
    tmp_path: Path, names: str, variants: tuple[str, ...], chosen: str, wanted: dict[str, list[str]]
) -> None:
    for name in names.split():
        (tmp_path / name).touch()
    found = pools(tmp_path, variants, chosen)
    assert {pool: [path.name for path in paths] for pool, paths in found.items()} == wanted


# ---- by hub name

LOOK = """
import sys
from bridge.config.tasks import parse_task
from bridge.errors import UserError
from bridge.tasks import load_task, resolve_task
try:
    found = resolve_task(parse_task({"name": "gsm8k", "path": sys.argv[1]}))
except UserError as error:
    sys.exit(f"refused: {error}")
print(sum(1 for _ in load_task(found).rows("test", None, 0)), found.path)
"""


def look(cache: Path, name: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    return subprocess.run(
        [sys.executable, "-c", LOOK, name], env=environment, capture_output=True, text=True, check=False
    )


def test_a_hub_name_is_found_in_the_cache(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="the train extra is not installed")
    repository = tmp_path / "hub" / "datasets--openai--gsm8k"
    revision = "0123456789" * 4
    write_parquet(
        repository / "snapshots" / revision / "main" / "test-00000-of-00001.parquet", [gsm8k(n) for n in range(4)]
    )
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision, encoding="utf-8")
    done = look(tmp_path, "openai/gsm8k")
    assert done.stdout.split() == ["4", str(repository / "snapshots" / revision)], done.stderr
    done = look(tmp_path, "openai/gsm9k")
    assert done.returncode == 1 and "refused: task gsm8k: path: openai/gsm9k: is no path here" in done.stderr
    assert "give the path of a copy" in done.stderr and "Traceback" not in done.stderr


# ---- the real files


@pytest.mark.skipif(not REAL.is_dir(), reason="GSM8K's files are not here")
def test_the_real_gsm8k(tmp_path: Path) -> None:
    """The sizes that its authors give, every answer an integer, and every worked solution grades right."""
    found = task("gsm8k", REAL)
    parts = {split: rows(found, split) for split in SPLITS}
    assert len(parts["test"]) == 1319 and sum(map(len, parts.values())) == 7473 + 1319
    for part in parts.values():
        for row in part:
            assert row.response is not None and "<<" not in row.response
            assert grade(row.response, row.gold, "number").correct
            assert json.dumps(int(row.gold.replace(",", "")))
    raw = [json.loads(line) for line in (REAL / "test.jsonl").read_bytes().split(b"\n") if line]
    assert [row.extra["question"] for row in parts["test"]] == [row["question"] for row in raw]


def test_an_unknown_setting_or_task_is_refused_with_the_nearest_name() -> None:
    from bridge.config.experiment import points

    def refused(task_settings: dict[str, Any]) -> str:
        raw = {"name": "x", "model": "a/b", "task": task_settings, "stages": {"d": {"kind": "data", "split": "sft"}}}
        with pytest.raises(UserError) as caught:
            points(raw, [], "exp.yaml")
        return str(caught.value)

    assert (
        refused({"name": "gsm8k", "calculater": True})
        == "exp.yaml: task.calculater: unknown key; did you mean 'calculator'?"
    )
    assert refused({"name": "gsm9k"}) == "exp.yaml: task.name: unknown name 'gsm9k'; did you mean 'gsm8k'?"
    assert refused({"levl": "easy"}).startswith("exp.yaml: task.name: is required; known: igsm, gsm8k, svamp")
    assert "task.level: input should be 'high' or 'middle'" in refused({"name": "race", "level": "hihg"})
    assert "task.sha256: must be 64 hexadecimal digits" in refused({"name": "race", "sha256": "abc"})


JOBS = Path(__file__).parents[3] / "jobs"


@pytest.mark.parametrize(("name", "stages"), [("gsm8k.yaml", {"rl": 6, "train_data": 2}), ("r3-gsm8k.yaml", {"rl": 9})])
def test_the_shipped_experiments_are_planned_without_a_model_or_a_network(
    tmp_path: Path, name: str, stages: dict[str, int]
) -> None:
    from bridge.launch.prepare import prepare

    write_jsonl(tmp_path / "train.jsonl", [gsm8k(n) for n in range(9)])
    write_jsonl(tmp_path / "test.jsonl", [gsm8k(n) for n in range(50, 53)])
    request = prepare(JOBS / name, [f"task.path={tmp_path}"], "example-a100").request
    graph = request.graph
    (outside,) = [value for key, value in request.externals.items() if key.startswith("task gsm8k: ")]
    assert (outside["path"], outside["binds"]) == (str(tmp_path), {str(tmp_path): str(tmp_path)})
    assert {stage: len(graph.stage(stage).elements) for stage in stages} == stages
    with pytest.raises(UserError, match=r"task gsm8k: path: \./nowhere/x: there is no such file or folder"):
        prepare(JOBS / name, ["task.path=./nowhere/x"], "example-a100")


# ---- whatever stands in a file

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.text(max_size=6)
    | st.sampled_from(["A", "D", "neutral", "#### 3"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["text", "label", "stem"]), inner),
    max_leaves=6,
)
FIELDS = sorted(
    {field for row in (*GOOD.values(), arc_hub(1), nli_hub(1)) for field in row} | {"answer_value", "output"}
)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(GOOD)), change=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_any_row_is_read_or_refused_with_its_line(
    tmp_path_factory: pytest.TempPathFactory, name: str, change: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("data")
    write_jsonl(folder / "test.jsonl", [GOOD[name], {**GOOD[name], **change}])
    try:
        found = rows(task(name, folder), "test")
    except UserError as error:
        assert f"{folder / 'test.jsonl'}, line 2" in str(error)
    else:
        assert 1 <= len(found) <= 4 and all(row.gold and row.prompt for row in found)


@settings(max_examples=150, deadline=None)
@given(suffix=st.sampled_from(FORMS), content=st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
def test_any_bytes_are_read_or_refused_with_their_file(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, content: bytes
) -> None:
    file = tmp_path_factory.mktemp("data") / f"test{suffix}"
    file.write_bytes(content)
    try:
        list(records(file))
    except UserError as error:
        assert str(file) in str(error)


@pytest.mark.parametrize("name", ["igsm", "gsm8k", "svamp", "arc", "mnli", "snli", "race", "dir/my.py:Task"])
def test_settings_survive_the_way_to_a_job(name: str) -> None:
    """As the record of a run, and the message to a worker, hold them: JSON."""
    extra = {"target": [1, 2], "deep": {"x": 0.5}} if ":" in name else {}
    found = parse_task({"name": name, "sha256": "0" * 64, **extra} if name != "igsm" else {"name": name})
    assert parse_task(json.loads(json.dumps(found.model_dump(mode="json"))), strict=False) == found
    assert {"path", "file"} & set(found.identity()) == set()


def test_an_image_is_given_the_blobs_that_the_hubs_cache_links_to(tmp_path: Path) -> None:
    from bridge.record import places

    blob = write_parquet(tmp_path / "blobs" / "0a1b", [gsm8k(1)])
    folder = tmp_path / "snapshots" / "r" / "main"
    folder.mkdir(parents=True)
    (folder / "test-00000-of-00001.parquet").symlink_to(blob)
    root = tmp_path / "snapshots" / "r"
    assert places(root) == {str(root): str(root), str(tmp_path / "blobs"): str(tmp_path / "blobs")}
    assert len(rows(task("gsm8k", root), "test")) == 1
