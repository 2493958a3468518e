"""The tokenizer made for a task: exact round trips, whole phrases, and prompts that are prefixes."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from igsm_cases import BRIDGE, DEMO, question

from bridge.behaviors import phrases, writer
from bridge.config.stages import Behavior
from bridge.config.tasks import IgsmSettings
from bridge.tasks import Example, load_task
from bridge.tasks.tokenizer import SPECIAL, build_tokenizer

transformers = pytest.importorskip("transformers", reason="the train extra is not installed")
INJECTED = Behavior(reflection=0.2, subgoal=True, analysis=3)


def tokenizer_of(task: IgsmSettings, folder: Path) -> Any:
    build_tokenizer(load_task(task).vocabulary() + phrases(task.style), folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tokenizer_of(DEMO, tmp_path_factory.mktemp("demo"))


def solved(task: IgsmSettings, size: int) -> list[Example]:
    return list(load_task(task).rows("sft", size, 2, writer(INJECTED, task.style)))


def ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("task", [DEMO, BRIDGE], ids=["demo", "bridge"])
def test_a_thousand_problems_come_back_exactly(task: IgsmSettings, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(task, tmp_path)
    for row in solved(task, 1000):
        for text in (question(row), row.response or ""):
            tokens = ids(tokenizer, text)
            assert tokenizer.decode(tokens) == text
            assert len(tokens) < 0.35 * len(text)
            assert tokenizer.unk_token_id not in tokens


@pytest.mark.parametrize("task", [DEMO, BRIDGE], ids=["demo", "bridge"])
def test_the_prompt_is_a_prefix_of_the_conversation(task: IgsmSettings, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(task, tmp_path)
    for row in solved(task, 50):
        prompt = tokenizer.apply_chat_template(row.prompt, tokenize=False, add_generation_prompt=True)
        answer = {"role": "assistant", "content": row.response}
        whole = tokenizer.apply_chat_template([*row.prompt, answer], tokenize=False)
        assert whole == f"{prompt}{row.response}<eos>"
        head, tail = ids(tokenizer, prompt), ids(tokenizer, f"{row.response}<eos>")
        assert ids(tokenizer, whole) == head + tail
        assert tail[-1] == tokenizer.eos_token_id
        prefix = load_task(task).response_prefix
        assert ids(tokenizer, prefix) == tail[: len(ids(tokenizer, prefix))]


def test_small_problems_are_short(demo: Any) -> None:
    """What a model of 0.3M weights needs: one token for each quantity and phrase (research brief on tiny models)."""
    assert len(demo) < 350  # 256 of them are single bytes
    names = [token for token in demo.get_vocab() if token.startswith("each ")]
    # 4 museums, halls, cabinets: 4 x 4 pairs with the next category and one total each
    assert len(names) == 3 * (16 + 4)
    lengths = [(len(ids(demo, question(row))), len(ids(demo, row.response or ""))) for row in solved(DEMO, 500)]
    queries, answers = zip(*lengths, strict=True)
    assert sum(queries) / 500 < 24 and max(queries) < 50
    assert sum(answers) / 500 < 60


def test_the_longest_phrase_wins_and_digits_stay_single(tmp_path: Path) -> None:
    build_tokenizer(["ab", "abc", "c d", "."], tmp_path)  # one character is a byte already
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(ids(tokenizer, "abcab c d12.")) == ["abc", "ab", "Ġ", "c d", "1", "2", "."]


@given(text=st.text(max_size=60) | st.text(st.characters(codec="ascii"), max_size=60))
def test_any_text_comes_back_exactly(demo: Any, text: str) -> None:
    text = unicodedata.normalize("NFC", text)
    assert demo.decode(ids(demo, text)) == text


@pytest.mark.parametrize("task", [DEMO, BRIDGE], ids=["demo", "bridge"])
def test_a_qwen2_model_folder_changes_nothing(task: IgsmSettings, tmp_path: Path) -> None:
    """transformers 5 rebuilds the tokenizer of a Qwen2 model in its own way."""
    plain = tokenizer_of(task, tmp_path)
    transformers.Qwen2Config(hidden_size=8, num_attention_heads=2).save_pretrained(tmp_path)
    beside_model = transformers.AutoTokenizer.from_pretrained(tmp_path)
    plain.save_pretrained(tmp_path / "saved")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for row in solved(task, 100):
        text = plain.apply_chat_template([*row.prompt, {"role": "assistant", "content": row.response}], tokenize=False)
        for other in (beside_model, saved):
            assert ids(other, text) == ids(plain, text)
            assert other.decode(ids(other, text)) == text
            assert len(other) == len(plain) and other.eos_token_id == plain.eos_token_id
            assert other.chat_template == plain.chat_template


def test_what_the_folder_holds(tmp_path: Path) -> None:
    size = build_tokenizer(["a phrase", "a phrase", "x"], tmp_path)
    assert size == len(SPECIAL) + 256 + 1
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (config["pad_token"], config["eos_token"], config["unk_token"]) == ("<pad>", "<eos>", "<unk>")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == size
    assert [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id] == [0, 1, 2]


def test_the_same_phrases_in_any_order_give_the_same_bytes(tmp_path: Path) -> None:
    build_tokenizer(["one", "three", "two"], tmp_path / "a")
    build_tokenizer(["two", "one", "three"], tmp_path / "b")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
