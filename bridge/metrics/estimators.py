"""pass@k and the two majorities: per question, exact, unbiased for every k up to the number of samples n.

Each estimator is the mean of "what would k samples have scored" over all C(n, k) subsets of the n samples, computed in
closed form. So a value for k < n has no sampling noise beyond that of the n samples themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import comb

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def pass_at_k(n: npt.ArrayLike, c: npt.ArrayLike, k: int) -> Floats:
    """Probability that at least one of k samples is correct: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1. Integers are exact, so
    nothing overflows or cancels.

    Args:
        n: samples per question, [questions] or one number for all.
        c: correct samples per question, [questions].

    Returns:
        One estimate per question, [questions].

    Raises:
        ValueError: k < 1, some n < k (the estimator does not exist there), or c outside 0..n.
    """
    return _per_question(n, c, k, lambda n, c: (comb(n, k) - comb(n - c, k)) / comb(n, k))


def strict_majority_at_k(n: npt.ArrayLike, c: npt.ArrayLike, k: int) -> Floats:
    """Probability that strictly more than half of k samples are correct: P(X > k/2), X ~ Hypergeometric(n, c, k).

    A sample without an answer counts as wrong. For k = n this is 1 where c > n/2, else 0. Same as G-Pass@k with a
    threshold just above one half. Shapes and errors as in `pass_at_k`.
    """

    def tail(n: int, c: int) -> float:
        return sum(comb(c, hits) * comb(n - c, k - hits) for hits in range(k // 2 + 1, k + 1)) / comb(n, k)

    return _per_question(n, c, k, tail)


def majority_at_k(
    correct: npt.NDArray[np.bool_], answers: Sequence[Sequence[str | None]], k: int, *, ties_lose: bool = False
) -> Floats:
    """Expected credit of a plurality vote among k samples.

    The classes are the distinct normalised answers; None ("no answer") is never a class and never votes. The class
    with most votes wins; where t classes tie at the top each wins with probability 1/t, or none with `ties_lose`. No
    vote at all scores 0.

    Args:
        correct: [questions, samples].
        answers: normalised answers of the same shape; equal answers to one question have equal verdicts.

    Returns:
        One expected credit per question, [questions].

    Raises:
        ValueError: shapes differ, k outside 1..samples, or verdicts that contradict the answers.
    """
    correct = np.asarray(correct, dtype=bool)
    if correct.ndim != 2 or len(answers) != len(correct) or any(len(row) != correct.shape[1] for row in answers):
        raise ValueError(f"correct has shape {correct.shape}, answers must have the same one")
    samples = correct.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}, it must lie between 1 and the number of samples, {samples}")
    credits = []
    for verdicts, row in zip(correct.tolist(), answers, strict=True):
        right, others = _classes(verdicts, row)
        credits.append(_plurality_credit(right, others, samples - right - sum(others), k, ties_lose))
    return np.array(credits, dtype=np.float64)


def _per_question(n: npt.ArrayLike, c: npt.ArrayLike, k: int, estimate: Callable[[int, int], float]) -> Floats:
    counts, corrects = np.broadcast_arrays(np.asarray(n), np.asarray(c))
    if k < 1 or (counts.size and counts.min() < k):
        raise ValueError(f"k is {k}, it must lie between 1 and the number of samples of every question")
    if (corrects < 0).any() or (corrects > counts).any():
        raise ValueError("the number of correct samples must lie between 0 and the number of samples")
    pairs = zip(counts.ravel().tolist(), corrects.ravel().tolist(), strict=True)
    cached = lru_cache(maxsize=None)(estimate)
    return np.array([cached(int(n), int(c)) for n, c in pairs], dtype=np.float64)


def _classes(verdicts: Sequence[bool], answers: Sequence[str | None]) -> tuple[int, tuple[int, ...]]:
    """Votes of the correct class (0 if nobody gave it) and of the wrong classes."""
    verdict_of: dict[str, bool] = {}
    for verdict, answer in zip(verdicts, answers, strict=True):
        if answer is None and verdict:
            raise ValueError("a sample without an answer is marked correct")
        if answer is not None and verdict_of.setdefault(answer, verdict) != verdict:
            raise ValueError(f"the answer {answer!r} is marked both correct and wrong for one question")
    right = {answer for answer, verdict in verdict_of.items() if verdict}
    if len(right) > 1:
        raise ValueError(f"two different answers are marked correct for one question: {sorted(right)}")
    votes = Counter(answer for answer in answers if answer is not None)
    return sum(votes[answer] for answer in right), tuple(sorted(votes[a] for a in votes if a not in right))


@lru_cache(maxsize=65536)
def _plurality_credit(right: int, others: tuple[int, ...], silent: int, k: int, ties_lose: bool) -> float:
    """Mean credit of the correct class over all subsets of size k.

    Subsets are counted by the correct class's votes m: every other class then has at most m votes, and a subset in
    which `ties` of them reach m is worth 1 / (ties + 1), or nothing with `ties_lose` and ties > 0. The other classes
    are added one by one to a table (subset size, ties) -> number of subsets.
    """
    if k == right + sum(others) + silent:
        best = max((right, *others))
        tied = others.count(best)
        return 1 / (1 + tied) if right == best > 0 and not (ties_lose and tied) else 0.0
    total = 0.0
    for m in range(1, min(right, k) + 1):
        table = {(taken, 0): comb(silent, taken) for taken in range(min(silent, k - m) + 1)}
        for size in others:
            grown: Counter[tuple[int, int]] = Counter()
            for (taken, ties), ways in table.items():
                for votes in range(min(size, m, k - m - taken) + 1):
                    grown[taken + votes, ties + (votes == m)] += ways * comb(size, votes)
            table = dict(grown)
        # Each term is a quotient of whole numbers, so a large n costs no precision.
        for (taken, ties), ways in table.items():
            if taken == k - m and not (ties_lose and ties):
                total += comb(right, m) * ways / ((ties + 1) * comb(right + sum(others) + silent, k))
    return min(total, 1.0)
