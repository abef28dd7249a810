"""Learning-rate schedules against torch's own."""

from __future__ import annotations

import pytest
import torch
from graft_lora.trainer.schedule import learning_rate


def of_torch(schedule, steps, warmup, peak):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    lr = torch.optim.lr_scheduler
    rest = {
        "constant": lambda: lr.ConstantLR(optimizer, factor=1.0),
        "cosine": lambda: lr.CosineAnnealingLR(optimizer, steps - warmup),
        "linear": lambda: lr.LinearLR(optimizer, 1.0, 0.0, steps - warmup),
    }[schedule]()
    rates = []
    for _ in range(steps - warmup):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        rest.step()
    return rates


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_warm_up_then_the_schedule_of_torch(schedule, warmup):
    rates = [learning_rate(schedule, step, 40, warmup, 2e-3) for step in range(40)]
    assert rates[:warmup] == pytest.approx([2e-3 * (step + 1) / warmup for step in range(warmup)])
    assert rates[warmup:] == pytest.approx(of_torch(schedule, 40, warmup, 2e-3), abs=1e-12)
    assert all(rate > 0 for rate in rates)


def test_more_warm_up_than_steps():
    assert [learning_rate("cosine", step, 3, 10, 1.0) for step in range(3)] == pytest.approx([0.1, 0.2, 0.3])
