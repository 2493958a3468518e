"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math


def learning_rate(step: int, total: int, peak: float, schedule: str, warmup: int = 0, floor: float = 0.0) -> float:
    """Learning rate of optimizer step `step` (counted from 0) of `total`.

    Warm-up is linear, (step + 1) / warmup · peak, so that no step is wasted at zero. After it, with
    x = (step − warmup) / (total − 1 − warmup) running from 0 to 1 at the last step:

        constant  peak
        linear    peak · (1 − (1 − floor) · x)
        cosine    peak · (floor + (1 − floor) · (1 + cos πx) / 2)

    `floor` is a fraction of `peak`. Steps beyond the last keep its value. Cosine without restarts is
    Loshchilov & Hutter 2017 (SGDR), equation 5, with one cycle.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    x = min((step - warmup) / max(total - 1 - warmup, 1), 1.0)
    if schedule == "constant":
        return peak
    if schedule == "linear":
        return peak * (1 - (1 - floor) * x)
    if schedule == "cosine":
        return peak * (floor + (1 - floor) * (1 + math.cos(math.pi * x)) / 2)
    raise ValueError(f"unknown schedule {schedule!r}")
