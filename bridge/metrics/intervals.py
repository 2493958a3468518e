"""Error bars over questions, and the paired comparison of two models.

The question is the unit: the K samples of one question are averaged first, and the spread over questions then holds
the noise of sampling too. Treating all rows as independent would understate the error by up to sqrt(K).
"""

from __future__ import annotations

from math import sqrt
from typing import TypedDict

import numpy as np
import numpy.typing as npt

Z = 1.959963984540054  # 97.5 % quantile of the standard normal distribution
FLIPS = 20_000  # random sign flips of the paired test, where all of them are too many
EXACT_UP_TO = 14  # differing questions for which every sign pattern is tried


class Comparison(TypedDict):
    """B against A on the same questions: `difference` is `b - a`."""

    questions: int
    a: float
    b: float
    difference: float
    interval: list[float]
    p_value: float


def mean_interval(values: npt.ArrayLike) -> tuple[float, float]:
    """95 % interval for the mean of per-question values in [0, 1].

    Wilson's score interval with the effective number of questions n = Q p (1-p) / s^2, where p is the mean and s^2 the
    sample variance over the Q questions. For verdicts of 0 and 1 this is Wilson's interval; for per-question means it
    is narrower by as much as they are less spread; for large Q it is p +- 1.96 s / sqrt(Q). It never leaves [0, 1]
    and holds the mean. Where the spread cannot be seen (one question, or all values equal) n = Q, as for 0/1 values,
    so all-wrong and all-right get an interval with a width.

    Source: Wilson 1927; the effective size is that of survey statistics (Franco et al. 2019, section 2.2).

    Args:
        values: [questions], each in [0, 1].

    Raises:
        ValueError: no questions, or a value outside [0, 1].
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not x.size or not ((x >= 0) & (x <= 1)).all():
        raise ValueError("an interval needs at least one question, with values between 0 and 1")
    p = float(x.mean())
    variance = float(x.var(ddof=1)) if x.size > 1 else 0.0
    n = x.size * p * (1 - p) / variance if variance > 1e-18 else float(x.size)
    centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z * sqrt(p * (1 - p) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))


def paired(a: npt.ArrayLike, b: npt.ArrayLike, *, seed: int = 0) -> Comparison:
    """Compare two models on the same questions: mean of b - a, its 95 % interval, and a two-sided p-value.

    The interval is d +- 1.96 s / sqrt(Q) over the per-question differences. Where they are all equal (or Q = 1) the
    spread cannot be seen, and the half width is z^2 / (Q + z^2), Wilson's upper bound for a share of which 0 of Q
    were seen: two equal models get an interval about 0 that shrinks with Q. The p-value is that of the sign-flip
    permutation test: exact where at most 14 questions differ (on 0/1 values that is McNemar's exact test),
    otherwise (1 + hits) / (1 + 20,000) from seeded random flips.

    Args:
        a, b: [questions], in the same order of questions, each in [0, 1].

    Raises:
        ValueError: different lengths, or no questions.
    """
    x, y = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or not x.size:
        raise ValueError(f"a paired comparison needs the same questions on both sides, not {x.shape} and {y.shape}")
    d = y - x
    mean, spread = float(d.mean()), float(d.std(ddof=1)) if d.size > 1 else 0.0
    half = Z * spread / sqrt(d.size) if spread > 1e-9 else Z * Z / (d.size + Z * Z)
    return {
        "questions": int(d.size),
        "a": float(x.mean()),
        "b": float(y.mean()),
        "difference": mean,
        "interval": [max(-1.0, mean - half), min(1.0, mean + half)],
        "p_value": _sign_flip(d, seed),
    }


def _sign_flip(d: npt.NDArray[np.float64], seed: int) -> float:
    """Share of sign patterns whose sum is at least as far from 0 as the one seen; [questions] -> p-value."""
    d = d[np.abs(d) > 1e-12]
    if not d.size:
        return 1.0
    seen = abs(float(d.sum())) - 1e-9  # equal sums must count as equal after rounding
    if d.size <= EXACT_UP_TO:
        signs = (np.arange(2**d.size)[:, None] >> np.arange(d.size)) & 1
        return float((np.abs((2 * signs - 1) @ d) >= seen).mean())
    rng, hits = np.random.default_rng(seed), 0
    block = max(1, 2_000_000 // d.size)
    for start in range(0, FLIPS, block):
        signs = rng.integers(0, 2, size=(min(block, FLIPS - start), d.size), dtype=np.int8)
        hits += int((np.abs((2 * signs - 1) @ d) >= seen).sum())
    return (1 + hits) / (1 + FLIPS)
