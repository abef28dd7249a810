"""Learning-rate schedules: linear warm-up, then constant, or falling to zero along a line or half a cosine."""

from __future__ import annotations

import math

SCHEDULES = ("constant", "cosine", "linear")


def learning_rate(schedule: str, step: int, steps: int, warmup: int, peak: float) -> float:
    """The rate of one step.

    Args:
        schedule: one of `SCHEDULES`.
        step: counts from 0.
        steps: of the whole run; the rate would reach zero at this step, so the last one still trains.
        warmup: steps of linear warm-up; the first has peak / warmup, the last the peak.
        peak: the highest rate.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress)
