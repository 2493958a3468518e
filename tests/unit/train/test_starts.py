"""R³'s start states in the RL stage: what is given, what is learnt from, and which states a step uses."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small import job, settings, sums, write_dataset, write_model, write_tokenizer

from bridge.config.stages import Starts
from bridge.errors import UserError
from bridge.stages import rl, sft
from bridge.tasks import Example
from bridge.train.chat import Chat
from bridge.train.dataset import Dataset, read_dataset
from bridge.train.model import load_tokenizer
from bridge.train.starts import by_state, chosen, start_states

RESPONSES = ["1+1=2\n1+2=3\n1+3=4\n#### 4", "2+2=4\n#### 4", "#### 5"]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    """One token for each character."""
    return Chat(load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    rows = [Example(str(n), [{"role": "user", "content": f"{n}+1="}], text, "4") for n, text in enumerate(RESPONSES)]
    return Dataset(tmp_path, rows, "number", "")


def test_lines_are_given_as_the_tokens_of_the_whole(chat: Chat, data: Dataset) -> None:
    states = start_states(chat, data, Starts(m=3))
    assert [[chat.response_text(start.given) for start in row] for row in states] == [
        ["", "1+1=2\n", "1+1=2\n1+2=3\n"],
        ["", "", ""],  # one line: the bare question, three times
        ["", "", ""],  # nothing but the answer
    ]
    pairs = chat.pairs([example.prompt for example in data.examples], RESPONSES)
    for row, (prompt, whole) in zip(states, pairs, strict=True):
        for start in row:
            assert start.prompt == [*prompt, *start.given] and whole[: len(start.given)] == start.given


def test_tokens_are_given_up_to_the_answer(chat: Chat, data: Dataset) -> None:
    states = start_states(chat, data, Starts(m=2, unit="token"))
    work = len("1+1=2\n1+2=3\n1+3=4")
    assert [len(row[1].given) for row in states] == [round(work / 2), round(5 / 2), 0]


def test_what_every_response_begins_with_is_no_part_of_the_demonstration(tmp_path: Path) -> None:
    pieces = ["<pad>", "<eos>", "<sep>", "<unk>", "\n", *"0123456789+=#<>/abcdefghijklmnopqrstuvwxyz {}.\\T"]
    chat = Chat(load_tokenizer(write_tokenizer(tmp_path, pieces=pieces)), "<think>\n")
    response = "<think>\n1+1=2\n2+2=4\n</think>\n<answer>\n4\n</answer>"
    rows = [Example("0", [{"role": "user", "content": "1+3="}], response, "4")]
    ((first, second),) = start_states(chat, Dataset(tmp_path, rows, "number", "<think>\n"), Starts(m=2))
    assert chat.response_text(first.given) == "<think>\n"
    assert chat.response_text(second.given) == "<think>\n1+1=2\n"
    assert chat.tokenizer.decode(second.prompt).endswith("<think>\n1+1=2\n")


def test_a_mixed_batch_goes_through_every_start_state(chat: Chat, data: Dataset) -> None:
    states = start_states(chat, data, Starts(m=3))
    seen = Counter((s.row, s.state) for step in range(3) for s in chosen(states, Starts(m=3), step, 3, 3, seed=1))
    assert seen == {(row, state): 1 for row in range(3) for state in range(3)}


def test_a_staged_batch_is_of_the_state_whose_turn_it_is(chat: Chat, data: Dataset) -> None:
    staged = Starts(m=3, mode="staged")
    states = start_states(chat, data, staged)
    turns = [{s.state for s in chosen(states, staged, step, 6, 3, seed=1)} for step in range(6)]
    assert turns == [{2}, {2}, {1}, {1}, {0}, {0}]


def test_shares_by_state(chat: Chat, data: Dataset) -> None:
    states = start_states(chat, data, Starts(m=2))
    batch = [states[0][0], states[1][1], states[1][1]]
    assert by_state(batch, [0.5, 1.0, 0.0]) == {"correct_start_0": 0.5, "correct_start_1": 0.5}
    assert by_state([row[0] for row in states], [1.0, 1.0, 0.0]) == {}


def mixed(folder: Path) -> Path:
    """Sums in R³'s mixed form."""
    rows = [
        {
            "item_id": f"sum_{n}",
            "question": f"{row['prompt']}\n\n### Response: {row['prompt'] if n % 2 else ''}",
            "answer_cot": row["response"].rpartition("\n####")[0],
            "answer_value": row["gold"],
        }
        for n, row in enumerate(sums(20))
    ]
    folder.mkdir(exist_ok=True)
    file = folder / "mix.json"
    file.write_text(json.dumps(rows), encoding="utf-8")
    return file


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / name).read_text(encoding="utf-8").splitlines()]


RL = {"prompts": 4, "group": 4, "lr": 1e-3, "max_new_tokens": 8, "log_every": 1, "samples_every": 1}


def test_the_stage_samples_from_inside_the_solutions_and_ends_at_the_question(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    data = write_dataset(tmp_path / "data", [r for r in sums(60) if r["response"].count("\n") == 2])
    starts = {"mode": "staged", "m": 2, "unit": "line"}
    rl.run(job(tmp_path / "rl", settings("rl", **RL, steps=4, starts=starts), model=model, data=data))
    metrics = lines(tmp_path / "rl", "metrics.jsonl")
    assert ["correct_start_1" in line for line in metrics] == [True, True, False, False]
    assert all(line.get("logprob_gap", 0) < 1e-4 for line in metrics)  # none where no group is mixed
    for row in lines(tmp_path / "rl", "samples.jsonl"):
        sum_ = row["prompt"].removesuffix("<sep>")
        assert row["completion"].startswith(sum_) or row["step"] > 2


def test_the_mixed_form_is_data_for_rl_and_for_nothing_else(tmp_path: Path) -> None:
    model, data = write_model(tmp_path / "model"), mixed(tmp_path / "data")
    rl.run(job(tmp_path / "rl", settings("rl", **RL, steps=2), model=model, data=data))
    given = [row for row in lines(tmp_path / "rl", "samples.jsonl") if row["completion"].startswith(row["prompt"][:4])]
    assert given
    for kind, more in (("sft", {"steps": 1, "lr": 1e-3}), ("rl", {**RL, "steps": 1, "starts": {}})):
        stage = {"sft": sft, "rl": rl}[kind]
        with pytest.raises(UserError, match=r"row 2 begins inside its worked solution"):
            stage.run(job(tmp_path / f"{kind}2", settings(kind, **more), model=model, data=data))  # type: ignore[attr-defined]


def test_demonstrations_are_needed(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "gold": "2"}) + "\n", encoding="utf-8")
    data = read_dataset(file, job(tmp_path, settings("rl", **RL, steps=1)).task)
    chat = Chat(load_tokenizer(write_tokenizer(tmp_path / "tokenizer")))
    with pytest.raises(UserError, match="row 1 has no worked solution"):
        start_states(chat, data, Starts())
