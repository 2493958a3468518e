"""pass@k, majority@k, intervals and paired comparison, on numpy arrays."""

from bridge.metrics.estimators import majority_at_k, pass_at_k, strict_majority_at_k
from bridge.metrics.intervals import Comparison, mean_interval, paired
from bridge.metrics.score import Metric, MetricComparison, Score, compare, per_question, score

__all__ = [
    "Comparison",
    "Metric",
    "MetricComparison",
    "Score",
    "compare",
    "majority_at_k",
    "mean_interval",
    "paired",
    "pass_at_k",
    "per_question",
    "score",
    "strict_majority_at_k",
]
