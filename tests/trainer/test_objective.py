"""Timestep distributions against their formulas; the loss; one generator for every draw."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest
import torch
from graft_lora.trainer.errors import SettingsError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.objective import add_noise, draw_noise, draw_sigmas, velocity_loss

KREA2, IDEOGRAM4 = FAMILIES["krea2"], FAMILIES["ideogram4"]
PROBABILITIES = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98)
SQUARE_1024 = {"krea2": (16, 128, 128), "ideogram4": (128, 64, 64)}


def expit(x):
    return 1 / (1 + math.exp(-x))


def shifted(u, tokens):
    mu = 0.5 + (1.15 - 0.5) * (tokens - 256) / (6400 - 256)
    return math.exp(mu) * u / (1 + (math.exp(mu) - 1) * u)


# Distribution → its quantile function, written down from reference/models.md.
FORMULAS = [
    ("uniform", KREA2, (16, 128, 128), lambda u: u),
    ("uniform", IDEOGRAM4, (128, 64, 64), lambda u: u),
    ("logit-normal", KREA2, (16, 128, 128), lambda u: expit(NormalDist().inv_cdf(u))),
    ("shifted", KREA2, (16, 128, 128), lambda u: shifted(u, 4096)),
    ("shifted", IDEOGRAM4, (128, 32, 32), lambda u: shifted(u, 1024)),
    ("family", KREA2, (16, 128, 128), lambda u: shifted(u, 4096)),
    ("family", KREA2, (16, 64, 64), lambda u: shifted(u, 1024)),
    ("family", IDEOGRAM4, (128, 64, 64), lambda u: expit(math.log(2) + 1.5 * NormalDist().inv_cdf(u))),
    ("family", IDEOGRAM4, (128, 32, 32), lambda u: expit(1.5 * NormalDist().inv_cdf(u))),
    ("family", IDEOGRAM4, (128, 16, 64), lambda u: expit(1.5 * NormalDist().inv_cdf(u))),
]


@pytest.mark.parametrize(("name", "family", "shape", "formula"), FORMULAS)
def test_quantiles_of_draws_follow_the_formula(name, family, shape, formula):
    count = 40_000
    sigmas = draw_sigmas(family, name, count, shape, torch.Generator().manual_seed(0)).double().sort().values
    assert 0 < sigmas[0] <= sigmas[-1] < 1
    for p in PROBABILITIES:
        # The share of draws below the formula's quantile is p, up to four standard errors.
        share = (sigmas <= formula(p)).double().mean().item()
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / count)


def test_krea2_shift_is_that_of_the_published_pipeline():
    """mu 0.906 at 1024²; the sampler's schedule there against diffusers' scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="exponential")
    mu = 0.5 + 0.65 * (4096 - 256) / 6144
    assert mu == pytest.approx(0.906, abs=5e-4)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / 28, 28).tolist(), mu=mu)
    found = KREA2.schedule(28, SQUARE_1024["krea2"])
    assert torch.allclose(found.float(), scheduler.sigmas, atol=1e-6)


@pytest.mark.parametrize(("steps", "mu", "std"), [(48, 0.0, 1.5), (20, 0.0, 1.75), (12, 0.5, 1.75)])
def test_ideogram4_schedule_is_that_of_the_published_pipeline(steps, mu, std):
    from diffusers.pipelines.ideogram4.pipeline_ideogram4 import _logit_normal_sigmas, _resolution_aware_mu

    centre = _resolution_aware_mu(1024, 1024, mu)
    wanted = _logit_normal_sigmas(steps, centre, std=std, device="cpu")
    found = IDEOGRAM4.schedule(steps, SQUARE_1024["ideogram4"], mu, std)
    assert torch.allclose(found[:-1].float(), wanted.float(), atol=1e-6)
    assert found[-1] == 0


def test_ideogram4_bounds_are_those_of_the_official_sampler():
    """Its own time 1 - sigma lies between 1 / (1 + e^9) and 1 / (1 + e^-7.5)."""
    ends = IDEOGRAM4.sigma_quantile(torch.tensor([1e-300, 1 - 1e-16], dtype=torch.float64), (128, 64, 64))
    assert ends[0].item() == pytest.approx(1 - 1 / (1 + math.exp(-7.5)), rel=1e-9)
    assert 1 - ends[1].item() == pytest.approx(1 / (1 + math.exp(9)), rel=1e-9)


def test_unknown_distribution_is_named():
    with pytest.raises(SettingsError, match="'sigmoid' is not known; choose one of family, uniform"):
        draw_sigmas(KREA2, "sigmoid", 1, (16, 8, 8), torch.Generator())


def test_noise_is_added_and_loss_is_that_of_the_velocity():
    data, noise = torch.randn(3, 2, 4, 4), torch.randn(3, 2, 4, 4)
    sigma = torch.tensor([0.0, 0.25, 1.0])
    noisy = add_noise(data, noise, sigma)
    assert torch.equal(noisy[0], data[0])
    assert torch.equal(noisy[2], noise[2])
    assert torch.allclose(noisy[1], 0.75 * data[1] + 0.25 * noise[1])
    assert torch.equal(velocity_loss(noise - data, data, noise), torch.zeros(3))
    # A prediction of zero costs the mean square of the target, sample by sample.
    wanted = torch.stack([(noise[i] - data[i]).square().mean() for i in range(3)])
    assert torch.allclose(velocity_loss(torch.zeros_like(data), data, noise), wanted)


def test_every_draw_comes_from_the_generator_given():
    def draws():
        generator = torch.Generator().manual_seed(4)
        return draw_sigmas(KREA2, "family", 3, (16, 8, 8), generator), draw_noise((3, 16, 8, 8), generator)

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draws()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert all(torch.equal(a, b) for a, b in zip(first, draws(), strict=True))


def test_weighted_loss_is_the_mean_over_the_masked_cells():
    data, noise, predicted = (torch.randn(2, 3, 4, 6) for _ in range(3))
    weights = torch.zeros(2, 1, 4, 6)
    weights[0, :, :, :2] = 1
    weights[1] = 0.5
    found = velocity_loss(predicted, data, noise, weights)
    error = (predicted - (noise - data)).square()
    assert torch.allclose(found, torch.stack([error[0, :, :, :2].mean(), error[1].mean()]))
    elsewhere = predicted.clone()
    elsewhere[0, :, :, 2:] += 7
    assert torch.equal(velocity_loss(elsewhere, data, noise, weights)[0], found[0])
