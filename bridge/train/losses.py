"""Losses as pure functions on tensors.

Shapes: B sequences, T token positions, V vocabulary. `mask` [B, T] says which positions count. Every loss is a sum
over this micro-batch divided by `total`, the number of counted tokens of the WHOLE optimizer step, so that adding
the gradients of any split into micro-batches gives the gradient of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # keeps exp() finite; e^20 is far outside any clip range


def token_logprobs(logits: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each target token: log softmax(logits / temperature)[target], in float32.

    logits: [B, T, V]; targets: [B, T], where logits[b, t] predicts targets[b, t]. Returns [B, T].
    The temperature must be the one that the tokens were sampled at.
    """
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    return scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(dim=-1)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` where `mask` holds; anything elsewhere, NaN included, has no influence."""
    return torch.where(mask, values, torch.zeros_like(values)).sum()


def sft_loss(logprobs: Tensor, mask: Tensor, total: int) -> Tensor:
    """Negative log-likelihood: −Σ mask · logprobs / total. logprobs, mask: [B, T]. Returns a scalar."""
    return -masked_sum(logprobs, mask) / max(total, 1)


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss and what is worth logging about it."""

    loss: Tensor
    clipped: int
    """Counted tokens whose ratio was clipped, so that they gave no gradient."""


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, total: int, clip: float
) -> PolicyLoss:
    """Clipped-ratio policy loss: Σ mask · −min(ρA, clamp(ρ, 1 − clip, 1 + clip)·A) / total.

    ρ = exp(logprobs − old_logprobs). logprobs, old_logprobs, mask: [B, T]; advantages: [B], one per sequence.
    `old_logprobs` are those of the policy that sampled and carry no gradient. Dividing by the tokens of the whole
    step is the token mean of DAPO (Yu et al. 2025, equation 8); the clip is PPO's (Schulman et al. 2017, equation 7).
    """
    ratio = (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    advantage = advantages.unsqueeze(-1)
    free = ratio * advantage
    limited = ratio.clamp(1 - clip, 1 + clip) * advantage
    loss = masked_sum(-torch.minimum(free, limited), mask) / max(total, 1)
    return PolicyLoss(loss, int(((limited < free) & mask).sum()))


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Per-token estimate of KL(policy ‖ reference): exp(−d) + d − 1 with d = logprobs − reference; never negative.

    logprobs, reference: [B, T]. Returns [B, T]. On tokens sampled from the policy its mean is the KL divergence
    (Schulman 2020, "Approximating KL divergence"). Used as a loss its expected gradient is that of the
    forward KL(reference ‖ policy); that is what GRPO uses (Shao et al. 2024, equation 4).
    """
    d = (logprobs - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.exp(-d) + d - 1
