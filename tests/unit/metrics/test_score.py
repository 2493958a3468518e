"""The metric table of an evaluation."""

import json

import numpy as np
import pytest

from bridge.metrics import compare, mean_interval, per_question, score

ANSWERS: list[list[str | None]] = [["7", "7", "8", None], ["1", "2", "3", "4"], [None, None, None, None]]
CORRECT = np.array([[a == gold for a in row] for row, gold in zip(ANSWERS, ["7", "1", "5"], strict=True)])


def test_every_metric_of_every_question() -> None:
    table = per_question(CORRECT, ANSWERS, ks=(1, 2, 4))
    expected = {
        "mean": [0.5, 0.25, 0],
        "pass@1": [0.5, 0.25, 0],
        "pass@2": [5 / 6, 0.5, 0],
        "strict_maj@2": [1 / 6, 0, 0],
        # pairs of 7 7 8 -: 77 wins, 7- twice wins, 78 twice half, 8- loses
        "maj@2": [(1 + 2 + 2 * 0.5) / 6, 3 * 0.5 / 6, 0],
        "pass@4": [1, 1, 0],
        "strict_maj@4": [0, 0, 0],
        "maj@4": [1, 0.25, 0],
    }
    assert list(table) == list(expected)
    for name, values in expected.items():
        assert table[name] == pytest.approx(values), name


def test_the_score_is_the_mean_with_its_interval_and_is_json() -> None:
    result = score(CORRECT, ANSWERS, ks=(1, 4))
    assert (result["questions"], result["samples"]) == (3, 4)
    assert set(result["metrics"]) == {"mean", "pass@1", "pass@4", "strict_maj@4", "maj@4"}
    assert result["metrics"]["maj@4"]["value"] == pytest.approx(1.25 / 3)
    assert result["metrics"]["maj@4"]["interval"] == list(mean_interval([1, 0.25, 0]))
    assert json.loads(json.dumps(result)) == result


def test_compare_takes_the_metrics_that_both_have() -> None:
    a = per_question(CORRECT, ANSWERS, ks=(1, 4))
    b = per_question(~np.zeros((3, 2), dtype=bool), [["7", "7"], ["1", "1"], ["5", "5"]], ks=(1, 2))
    rows = compare(a, b)
    assert [row["metric"] for row in rows] == ["mean", "pass@1"]
    assert rows[0]["difference"] == pytest.approx(0.75)
    assert json.loads(json.dumps(rows)) == rows


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="not empty"):
        score(np.zeros((0, 4), dtype=bool), [])
    with pytest.raises(ValueError, match="k is 8"):
        score(CORRECT, ANSWERS, ks=(8,))
