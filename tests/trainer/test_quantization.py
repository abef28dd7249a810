"""Frozen weights: equal to torchao's, exact gradients, nothing dequantised kept, and movable."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import tiny
import torch
from graft_lora.trainer import adapters, formats, on_cpu
from graft_lora.trainer.adapters import LoraSettings
from graft_lora.trainer.base_model import choose_format
from graft_lora.trainer.errors import SettingsError
from graft_lora.trainer.families import FAMILIES
from graft_lora.trainer.formats import FORMATS, NF4, NearestLevel, format_of
from graft_lora.trainer.quantization import FrozenLinear, quantize_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

MODES = ["fp32", "bf16", "fp8", "int8", "nf4", "mxfp8"]
QUANTISED = ["fp8", "int8", "nf4"]


def weight(rows=256, columns=192, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / columns**0.5


def torchao_dequantised(mode, w):
    """What torchao itself makes of the weight."""
    linear = nn.Linear(w.shape[1], w.shape[0], bias=False)
    linear.weight = nn.Parameter(w.clone())
    if mode == "nf4":
        from torchao.quantization import to_nf4

        return to_nf4(w.clone(), 64, 256).get_original_weight()
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    quantize_(linear, Int8WeightOnlyConfig() if mode == "int8" else Float8WeightOnlyConfig())
    return linear.weight.dequantize()


@pytest.mark.parametrize("mode", QUANTISED)
def test_dequantised_weight_equals_torchao(mode):
    w = weight(256, 256)
    layer = FrozenLinear(256, 256).store(w, FORMATS[mode])
    assert torch.equal(layer.dequantized(torch.float32), torchao_dequantised(mode, w))
    assert torch.equal(layer.dequantized(torch.bfloat16), torchao_dequantised(mode, w).bfloat16())
    assert layer.data.element_size() == 1


@pytest.mark.parametrize("on_the_cpu", [True, False])
def test_nf4_dequantises_alike_in_one_chunk_and_in_many(monkeypatch, on_the_cpu):
    layer = FrozenLinear(256, 256).store(weight(256, 256), FORMATS["nf4"])
    whole = layer.dequantized(torch.float32)
    monkeypatch.setattr(on_cpu, "is_cpus", lambda tensor: on_the_cpu)
    monkeypatch.setattr(on_cpu, "FITS_CACHES", 64 * 100)
    monkeypatch.setattr(NF4, "chunk", 64 * 100)
    assert torch.equal(layer.dequantized(torch.float32), whole)


def stored_by_torchao(mode, w):
    """The very numbers, quantised whole."""
    from torchao.quantization import Float8Tensor, Int8Tensor, PerRow, to_nf4

    if mode == "int8":
        q = Int8Tensor.from_hp(w, PerRow())
        return {"data": q.qdata, "scale": q.scale}
    if mode == "fp8":
        q = Float8Tensor.from_hp(w, torch.float8_e4m3fn, PerRow())
        return {"data": q.qdata, "scale": q.scale}
    q = to_nf4(w, 64, 256)
    scales = {"scale": q.quantized_scalers, "scale_factor": q.quantization_factor, "scale_mean": q.scaler_mean}
    return {"data": q.quantized_data, **scales}


def same_bits(found, wanted):
    return found.shape == wanted.shape and torch.equal(
        found.reshape(-1).view(torch.uint8), wanted.reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [64 * 256, 64 * 100, 1, 2**24])
@pytest.mark.parametrize("mode", QUANTISED)
def test_a_weight_quantised_in_pieces_has_the_bits_of_the_whole(monkeypatch, mode, size, dtype):
    """Pieces of many rows, of an odd share of the rows, of one row or block, and one piece."""
    w = weight(512, 320).to(dtype)
    w[7], w[300] = 0, w[300] * 1e-6  # rows and blocks of zeros, and tiny ones
    before = w.clone()
    monkeypatch.setitem(formats.PIECE, "cpu", size)
    found, wanted = FORMATS[mode].quantize(w), stored_by_torchao(mode, w.float())
    for name, buffer in wanted.items():
        assert same_bits(found[name], buffer), name
    assert torch.equal(w, before)


def test_nf4_finds_torchaos_level_at_every_bound_between_two():
    """The 200 fp32 numbers on each side of each bound, where rounding decides, and numbers all over."""
    levels = stored_levels()
    numbers = [torch.rand(2**16, generator=torch.Generator().manual_seed(0)) * 2 - 1, levels, torch.zeros(1), -levels]
    for above in (False, True):
        number = (levels[1:] + levels[:-1]) / 2
        for _ in range(200):
            numbers.append(number)
            number = number.nextafter(torch.tensor(1.0 if above else -1.0))
    numbers = torch.cat(numbers)
    wanted = (numbers[:, None] - levels).abs().min(-1).indices
    assert len(wanted.unique()) == 16
    assert torch.equal(NearestLevel(levels)(numbers).long(), wanted)


def stored_levels():
    from torchao.quantization import to_nf4

    return to_nf4(torch.ones(64), 64, 1).nf4


@pytest.mark.parametrize("mode", MODES)
def test_the_layout_of_a_format_is_what_it_stores(mode):
    shapes = ((256, 192), (32, 64), (64, 160)) if mode == "mxfp8" else ((256, 192), (24, 64), (6, 160))
    for rows, columns in shapes:
        stored = FORMATS[mode].quantize(weight(rows, columns))
        found = {name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in stored.items()}
        assert found == FORMATS[mode].layout((rows, columns))


def test_storing_again_in_another_format_leaves_nothing_of_the_first():
    layer = FrozenLinear(256, 256).store(weight(256, 256), FORMATS["nf4"]).store(weight(256, 256), FORMATS["bf16"])
    assert set(dict(layer.named_buffers())) == {"data"}


class Stack(nn.Module):
    """Several Linears with a nonlinearity between: a gradient that is wrong in the lower layers alone would show."""

    def __init__(self, width=192):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norm = nn.Parameter(torch.ones(width))  # like a real base, it has parameters beside its Linears

    def forward(self, x):
        x = x * self.norm.to(x.dtype)
        for block in self.blocks:
            x = x + torch.nn.functional.silu(block(x))
        return x


def lora_gradients(model, dtype):
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(1)).to(dtype)
    with adapters.active(model, "a", train=True):
        model(x).float().square().mean().backward()
        return [p.grad.clone() for p in adapters.parameters(model, "a")]


def with_adapter(model):
    names = [f"blocks.{i}" for i in range(4)]
    adapters.inject(model, "a", LoraSettings(rank=4, alpha=8), names, torch.Generator().manual_seed(2))
    for layer in adapters.adapted(model, "a").values():
        nn.init.normal_(layer.lora_B["a"].weight, std=0.1, generator=torch.Generator().manual_seed(3))
    return model


def stack(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Stack().requires_grad_(False)


@pytest.mark.parametrize("injected", ["before", "after"])
@pytest.mark.parametrize("mode", MODES)
def test_lora_gradients_equal_those_of_the_dequantised_base(mode, injected):
    """torchao's Int8DynamicActivation mode gets the lower layer wrong by 70 % and says nothing; this would see it."""
    if injected == "before":
        model = quantize_model(with_adapter(stack()), lambda name: FORMATS[mode])
    else:
        model = with_adapter(quantize_model(stack(), lambda name: FORMATS[mode]))
    assert all(isinstance(layer.base_layer, FrozenLinear) for layer in adapters.adapted(model, "a").values())
    plain = stack()
    for block, layer in zip(plain.blocks, adapters.adapted(model, "a").values(), strict=True):
        block.weight.copy_(layer.base_layer.dequantized(torch.float32))
    plain = with_adapter(plain)
    for found, wanted in zip(lora_gradients(model, torch.float32), lora_gradients(plain, torch.float32), strict=True):
        assert wanted.norm() > 0
        assert tiny.relative(found, wanted) < 1e-5
    half = lora_gradients(model, torch.bfloat16)
    for found, wanted in zip(half, lora_gradients(plain, torch.float32), strict=True):
        assert found.dtype == torch.float32
        assert tiny.relative(found, wanted) < 0.03


class Alive(TorchDispatchMode):
    """Every tensor storage that an operation made and that is still referenced, by weak reference."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.made.append((weakref.ref(tensor), tuple(tensor.shape), str(func)))
        return out

    def shapes(self):
        gc.collect()
        return [shape for reference, shape, _ in self.made if reference() is not None]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_no_dequantised_weight_is_alive_between_forward_and_backward(mode, compute):
    width = 192
    model = with_adapter(quantize_model(stack(), lambda name: FORMATS[mode]))
    with adapters.active(model, "a", train=True):
        x = torch.randn(3, width).to(compute)
        with Alive() as alive:
            out = model(x)
        # Between forward and backward. A dense weight of the compute dtype is the buffer itself, which no operation
        # made.
        kept = [shape for shape in alive.shapes() if torch.Size(shape).numel() >= width * width]
        assert kept == []
        assert any(torch.Size(shape).numel() >= width * width for _, shape, _ in alive.made) or mode in ("fp32", "bf16")
        out.float().sum().backward()


def test_the_count_above_sees_a_weight_that_is_kept():
    layer = FrozenLinear(192, 192).store(weight(192, 192), FORMATS["int8"])
    with Alive() as alive:
        out = torch.nn.functional.linear(torch.randn(3, 192, requires_grad=True), layer.dequantized(torch.float32))
    assert (192, 192) in alive.shapes()
    out.sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_moves_copies_lists_and_runs_under_inference_mode(mode):
    with torch.inference_mode():
        model = with_adapter(quantize_model(stack(), lambda name: FORMATS[mode]))
        x = torch.randn(3, 192)
        out = model(x)
        model.to("cpu")
        state = {key: value.clone() for key, value in model.state_dict().items()}
        assert torch.equal(copy.deepcopy(model)(x), out)
        other = with_adapter(quantize_model(stack(seed=9), lambda name: FORMATS[mode]))
        assert not torch.equal(other(x), out)
        other.load_state_dict(state)
        assert torch.equal(other(x), out)
    # What was loaded under inference mode can still be trained.
    assert all(gradient.isfinite().all() for gradient in lora_gradients(model, torch.float32))


@pytest.mark.parametrize("mode", QUANTISED)
def test_a_cast_of_the_model_leaves_data_and_scales(mode):
    layer = FrozenLinear(256, 256).store(weight(256, 256), FORMATS[mode])
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    nn.Sequential(layer).to(torch.bfloat16).half()
    for name, buffer in layer.named_buffers():
        assert buffer.dtype == before[name].dtype
        assert torch.equal(buffer.float(), before[name].float())


def test_backward_finds_weights_that_moved_after_the_forward():
    layer = FrozenLinear(64, 64).store(weight(64, 64), FORMATS["int8"])
    x = torch.randn(2, 64, requires_grad=True)
    out = layer(x)
    layer.data = layer.data.clone()  # as moving to the CPU and back would leave it
    out.sum().backward()
    assert tiny.relative(x.grad, torch.ones(2, 64) @ layer.dequantized(torch.float32)) < 1e-6


@pytest.mark.parametrize("name", ["krea2", "ideogram4"])
def test_excluded_layers_are_never_quantised(name):
    family = FAMILIES[name]
    model = tiny.build(name)
    quantize_model(model, lambda path: choose_format(family, "int8", path))
    dense = {p for p, m in model.named_modules() if isinstance(m, FrozenLinear) and m.format.name == "bf16"}
    wanted = {
        "krea2": {
            "first", "last.linear", "tmlp.0", "tmlp.2", "tproj.1", "txtmlp.1", "txtmlp.3", "txtfusion.projector",
        },
        "ideogram4": {
            "input_proj", "llm_cond_proj", "t_embedding.mlp_in", "t_embedding.mlp_out", "adaln_proj",
            "layers.0.adaln_modulation", "layers.1.adaln_modulation", "final_layer.linear",
            "final_layer.adaln_modulation",
        },
    }  # fmt: skip
    assert dense == wanted[name]


def test_unknown_precision_is_named():
    with pytest.raises(
        SettingsError, match="precision 'int3' is not known; choose one of fp32, bf16, fp8, int8, nf4, mxfp8"
    ):
        format_of("int3")
