"""What a sampling engine is: token ids in, completions out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with at least this probability."""
    max_new_tokens: int = 512


@dataclass(frozen=True)
class Completion:
    """One sampled response."""

    ids: list[int]
    """The sampled tokens, with the stop token that ended them. Training uses these and never text."""
    logprobs: list[float]
    """Log-probability of each under the model at the sampling temperature (at 1 when greedy), before top-p."""
    truncated: bool
    """Ended by max_new_tokens and not by a stop token."""


class Engine(Protocol):
    """Samples completions of token prompts."""

    def sample(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[list[Completion]]:
        """len(seeds[i]) completions of prompts[i], in the order of the seeds.

        A seed decides all the randomness of its completion: the same prompt, seed and weights give the same tokens,
        whatever else is in the batch, as far as rounding allows (a matrix product may round differently in a
        batch of another size, and a draw that falls on the boundary between two tokens may then fall differently).
        """
        ...


def sample_seed(*parts: int | str) -> int:
    """A seed of 64 bits from what identifies a sample, such as (run seed, question, sample index).

    Hashed, so that neighbouring questions and samples do not share streams.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def uniforms(seeds: Sequence[int], length: int) -> npt.NDArray[np.float64]:
    """[len(seeds), length] numbers in [0, 1): row i is the stream of seeds[i], one number per token.

    Philox is counter-based: a stream costs nothing until it is read, and streams of different keys are independent
    (Salmon et al. 2011).
    """
    found = np.empty((len(seeds), length))
    for row, seed in enumerate(seeds):
        found[row] = np.random.Generator(np.random.Philox(key=seed)).random(length)
    return found
