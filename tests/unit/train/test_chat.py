"""Conversations to ids: one boundary for training and sampling, the end of turn trained exactly once."""

from pathlib import Path

import pytest
from small import TEMPLATE, write_tokenizer

from bridge.errors import UserError
from bridge.train.chat import Chat
from bridge.train.model import load_tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = [*"abcdefghijklmnopqrstuvwxyz<>/", " ", "\n"]


def chat(folder: Path, template: str = TEMPLATE, pieces: list[str] | None = None, prefix: str = "") -> Chat:
    return Chat(load_tokenizer(write_tokenizer(folder, template, pieces)), prefix)


def chatml(folder: Path, prefix: str = "") -> Chat:
    return chat(folder, CHATML, ["<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", *LETTERS], prefix)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_prompt_and_response_ids(tmp_path: Path) -> None:
    got = chat(tmp_path)
    ((prompt, response),) = got.pairs([user("1+2=")], ["3"])
    # <eos> is 1, <sep> is 2, digits start at 5, + is 15, = is 16
    assert prompt == [6, 15, 7, 16, 2]
    assert response == [8, 1]
    assert got.prompts([user("1+2=")]) == [prompt]
    assert got.response_text(response) == "3"
    assert got.response_text(response[:-1]) == "3"


def test_the_end_of_turn_of_the_template_is_trained_and_what_follows_is_not(tmp_path: Path) -> None:
    got = chatml(tmp_path)
    tokenizer = got.tokenizer
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ((prompt, response),) = got.pairs([user("hi")], ["yes"])
    assert tokenizer.decode(prompt) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert response[-1] == end == got.end_id
    assert response.count(end) == 1
    assert tokenizer.decode(response) == "yes<|im_end|>"
    assert got.stop_ids == {end, tokenizer.eos_token_id}


def test_a_template_without_an_end_gets_the_end_of_sequence_token(tmp_path: Path) -> None:
    got = chat(tmp_path, "{% for m in messages %}{{ m['content'] }}{% endfor %}")
    ((_, response),) = got.pairs([user("1=")], ["2"])
    assert response == [7, 1]


def test_the_prefix_is_given_and_not_trained(tmp_path: Path) -> None:
    got = chatml(tmp_path, prefix="<think>\n")
    ((prompt, response),) = got.pairs([user("hi")], ["<think>\nwell</think>"])
    assert got.tokenizer.decode(prompt).endswith("assistant\n<think>\n")
    assert got.tokenizer.decode(response) == "well</think><|im_end|>"
    assert got.prompts([user("hi")]) == [prompt]
    assert got.response_text(response) == "<think>\nwell</think>"


def test_a_response_without_the_prefix_names_its_row(tmp_path: Path) -> None:
    got = chatml(tmp_path, prefix="<think>")
    with pytest.raises(UserError, match="row 1: the response does not begin with"):
        got.pairs([user("a"), user("b")], ["<think>a", "b"])


def test_a_template_that_changes_the_prompt_is_refused(tmp_path: Path) -> None:
    got = chat(tmp_path, "{{ messages|length }}" + TEMPLATE)
    with pytest.raises(UserError, match="row 0: the chat template renders the prompt differently"):
        got.pairs([user("1=")], ["2"])


def test_many_conversations_keep_their_order(tmp_path: Path) -> None:
    got = chat(tmp_path)
    texts = [str(number) for number in range(3000)]
    pairs = got.pairs([user(text) for text in texts], texts)
    assert [got.response_text(response) for _, response in pairs] == texts


def test_a_tokenizer_without_template_or_end_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    config = folder / "tokenizer_config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace("chat_template", "other"), encoding="utf-8")
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(folder)
    config.write_text(text.replace('"eos_token"', '"other"'), encoding="utf-8")
    with pytest.raises(UserError, match="no eos_token"):
        load_tokenizer(folder)
