"""Graft beside ComfyUI's TrainLoraNode: what both do on one tiny base, with the same pictures, rank, rate and seed.

    COMFYUI_PATH=<ComfyUI's folder> python benchmarks/stock_node.py [--results benchmarks/RESULTS-stock-node.md]

Run it with the Python that ComfyUI runs on, on which Graft is installed. Every figure and every error's text in the
table is measured in this run, on the CPU, on the demonstration bases; the README's table is what it prints. Takes about
two minutes on two cores.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sides
import torch
from graft_lora.lora_convert import read_lora, read_state, write_lora, write_state
from graft_lora.lora_convert.sizes import Sizes
from graft_lora.trainer import loop
from graft_lora.trainer.checkpoints import read_shapes
from graft_lora.trainer.errors import SettingsError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.live_bytes import LiveBytes
from graft_lora.trainer.objective import DISTRIBUTIONS, sigma_quantiles
from graft_lora.trainer.plots import loss_plot
from graft_lora.trainer.preflight import check
from graft_lora.trainer.run import train
from graft_lora.trainer.samples import Sample, write_sample
from graft_lora.trainer.settings import DatasetSettings, ModelSettings, RunSettings, TrainSettings
from graft_lora.trainer.watcher import STOP, Watcher
from sides import Graft, State, Stock, change, difference, pictures, size, watched

Cells = tuple[str, str, str]  # what was tried, what TrainLoraNode did, what Graft did
HEAD = ("", "", "ComfyUI's TrainLoraNode", "Graft")
MIB = 2**20
STILL = 1e-7  # the lowest learning rate that TrainLoraNode takes


def batches(stock: Stock, graft: Graft) -> Cells:
    """Pairs of picture and caption in one batch: rows of the transformer's input beside rows of its conditioning."""

    def pairs(module: Any, call: Any) -> set[tuple[float, float]]:
        found = set()

        def look(_self: Any, x: Any, _t: Any, text: Any = None, *_: Any, context: Any = None, **__: Any) -> None:
            for picture, caption in zip(x, text if context is None else context, strict=True):
                found.add((float(picture.double().sum()), float(caption.double().sum())))

        with watched(type(module), "forward", look):
            call()
        return found

    apart = {"batch_size": 4, "steps": 1}
    theirs = pairs(stock.model.model.diffusion_model, lambda: stock.train(gradient_checkpointing=False, **apart))
    ours = pairs(graft.base.model, lambda: graft.train(checkpointing=False, **apart))
    return (
        "A batch of 4 pictures",
        f"{len(theirs)} pairs: every picture runs with every caption of the batch",
        f"{len(ours)} pairs: each picture with its own caption",
    )


def resolutions(stock: Stock, graft: Graft) -> Cells:
    """The latents to which noise is added, beside the normalised ones."""
    from comfy_extras.nodes_train import TrainSampler
    from graft_lora.nodes import host

    square = pictures("krea2")
    wide = [Sample(s.name, s.caption, s.latents[:, :6].contiguous(), s.conditioning) for s in square[2:]]
    mixed = square[:2] + wide
    latents = [sides.raw("krea2", mixed[:2]), sides.raw("krea2", mixed[2:])]

    def seen(samples: list[Sample], **how: Any) -> float:
        errors = []

        def look(_self: Any, _wrap: Any, _sigmas: Any, _noise: Any, latent: Any, _cond: Any, chosen: Any, *_: Any, **__: Any) -> None:
            wanted = torch.stack([samples[index].latents for index in chosen])
            errors.append(float((latent.detach().reshape(wanted.shape) - wanted).norm() / wanted.norm()))

        with watched(TrainSampler, "fwd_bwd", look):
            stock.train(samples, **how)
        return statistics.mean(errors)

    one, buckets, several = (
        seen(square),
        seen(mixed, latents=latents, bucket_mode=True),
        seen(mixed, latents=latents),
    )
    given = [host.normalised_latents(entry, graft.family) for entry in latents]
    given = [Sample(s.name, s.caption, row, s.conditioning) for s, row in zip(mixed, [*given[0], *given[1]], strict=True)]
    met: list[Any] = []
    with watched(loop, "add_noise", lambda data, *_: met.extend(data)):
        graft.train(given)
    own = statistics.mean(min(float((x - s.latents).norm() / s.latents.norm()) for s in mixed if s.latents.shape == x.shape) for x in met)
    return (
        "Pictures of two sizes, Krea 2",
        f"trains on latents that are {buckets:.0%} (bucket mode) and {several:.0%} (several sizes) off the normalised "
        f"ones, which the sampler uses; {one:.0%} off with one size",
        f"{own:.0%} off",
    )


# --- memory ----------------------------------------------------------------------------------------------------------


def checkpointing(stock: Stock, graft: Graft) -> Cells:
    """Bytes alive at the peak of a step's forward and backward pass, above those before it."""
    from comfy_extras.nodes_train import TrainSampler

    samples = sides.noise_pictures("krea2", 48)

    def theirs(**how: Any) -> float:
        found = []
        with LiveBytes() as live:

            def before(*_: Any, **__: Any) -> None:
                live.reset()
                found.append(live.now)

            with watched(TrainSampler, "fwd_bwd", before, lambda *_, **__: found.append(live.peak)):
                stock.train(samples, steps=1, **how)
        return (found[1] - found[0]) / MIB

    def ours(on: bool) -> float:
        with torch.inference_mode(), graft.session(samples, checkpointing=on) as session, LiveBytes() as live:
            session.step()
            live.reset()
            start = live.now
            session.step()
        return (live.peak - start) / MIB

    off, one, two = theirs(gradient_checkpointing=False), theirs(), theirs(checkpoint_depth=2)
    return (
        "Gradient checkpointing, one picture of 768²",
        f"{one:.0f} MiB for a step at the default depth of 1, {off:.0f} without; depth 2: {two:.0f}",
        f"{ours(True):.0f} MiB, {ours(False):.0f} without",
    )


def offloading(stock: Stock, graft: Graft) -> Cells:
    """Modules whose factor that was zero at the start still is."""
    lora = stock.train(offloading=True, checkpoint_depth=5)
    factors = {key: value for key, value in lora.items() if key.endswith("lora_down.weight")}
    dead = [key for key, value in factors.items() if not value.any()]
    with_blocks = Graft("krea2", blocks_on_cpu=3)
    session = with_blocks.train()
    layers = adapters.adapted(with_blocks.base.model, session.name).values()
    ours = [layer for layer in layers if not layer.zero_at_start(session.name).any()]
    text = [key for key in dead if "txtfusion" in key]
    return (
        "Weights kept in main memory (offloading, depth 5)",
        f"{len(dead)} of {len(factors)} layers learn nothing, {len(text)} of them in the text fusion, without a word",
        f"{len(ours)} of {len(layers)} learn nothing (3 of 3 blocks on the CPU), and a run that ends with such a layer "
        "is an error that names it",
    )


# --- the LoRA --------------------------------------------------------------------------------------------------------


def alpha(stock: Stock, graft: Graft) -> Cells:
    """The alphas of a LoRA's file after 40 steps."""

    def alphas(state: sides.State) -> list[float]:
        return [float(value) for key, value in state.items() if key.endswith(".alpha")]

    full, half = (alphas(stock.train(steps=40, lora_dtype=dtype)) for dtype in ("fp32", "bf16"))
    session = graft.train(steps=40)
    own = alphas(write_comfyui(adapters.to_canonical(graft.base.model, session.name)))
    return (
        f"Alpha, rank {sides.RANK}, 40 steps",
        f"cannot be set; starts at 1, so the LoRA acts at 1/{sides.RANK}; is trained along: {min(full):.3f} to "
        f"{max(full):.3f} after (lora_dtype bf16 rounds that away: {min(half):.3f} to {max(half):.3f})",
        f"is a setting, {sides.RANK} here; {min(own):.3f} to {max(own):.3f} after",
    )


def resuming(stock: Stock, graft: Graft, folder: Path) -> Cells:
    """What of a LoRA's file the node goes on with, at a learning rate that changes next to nothing."""

    def resumed(state: sides.State, name: str, **how: Any) -> tuple[sides.State, list[str]]:
        write_state(folder / name, {key: value.contiguous() for key, value in state.items()}, {}, overwrite=True)
        said: list[str] = []
        with listening(said):
            return stock.train(existing_lora=name, **{"steps": 1, "learning_rate": STILL, **how}), said

    with seeded():
        halves = stock.train(steps=4)
    halves, _ = resumed(halves, "halves_4_steps_.safetensors", steps=4, learning_rate=sides.RATE)
    with seeded():
        whole = stock.train(steps=8)
    apart = difference(change(halves), change(whole))
    again, _ = resumed(whole, "whole_8_steps_.safetensors")
    kept = difference(change(again), change(whole))
    plain = {key for key in whole if key.endswith((".diff_b", ".diff"))}
    lost = [key for key in plain if size({key: again[key]}) < 0.01 * size({key: whole[key]})]
    session = graft.train()
    trained = write_comfyui(adapters.to_canonical(graft.base.model, session.name))
    eight, _ = resumed(trained, "alpha8_8_steps_.safetensors")
    weaker = size(change(trained)) / size(change(eight))
    sizes = Sizes.of("krea2", read_shapes(graft.base.source))
    other, said = resumed(write_lora(read_lora(trained, None, sizes), "diffusers")[0], "diffusers_8_steps_.safetensors")
    left = size(change(other)) / size(change(trained))
    write_state(folder / "mine.safetensors", trained, {}, overwrite=True)
    name = error_of(stock.train, existing_lora="mine.safetensors")
    return (
        "Continuing a LoRA",
        f"up and down come back ({kept:.1%} off); {len(lost)} of {len(plain)} biases and norms start again at 0; one of "
        f"alpha 8 becomes {weaker:.1f} times weaker; of one in diffusers' names {left:.0%} is left, with {len(said)} "
        f"warnings; 4 + 4 steps differ from 8 by {apart:.0%}; `mine.safetensors`: `{name}`",
        "",
    )


def seeds(stock: Stock, graft: Graft) -> Cells:
    """Two runs of one seed, after something else has drawn from torch's own generator."""
    loras = []
    for elsewhere in (1, 2):
        torch.manual_seed(elsewhere)
        theirs = change(stock.train())
        torch.manual_seed(elsewhere)
        session = graft.train()
        loras.append((theirs, change(write_comfyui(adapters.to_canonical(graft.base.model, session.name)))))
    (one, ours), (two, again) = loras
    return (
        "The same seed twice",
        f"the LoRAs differ by {difference(one, two):.0%}: the first weights do not come from the seed",
        f"{'the same, bit for bit' if all(torch.equal(ours[key], again[key]) for key in ours) else 'they differ'}",
    )


# --- the objective ---------------------------------------------------------------------------------------------------


def losses(stock: Stock, graft: Graft) -> Cells:
    """Loss of a step as a multiple of the velocity's mean squared error, at its noise level."""
    from comfy_extras.nodes_train import TrainSampler

    def weights(module: Any, owner: Any, name: str, read: Any, call: Any) -> list[tuple[float, float]]:
        outputs: list[Any] = []
        found: list[tuple[float, float]] = []

        def after(loss: Any, *given: Any, **_: Any) -> None:
            sigma, noise, data = read(*given)
            error = (outputs[-1].detach().reshape(noise.shape) - (noise - data)).square().mean()
            found.append((float(sigma), float(loss) / float(error)))

        with watched(type(module), "forward", after=lambda out, *_, **__: outputs.append(out)):
            with watched(owner, name, after=after):
                call()
        return sorted(found)

    def given(_self: Any, _wrap: Any, sigmas: Any, noise: Any, latent: Any, *_: Any) -> Any:
        return sigmas.detach(), noise, latent

    how = {"steps": 40, "learning_rate": STILL}
    module = stock.model.model.diffusion_model
    theirs = weights(module, TrainSampler, "fwd_bwd", given, lambda: stock.train(gradient_checkpointing=False, **how))
    drawn: list[Any] = []
    with watched(loop, "add_noise", lambda data, noise, sigma: drawn.append(sigma)):
        ours = weights(
            graft.base.model, loop, "velocity_loss", lambda _out, data, noise, *_: (drawn[-1], noise, data),
            lambda: graft.train(checkpointing=False, timesteps="uniform", **how),
        )  # fmt: skip
    (low, least), (high, most) = theirs[0], theirs[-1]
    return (
        "What a noise level counts, Krea 2",
        f"an error at sigma {low:.2f} counts {least:.4f}, at {high:.2f} {most:.2f}: details hardly count",
        f"{ours[0][1]:.2f} at sigma {ours[0][0]:.2f}, {ours[-1][1]:.2f} at {ours[-1][0]:.2f}",
    )


def noise_levels(stock: Stock, other: Stock) -> Cells:
    """Medians of the noise levels that are drawn for pictures of 1024²."""
    from comfy_extras.nodes_train import TrainSampler

    def median(side: Stock) -> float:
        torch.manual_seed(0)
        wrap = SimpleNamespace(inner_model=side.model.model)
        return float(TrainSampler._generate_batch_sigmas(None, wrap, 10_001, "cpu").median())

    def own(name: str) -> float:
        family, half = FAMILIES[name], torch.tensor([0.5], dtype=torch.float64)
        cells = 1024 // family.latent_downscale
        return float(sigma_quantiles(family, "family", half, (family.latent_channels, cells, cells)))

    return (
        "Noise levels drawn, middle of them at 1024²",
        f"Krea 2 {median(stock):.3f}, Ideogram 4 {median(other):.2f}, whatever the size; no choice",
        f"Krea 2 {own('krea2'):.3f}, Ideogram 4 {own('ideogram4'):.3f}, moved with the size; four distributions to choose",
    )


# --- modes that fail -------------------------------------------------------------------------------------------------


def bypass(stock: Stock, other: Stock) -> Cells:
    """Adapters beside the weights rather than in them."""
    lora = other.train(steps=1)
    assert lora
    errors = error_of(other.train, bypass_mode=True), error_of(stock.train, bypass_mode=True, algorithm="LoHa")
    graft = Graft("ideogram4")
    session = graft.train()
    layers = adapters.adapted(graft.base.model, session.name)
    session.check_trained()
    return (
        "Bypass mode",
        f"Ideogram 4: `{errors[0]}`; LoHa: `{errors[1]}`",
        f"always works that way: all {len(layers)} layers of Ideogram 4 learned. LoHa is not trained: LoRA, DoRA, LoKr",
    )


# --- the run ---------------------------------------------------------------------------------------------------------


@contextmanager
def seeded() -> Iterator[None]:
    """Torch's own generator, from which the node draws its first weights, at one state."""
    torch.manual_seed(0)
    yield


@contextmanager
def listening(said: list[str]) -> Iterator[None]:
    """Warnings and errors of ComfyUI's log."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def main() -> None:
    import sys
    version = sides.open_comfyui()
    import folder_paths
    stock, graft, other = Stock("krea2"), Graft("krea2"), Stock("ideogram4")
    with tempfile.TemporaryDirectory() as name:
        folder_paths.add_model_folder_path("loras", name, True)
        for row in (batches, resolutions, checkpointing, offloading, alpha, resuming, seeds, losses, noise_levels, bypass):
            import time; t=time.time()
            try:
                args = {"resuming": (stock, graft, Path(name)), "noise_levels": (stock, other), "bypass": (stock, other)}.get(row.__name__, (stock, graft))
                print(row.__name__, *row(*args), sep="\n   ", flush=True)
            except Exception:
                import traceback; traceback.print_exc()
            print(time.time()-t, flush=True)


if __name__ == "__main__":
    main()
