"""Estimators against values worked out by hand and against enumeration of all subsets."""

from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridge.metrics import majority_at_k, pass_at_k, strict_majority_at_k


@pytest.mark.parametrize(
    ("n", "c", "k", "value"),
    [
        (10, 3, 1, 0.3),
        (4, 1, 2, 0.5),  # 3 of 6 pairs hold the correct sample
        (5, 2, 3, 0.9),  # 1 - C(3,3)/C(5,3)
        (8, 0, 8, 0.0),
        (8, 1, 8, 1.0),
        (3, 3, 2, 1.0),
    ],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, value: float) -> None:
    assert pass_at_k(n, [c], k) == pytest.approx([value], abs=1e-15)


def test_pass_at_k_takes_a_number_of_samples_per_question() -> None:
    assert pass_at_k([2, 4], [1, 1], 2).tolist() == [1.0, 0.5]


def test_pass_at_k_stays_exact_where_factorials_overflow_a_float() -> None:
    # 1 - C(9999, 5000)/C(10000, 5000) = 1 - 5000/10000
    assert pass_at_k(10_000, [1], 5_000)[0] == 0.5


@given(st.integers(1, 9), st.data())
def test_pass_and_strict_majority_equal_enumeration(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, [c], k)[0] == pytest.approx(np.mean([any(s) for s in subsets]))
    assert strict_majority_at_k(n, [c], k)[0] == pytest.approx(np.mean([2 * sum(s) > k for s in subsets]))


@given(st.integers(1, 60), st.data())
def test_pass_at_k_grows_with_k_from_the_mean(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    values = [pass_at_k(n, [c], k)[0] for k in range(1, n + 1)]
    assert values[0] == pytest.approx(c / n)
    assert values == sorted(values)
    assert values[-1] == (c > 0)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 2), (4, -1, 2)])
def test_undefined_estimates_are_refused(n: int, c: int, k: int) -> None:
    for estimator in (pass_at_k, strict_majority_at_k):
        with pytest.raises(ValueError, match="must lie between"):
            estimator(n, [c], k)


def test_strict_majority_needs_more_than_half() -> None:
    assert strict_majority_at_k(8, [3, 4, 5, 8], 8).tolist() == [0, 0, 1, 1]


def maj(gold: str, answers: list[str | None], k: int, ties_lose: bool = False) -> float:
    return float(majority_at_k(np.array([[a == gold for a in answers]]), [answers], k, ties_lose=ties_lose)[0])


@pytest.mark.parametrize(
    ("answers", "value"),
    [
        (["7", "7", "8"], 1.0),
        (["7", "8", "8"], 0.0),
        (["7", "8", "9"], 1 / 3),
        (["7", "7", "8", "8", "9"], 1 / 2),
        (["7", None, None, None], 1.0),  # "no answer" never wins the vote
        ([None, None], 0.0),
        (["8", "9", None], 0.0),
        (["7", "7", "7", "8", "8", "8", "9", "9"], 1 / 2),  # a win by plurality without a strict majority
    ],
)
def test_plurality_by_hand(answers: list[str | None], value: float) -> None:
    assert maj("7", answers, len(answers)) == value


def vote(gold: str, drawn: tuple[str | None, ...]) -> float:
    """Plurality with expected credit on ties, written another way: over the list of winners."""
    cast = [a for a in drawn if a is not None]
    if not cast:
        return 0.0
    top = max(cast.count(a) for a in cast)
    winners = {a for a in cast if cast.count(a) == top}
    return (gold in winners) / len(winners)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(["7", "8", "9", "10", None]), min_size=1, max_size=9), st.data())
def test_plurality_equals_enumeration_of_all_subsets(answers: list[str | None], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(answers)))
    subsets = list(combinations(answers, k))
    assert len(subsets) == comb(len(answers), k)
    assert maj("7", answers, k) == pytest.approx(np.mean([vote("7", s) for s in subsets]))
    assert maj("7", answers, k, ties_lose=True) == pytest.approx(np.mean([vote("7", s) == 1 for s in subsets]))


@given(st.lists(st.sampled_from(["7", "8", "9", None]), min_size=1, max_size=12))
def test_strict_majority_never_exceeds_plurality(answers: list[str | None]) -> None:
    c, n = sum(a == "7" for a in answers), len(answers)
    assert strict_majority_at_k(n, [c], n)[0] <= maj("7", answers, n)


@pytest.mark.parametrize(
    ("correct", "answers", "k", "message"),
    [
        ([[True, False]], [["7", "7"]], 2, "both correct and wrong"),
        ([[True, True]], [["7", "8"]], 2, "two different answers"),
        ([[True, False]], [[None, "7"]], 2, "without an answer"),
        ([[True, False]], [["7"]], 2, "same one"),
        ([[True, False]], [["7", "8"]], 3, "k is 3"),
    ],
)
def test_verdicts_that_cannot_be_are_refused(
    correct: list[list[bool]], answers: list[list[str | None]], k: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        majority_at_k(np.array(correct), answers, k)
