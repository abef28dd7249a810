"""The Euler sampler against the formula and against diffusers' scheduler."""

from __future__ import annotations

import pytest
import tiny
import torch
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.sampling import sample


class Straight(torch.nn.Module):
    """A model that knows the data: its velocity is exactly (x - data) / sigma."""

    def __init__(self, data):
        super().__init__()
        self.data = data

    def forward(self, x, sigma_B, text):
        return (x - self.data) / sigma_B.view(-1, 1, 1, 1)


def test_a_perfect_model_reaches_the_data_exactly(family_name):
    shape = tiny.LATENTS[family_name]
    data = torch.randn(1, *shape)
    found = sample(
        Straight(data), FAMILIES[family_name], torch.zeros(1, 1, 4), None, shape, torch.Generator(), guidance=1
    )
    assert torch.allclose(found, data, atol=1e-4)


@pytest.mark.parametrize("guidance", [1, 3.0])
def test_equals_diffusers_scheduler_and_guidance(family_name, guidance):
    from diffusers import FlowMatchEulerDiscreteScheduler

    family, model = FAMILIES[family_name], tiny.build(family_name).eval()
    arguments = tiny.inputs(family_name, batch=1)
    cond, shape = arguments["conditioning"], tiny.LATENTS[family_name]
    uncond = None if family.image_only_pass else cond[:, :1]
    text = model.encode_text(cond)
    empty = None if uncond is None else model.encode_text(uncond)
    found = sample(model, family, text, empty, shape, torch.Generator().manual_seed(3), 5, guidance)

    scheduler = FlowMatchEulerDiscreteScheduler()
    sigmas = family.schedule(5, shape)
    scheduler.set_timesteps(sigmas=sigmas[:-1].tolist())
    x = sigmas[0].float() * torch.randn((1, *shape), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for index, t in enumerate(scheduler.timesteps):
            sigma = sigmas[index].float().expand(1)
            velocity = model(x, sigma, cond)
            if guidance != 1:
                # diffusers' Krea 2: cond + g·(cond - uncond) with g = scale - 1; its Ideogram 4 comes to the same.
                velocity = velocity + (guidance - 1) * (velocity - model(x, sigma, uncond))
            x = scheduler.step(velocity, t, x).prev_sample
    assert tiny.relative(found, x) < 1e-5


def test_the_same_seed_gives_the_same_picture(family_name):
    family, model = FAMILIES[family_name], tiny.build(family_name)
    text = model.encode_text(tiny.inputs(family_name, batch=1)["conditioning"])
    pictures = [
        sample(model, family, text, text, tiny.LATENTS[family_name], torch.Generator().manual_seed(s), 2)
        for s in (1, 1, 2)
    ]
    assert torch.equal(pictures[0], pictures[1])
    assert not torch.equal(pictures[0], pictures[2])


def test_the_unconditional_transformer_of_a_pair_guides():
    """Ideogram 4 ships two transformers: the second, which never sees text, gives the unconditional pass."""
    family, model, other = FAMILIES["ideogram4"], tiny.build("ideogram4"), tiny.build("ideogram4", seed=5)
    text = model.encode_text(tiny.inputs("ideogram4", batch=1)["conditioning"])
    shape = tiny.LATENTS["ideogram4"]
    found = sample(model, family, text, None, shape, torch.Generator().manual_seed(3), 1, 3.0, other)
    sigmas = family.schedule(1, shape)
    x = sigmas[0].float() * torch.randn((1, *shape), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        cond, uncond = model(x, sigmas[:1].float(), text=text), other(x, sigmas[:1].float())
    wanted = x + (sigmas[1] - sigmas[0]).float() * (uncond + 3.0 * (cond - uncond))
    assert tiny.relative(found, wanted) < 1e-6
