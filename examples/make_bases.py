"""Trains the demonstration bases and codecs from scratch: `python -m graft_lora.examples.make_bases krea2`.

Takes about 15 minutes a family on two cores. Nothing here is needed to use Graft; it is kept so that anyone can make
the files again.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import time

import numpy as np
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from torch import Tensor, nn

from ..trainer.families import FAMILIES, Family
from ..trainer.families.ideogram4 import Ideogram4Config
from ..trainer.families.krea2 import Krea2Config
from .demo_parts import Codec, TextEncoder, base_path, codec_path
from .shapes import SIZE, draw_known, star_points

# Both keep the head width of the published models; Krea 2's text width must be a multiple of its 20 text heads.
CONFIGS = {
    "krea2": Krea2Config(
        width=256, heads=2, kv_heads=1, mlp=768, blocks=3, text_width=40, text_heads=20, text_kv_heads=20, text_mlp=128
    ),
    "ideogram4": Ideogram4Config(width=256, heads=2, mlp=640, layers=4, time_width=64, text_features=13 * 32),
}
EMA = 0.999
PICTURES = 16_000


def to_tensor(images: list[Image.Image]) -> Tensor:
    stacked = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return stacked.permute(0, 3, 1, 2).float() / 127.5 - 1


def random_polygons(rng: random.Random) -> Image.Image:
    """What the codec learns from beside the known shapes: polygons of any colour, so that it favours none."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(rng.randrange(256) for _ in range(3)))
    canvas = ImageDraw.Draw(image)
    for _ in range(rng.randint(1, 3)):
        colour = tuple(rng.randrange(256) for _ in range(3))
        x, y, radius = rng.uniform(8, 56), rng.uniform(8, 56), rng.uniform(6, 28)
        points = star_points(x, y, radius, rng.randint(3, 8), rng.uniform(0.3, 1.0))
        canvas.polygon(points, fill=colour)
    return image


def train_codec(family: Family, steps: int, generator: torch.Generator) -> Codec:
    """An autoencoder whose decoder bears some noise on normalised latents."""
    rng = random.Random(1)
    images = [random_polygons(rng) for _ in range(3000)] + [draw_known(rng).image for _ in range(3000)]
    pictures = to_tensor(images)
    codec = Codec(family)
    optimizer = torch.optim.AdamW(codec.parameters(), 2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for step in range(steps):
        batch = pictures[torch.randint(len(pictures), (32,), generator=generator)]
        cells = codec.encoder(batch)
        spread = cells.std(dim=(0, 2, 3), keepdim=True)
        noisy = cells + 0.1 * spread * torch.randn(cells.shape, generator=generator)
        error = codec.decoder(noisy) - batch
        loss = error.abs().mean() + error.square().mean() + 1e-3 * cells.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"codec {step} {loss.item():.4f}", flush=True)
    codec.requires_grad_(False).eval()
    latents = codec.pack(codec.encoder(pictures[:2000]))
    codec.mean_C.copy_(latents.mean(dim=(0, 2, 3)))
    codec.std_C.copy_(latents.std(dim=(0, 2, 3)))
    return codec


def train_base(family: Family, codec: Codec, steps: int, batch: int, generator: torch.Generator) -> nn.Module:
    config = CONFIGS[family.name]
    model = family.build(config)
    initialise(model, generator)
    average = copy.deepcopy(model).requires_grad_(False)
    rng = random.Random(2)
    drawn = [draw_known(rng) for _ in range(PICTURES)]
    encoder = TextEncoder(family.conditioning_width(config))
    latents = torch.cat(
        [codec.encode(to_tensor([p.image for p in drawn[i : i + 200]])) for i in range(0, PICTURES, 200)]
    )
    texts = [encoder(picture.caption) for picture in drawn]
    empty = encoder("")
    optimizer = torch.optim.AdamW(model.parameters(), 1.5e-3, weight_decay=0.01, betas=(0.9, 0.99))
    started = time.time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 1.5e-3 * min(1, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        chosen = torch.randint(len(drawn), (batch,), generator=generator).tolist()
        # One batch in ten learns the unconditional pass, for guidance.
        kind = torch.rand((), generator=generator).item()
        rows = [empty if kind < 0.1 else texts[i] for i in chosen]
        conditioning, mask = pad(rows)
        clean = latents[chosen]
        noise = torch.randn(clean.shape, generator=generator)
        u = torch.rand(batch, generator=generator, dtype=torch.float64)
        own = family.sigma_quantile(u, clean.shape)
        # Half of the noise levels uniform: at 64 pixels Ideogram 4's own distribution hardly visits the high ones.
        sigma = torch.where(torch.rand(batch, generator=generator) < 0.5, own, u).float()
        noisy = torch.lerp(clean, noise, sigma[:, None, None, None])
        text = () if kind < 0.1 and family.image_only_pass else (conditioning, mask)
        loss = (model(noisy, sigma, *text) - (noise - clean)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            decay = min(EMA, (step + 1) / (step + 10))
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 1 - decay)
        if step % 100 == 0:
            print(f"{family.name} {step} {loss.item():.4f} {time.time() - started:.0f} s", flush=True)
    return average


def pad(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(len(row) for row in rows)
    conditioning = torch.stack([nn.functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows])
    mask = torch.arange(longest)[None] < torch.tensor([len(row) for row in rows])[:, None]
    return conditioning, mask


def initialise(model: nn.Module, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and not name.endswith("modulation.lin"):
            nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]), generator=generator)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
    for name in ("last.linear.weight", "final_layer.linear.weight"):
        if name in dict(model.named_parameters()):
            nn.init.zeros_(model.get_parameter(name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--codec-steps", type=int, default=2500)
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--batch", type=int, default=32)
    arguments = parser.parse_args()
    family = FAMILIES[arguments.family]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    if codec_path(family).exists():
        codec = Codec.load(family)
    else:
        codec = train_codec(family, arguments.codec_steps, generator)
        state = {name: value.half().contiguous() for name, value in codec.state_dict().items()}
        save_file(state, codec_path(family), {"graft_demo": "codec"})
    model = train_base(family, codec, arguments.steps, arguments.batch, generator)
    state = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    save_file(state, base_path(family), {"graft_demo": "base"})


if __name__ == "__main__":
    main()
