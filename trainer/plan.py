"""The memory plan: what a run will take, before anything of it is loaded.

A training step is carried out at full size with tensors that have shapes and no data (`FakeTensorMode`), and the bytes
alive are counted. The blocks of a transformer are alike, so every figure is linear in their number: two counts with few
blocks give it for all of them (a test compares with a count of them all). So it is in the number of those that
recompute: none and all but the last give what lies between.

What is counted is what torch's allocator hands out. CUDA's own context, kernels' workspaces and the allocator's
rounding come on top: `usable` leaves room for them.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from . import adapters, memory
from .base_model import choose_format, compute_dtype_of, dense_format
from .batches import Batch
from .disk import gib
from .errors import DoesNotFitError
from .families import Family, Transformer
from .formats import AS_STORED, Format
from .live_bytes import LiveBytes, tensors_of
from .lora_settings import LoraSettings
from .objective import add_noise, velocity_loss
from .offload import SLOTS
from .optimizers import moments_bytes
from .quantization import FrozenLinear, replace_linears
from .settings import AUTO
from .text_trunk import is_frozen

GIB = 2**30
# What `auto` tries, the best first. fp8 is never chosen by itself: it takes the memory of int8 and is less exact.
AUTO_PRECISIONS = ("bf16", "int8", "nf4")
# Tokens of a long caption, where the captions have not been encoded yet.
ASSUMED_TOKENS = 512
FEW, MORE = 3, 4  # blocks counted; from 3 on the largest moment lies in the middle of the model, as with all of them
# Host memory that reading a model file takes beside what it keeps.
LOADING = int(1.5 * GIB)


@dataclass(frozen=True)
class Workload:
    """All that a run's memory depends on.

    Attributes:
        family: of the base.
        config: its sizes.
        latent_shape: (C, h, w) of the largest pictures.
        text_tokens: of the longest caption.
        lora: the adapter.
        precision: how the base is stored, or `auto`.
        stored: Linear → format, of a base that is kept as its file stores it (`as_stored.formats_for`).
        compute_dtype: of activations.
        batch_size: pictures in one forward pass.
        optimizer: as in the training settings.
        ema: whether a moving average is kept.
        checkpointing: whether the blocks recompute their activations, how many of them do, or `auto`.
        blocks_on_cpu: a number, or `auto`.
        preview: whether pictures are sampled during the run.
        unconditional: whether previews use a transformer of their own for the unconditional pass.
        dataset_bytes: of the encoded samples, which stay in main memory.
    """

    family: Family
    config: Any
    latent_shape: tuple[int, int, int]
    text_tokens: int = ASSUMED_TOKENS
    lora: LoraSettings = field(default_factory=LoraSettings)
    precision: str = AUTO
    stored: tuple[tuple[str, Format], ...] = ()
    compute_dtype: str = "bf16"
    batch_size: int = 1
    optimizer: str = "adamw"
    ema: bool = False
    checkpointing: bool | int | str = AUTO
    blocks_on_cpu: int | str = AUTO
    preview: bool = True
    unconditional: bool = False
    dataset_bytes: int = 0

    @property
    def blocks(self) -> int:
        """How many blocks the transformer has."""
        return self.family.block_count(self.config)


@dataclass(frozen=True)
class Prediction:
    """Peaks in bytes.

    Attributes:
        device: of the device that trains.
        host: of main memory, the process's own libraries apart.
        weights: of `device`, the frozen weights that stay there.
        adapter: of `device`, the adapter, its optimiser's state and its average.
    """

    device: int
    host: int
    weights: int
    adapter: int

    @property
    def activations(self) -> int:
        """The rest of `device`: activations, gradients, and weights dequantised for a moment."""
        return self.device - self.weights - self.adapter


@dataclass(frozen=True)
class _Counts:
    """Bytes of a run with all its blocks on the device, and of what could be elsewhere."""

    weights: float
    block: float
    trunk: float  # of a text trunk that waits on the CPU
    adapter: float
    peak: float


def predict(workload: Workload) -> Prediction:
    """The peaks of a workload in which nothing is left to `auto`."""
    counts = _counts(
        replace(workload, blocks_on_cpu=0, unconditional=False, dataset_bytes=0), workload.checkpointing is True
    )
    on_cpu = int(workload.blocks_on_cpu)
    # Blocks on the CPU are replaced by the slots that they visit, at every moment alike.
    saved = (on_cpu - min(SLOTS, on_cpu)) * counts.block
    host = on_cpu * _pinned(counts.block) + counts.trunk + LOADING + 2 * counts.adapter + workload.dataset_bytes
    guide = guide_host = 0.0
    if workload.unconditional:
        # Every block of the second transformer waits on the CPU.
        blocks = workload.blocks
        guide = counts.weights - (blocks - SLOTS) * counts.block
        guide_host = blocks * _pinned(counts.block)
    return Prediction(
        device=int(counts.peak - saved + guide),
        host=int(host + guide_host),
        weights=int(counts.weights - saved + guide),
        adapter=int(counts.adapter),
    )


def _pinned(bytes: float) -> int:
    """Torch's allocator of pinned memory rounds up to a power of two."""
    return 2 ** math.ceil(math.log2(bytes))


@lru_cache(maxsize=256)
def _counts(workload: Workload, recomputes_all: bool) -> _Counts:
    """Counts of a workload, `recomputes_all` being whether its checkpointing is True: to a cache that equals 1."""
    total, number = workload.blocks, int(workload.checkpointing)
    # Targets that name blocks by their numbers do not treat them alike.
    alike = workload.lora.blocks.strip() == "all" and workload.lora.targets in workload.family.presets
    if total <= MORE or not alike or not _stored_alike(workload):
        return _count(workload)
    # In that number it is a line up to the last but one: where the last block recomputes, its memory is what it was. A
    # text trunk that is trained recomputes with the first block, and takes less than the line says.
    if not recomputes_all and 0 < number < total - 1:
        none, most = (_counts(replace(workload, checkpointing=end), False) for end in (False, total - 1))
        return _on_line(none, most, number / (total - 1))

    def with_blocks(blocks: int) -> _Counts:
        how_many = workload.checkpointing if recomputes_all or not number else number - total + blocks
        config = workload.family.with_blocks(workload.config, blocks)
        return _count(replace(workload, config=config, checkpointing=how_many))

    return _on_line(with_blocks(FEW), with_blocks(MORE), (total - FEW) / (MORE - FEW))


def _on_line(start: _Counts, end: _Counts, place: float) -> _Counts:
    """Figures on the line through both: those of the start at 0 and those of the end at 1."""
    line = {f.name: (getattr(start, f.name), getattr(end, f.name)) for f in fields(_Counts)}
    return _Counts(**{name: a + place * (b - a) for name, (a, b) in line.items()})


def _stored_alike(workload: Workload) -> bool:
    """Whether the file stores every block of the transformer in the same formats; some leave single ones dense."""
    blocks: dict[int, dict[str, Format]] = {}
    for name, format in workload.stored:
        number = workload.family.block_of(name)
        if number is not None:
            blocks.setdefault(number, {})[name.replace(f".{number}.", ".", 1)] = format
    return all(block == blocks[0] for block in blocks.values())


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def skeleton(workload: Workload) -> Transformer:
    """The frozen base as `load_base` would make it, on the meta device."""
    family, precision = workload.family, workload.precision
    dense, stored = dense_format(precision), dict(workload.stored)

    def freeze(name: str, linear: nn.Linear) -> FrozenLinear:
        layer, shape = FrozenLinear.like(linear), (linear.out_features, linear.in_features)
        format = stored[name] if precision == AS_STORED else choose_format(family, precision, name)
        layer.format = format if format.fits_shape(shape) else dense
        for buffer, (dtype, size) in layer.format.layout(shape).items():
            layer.register_buffer(buffer, torch.empty(size, dtype=dtype))
        if linear.bias is not None:
            layer.register_buffer("bias", torch.empty(linear.bias.shape, dtype=dense.dtype))
        return layer

    with torch.device("meta"):
        model = family.build(workload.config).requires_grad_(False)
        replace_linears(model, freeze)
    model.compute_dtype = compute_dtype_of(workload.compute_dtype)
    return model.eval()


def _count(workload: Workload) -> _Counts:
    """Carries out one training step, and one step of a preview, without data."""
    model = skeleton(workload)
    family = workload.family
    targets = adapters.resolve_targets(family, adapters.linears(model), workload.lora)
    # The mean, since a file may store blocks in different formats.
    main = family.main_blocks(model)
    linears = [module for block in main for module in block.modules() if isinstance(module, FrozenLinear)]
    block = _bytes([buffer for linear in linears for buffer in linear.buffers()]) / len(main)
    adapters.inject(model, "plan", workload.lora, targets, torch.Generator())
    trunk = 0
    if parked := is_frozen(family, targets):
        for name in family.text_trunk:
            trunk += _bytes(tensors_of(model.get_submodule(name)))
            delattr(model, name)
    with torch.inference_mode(False), torch.enable_grad(), FakeTensorMode():
        _give_storages(model)
        parameters = adapters.parameters(model, "plan")
        sizes = [parameter.numel() for parameter in parameters]
        state = [torch.empty(moments_bytes(sizes, workload.optimizer), dtype=torch.uint8)]
        if workload.ema:
            state += [torch.empty_like(parameter) for parameter in parameters]
        batch = _batch(workload, parked)
        everything = tensors_of(model)
        adapter = _bytes(parameters) + _bytes(state)
        assert not isinstance(workload.checkpointing, str), "the number of blocks that recompute is to be chosen first"
        with LiveBytes([*everything, *state]) as live:
            if workload.preview:
                _preview(workload, model, batch, parameters)
            with (
                adapters.active(model, "plan", train=True),
                memory.recomputing(*family.by_place(model), workload.checkpointing),
            ):
                _step(workload, model, batch, parameters)
        weights = _bytes(everything) - _bytes(parameters)
        return _Counts(weights, block, trunk, adapter, live.peak)


def _give_storages(model: nn.Module) -> None:
    """Puts a tensor with a storage of its own in the place of each one on the meta device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                value = torch.empty(parameter.shape, dtype=parameter.dtype)
                module._parameters[name] = nn.Parameter(value, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _batch(workload: Workload, after_trunk: bool) -> Batch:
    size, family, config = workload.batch_size, workload.family, workload.config
    width = config.width if after_trunk else family.conditioning_width(config)
    dtype = compute_dtype_of(workload.compute_dtype)
    text = torch.empty(size, workload.text_tokens, width, dtype=dtype)
    # Captions of one batch are rarely of one length.
    mask = torch.empty(size, workload.text_tokens, dtype=torch.bool) if size > 1 else None
    return Batch(torch.empty(size, *workload.latent_shape), text, mask, None, (), after_trunk)


def _step(workload: Workload, model: Transformer, batch: Batch, parameters: Sequence[nn.Parameter]) -> None:
    """What `TrainSession.step` does with the device's memory."""
    noise, sigma_B = torch.empty_like(batch.latents), torch.empty(workload.batch_size)
    predicted = batch.velocity(model, add_noise(batch.latents, noise, sigma_B), sigma_B)
    velocity_loss(predicted, batch.latents, noise).mean().backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def _preview(workload: Workload, model: Transformer, batch: Batch, parameters: Sequence[Tensor]) -> None:
    """A guided Euler step for one picture, as `sampling.sample` does it; the average stands in for the weights.

    Both passes take the same: one is carried out, with room for the other's result.
    """
    own = [parameter.clone() for parameter in parameters] if workload.ema else []
    one = Batch(batch.latents[:1].clone(), batch.conditioning[:1].clone(), None, None, (), batch.after_trunk)
    with torch.no_grad(), adapters.active(model, "plan"):
        x, sigma_B = one.latents, torch.empty(1)
        velocity = one.velocity(model, x, sigma_B).float()
        without = torch.empty_like(velocity)
        x = x + 0.5 * (without + 2.0 * (velocity - without))
    del own


# --- choosing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """Bytes that a run may take.

    Attributes:
        device: on the device that trains.
        host: in main memory.
    """

    device: int
    host: int


def usable(total: int, free: int) -> int:
    """Bytes of a card that a run may count on: 90 % less half a GiB, for CUDA's context, workspaces and rounding.

    That is 10.3 GiB of 12, 13.9 of 16 and 21.1 of 24; less where other programs hold some of it.
    """
    return min(int(0.9 * total - 0.5 * GIB), free - GIB // 4)


def choose(workload: Workload, budget: Budget, modes: Mapping[str, str | None] | None = None) -> Workload:
    """The workload with every `auto` replaced by what fits the budget.

    The highest precision comes first for which at most half of the blocks wait on the CPU: their copies then hide
    behind the computing of the others. Then as few blocks as can be wait there, and beside them as few as can be
    recompute.

    Args:
        workload: with `auto` for whatever is to be chosen.
        budget: what there is.
        modes: precision → why it cannot be used, or None where it can; by default each can be.

    Raises:
        DoesNotFitError: nothing fits. It says what is needed and what would fit.
    """
    usable = [p for p in AUTO_PRECISIONS if not (modes or {}).get(p)]
    found = _fitting(workload, budget, usable)
    if found is None:
        raise DoesNotFitError(_too_large(workload, budget, usable))
    return found


def _fitting(workload: Workload, budget: Budget, precisions: Sequence[str]) -> Workload | None:
    """The workload with every `auto` replaced, or None where nothing fits."""
    candidates = precisions if workload.precision == AUTO else [workload.precision]
    for most in (workload.blocks // 2, workload.blocks) if workload.blocks_on_cpu == AUTO else (workload.blocks,):
        for precision in candidates:
            found = _fit(replace(workload, precision=precision), budget, most)
            if found is not None:
                return found
    return None


def _fit(workload: Workload, budget: Budget, most: int) -> Workload | None:
    """With this precision: checkpointing and the fewest blocks on the CPU, at most `most`, or None."""
    counts = [workload.blocks_on_cpu] if workload.blocks_on_cpu != AUTO else range(most + 1)
    checkpointing = True if workload.checkpointing == AUTO else workload.checkpointing
    for blocks in counts:
        tried = replace(workload, checkpointing=checkpointing, blocks_on_cpu=blocks)
        if _fits(tried, budget):
            return _fewest_recomputed(tried, budget) if workload.checkpointing == AUTO else tried
    return None


def _fewest_recomputed(workload: Workload, budget: Budget) -> Workload:
    """A workload that fits with all its blocks recomputed, with as few as it takes."""
    # The last one is slim for nothing (`memory.recomputing`), and the more of the others recompute, the less it takes.
    numbers = range(workload.blocks)
    place = bisect_left(numbers, True, key=lambda number: _fits(replace(workload, checkpointing=number), budget))
    # Even with all of them, what a number lets them keep may be too much.
    return replace(workload, checkpointing=numbers[place] or False) if place < len(numbers) else workload


def _fits(workload: Workload, budget: Budget) -> bool:
    prediction = predict(workload)
    return prediction.device <= budget.device and prediction.host <= budget.host


def _too_large(workload: Workload, budget: Budget, precisions: Sequence[str]) -> str:
    """What was wanted, what there is, and what would fit: other settings first, then smaller pictures."""
    least = replace(
        workload,
        precision=precisions[-1] if workload.precision == AUTO else workload.precision,
        checkpointing=True if workload.checkpointing == AUTO else workload.checkpointing,
        blocks_on_cpu=workload.blocks if workload.blocks_on_cpu == AUTO else workload.blocks_on_cpu,
    )
    prediction = predict(least)
    message = (
        f"{workload.family.title} at {_side(workload)}² with rank {workload.lora.rank} takes {gib(prediction.device)} "
        f"on the device and {gib(prediction.host)} of main memory in {least.precision} with {least.blocks_on_cpu} "
        f"blocks on the CPU; {gib(budget.device)} and {gib(budget.host)} can be used: "
    )
    for what, other in _ways_out(workload):
        if _fitting(other, budget, precisions) is not None:
            return f"{message}{what} would fit"
    lacking = "the device" if prediction.device > budget.device else "main memory"
    return f"{message}no smaller picture would fit either, {lacking} is too small; close what else uses it"


def _ways_out(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Changes that a user could make, the least first, and what the workload would then be."""
    settings: tuple[tuple[str, dict[str, Any]], ...] = (
        ("checkpointing = true", {"checkpointing": True}),
        ('blocks_on_cpu = "auto"', {"blocks_on_cpu": AUTO}),
        ('precision = "auto"', {"precision": AUTO}),
        ('precision and blocks_on_cpu = "auto"', {"precision": AUTO, "blocks_on_cpu": AUTO}),
        ("batch_size = 1", {"batch_size": 1}),
    )
    for what, change in settings:
        if workload.checkpointing is not False or "checkpointing" in change:
            yield what, replace(workload, **change)
    easiest = replace(workload, checkpointing=True, blocks_on_cpu=AUTO, precision=AUTO, batch_size=1)
    yield "all of these together", easiest
    for side in (1024, 768, 640, 512, 384, 256):
        if side < _side(workload):
            yield f"{side}²", at_resolution(easiest, side)


def at_resolution(workload: Workload, side: int) -> Workload:
    """The workload with square pictures of `side` pixels."""
    cells = side // workload.family.latent_downscale
    return replace(workload, latent_shape=(workload.latent_shape[0], cells, cells))


def _side(workload: Workload) -> int:
    """Side of a square of as many pixels as the pictures have."""
    rows, columns = workload.latent_shape[1:]
    return round(math.sqrt(rows * columns)) * workload.family.latent_downscale


def describe(workload: Workload) -> str:
    """One line on a workload in which nothing is left to `auto`."""
    prediction = predict(workload)
    return (
        f"memory plan: {workload.precision}, {_recomputed(workload)}, {workload.blocks_on_cpu} of "
        f"{workload.blocks} blocks on the CPU: {gib(prediction.device)} on the device (weights "
        f"{gib(prediction.weights)}, adapter {gib(prediction.adapter)}, activations {gib(prediction.activations)}), "
        f"{gib(prediction.host)} of main memory"
    )


def _recomputed(workload: Workload) -> str:
    if not workload.checkpointing:
        return "without checkpointing"
    if workload.checkpointing is True:
        return "checkpointing for the least memory"
    return f"checkpointing in {workload.checkpointing} of {workload.blocks} blocks"
