"""The metric table of an evaluation, from verdicts and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from bridge.metrics.estimators import Floats, majority_at_k, pass_at_k, strict_majority_at_k
from bridge.metrics.intervals import Comparison, mean_interval, paired


class Metric(TypedDict):
    value: float
    interval: list[float]
    """95 %, over questions."""


class Score(TypedDict):
    questions: int
    samples: int
    """Per question."""
    metrics: dict[str, Metric]


class MetricComparison(Comparison):
    metric: str


def per_question(
    correct: npt.NDArray[np.bool_],
    answers: Sequence[Sequence[str | None]],
    ks: Sequence[int] = (1, 8),
    *,
    ties_lose: bool = False,
) -> dict[str, Floats]:
    """Every metric for every question: `mean`, then `pass@k` for each k, `strict_maj@k` and `maj@k` for each k > 1.

    For k = 1 the three coincide with the mean, and only `pass@1` is given.

    Args:
        correct: verdicts, [questions, samples].
        answers: normalised answers of the same shape, None where there is none. They decide the vote.
        ks: sizes, each at most the number of samples.
        ties_lose: a tied vote is worth nothing in `maj@k`, not its share.

    Returns:
        [questions] per metric.

    Raises:
        ValueError: shapes differ, a k outside 1..samples, or verdicts that contradict the answers.
    """
    correct = np.asarray(correct, dtype=bool)
    if correct.ndim != 2 or not correct.size:
        raise ValueError(f"correct has shape {correct.shape}, it must be [questions, samples] and not empty")
    n, c = correct.shape[1], correct.sum(axis=1)
    table = {"mean": correct.mean(axis=1)}
    for k in ks:
        table[f"pass@{k}"] = pass_at_k(n, c, k)
        if k > 1:
            table[f"strict_maj@{k}"] = strict_majority_at_k(n, c, k)
            table[f"maj@{k}"] = majority_at_k(correct, answers, k, ties_lose=ties_lose)
    return table


def score(
    correct: npt.NDArray[np.bool_],
    answers: Sequence[Sequence[str | None]],
    ks: Sequence[int] = (1, 8),
    *,
    ties_lose: bool = False,
) -> Score:
    """The mean over questions of every metric of `per_question`, with its 95 % interval. Arguments as there."""
    table = per_question(correct, answers, ks, ties_lose=ties_lose)
    questions, samples = np.shape(correct)
    metrics: dict[str, Metric] = {
        name: {"value": float(values.mean()), "interval": list(mean_interval(values))} for name, values in table.items()
    }
    return {"questions": questions, "samples": samples, "metrics": metrics}


def compare(a: Mapping[str, npt.ArrayLike], b: Mapping[str, npt.ArrayLike], *, seed: int = 0) -> list[MetricComparison]:
    """B against A for every metric that both have, from their `per_question` tables over the same questions."""
    return [{"metric": name, **paired(a[name], b[name], seed=seed)} for name in a if name in b]
