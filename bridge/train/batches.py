"""Which rows an optimizer step takes, and rows as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from bridge.train.losses import token_logprobs
from bridge.train.model import forward_logits


def stream(size: int, start: int, count: int, seed: int) -> list[int]:
    """Indices `start` … `start + count` of an endless stream over `size` rows: one fresh permutation per pass.

    A pure function of its arguments, so the cursor of a run is just a number and resuming repeats or skips nothing.
    """
    found: list[int] = []
    while count > 0:
        epoch, offset = divmod(start, size)
        order = np.random.default_rng([seed, epoch]).permutation(size)[offset : offset + count]
        found += order.tolist()
        start, count = start + len(order), count - len(order)
    return found


@dataclass(frozen=True)
class Row:
    """One sequence; the tokens from `first` on are trained."""

    ids: Sequence[int]
    first: int

    @property
    def targets(self) -> int:
        """How many tokens are trained. The first token of a sequence has nothing to be predicted from."""
        return max(len(self.ids) - max(self.first, 1), 0)


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences. Column t of `targets` and `mask` is the token predicted at position first + t."""

    ids: Tensor
    """[B, T]"""
    first: int
    targets: Tensor
    """[B, T − 1 − first]"""
    mask: Tensor
    """Like targets: which of them are trained. Made from lengths, never from a pad id, which may equal the end."""


def collate(rows: Sequence[Row], device: torch.device) -> Batch:
    """Pad rows on the right. The pad value is 0 and has no influence."""
    width = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row.ids)] = torch.tensor(row.ids)
    starts = torch.tensor([max(row.first, 1) for row in rows]).unsqueeze(1)
    ends = torch.tensor([len(row.ids) for row in rows]).unsqueeze(1)
    first = int(starts.min()) - 1
    column = torch.arange(first + 1, width)
    mask = (column >= starts) & (column < ends)
    return Batch(ids.to(device), first, ids[:, first + 1 :].to(device), mask.to(device))


def aligned(values: Sequence[Sequence[float]], rows: Sequence[Row], batch: Batch) -> Tensor:
    """One value for each trained token of each row, shaped like `batch.targets`, 0 elsewhere."""
    found = torch.zeros(batch.targets.shape)
    for index, (own, row) in enumerate(zip(values, rows, strict=True)):
        start = max(row.first, 1) - 1 - batch.first
        found[index, start : start + len(own)] = torch.tensor(own)
    return found.to(batch.targets.device)


def micro_batches(rows: Sequence[Row], size: int) -> Iterator[list[int]]:
    """Split the rows of one optimizer step, as indices: longest first, so that neighbours need little padding."""
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].ids), i))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def batch_logprobs(model: nn.Module, batch: Batch, vocabulary: int, temperature: float = 1.0) -> Tensor:
    """Log-probability of each target token, shaped like `batch.targets`.

    Only the first `vocabulary` rows of the output count: a matrix padded for speed has rows without a text, which
    the sampler never draws, so the normaliser must not know them either.
    """
    logits = forward_logits(model, batch.ids, batch.first)[:, :-1, :vocabulary]
    return token_logprobs(logits, batch.targets, temperature)
