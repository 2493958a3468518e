"""Drawing tokens: exact distributions, no sampling noise in the tests."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.rollout.engine import Sampling, sample_seed, uniforms
from bridge.rollout.hf import draw, nucleus

LOGITS = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()


def tokens(levels: list[float], sampling: Sampling, logits: torch.Tensor = LOGITS) -> list[int]:
    return draw(logits.expand(len(levels), -1), torch.tensor(levels, dtype=torch.float64), sampling)[0].tolist()


def test_each_token_owns_its_share_of_the_unit_interval() -> None:
    levels = [0.0, 0.0999, 0.1001, 0.2999, 0.3001, 0.5999, 0.6001, 0.999999999999999999]
    assert tokens(levels, Sampling()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_temperature_sharpens_before_drawing() -> None:
    # at T = 1/2 the weights are squared: 1, 4, 9, 16 of 30
    edges = [1 / 30, 5 / 30, 14 / 30]
    levels = [edge + shift for edge in edges for shift in (-1e-4, 1e-4)]
    assert tokens(levels, Sampling(temperature=0.5)) == [0, 1, 1, 2, 2, 3]


def test_greedy_takes_the_most_likely_whatever_the_number() -> None:
    assert tokens([0.0, 0.5, 0.99], Sampling(temperature=0.0)) == [3, 3, 3]


def test_top_p_keeps_the_token_that_crosses_the_line() -> None:
    # .4 + .3 = .7 reaches .6, so only tokens 2 and 3 stay, in the ratio 3 : 4
    levels = [0.0, 3 / 7 - 1e-4, 3 / 7 + 1e-4, 0.9999]
    assert tokens(levels, Sampling(top_p=0.6)) == [2, 2, 3, 3]
    assert tokens([0.0, 0.999], Sampling(top_p=1e-9)) == [3, 3]


def test_a_token_without_probability_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf, 0.0, -math.inf])
    assert tokens([0.0, 0.4999, 0.5001, 1 - 2**-53], Sampling(), logits) == [1, 1, 3, 3]


def test_log_probabilities_are_at_the_temperature_and_before_top_p() -> None:
    _, hot = draw(LOGITS.unsqueeze(0), torch.tensor([0.99]), Sampling(temperature=0.5, top_p=0.5))
    assert hot.item() == pytest.approx(math.log(16 / 30), abs=1e-6)
    _, greedy = draw(LOGITS.unsqueeze(0), torch.tensor([0.99]), Sampling(temperature=0.0))
    assert greedy.item() == pytest.approx(math.log(0.4), abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.floats(0.01, 0.999))
def test_nucleus_is_the_smallest_sufficient_set(weights: list[int], top_p: float) -> None:
    probabilities = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    kept = nucleus(probabilities, top_p)[0]
    inside = kept[kept > 0]
    assert torch.equal(kept[kept > 0], probabilities[0][kept > 0])
    assert float(inside.sum()) >= top_p - 1e-9
    assert float(inside.sum() - inside.min()) < top_p + 1e-9
    if (kept == 0).any():
        assert float(probabilities[0][kept == 0].max()) <= float(inside.min())


def test_seeds_depend_on_every_part_and_on_its_place() -> None:
    made = {sample_seed(a, b, c) for a in range(5) for b in range(20) for c in range(8)}
    assert len(made) == 5 * 20 * 8
    assert sample_seed(1, 2) != sample_seed(2, 1) and sample_seed(1, 2) != sample_seed("1", 2)
    assert all(0 <= seed < 2**64 for seed in made)
    assert sample_seed(0, 0, 0) == sample_seed(0, 0, 0)


def test_streams_are_uniform_uncorrelated_and_prefixes_of_longer_ones() -> None:
    numbers = uniforms([sample_seed(0, index) for index in range(400)], 50)
    assert (numbers >= 0).all() and (numbers < 1).all()
    assert abs(numbers.mean() - 0.5) < 5 / math.sqrt(12 * numbers.size)
    flat = numbers - numbers.mean()
    neighbours = (flat[1:] * flat[:-1]).mean() * 12
    assert abs(neighbours) < 5 / math.sqrt(numbers.size)
    assert (uniforms([7], 80)[0, :50] == uniforms([7], 50)[0]).all()
