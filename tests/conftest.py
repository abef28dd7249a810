"""Shared fixtures. `tiny` and the benchmarks' `measure` are imported by path, since they are in no package."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import pytest
import tiny
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every test draws the same numbers whatever ran before it in its worker, and no two tests the same ones."""
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.fixture(params=tiny.NAMES)
def family_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _same_globals_afterwards():
    """No test, and so nothing that it calls, leaves a global of torch changed."""

    def globals_of_torch():
        cuda = torch.backends.cuda
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_dtype(),
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        )

    before = globals_of_torch()
    yield
    assert globals_of_torch() == before


# Two workers with two threads each are slower than two with one, on the two cores that the suite is made for.
torch.set_num_threads(1)
