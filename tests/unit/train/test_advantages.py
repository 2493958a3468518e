"""Group-normalised advantages."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bridge.train.advantages import group_advantages, mixed_groups


def test_one_right_of_eight() -> None:
    # mean 1/8, unbiased std √((1 − 1/8)/7 · …) = √(1/8): A+ = 0.875/0.353553 = 2.4749, A− = −0.3536
    got = group_advantages(torch.tensor([[1.0] + [0.0] * 7]))
    assert got[0].tolist() == pytest.approx([2.4749] + [-0.3536] * 7, abs=1e-4)


@given(st.integers(2, 16), st.data())
def test_binary_rewards_follow_the_closed_form(group: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(1, group - 1))
    got = group_advantages(torch.tensor([[1.0] * right + [0.0] * (group - right)], dtype=torch.float64))[0]
    scale = (group - 1) / group
    assert got[0].item() == pytest.approx(math.sqrt((group - right) / right * scale), rel=1e-4)
    assert got[-1].item() == pytest.approx(-math.sqrt(right / (group - right) * scale), rel=1e-4)


def test_groups_do_not_mix_and_the_mean_is_zero() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [10.0, 9.0, 9.0, 9.0]])
    got = group_advantages(rewards)
    assert torch.allclose(got[0], got[1], atol=1e-4)
    assert torch.allclose(got.mean(dim=1), torch.zeros(2), atol=1e-6)


def test_a_constant_group_gets_zeros() -> None:
    assert group_advantages(torch.full((2, 4), 0.7)).abs().max().item() < 1e-6


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="two completions"):
        group_advantages(torch.ones(3, 1))


def test_mixed_groups_looks_at_the_range() -> None:
    rewards = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.05, 0.05], [0.05, 0.0], [1.0, 0.0]])
    assert mixed_groups(rewards).tolist() == [False, False, False, True, True]
