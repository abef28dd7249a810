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
from dataclasses import dataclass, replace
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
STILL = 1e-7  # the lowest learning rate that TrainLoraNode takes


@dataclass(frozen=True)
class Bench:
    """What is compared: TrainLoraNode on both bases, Graft on Krea 2's, and a folder of LoRAs that ComfyUI knows."""

    stock: Stock
    stock_ideogram: Stock
    graft: Graft
    folder: Path


# --- what is trained on ----------------------------------------------------------------------------------------------


def batches(bench: Bench) -> Cells:
    """Pairs of picture and caption in one batch: rows of the transformer's input beside rows of its conditioning."""

    def pairs(module: Any, call: Callable[..., Any]) -> int:
        found = set()

        def look(_self: Any, x: Any, _sigma: Any, text: Any = None, *_: Any, context: Any = None, **__: Any) -> None:
            rows = x.detach(), (text if context is None else context).detach()
            found.update((p.double().sum().item(), c.double().sum().item()) for p, c in zip(*rows, strict=True))

        with watched(type(module), "forward", look):
            call(batch_size=4, steps=1)
        return len(found)

    theirs = pairs(bench.stock.model.model.diffusion_model, bench.stock.train)
    ours = pairs(bench.graft.base.model, bench.graft.train)
    return (
        "A batch of 4 pictures",
        f"{theirs} passes: every picture is run with every caption of the batch",
        f"{ours} passes: each picture with its own caption",
    )


def resolutions(bench: Bench) -> Cells:
    """The latents to which noise is added, beside the normalised ones."""
    from comfy_extras.nodes_train import TrainSampler
    from graft_lora.nodes import host

    square = pictures("krea2")
    mixed = square[:2] + [replace(sample, latents=sample.latents[:, :6].contiguous()) for sample in square[2:]]
    latents = [sides.raw("krea2", mixed[:2]), sides.raw("krea2", mixed[2:])]

    def off(samples: list[Sample], *given: Any, **how: Any) -> float:
        errors = []

        def look(
            _self: Any, _wrap: Any, _sigmas: Any, _noise: Any, data: Any, _cond: Any, chosen: Any, *_: Any
        ) -> None:
            wanted = torch.stack([samples[index].latents for index in chosen])
            errors.append(float((data.detach().reshape(wanted.shape) - wanted).norm() / wanted.norm()))

        with watched(TrainSampler, "fwd_bwd", lambda *seen, **_: look(*seen)):
            bench.stock.train(samples, *given, **how)
        return statistics.mean(errors)

    normalised = [row for entry in latents for row in host.normalised_latents(entry, bench.graft.family)]
    given = [replace(sample, latents=row) for sample, row in zip(mixed, normalised, strict=True)]
    met: list[Any] = []
    with watched(loop, "add_noise", lambda data, *_: met.extend(data)):
        bench.graft.train(given)
    own = statistics.mean(
        min(float((x - s.latents).norm() / x.norm()) for s in mixed if s.latents.shape == x.shape) for x in met
    )
    one, buckets, several = off(square), off(mixed, latents, bucket_mode=True), off(mixed, latents)
    return (
        "Pictures of two sizes (Krea 2)",
        f"trains on latents that were not normalised: {buckets:.0%} off in bucket mode, {several:.0%} without it; "
        f"{one:.0%} where all have one size",
        f"{own:.0%} off",
    )


# --- memory ----------------------------------------------------------------------------------------------------------


def checkpointing(bench: Bench) -> Cells:
    """Bytes alive at the peak of a step, above those before it."""
    samples = sides.noise_pictures("krea2", 96)

    def theirs(on: bool, depth: int = 1) -> float:
        how = {"gradient_checkpointing": on, "checkpoint_depth": depth}
        return sides.step_of_node(lambda: bench.stock.train(samples, steps=1, **how)).peak

    def ours(on: bool) -> float:
        with torch.inference_mode():
            return sides.step_of_graft(bench.graft.session(samples, checkpointing=on)).peak

    return (
        "Memory of a step with checkpointing, one picture of 768²",
        f"{theirs(True):.0f} MiB for a step at the default depth 1, {theirs(False):.0f} MiB without checkpointing, "
        f"{theirs(True, 2):.0f} MiB at depth 2",
        f"{ours(True):.0f} MiB for a step, {ours(False):.0f} MiB without checkpointing",
    )


def offloading(bench: Bench) -> Cells:
    """Layers whose factor that was zero at the start still is, where the weights wait in main memory."""
    lora = bench.stock.train(offloading=True, gradient_checkpointing=True, checkpoint_depth=5)
    factors = {key: value for key, value in lora.items() if key.endswith("lora_down.weight")}
    dead = [key for key, value in factors.items() if not value.any()]
    graft = Graft("krea2", blocks_on_cpu=3)
    ours, count = graft.untrained(graft.train(checkpointing=True))
    return (
        "Offloading with checkpointing at depth 5 (Krea 2)",
        f"{len(dead)} of {len(factors)} layers learn nothing, {sum('txtfusion' in key for key in dead)} of them in the "
        "text fusion; nothing is said",
        f"with all 3 blocks in main memory {ours} of {count} layers learn nothing; one that did would be an error that "
        "names it",
    )


# --- the LoRA --------------------------------------------------------------------------------------------------------


def alpha(bench: Bench) -> Cells:
    """The alphas of a LoRA's file after 40 steps."""

    def alphas(state: State) -> str:
        values = [float(value) for key, value in state.items() if key.endswith(".alpha")]
        return f"{min(values):.3f} to {max(values):.3f}"

    full, half = (alphas(bench.stock.train(steps=40, lora_dtype=dtype)) for dtype in ("fp32", "bf16"))
    own = alphas(bench.graft.file(bench.graft.train(steps=40)))
    return (
        f"Alpha, rank {sides.RANK}, 40 steps",
        f"starts at 1 and cannot be set, so the LoRA acts at 1/{sides.RANK}. It is trained along: {full} afterwards "
        f"with `lora_dtype` fp32; bf16 rounds that away ({half})",
        f"is a setting, here {sides.RANK}; {own} afterwards",
    )


def resuming(bench: Bench) -> Cells:
    """What of a LoRA's file the node goes on with, at a learning rate that changes next to nothing."""
    stock, graft = bench.stock, bench.graft

    def resumed(state: State, name: str, **how: Any) -> State:
        write_state(bench.folder / name, {key: value.contiguous() for key, value in state.items()}, {})
        return stock.train(existing_lora=name, **{"steps": 1, "learning_rate": STILL, **how})

    torch.manual_seed(0)  # from torch's own generator the node draws its first weights
    halves = resumed(stock.train(steps=4), "halves_4_steps_.safetensors", steps=4, learning_rate=sides.RATE)
    torch.manual_seed(0)
    whole = stock.train(steps=8)
    again = resumed(whole, "whole_8_steps_.safetensors")
    kept, apart = difference(change(again), change(whole)), difference(change(halves), change(whole))
    plain = [key for key in whole if key.endswith((".diff_b", ".diff"))]
    lost = [key for key in plain if size({key: again[key]}) < 0.01 * size({key: whole[key]})]
    trained = graft.file(graft.train())
    weaker = size(change(trained)) / size(change(resumed(trained, "alpha8_8_steps_.safetensors")))
    sizes = Sizes.of("krea2", read_shapes(graft.base.source))
    foreign = write_lora(read_lora(trained, None, sizes), "diffusers", sizes=sizes).state
    with listening() as said:
        left = size(change(resumed(foreign, "diffusers_8_steps_.safetensors"))) / size(change(trained))
    write_state(bench.folder / "mine.safetensors", trained, {})
    name = error_of(stock.train, existing_lora="mine.safetensors")
    with torch.inference_mode(), graft.session(steps=8) as second:
        second.load_state_dict(graft.train(steps=4).state_dict())
        list(second.steps())
    same = equal(graft.file(second), graft.file(graft.train(steps=8)))
    return (
        "Continuing",
        f"the layers' weights come back ({kept:.0%} off); {len(lost)} of {len(plain)} biases and norms start again at "
        f"0. A LoRA of alpha 8 becomes {weaker:.1f} times weaker. Of one with diffusers' names {left:.0%} is left, "
        f"with {len(said)} warnings. 4 and 4 steps differ from 8 by {apart:.0%}. A file called `mine`: `{name}`",
        f"4 and 4 steps are {same} 8. It continues runs, not LoRA files, and refuses one that differs: "
        f"`{refusal(bench)}`",
    )


def refusal(bench: Bench) -> str:
    """What a run says that is continued with another alpha."""
    settings = run_settings(bench, "refused")
    run_to(settings, bench.graft, 1)
    other = replace(settings, lora=replace(settings.lora, alpha=4.0))
    return error_of(run_to, other, bench.graft, 8, resume=True).removeprefix(f"{SettingsError.__name__}: ")


def seeds(bench: Bench) -> Cells:
    """Two runs of one seed, after something else has drawn from torch's own generator."""
    loras = []
    for elsewhere in (1, 2):
        torch.manual_seed(elsewhere)
        theirs = change(bench.stock.train())
        torch.manual_seed(elsewhere)
        loras.append((theirs, bench.graft.file(bench.graft.train())))
    (one, ours), (two, again) = loras
    return (
        "The same seed twice, with other work before",
        f"the two LoRAs differ by {difference(two, one):.0%}: the seed does not cover the first weights",
        f"the second LoRA is {equal(ours, again)} the first",
    )


# --- the objective ---------------------------------------------------------------------------------------------------


def noise_levels(bench: Bench) -> Cells:
    """What a noise level counts, and which ones are drawn."""
    (low, least), (high, most) = stock_weights(bench)
    (own_low, own_least), (own_high, own_most) = graft_weights(bench)
    medians = [stock_median(side) for side in (bench.stock, bench.stock_ideogram)]
    own = [graft_median(name) for name in ("krea2", "ideogram4")]
    return (
        "Noise levels, 1 being pure noise",
        f"an error at {low:.2f} counts {least:.3f}, at {high:.2f} {most:.3f}: fine detail hardly counts. Half of those "
        f"drawn lie above {medians[0]:.3f} (Krea 2) and {medians[1]:.3f} (Ideogram 4); there is no choice",
        f"an error at {own_low:.2f} counts {own_least:.3f}, at {own_high:.2f} {own_most:.3f}. Half lie above "
        f"{own[0]:.3f} and {own[1]:.3f} at 1024², or choose one of {len(DISTRIBUTIONS)} distributions",
    )


def weights(module: Any, owner: Any, name: str, read: Callable[..., Any], call: Callable[..., Any]) -> Any:
    """Lowest and highest noise level of 40 steps, each with its loss as a multiple of the velocity's squared error.

    Args:
        module: the transformer, whose output is the velocity.
        owner, name: of the function that returns the loss.
        read: its arguments → noise level, noise and data.
        call: trains.
    """
    outputs: list[Any] = []
    found: list[tuple[float, float]] = []

    def after(loss: Any, *given: Any, **_: Any) -> None:
        sigma, noise, data = (tensor.detach() for tensor in read(*given))
        error = (outputs[-1].reshape(noise.shape) - (noise - data)).square().mean()
        found.append((sigma.item(), loss.item() / error.item()))

    seen = watched(type(module), "forward", after=lambda output, *_, **__: outputs.append(output.detach()))
    with seen, watched(owner, name, after=after):
        call(steps=40, learning_rate=STILL)
    return min(found), max(found)


def stock_weights(bench: Bench) -> Any:
    from comfy_extras.nodes_train import TrainSampler

    def read(_self: Any, _wrap: Any, sigmas: Any, noise: Any, data: Any, *_: Any) -> Any:
        return sigmas, noise, data

    return weights(bench.stock.model.model.diffusion_model, TrainSampler, "fwd_bwd", read, bench.stock.train)


def graft_weights(bench: Bench) -> Any:
    drawn: list[Any] = []
    with watched(loop, "add_noise", lambda _data, _noise, sigma: drawn.append(sigma)):
        return weights(
            bench.graft.base.model, loop, "velocity_loss", lambda _out, data, noise, *_: (drawn[-1], noise, data),
            bench.graft.train,
        )  # fmt: skip


def stock_median(stock: Stock) -> float:
    from comfy_extras.nodes_train import TrainSampler

    torch.manual_seed(0)
    wrap = SimpleNamespace(inner_model=stock.model.model)
    return TrainSampler._generate_batch_sigmas(None, wrap, 10_001, "cpu").median().item()


def graft_median(name: str) -> float:
    family, half = FAMILIES[name], torch.tensor([0.5], dtype=torch.float64)
    cells = 1024 // family.latent_downscale
    return sigma_quantiles(family, "family", half, (family.latent_channels, cells, cells)).item()


# --- the run ---------------------------------------------------------------------------------------------------------


def bypass(bench: Bench) -> Cells:
    """Adapters beside the weights rather than in them."""
    errors = [
        error_of(bench.stock_ideogram.train, bypass_mode=True),
        error_of(bench.stock.train, bypass_mode=True, algorithm="LoHa"),
    ]
    graft = Graft("ideogram4")
    dead, count = graft.untrained(graft.train())
    return (
        "Bypass mode: the LoRA beside the weights",
        f"Ideogram 4: `{errors[0]}`. Krea 2 with LoHa: `{errors[1]}`",
        f"is how it always works; {count - dead} of {count} layers of Ideogram 4 learn. It trains LoRA, DoRA and LoKr, "
        "no LoHa",
    )


def stopping(bench: Bench) -> Cells:
    """Stop in step 4 of 8; what else a run of an evening wants; and how often the base lies in memory."""
    import comfy.model_management as management
    import folder_paths
    from comfy_extras.nodes_train import SaveLoRA, TrainLoraNode, TrainSampler

    output, calls = bench.folder / "output", []
    folder_paths.set_output_directory(str(output))
    module, base_model = bench.stock.model.model.diffusion_model, bench.graft.base.model
    own, base = sides.weights_of(module), sides.weights_of(base_model)
    theirs: set[int] = set()
    ours: set[int] = set()

    def interrupt(*_: Any, **__: Any) -> None:
        calls.append(1)
        management.interrupt_current_processing(len(calls) == 4)

    try:
        with watched(TrainSampler, "fwd_bwd", interrupt), watched(type(module), "forward", note(theirs)):
            bench.stock.train()
        raise SystemExit("TrainLoraNode was not stopped: correct the table's words")
    except management.InterruptProcessingException:
        left = len(list(output.rglob("*")))
    SaveLoRA.execute(bench.stock.train(steps=1), "kept")
    header = read_state(next(output.rglob("kept*")))[1]
    names = " ".join(entry.id for entry in TrainLoraNode.define_schema().inputs)
    has = [word for word in ("preview", "schedule", "clip", "ema", "save") if word in names]
    stopped = run_settings(bench, "stopped")
    with watched(type(base_model), "forward", note(ours)):
        saved = run_to(stopped, bench.graft, 4)
    kept = read_state(saved)[1]
    run_to(stopped, bench.graft, 8, resume=True)
    same = equal(read_state(saved)[0], read_state(run_to(run_settings(bench, "whole"), bench.graft, 8))[0])
    return (
        "Stop in step 4 of 8, and what a long run wants",
        f"{left} files are left. Of previews, schedule, clipping, EMA and saves in between it has {len(has)}. A LoRA's "
        f"file notes {len(header)} things about its making. The base is loaded again for the run: {len(own & theirs)} "
        f"of {len(own)} weights are those already loaded",
        f"the LoRA is left, and continued to step 8 it is {same} that of a run without a stop. All five are settings. "
        f"The file notes {len(kept)} things. The base is not loaded again: {len(base & ours)} of {len(base)} weights "
        "are those already loaded",
    )


def loose_ends(bench: Bench) -> Cells:
    """The curve of a run of one step, and a switch of ComfyUI's that a run sets."""
    import comfy.model_management as management
    from comfy_extras.nodes_train import LossGraphNode
    from graft_lora.nodes import host

    _, losses, _ = bench.stock.outputs(steps=1)
    error = error_of(LossGraphNode.execute, losses, "curve")
    bench.stock.train(steps=1, quantized_backward=True)
    switch = management.training_fp8_bwd
    management.training_fp8_bwd = False
    model = host.load_base_model(bench.graft.base.source, "fp32", "fp32", blocks_on_cpu=0)
    with host.training(model, None):
        host.hosted_base(model).load()
        with bench.graft.session(steps=1) as session:
            (log,) = session.steps()
    plot = bench.folder / "loss.png"
    loss_plot(plot, [log.loss], "one step")
    return (
        "Loose ends",
        f"the loss curve of one step: `{error}`. `quantized_backward` stays {'on' if switch else 'off'} for all of "
        "ComfyUI after the run",
        f"the curve is {'drawn' if plot.is_file() else 'missing'}; the switch is "
        f"{'on' if management.training_fp8_bwd else 'off'} after the run",
    )


def note(places: set[int]) -> Callable[..., None]:
    """Notes where the weights lie of a transformer that is called."""
    return lambda module, *_, **__: places.update(sides.weights_of(module))


# --- helpers ---------------------------------------------------------------------------------------------------------


def run_settings(bench: Bench, name: str) -> RunSettings:
    """Of a whole run in a folder, on the same encoded pictures."""
    cache = bench.folder / "encoded"
    cache.mkdir(exist_ok=True)
    for sample in pictures("krea2"):
        write_sample(cache, sample, bench.graft.family, overwrite=True)
    return RunSettings(
        output=str(bench.folder / "runs" / name),
        model=ModelSettings(path=str(bench.graft.base.source), precision="fp32", compute_dtype="fp32", device="cpu"),
        dataset=DatasetSettings(cache=str(cache)),
        lora=sides.LORA,
        train=TrainSettings(steps=sides.STEPS, learning_rate=sides.RATE, warmup_steps=0),
    )


def run_to(settings: RunSettings, graft: Graft, steps: int, resume: bool = False) -> Path:
    """Runs it, wishing to stop after so many steps, and returns the LoRA's file."""

    class Stopping(Watcher):
        done = 0

        def stepped(self, logs: Any, total: int, losses: Any) -> None:
            self.done = logs[-1].step

        def wish(self) -> str:
            return STOP if self.done >= steps else ""

    return train(check(settings, None, resume), graft.base, None, Stopping(), resume).lora


def equal(one: State, other: State) -> str:
    """The words for whether two LoRAs are the same, to stand before the second."""
    same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return "bit for bit" if same else "not"


def error_of(call: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """The error's kind and its text. Where there is none the script ends, since the table's words would be wrong."""
    try:
        call(*arguments, **named)
    except Exception as error:  # whatever kind it is, it is what is measured
        return f"{type(error).__name__}: {error}"
    raise SystemExit(f"{call.__qualname__} with {named} was expected to fail and did not: correct the table's words")


@contextmanager
def listening() -> Iterator[list[str]]:
    """Warnings and errors that are logged."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger().removeHandler(handler)


# In the order of the faults as they were found.
ROWS = (
    batches, resolutions, checkpointing, alpha, resuming, offloading, seeds, noise_levels, bypass, stopping, loose_ends,
)  # fmt: skip


def table(bench: Bench) -> str:
    """Markdown, one row for each of `ROWS`."""
    lines = [HEAD, ("---",) * len(HEAD)]
    for index, row in enumerate(ROWS, 1):
        print(f"{index} of {len(ROWS)}: {row.__doc__.splitlines()[0]}", file=sys.stderr, flush=True)
        lines.append((str(index), *row(bench)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    results = Path(__file__).with_name("RESULTS-stock-node.md")
    parser.add_argument("--results", type=Path, default=results, help="the file that is written")
    arguments = parser.parse_args()
    version = sides.open_comfyui()
    torch.set_num_threads(1)  # so small a model gains nothing from more, and waits for them on a busy machine
    warnings.simplefilter("ignore")  # torch's, of ComfyUI's autocast in fp32 on the CPU
    import folder_paths

    with tempfile.TemporaryDirectory() as name:
        folder_paths.add_model_folder_path("loras", name, is_default=True)
        found = table(Bench(Stock("krea2"), Stock("ideogram4"), Graft("krea2"), Path(name)))
    print(found)
    text = f"# benchmarks/stock_node.py\n\nComfyUI {version}, torch {torch.__version__}, on the CPU\n\n{found}\n"
    arguments.results.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
