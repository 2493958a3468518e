"""The learning rate at chosen steps, worked out by hand."""

import pytest

from bridge.train.schedules import learning_rate


def test_warmup_is_linear_and_reaches_the_peak() -> None:
    assert [learning_rate(s, 100, 2.0, "constant", warmup=4) for s in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_without_warmup_the_first_step_is_at_the_peak(schedule: str) -> None:
    assert learning_rate(0, 10, 3e-4, schedule, floor=0.1) == pytest.approx(3e-4)


def test_linear_and_cosine_end_at_the_floor() -> None:
    assert learning_rate(10, 11, 1.0, "linear", floor=0.1) == pytest.approx(0.1)
    assert learning_rate(10, 11, 1.0, "cosine", floor=0.1) == pytest.approx(0.1)
    assert learning_rate(99, 11, 1.0, "cosine", floor=0.1) == pytest.approx(0.1)


def test_half_way() -> None:
    assert learning_rate(7, 13, 1.0, "linear", warmup=2, floor=0.2) == pytest.approx(0.6)  # x = 5/10
    assert learning_rate(7, 13, 1.0, "cosine", warmup=2, floor=0.2) == pytest.approx(0.6)
    assert learning_rate(2, 13, 1.0, "linear", warmup=2) == 1.0


def test_a_single_step_and_all_warmup_do_not_divide_by_zero() -> None:
    assert learning_rate(0, 1, 1.0, "cosine") == 1.0
    assert learning_rate(4, 5, 1.0, "linear", warmup=5) == 1.0


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="polynomial"):
        learning_rate(0, 1, 1.0, "polynomial")
