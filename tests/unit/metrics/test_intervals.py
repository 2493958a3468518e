"""Intervals and the paired test: by hand, by independent formulas, and by simulation of the coverage."""

from itertools import product
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.metrics import mean_interval, paired

unit_values = st.lists(st.integers(0, 8).map(lambda c: c / 8), min_size=1, max_size=40)


def test_wilson_for_verdicts() -> None:
    # Wilson for p = 0.5 and n = 9 (the effective size of 10 verdicts): 0.5 -+ z sqrt(1/(4 (n + z^2))), z^2 = 3.8415
    low, high = mean_interval([0, 1] * 5)
    half = 1.95996 * (1 / (4 * (9 + 3.84146))) ** 0.5
    assert (low, high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-5)


@pytest.mark.parametrize("questions", [1, 10, 300])
def test_all_wrong_and_all_right_have_a_width(questions: int) -> None:
    # Wilson for 0 of n is [0, z^2 / (n + z^2)].
    bound = 3.84146 / (questions + 3.84146)
    assert mean_interval([0.0] * questions) == pytest.approx((0.0, bound), abs=1e-5)
    assert mean_interval([1.0] * questions) == pytest.approx((1 - bound, 1.0), abs=1e-5)


def test_one_question_says_almost_nothing() -> None:
    low, high = mean_interval([0.5])
    assert low < 0.1
    assert high > 0.9


def test_large_sets_agree_with_the_normal_interval() -> None:
    values = np.random.default_rng(1).binomial(8, np.random.default_rng(2).beta(1, 2, 4000)) / 8
    half = 1.96 * values.std(ddof=1) / 4000**0.5
    assert mean_interval(values) == pytest.approx((values.mean() - half, values.mean() + half), abs=2e-4)


@given(unit_values)
def test_the_interval_holds_the_mean_and_stays_inside(values: list[float]) -> None:
    low, high = mean_interval(values)
    assert 0 <= low <= np.mean(values) <= high <= 1
    assert low < high


@pytest.mark.parametrize("values", [[], [1.5], [-0.1, 0.2], [float("nan")]])
def test_values_that_are_no_scores_are_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        mean_interval(values)


@pytest.mark.parametrize(("alpha", "beta", "samples"), [(0.3, 0.6, 8), (0.5, 8, 8), (2, 2, 1), (0.2, 4, 1)])
@pytest.mark.parametrize("questions", [40, 300])
def test_coverage_over_questions(alpha: float, beta: float, samples: int, questions: int) -> None:
    rng = np.random.default_rng(7)
    truth, hits, rounds = alpha / (alpha + beta), 0, 600
    for _ in range(rounds):
        values = rng.binomial(samples, rng.beta(alpha, beta, questions)) / samples
        low, high = mean_interval(values)
        hits += low <= truth <= high
    # 95 % over 600 rounds has a standard error of 0.9 points.
    assert 0.92 <= hits / rounds <= 0.985


def test_paired_difference_by_hand() -> None:
    # Differences 1, 1, 0, 0, 0: mean 0.4, s = sqrt(0.3); McNemar with 2 discordant pairs: 2 * (1/2)^2 = 0.5.
    result = paired([0, 0, 1, 0, 1], [1, 1, 1, 0, 1])
    half = 1.95996 * (0.3 / 5) ** 0.5
    assert (result["a"], result["b"], result["questions"]) == (0.4, 0.8, 5)
    assert result["difference"] == pytest.approx(0.4)
    assert result["interval"] == pytest.approx([0.4 - half, 0.4 + half], abs=1e-5)
    assert result["p_value"] == 0.5


@given(st.integers(0, 7), st.integers(0, 7), st.integers(0, 5))
def test_on_verdicts_the_p_value_is_the_exact_mcnemar_test(fixed: int, broken: int, same: int) -> None:
    a = [0] * fixed + [1] * broken + [1] * (same + 1)
    b = [1] * fixed + [0] * broken + [1] * (same + 1)
    m, low = fixed + broken, min(fixed, broken)
    mcnemar = min(1.0, 2 * sum(comb(m, i) for i in range(low + 1)) / 2**m)
    assert paired(a, b)["p_value"] == pytest.approx(mcnemar)


def test_random_flips_agree_with_all_flips() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 5, 16) / 4, rng.integers(1, 6, 16).clip(0, 4) / 4
    d = (b - a)[np.abs(b - a) > 0]
    signs = np.array(list(product([-1, 1], repeat=d.size)))
    exact = float((np.abs(signs @ d) >= abs(d.sum()) - 1e-9).mean())
    a, b = np.concatenate([a, a]), np.concatenate([b, a])  # equal questions do not change the test
    assert paired(a, b)["p_value"] == pytest.approx(exact, abs=0.015)
    many = paired(rng.random(200) * 0.5, rng.random(200) * 0.5 + 0.4)
    assert many["p_value"] == pytest.approx(1 / 20_001)


def test_a_model_compared_with_itself() -> None:
    result = paired([0.25, 1.0, 0.5] * 100, [0.25, 1.0, 0.5] * 100)
    assert result["difference"] == 0
    assert result["p_value"] == 1
    assert result["interval"] == pytest.approx([-0.01264, 0.01264], abs=1e-4)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=30))
def test_swapping_the_sides_swaps_the_signs(pairs: list[tuple[int, int]]) -> None:
    a, b = [x / 4 for x, _ in pairs], [y / 4 for _, y in pairs]
    ab, ba = paired(a, b), paired(b, a)
    assert ab["difference"] == pytest.approx(-ba["difference"])
    assert ab["interval"] == pytest.approx([-ba["interval"][1], -ba["interval"][0]])
    assert ab["p_value"] == ba["p_value"]
    assert ab["interval"][0] <= ab["difference"] <= ab["interval"][1]
    assert ab == paired(a, b)  # the same every time


def test_false_alarms_of_the_paired_test() -> None:
    rng, alarms = np.random.default_rng(11), 0
    for _ in range(200):
        p = rng.beta(1, 2, 60)
        a, b = rng.binomial(4, p) / 4, rng.binomial(4, p) / 4
        result = paired(a, b)
        alarms += result["p_value"] < 0.05
    assert alarms <= 20  # 10 expected; more than 20 has probability below 0.2 %


def test_different_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="same questions"):
        paired([0, 1], [0, 1, 1])
