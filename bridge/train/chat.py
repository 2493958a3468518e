"""Conversations to token ids and back, by the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bridge.errors import UserError
from bridge.tasks.frames import Message

BATCH = 2048  # conversations tokenised in one call


class Demonstration(NamedTuple):
    """A worked solution as tokens."""

    prompt: list[int]
    """Ids up to where sampling starts."""
    ids: list[int]
    """Ids of the response after the prefix, as SFT learns them, without the end of the turn."""
    ends: list[int]
    """For each of them the offset in `text` at which it ends."""
    text: str
    """The response after the prefix."""


class Chat:
    """Encodes prompts and worked answers the same way for training, sampling and evaluation.

    The text of a conversation is cut in three: prompt (up to where the assistant begins), `prefix` (how every
    response begins, such as `<think>`; given to the model, never sampled), and the rest with its end-of-turn token.
    Each part is tokenised on its own, so training sees exactly the boundary that sampling starts from. No special
    token is added beyond those that the template writes; the end of turn is added where the template has none.
    """

    def __init__(self, tokenizer: Any, prefix: str = "", stop_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.prefix = prefix
        self.end_id = _end_of_turn(tokenizer)
        """The token that ends a response in training."""
        self.stop_ids = frozenset({self.end_id, tokenizer.eos_token_id, *stop_ids})
        """Every token that ends a response in sampling."""
        self.vocabulary = len(tokenizer)
        """Ids from here on have no text: rows that only pad the embedding matrix."""

    def prompts(self, conversations: Sequence[Sequence[Message]]) -> list[list[int]]:
        """Ids of each conversation up to where sampling starts."""
        opening = self._ids([self.prefix])[0] if self.prefix else []
        return [ids + opening for ids in self._ids(self._prompt_texts(conversations))]

    def pairs(
        self, conversations: Sequence[Sequence[Message]], responses: Sequence[str]
    ) -> list[tuple[list[int], list[int]]]:
        """(prompt ids, response ids) of each conversation with its response; the response ids end with `end_id`.

        Raises UserError, naming the row, when the template changes the prompt once there is a response, or when a
        response does not begin with the prefix.
        """
        prompt_texts = self._prompt_texts(conversations)
        whole = [
            [*messages, {"role": "assistant", "content": response}]
            for messages, response in zip(conversations, responses, strict=True)
        ]
        texts = self._render(whole, add_generation_prompt=False)
        rest = [self._rest(row, *parts) for row, parts in enumerate(zip(prompt_texts, texts, strict=True))]
        opening = self._ids([self.prefix])[0] if self.prefix else []
        prompts = [ids + opening for ids in self._ids(prompt_texts)]
        return [(prompt, self._ended(ids)) for prompt, ids in zip(prompts, self._ids(rest), strict=True)]

    def demonstrations(
        self, conversations: Sequence[Sequence[Message]], responses: Sequence[str]
    ) -> list[Demonstration]:
        """Each conversation with its response, tokenised as in `pairs`, and where each token of the response ends.

        Raises UserError as `pairs` does, and where the tokenizer cannot tell where its tokens end.
        """
        if not self.tokenizer.is_fast:
            raise UserError("starts: the tokenizer does not tell where its tokens end; use its fast form")
        found = []
        for (prompt, ids), text in zip(self.pairs(conversations, responses), responses, strict=True):
            rest = text[len(self.prefix) :]
            marks = self.tokenizer(rest, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            ends = [end for _, end in marks][: len(ids)]
            found.append(Demonstration(prompt, ids[: len(ends)], ends, rest))
        return found

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        return self._ids(texts)

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """What the model is shown, as text, without the prefix."""
        return self._prompt_texts([messages])[0]

    def response_text(self, ids: Sequence[int]) -> str:
        """The response that sampled ids stand for: the prefix, then the ids without the final end of turn."""
        kept = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        text: str = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self.prefix + text

    def _prompt_texts(self, conversations: Sequence[Sequence[Message]]) -> list[str]:
        return self._render(conversations, add_generation_prompt=True)

    def _render(self, conversations: Sequence[Sequence[Message]], *, add_generation_prompt: bool) -> list[str]:
        render = self.tokenizer.apply_chat_template
        return [render(c, tokenize=False, add_generation_prompt=add_generation_prompt) for c in conversations]

    def _rest(self, row: int, prompt: str, whole: str) -> str:
        if not whole.startswith(prompt):
            raise UserError(
                f"row {row}: the chat template renders the prompt differently once there is a response, "
                "so training would not match sampling; fix the template or its generation prompt"
            )
        if not whole.startswith(self.prefix, len(prompt)):
            raise UserError(f"row {row}: the response does not begin with the response prefix {self.prefix!r}")
        return whole[len(prompt) + len(self.prefix) :]

    def _ended(self, ids: list[int]) -> list[int]:
        return ids[: ids.index(self.end_id) + 1] if self.end_id in ids else [*ids, self.end_id]

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        found: list[list[int]] = []
        for start in range(0, len(texts), BATCH):
            part = list(texts[start : start + BATCH])
            found += self.tokenizer(part, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return found


def _end_of_turn(tokenizer: Any) -> int:
    """The special token that the template writes after a response, or else the end-of-sequence token."""
    marker = "bridge"
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": marker}]
    tail = tokenizer.apply_chat_template(messages, tokenize=False).rpartition(marker)[2]
    special = set(tokenizer.all_special_ids)
    ids = tokenizer(tail, add_special_tokens=False)["input_ids"] if tail else []
    end: int = next((i for i in ids if i in special), tokenizer.eos_token_id)
    return end
