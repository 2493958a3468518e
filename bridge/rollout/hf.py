"""Sampling with the transformers model itself: runs everywhere, and always has the present weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from bridge.errors import UserError
from bridge.rollout.engine import Completion, Sampling, uniforms
from bridge.train.model import Decoder, positions

DROP_SHARE = 0.2  # finished rows are dropped once they are this share: each drop copies the whole cache


def nucleus(probabilities: Tensor, top_p: float) -> Tensor:
    """Zero all but the smallest set of most likely tokens whose probability reaches `top_p`. [B, V] → [B, V].

    Not normalised again. At least one token stays. Holtzman et al. 2020, section 3.1.
    """
    ordered, index = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probabilities).scatter(-1, index, torch.where(before < top_p, ordered, 0.0))


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token for each row, by inverting the cumulative distribution at a uniform number.

    logits: [B, V]; uniform: [B] in [0, 1). Returns (tokens [B], their log-probabilities [B] before top-p).
    """
    scaled = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        scaled = scaled / sampling.temperature
    logprobs = scaled.log_softmax(dim=-1)
    if sampling.temperature == 0.0:
        tokens = logprobs.argmax(dim=-1, keepdim=True)
    else:
        probabilities = logprobs.double().exp()
        if sampling.top_p < 1.0:
            probabilities = nucleus(probabilities, sampling.top_p)
        cumulative = probabilities.cumsum(dim=-1)
        # Just below the top: a draw at the very end must not fall behind the last token with any probability.
        level = uniform.clamp(max=1 - 1e-12).unsqueeze(-1) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, level, right=True)
    return tokens.squeeze(-1), logprobs.gather(-1, tokens).squeeze(-1)


class TransformersEngine:
    """Left-padded batches with a key-value cache; each prompt is read once for all its completions.

    Args:
        model: a causal language model; its present weights are used at every call.
        stop_ids: tokens that end a completion.
        vocabulary: ids from here on are never drawn.
        rows: completions that are decoded at once. Only memory and speed depend on it.
    """

    def __init__(self, model: nn.Module, stop_ids: Collection[int], vocabulary: int, rows: int = 256) -> None:
        self._model, self._vocabulary, self._rows = model, vocabulary, rows
        self._device = next(model.parameters()).device
        self._stop = torch.tensor(sorted(stop_ids), device=self._device)
        self._positions = positions(model)

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """See `Engine.sample`. Raises UserError for an empty prompt or one that leaves no room for the response."""
        self._check(prompts, sampling)
        was_training = self._model.training
        self._model.eval()
        jobs = [(index, seed) for index, own in enumerate(seeds) for seed in own]
        found: list[list[Completion]] = [[] for _ in prompts]
        for start in range(0, len(jobs), self._rows):
            part = jobs[start : start + self._rows]
            for (index, _), completion in zip(part, self._batch(prompts, part, sampling), strict=True):
                found[index].append(completion)
        self._model.train(was_training)
        return found

    def _check(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        longest = max((len(prompt) for prompt in prompts), default=0)
        if any(not prompt for prompt in prompts):
            raise UserError("a prompt has no tokens, so nothing can be sampled after it")
        if longest >= self._positions:
            raise UserError(f"the longest prompt has {longest} tokens, but the model has {self._positions} positions")
        if longest + sampling.max_new_tokens > self._positions:
            raise UserError(
                f"the longest prompt has {longest} tokens; with max_new_tokens {sampling.max_new_tokens} that is more "
                f"than the {self._positions} positions of the model; lower max_new_tokens"
            )

    @torch.inference_mode()
    def _batch(
        self, prompts: Sequence[Sequence[int]], jobs: Sequence[tuple[int, int]], sampling: Sampling
    ) -> list[Completion]:
        limit, count = sampling.max_new_tokens, len(jobs)
        numbers = torch.from_numpy(uniforms([seed for _, seed in jobs], limit)).to(self._device)
        decoder, logits, mask, place = self._prefill(prompts, [index for index, _ in jobs], limit)
        width = mask.shape[1] - limit
        ids = torch.zeros(count, limit, dtype=torch.long, device=self._device)
        logprobs = torch.zeros(count, limit, device=self._device)
        lengths = torch.full((count,), limit, device=self._device)
        truncated = torch.ones(count, dtype=torch.bool, device=self._device)
        alive = torch.arange(count, device=self._device)  # which completion each row of the batch is
        running = torch.ones(count, dtype=torch.bool, device=self._device)
        for t in range(limit):
            tokens, drawn = draw(logits[:, : self._vocabulary], numbers[alive, t], sampling)
            ids[alive, t], logprobs[alive, t] = tokens, drawn
            ended = running & torch.isin(tokens, self._stop)
            lengths[alive[ended]] = t + 1
            truncated[alive[ended]] = False
            running &= ~ended
            left = int(running.sum())
            if left == 0 or t + 1 == limit:
                break
            if len(alive) - left >= DROP_SHARE * len(alive):
                rows = running.nonzero().squeeze(-1)
                decoder.select(rows)
                alive, tokens, mask, place = alive[rows], tokens[rows], mask[rows], place[rows]
                running = running[rows]
            logits = decoder.step(tokens.unsqueeze(1), mask[:, : width + t + 1], place + t)
        return [
            Completion(ids[i, :n].tolist(), logprobs[i, :n].tolist(), bool(truncated[i]))
            for i, n in enumerate(lengths.tolist())
        ]

    def _prefill(
        self, prompts: Sequence[Sequence[int]], owners: Sequence[int], limit: int
    ) -> tuple[Decoder, Tensor, Tensor, Tensor]:
        """Read each prompt once. Returns, per completion: the cache, first logits, mask with room, next position."""
        used = sorted(set(owners))
        width = max(len(prompts[index]) for index in used)
        ids = torch.zeros(len(used), width, dtype=torch.long)
        mask = torch.ones(len(used), width + limit, dtype=torch.long)
        for row, index in enumerate(used):
            space = width - len(prompts[index])
            ids[row, space:] = torch.tensor(prompts[index])
            mask[row, :space] = 0
        ids, mask = ids.to(self._device), mask.to(self._device)
        places = (mask[:, :width].cumsum(dim=1) - 1).clamp(min=0)
        decoder = Decoder(self._model)
        logits = decoder.step(ids, mask[:, :width], places)
        row_of = {index: row for row, index in enumerate(used)}
        rows = torch.tensor([row_of[index] for index in owners], device=self._device)
        decoder.select(rows)
        return decoder, logits[rows], mask[rows], places[rows, -1:] + 1
