"""Advantages from the rewards of a group of completions of one prompt."""

from __future__ import annotations

from torch import Tensor


def group_advantages(rewards: Tensor, eps: float = 1e-6) -> Tensor:
    """GRPO advantages: (r − mean) / (std + eps) within each group.

    rewards: [P, G], P prompts with G ≥ 2 completions each. Returns [P, G].
    The standard deviation is the unbiased one (n − 1). With binary rewards and c of G right, the right ones get
    √((G−c)/c · (G−1)/G) and the wrong ones −√(c/(G−c) · (G−1)/G), up to eps. A constant group gets zeros.
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2.
    """
    if rewards.dim() != 2 or rewards.shape[1] < 2:
        raise ValueError(f"a group needs at least two completions, got shape {tuple(rewards.shape)}")
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (rewards.std(dim=1, keepdim=True, unbiased=True) + eps)


def mixed_groups(rewards: Tensor, tolerance: float = 1e-6) -> Tensor:
    """Which groups can teach something: those whose rewards are not all the same.

    rewards: [P, G]. Returns [P] of bool: max − min > tolerance. The range is used and not the mean, because a
    constant group of partial rewards teaches nothing either.
    """
    return rewards.amax(dim=1) - rewards.amin(dim=1) > tolerance
