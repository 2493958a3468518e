"""R³: where a demonstration is cut, and its JSON forms read and written."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from public_rows import gsm8k, nli, race, task, write_json, write_jsonl

from bridge.config.stages import DataSettings, Starts
from bridge.errors import UserError
from bridge.stages.data import write_split
from bridge.tasks import Example, load_task
from bridge.tasks.starts import answer_begins, pieces_given, stage_of, token_starts
from bridge.tasks.tables import read_examples

REAL = Path("/work/shared/data/gsm8k")

# ---- the rule


@pytest.mark.parametrize(
    ("lines", "given_lines"),
    [
        (1, [0, 0, 0, 0, 0]),
        (2, [0, 0, 1, 1, 1]),
        (3, [0, 1, 1, 2, 2]),
        (4, [0, 1, 2, 2, 3]),
        (5, [0, 1, 2, 3, 4]),
        (6, [0, 1, 2, 4, 5]),
        (7, [0, 1, 3, 4, 6]),
        (10, [0, 2, 4, 6, 8]),
    ],
)
def test_the_rule_by_hand(lines: int, given_lines: list[int]) -> None:
    """min(n - 1, round(i n / 5)), half to even: 0.4 0.8 1.2 1.6 of two lines round to 0 1 1 2, and 2 becomes 1."""
    assert pieces_given(lines, Starts()) == given_lines


def test_the_counts_of_the_released_four_line_chains() -> None:
    """Of R³'s released mix, chains of four lines start after 0, 1, 2, 3 lines in proportions 1 : 1 : 2 : 1."""
    given_lines = pieces_given(4, Starts())
    assert [given_lines.count(lines) for lines in range(4)] == [1, 1, 2, 1]


@given(count=st.integers(0, 400), m=st.integers(2, 100))
def test_start_states_rise_from_the_question_and_leave_something_to_do(count: int, m: int) -> None:
    found = pieces_given(count, Starts(m=m))
    assert len(found) == m and found[0] == 0 and found == sorted(found)
    assert found[-1] <= max(count - 1, 0)
    assert pieces_given(count, Starts(m=m, from_question=False)) == found[1:]


@given(steps=st.integers(1, 300), starts=st.integers(1, 12))
def test_a_staged_curriculum_goes_from_the_last_step_to_the_question(steps: int, starts: int) -> None:
    stages = [stage_of(step, steps, starts) for step in range(steps)]
    assert stages[0] == starts - 1 and all(a - b in (0, 1) or steps < starts for a, b in pairwise(stages))
    if steps >= starts:
        assert stages[-1] == 0
        counts = [stages.count(stage) for stage in range(starts)]
        assert max(counts) - min(counts) <= 1


# ---- cuts on token ids


def pieces(text: str, size: int) -> tuple[list[int], list[int]]:
    """Token ids of `size` characters each, and where each ends."""
    ends = [min(at + size, len(text)) for at in range(0, len(text), size)]
    return list(range(len(ends))), ends


TEXT = "One pen. Two more.\nThree pens now.\nIt is 3, or 3.0 exactly. Done.\n#### 3"


@given(size=st.integers(1, 9), m=st.integers(2, 12), unit=st.sampled_from(["line", "sentence", "token"]))
def test_cuts_stand_on_tokens_and_before_the_answer(size: int, m: int, unit: Any) -> None:
    ids, ends = pieces(TEXT, size)
    end = answer_begins(TEXT)
    assert TEXT[end:] == "\n#### 3"
    found = token_starts(ids, ends, TEXT, end, Starts(m=m, unit=unit))
    assert len(found) == m and found[0] == 0 and found == sorted(found)
    for tokens in found:
        given_text = TEXT[: ends[tokens - 1]] if tokens else ""
        assert len(given_text) <= end and "#" not in given_text


def test_lines_and_sentences_are_cut_after_the_white_space_that_ends_them() -> None:
    ids, ends = pieces(TEXT, 1)
    end = answer_begins(TEXT)

    def given_texts(unit: Any, m: int) -> list[str]:
        return [TEXT[:tokens] for tokens in token_starts(ids, ends, TEXT, end, Starts(m=m, unit=unit))]

    assert given_texts("line", 3) == ["", "One pen. Two more.\n", "One pen. Two more.\nThree pens now.\n"]
    sentences = ["", "One pen. ", "One pen. Two more.\n", "One pen. Two more.\nThree pens now.\n"]
    assert given_texts("sentence", 5) == [*sentences, TEXT[: TEXT.index("Done")]]
    assert given_texts("token", 2) == ["", TEXT[: round(end / 2)]]


def test_a_token_that_reaches_over_a_line_break_is_not_given() -> None:
    text = "ab\ncd\n#### 1"
    assert token_starts([7, 8, 9], [1, 4, 12], text, answer_begins(text), Starts(m=2)) == [0, 1]


def test_what_is_given_and_what_follows_are_the_tokens_of_the_whole(tmp_path: Path) -> None:
    """With a real byte-level tokenizer, in which a line break and what follows it are one token."""
    transformers = pytest.importorskip("transformers")
    from bridge.tasks.tokenizer import build_tokenizer

    build_tokenizer(["pens.\n", "\nCem has", "Bob "], tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "Bob has 8 pens.\nCem has 11 pens.\n#### 11"
    found = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    ends = [end for _, end in found["offset_mapping"]]
    starts = token_starts(found["input_ids"], ends, text, answer_begins(text), Starts(m=2))
    assert [tokenizer.decode(found["input_ids"][:tokens]) for tokens in starts] == ["", "Bob has 8 pens.\n"]


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("a\nb\n#### 3", "\n#### 3"),
        ("<think>\na\n</think>\n<answer>\n3\n</answer>", "\n</think>\n<answer>\n3\n</answer>"),
        ("no marker", ""),
    ],
)
def test_where_the_answer_begins(text: str, rest: str) -> None:
    assert text[answer_begins(text) :] == rest


# ---- JSON

MIX = {
    "item_id": "gsm8k_7",
    "question": "Ann has 4 pens. How many has Cem?\n\n### Response: Bob has 4*2 = <<4*2=8>>8 pens.",
    "answer_cot": "Cem has 8+3 = <<8+3=11>>11 pens.",
    "answer_value": "11",
}


def test_the_mixed_form_is_read_as_data(tmp_path: Path) -> None:
    from_question = {**MIX, "question": "Ann has 4 pens. How many has Cem?\n\n### Response: "}
    others = {
        "instruction": "Premise: A.\n\nHypothesis: B.\n\n### Response: The premise says",
        "input": "",
        "output": "nothing about B. ### it is not possible to tell",
    }
    file = write_json(tmp_path / "gsm8k_nl_mix_example.json", [MIX, from_question, others])
    user = {"role": "user", "content": "Ann has 4 pens. How many has Cem?"}
    first, second, third = read_examples(file)
    assert first == Example(
        "gsm8k_7", [user], "Cem has 8+3 = <<8+3=11>>11 pens.\n#### 11", "11", start="Bob has 4*2 = <<4*2=8>>8 pens."
    )
    assert (second.start, second.prompt) == ("", [user])
    assert third.start == "The premise says" and third.gold == "it is not possible to tell"
    assert third.response == "nothing about B.\n#### it is not possible to tell"


def test_train_and_test_forms_are_read_as_a_tasks_data(tmp_path: Path) -> None:
    train = {"item_id": "svamp_1", "question": "2 and 3?", "answer_cot": "2 + 3 = 5.\n#### 5.0", "answer_value": "5.0"}
    test = {"item_id": "svamp_9", "question": "2 and 4?", "answer_value": "6.0"}
    write_json(tmp_path / "svamp_nl_train_example.json", [train])
    write_json(tmp_path / "svamp_test.json", [test])
    write_json(tmp_path / "svamp_nl_mix_example.json", [MIX])
    found = task("svamp", tmp_path, rl_share="all", instruction="")
    (row,) = load_task(found).rows("sft", None, 0)
    assert (row.id, row.gold, row.response) == ("svamp_1", "5", "2 + 3 = 5.\n#### 5")
    (row,) = load_task(found).rows("test", None, 0)
    assert (row.id, row.gold, row.prompt[0]["content"]) == ("svamp_9", "6", "2 and 4?")


def test_labels_and_choices_are_read_with_their_rationales(tmp_path: Path) -> None:
    rows = [{"instruction": "Premise: A.", "input": "", "output": "A says so. ### yes"}]
    write_json(tmp_path / "mnli_test.json", rows)
    (row,) = load_task(task("mnli", tmp_path)).rows("test", None, 0)
    assert (row.gold, row.response) == ("yes", "A says so.\n#### yes")
    rows = [{"instruction": "Article: A.\nOptions: A: x\nB: y", "input": "", "output": "Because.\nSo B. ### B"}]
    write_json(tmp_path / "r" / "raceHigh_test.json", rows)
    (row,) = load_task(task("race", tmp_path / "r")).rows("test", None, 0)
    assert (row.gold, row.response) == ("B", "Because.\nSo B.\n#### B")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answer_value": None}, "`answer_value`"),
        ({"answer_value": True}, "`answer_value`"),
        ({"answer_cot": 3}, "`answer_cot`"),
        ({"question": ""}, "`question`"),
    ],
)
def test_broken_rows_are_named(tmp_path: Path, change: dict[str, object], said: str) -> None:
    file = write_json(tmp_path / "x.json", [MIX, {**MIX, **change}])
    with pytest.raises(UserError) as caught:
        read_examples(file)
    assert f"{file}, item 2: {said}" in str(caught.value)


def test_an_output_without_an_answer_is_named(tmp_path: Path) -> None:
    file = write_json(tmp_path / "x.json", [{"instruction": "A?", "input": "", "output": "no marker"}])
    with pytest.raises(UserError, match=r"item 1: `output` must be text that ends with"):
        read_examples(file)


def test_the_mixed_form_is_no_set_of_questions(tmp_path: Path) -> None:
    write_json(tmp_path / "test.json", [MIX])
    with pytest.raises(UserError, match="item 1: is of R³'s mixed form"):
        list(load_task(task("gsm8k", tmp_path)).rows("test", None, 0))


def export(folder: Path, name: str, split: str, **settings: object) -> list[dict[str, str]]:
    file = folder.parent / f"{name}-{split}.json"
    write_split(task(name, folder, **settings), DataSettings(kind="data", split=split), file)  # type: ignore[arg-type]
    found: list[dict[str, str]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_what_is_written_is_r3s_form_and_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "gsm8k"
    write_jsonl(folder / "train.jsonl", [gsm8k(n) for n in range(9)])
    write_jsonl(folder / "test.jsonl", [gsm8k(50)])
    whole: dict[str, Any] = {"rl_share": "all", "val_share": 0.001, "calculator": True}
    train = export(folder, "gsm8k", "sft", **whole)
    work = gsm8k(0)["answer"].rpartition("\n####")[0]
    assert train[0] == {
        "item_id": "train-0", "question": gsm8k(0)["question"], "answer_cot": work, "answer_value": "3",
    }  # fmt: skip
    mix = export(folder, "gsm8k", "rl", **whole)
    assert len(mix) == 5 * len(train) == 45
    first, second = work.split("\n")
    assert [row["question"].partition("\n\n### Response: ")[2] for row in mix[:5]] == ["", "", first, first, first]
    assert [row["answer_cot"] for row in mix[:5]] == [work, work, second, second, second]
    (test,) = export(folder, "gsm8k", "test")
    assert test == {"item_id": "test-0", "question": gsm8k(50)["question"], "answer_value": "103"}
    rows = read_examples(tmp_path / "gsm8k-rl.json")
    assert [row.start for row in rows[:3]] == ["", "", first] and rows[2].response == f"{second}\n#### 3"


def test_labels_are_written_in_the_other_form(tmp_path: Path) -> None:
    rows = [{"instruction": f"Premise: {n}.", "input": "", "output": f"It is {n}.\nSo there. ### no"} for n in range(4)]
    write_json(tmp_path / "d" / "mnli_train.json", rows)
    write_jsonl(tmp_path / "d" / "mnli_dev_matched.jsonl", [nli(1)])
    settings: dict[str, object] = {"rl_share": "all", "val_share": 0.001}
    assert export(tmp_path / "d", "mnli", "sft", **settings) == rows
    mix = export(tmp_path / "d", "mnli", "rl", **settings)
    assert mix[4] == {
        "instruction": "Premise: 0.\n\n### Response: It is 0.", "input": "", "output": "So there. ### no",
    }  # fmt: skip
    (test,) = export(tmp_path / "d", "mnli", "test")
    assert test["output"] == "### it is not possible to tell"


def test_a_demonstration_is_needed(tmp_path: Path) -> None:
    write_json(tmp_path / "r" / "train" / "high" / "1.txt", race(1, 40))
    with pytest.raises(UserError, match="has no worked solution, which R³'s mix form is made of"):
        export(tmp_path / "r", "race", "rl")
    assert not list(tmp_path.glob("race-rl.json*"))


@pytest.mark.skipif(not REAL.is_dir(), reason="GSM8K's files are not here")
def test_rows_of_the_released_mix_come_out_of_the_real_training_set(tmp_path: Path) -> None:
    """Numbers of given lines in R³'s published sample for these questions (facts of the data, not its text)."""
    file = tmp_path / "mix.json"
    found = task("gsm8k", REAL, rl_share="all", val_share=1e-9, calculator=True)
    write_split(found, DataSettings(kind="data", split="rl"), file)
    rows = json.loads(file.read_text(encoding="utf-8"))
    assert len(rows) == 5 * 7473
    starts: dict[str, set[int]] = {}
    for row in rows:
        question, _, start = row["question"].partition("\n\n### Response: ")
        starts.setdefault(question, set()).add(len(start.split("\n")) if start else 0)
    for begin, lines in RELEASED:
        (question,) = [question for question in starts if question.startswith(begin)]
        assert lines in starts[question]


# Beginnings of questions in R³_math/data/gsm8k_nl_mix_example.json, and how many lines are given there.
RELEASED = [
    ("Martin went on an eight-hour business trip.", 0),
    ("Angie bought three times as many pretzels", 1),
    ("In 2 years, Maxwell will be twice", 1),
    ("Kathryn moved to a new city", 3),
    ("Josh had 100 gummy bear candies.", 3),
    ("Liz bought a recipe book that cost $6", 3),
    ("Tom is playing a game and gets 10 points", 1),
    ("If 100 pieces, each 15 centimeters long", 2),
    ("Kim has 4 dozen shirts.", 2),
    ("Jeff had 300 pencils and donated 30%", 2),
]


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("rl: {kind: rl, model: a/b, data: ./mix.json, steps: 1, lr: 1e-6}", None),
        ("rl: {kind: rl, model: a/b, data: ./mix.json, steps: 1, lr: 1e-6, starts: {}}", "row 1 begins inside"),
        ("sft: {kind: sft, model: a/b, data: ./mix.json, steps: 1, lr: 1e-6}", "row 1 begins inside"),
        ("rl: {kind: rl, model: a/b, data: ./test.json, steps: 1, lr: 1e-6}", None),
        ("rl: {kind: rl, model: a/b, data: ./test.json, steps: 1, lr: 1e-6, starts: {}}", "row 1 has no response"),
    ],
)
def test_a_file_that_a_stage_cannot_use_is_told_at_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, said: str | None
) -> None:
    from bridge.launch.prepare import prepare

    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "mix.json", [MIX])
    write_json(tmp_path / "test.json", [{"item_id": "x", "question": "2 and 4?", "answer_value": "6"}])
    text = f"name: x\nmodel: a/b\ntask: {{name: igsm}}\nstages:\n  {stage}\n"
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    if said is None:
        prepare(tmp_path / "x.yaml", [], "local")
        return
    with pytest.raises(UserError, match=said):
        prepare(tmp_path / "x.yaml", [], "local")
