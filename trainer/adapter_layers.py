"""The layer that carries adapters: a frozen Linear and, by name, LoRA, DoRA or LoKr beside it.

PEFT injects it and keeps A, B and DoRA's magnitude where it keeps its own. What PEFT 0.21 would do with the base's
weight is written anew: its DoRA forms W + s · B A densely in each forward pass, and its LoKr, a tuner that cannot share
a model with LoRA's, forms w1 ⊗ w2 densely and keeps it for backward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..lora_convert import LokrModule, LoraModule
from . import kept
from .quantization import FrozenLinear, input_gradient, matmul
from .quiet import quiet_torchao

with quiet_torchao():
    import peft
    from peft.tuners.lora import Linear as PeftLinear

_TINY = torch.finfo(torch.float32).tiny


def factorization(dimension: int, factor: int) -> tuple[int, int]:
    """Two numbers, the smaller first, whose product is the dimension (LyCORIS' function of that name).

    A factor that divides the dimension is one of the two. Else the smaller one is the largest divisor that is at most
    the factor and the root of the dimension; -1 stands for no limit but the root.
    """
    if factor > 0 and dimension % factor == 0:
        return min(factor, dimension // factor), max(factor, dimension // factor)
    limit = min(math.isqrt(dimension), factor if factor > 0 else dimension)
    smaller = next(number for number in range(limit, 0, -1) if dimension % number == 0)
    return smaller, dimension // smaller


def lokr_shapes(rows: int, columns: int, rank: int, factor: int) -> tuple[tuple[int, int], tuple[int, int], bool]:
    """Shapes of w1 and w2 for a weight (rows, columns), and whether w2 is whole.

    w1 always is. w2 is of the given rank unless that is half its longer side or more (LyCORIS' rule).
    """
    out_1, out_2 = factorization(rows, factor)
    in_1, in_2 = factorization(columns, factor)
    return (out_1, in_1), (out_2, in_2), rank >= max(out_2, in_2) / 2


@dataclass
class AdapterConfig(peft.LoraConfig):
    """PEFT's configuration, and what it has no word for.

    Attributes:
        kind: one of `lora_settings.KINDS`.
        factor: of LoKr, see `factorization`.
    """

    kind: str = field(default="lora")
    factor: int = field(default=-1)


class Magnitude(nn.Module):
    """DoRA's length of every output row, and the base's own, squared, to start from.

    Attributes:
        weight: (out,) the length m.
        squares: (out,) fp32, ‖W‖² by row; not saved, since it follows from the base.
    """

    squares: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows))
        self.register_buffer("squares", torch.empty(rows), persistent=False)

    @torch.no_grad()
    def start(self, layer: nn.Linear, device: torch.device, dtype: torch.dtype) -> None:
        """Lengths and squares of the base."""
        # Some rows at a time, which spares an fp32 copy of a dense bf16 weight.
        rows = (rows.to(device).float() for rows in layer.weight.split(1024))
        self.squares = torch.cat([some.square().sum(dim=1) for some in rows])
        self.weight = nn.Parameter(self.norm(0).to(dtype))

    def norm(self, change: Tensor | float) -> Tensor:
        """The root of the squares and a change of them, (out,) fp32; a row of zeros has the least length there is."""
        return (self.squares + change).clamp_min(_TINY).sqrt()


class Kronecker(nn.Module):
    """LoKr's factors: dW = s · w1 ⊗ w2, where w2 may be w2_a @ w2_b.

    Attributes:
        w1: (out₁, in₁).
        w2: (out₂, in₂), or None.
        w2_a: (out₂, rank), or None.
        w2_b: (rank, in₂), or None.
    """

    def __init__(self, rows: int, columns: int, rank: int, factor: int) -> None:
        super().__init__()
        first, second, self.whole = lokr_shapes(rows, columns, rank, factor)
        self.w1 = nn.Parameter(torch.empty(first))
        if self.whole:
            self.w2 = nn.Parameter(torch.empty(second))
        else:
            self.w2_a = nn.Parameter(torch.empty(second[0], rank))
            self.w2_b = nn.Parameter(torch.empty(rank, second[1]))

    def forward(self, x: Tensor, scale: float) -> Tensor:
        """(…, in) → (…, out) = s · (w1 ⊗ w2) x in x's dtype, by which nothing of the size of the weight is formed.

        The small product comes first: with a decomposed w2 what is kept for backward is (…, in₁, rank) and
        (…, out₁, rank), else (…, in₁, out₂).
        """
        mixing = (scale * self.w1).to(x.dtype)
        grouped = x.unflatten(-1, (self.w1.shape[1], -1))
        inner = F.linear(grouped, (self.w2 if self.whole else self.w2_b).to(x.dtype))
        mixed = F.linear(inner.transpose(-1, -2), mixing).transpose(-1, -2)
        return (mixed if self.whole else F.linear(mixed, self.w2_a.to(x.dtype))).flatten(-2)


class LoraLinear(PeftLinear):
    """A frozen Linear with named adapters, whose fp32 (or any) master weights compute in the dtype of the input.

    The sum has the dtype of the base's output, so an fp32 adapter on k alone cannot make k differ from q.

    DoRA (arXiv 2402.09353) with s = alpha / rank: y = g · (W + s · B A) x + bias, g = m / ‖W + s · B A‖ by output row,
    the norm being no part of the gradient (its section 4.3). Beside what LoRA keeps, backward needs the base's output.
    Dropout acts on the input of B A alone; PEFT drops that of W too, for which it multiplies by W a second time.

    Attributes:
        strengths: adapter → what its change is multiplied by; 1 where it is not named.
    """

    strengths: Mapping[str, float] = {}

    adapter_layer_names = (*PeftLinear.adapter_layer_names, "lokr")

    def update_layer(self, adapter_name: str, r: int, lora_alpha: float, config: Any, **kwargs: Any) -> None:
        """PEFT's hook that makes an adapter's weights; they are initialised by `start`."""
        if not hasattr(self, "lokr"):
            # PEFT calls this from its own __init__, after which it would be too late.
            self.lokr = nn.ModuleDict()
        if config.kind == "lokr":
            self.lokr[adapter_name] = Kronecker(self.out_features, self.in_features, r, config.factor)
            self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
            self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
            self.use_rslora[adapter_name] = False
            self.scaling[adapter_name] = 1.0 if self.lokr[adapter_name].whole else lora_alpha / r
            return
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        if config.kind == "dora":
            self.lora_magnitude_vector[adapter_name] = Magnitude(self.out_features)

    @property
    def names(self) -> list[str]:
        """Every adapter of this layer, of whatever kind."""
        return list(self.lora_dropout)

    def weights(self, name: str) -> dict[str, nn.Parameter]:
        """The adapter's trained weights in a fixed order, which a saved state relies on."""
        return {part: getattr(owner, leaf) for part, (owner, leaf) in self._owners(name).items()}

    def _owners(self, name: str) -> dict[str, tuple[nn.Module, str]]:
        """Where each of the adapter's weights is kept."""
        if name in self.lokr:
            return {part: (self.lokr[name], part) for part, _ in self.lokr[name].named_parameters()}
        found = {"lora_A": (self.lora_A[name], "weight"), "lora_B": (self.lora_B[name], "weight")}
        if name in self.lora_magnitude_vector:
            found["magnitude"] = (self.lora_magnitude_vector[name], "weight")
        return found

    def zero_at_start(self, name: str) -> Tensor:
        """The factor that is zero at the start and makes the change zero: B, w2, or w2_b (LyCORIS' choice)."""
        weights = self.weights(name)
        return next(weights[part] for part in ("lora_B", "w2", "w2_b") if part in weights)

    @torch.no_grad()
    def start(self, name: str, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> None:
        """Initial weights: one factor zero, the others Kaiming uniform with a = √5, as PEFT and LyCORIS have them.

        Args:
            generator: a CPU generator, the only source of them.
            device: where the weights go.
            dtype: of the weights.
        """
        zero, weights = self.zero_at_start(name), self.weights(name)
        for part, (owner, leaf) in self._owners(name).items():
            if part != "magnitude":
                initial = torch.zeros(weights[part].shape)
                if weights[part] is not zero:
                    bound = 1 / math.sqrt(initial.shape[1])
                    initial.uniform_(-bound, bound, generator=generator)
                setattr(owner, leaf, nn.Parameter(initial.to(device, dtype)))
        if name in self.lora_magnitude_vector:
            self.lora_magnitude_vector[name].start(self.base_layer, device, dtype)

    def move(self, name: str, device: torch.device | str) -> None:
        """Puts the adapter's weights, and the squares of the base that a DoRA keeps, on a device."""
        for owner, _ in self._owners(name).values():
            owner.to(device)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = None if args or kwargs else self._plain()
        if name is not None:
            down, up, scale = self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
            if torch.is_grad_enabled():
                return _LoraMatmul.apply(x, self, down, up, scale)
            return _add_change(self.base_layer(x), _low(x, down), up, scale)
        base = result = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters:
            return result
        for name in self.active_adapters:
            if name in self.lora_dropout:
                change, strength = self._change(name, x, base), self.strengths.get(name, 1.0)
                result = result + (change if strength == 1 else strength * change).to(result.dtype)
        return result

    def _plain(self) -> str | None:
        """The active adapter, where it is the only one, a plain LoRA at full strength, and nothing is dropped."""
        active = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_dropout]
        if len(active) != 1 or not isinstance(self.base_layer, FrozenLinear):
            return None
        (name,) = active
        dropout = self.lora_dropout[name]
        drops = isinstance(dropout, nn.Dropout) and dropout.training
        other = name in self.lokr or name in self.lora_magnitude_vector or self.strengths.get(name, 1.0) != 1
        return None if drops or other else name

    def _change(self, name: str, x: Tensor, base: Tensor) -> Tensor:
        """What the adapter adds to the base's output (…, out)."""
        dropped = self.lora_dropout[name](x)
        if name in self.lokr:
            return self.lokr[name](dropped, self.scaling[name])
        down = self.lora_A[name].weight.to(x.dtype)
        up = self.lora_B[name].weight
        if name not in self.lora_magnitude_vector:
            return F.linear(F.linear(dropped, down), _scaled(up, self.scaling[name], x.dtype))
        # The bias is cloned, since backward keeps it and that of a block on the CPU gives its place to another block's.
        # g - 1 is formed in fp32: at the start it is zero, and in bf16 a change of g below 1/256 would be lost.
        gain = self.lora_magnitude_vector[name].weight / self.changed_norm(name, x.dtype)
        excess = (gain - 1).to(base.dtype)
        up = (self.scaling[name] * gain[:, None] * up).to(x.dtype)
        bias = None if self.base_layer.bias is None else (-excess * self.base_layer.bias.clone()).to(x.dtype)
        return torch.addcmul(F.linear(F.linear(dropped, down), up, bias).to(base.dtype), base, excess)

    @torch.no_grad()
    def changed_norm(self, name: str, dtype: torch.dtype) -> Tensor:
        """‖W + s · B A‖ by output row, (out,) fp32, without the dense sum.

        ‖W‖² + 2s · Σ B ∘ (W Aᵀ) + s² · Σ (B A Aᵀ) ∘ B, sums over the rank. W is dequantised for the one product, in the
        dtype of the computation, as for the base's own.
        """
        scale, layer = self.scaling[name], self.base_layer
        down, up = (part[name].weight.float() for part in (self.lora_A, self.lora_B))
        weight = layer.dequantized(dtype) if isinstance(layer, FrozenLinear) else layer.weight.to(dtype)
        # Between steps, as when saving, the weight of a block that waits on the CPU is there.
        crossed = F.linear(weight.to(down.device), down.to(dtype)).float()
        change = scale * (up * (2 * crossed + scale * (up @ (down @ down.T)))).sum(dim=1)
        return self.lora_magnitude_vector[name].norm(change)

    @torch.no_grad()
    def canonical(self, name: str, file_alpha: float, dtype: torch.dtype) -> LoraModule | LokrModule:
        """The adapter's weights, copied to the CPU: on the device there may be no room for a copy.

        Args:
            file_alpha: the alpha of a file, which readers divide by the rank.
            dtype: of the computation, in which a DoRA's norm was formed.
        """
        copies = {part: weight.detach().to("cpu", copy=True) for part, weight in self.weights(name).items()}
        if name in self.lokr:
            w2 = copies["w2"] if self.lokr[name].whole else (copies["w2_a"], copies["w2_b"])
            return LokrModule(copies["w1"], w2, file_alpha)
        over_base = None
        if name in self.lora_magnitude_vector:
            magnitude = self.lora_magnitude_vector[name]
            over_base = (magnitude.weight * magnitude.norm(0) / self.changed_norm(name, dtype)).cpu()
        return LoraModule(
            copies["lora_A"],
            copies["lora_B"],
            file_alpha,
            magnitude=copies.get("magnitude"),
            magnitude_over_base=over_base,
        )

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Keeps PEFT from casting the master weights to the base's dtype."""


def _scaled(up: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """s · B in the dtype of the computation: scaling B is cheaper than scaling what it gives."""
    return (up if scale == 1 else scale * up).to(dtype)


def _low(x: Tensor, down: Tensor) -> Tensor:
    """A x, (tokens, rank) in x's dtype."""
    return F.linear(x.flatten(0, -2), down.to(x.dtype))


def _add_change(y: Tensor, low: Tensor, up: Tensor, scale: float) -> Tensor:
    """y + s · B A x, written into y: the product adds straight into it, so that the sum is rounded once.

    Args:
        y: (…, out) in one piece that nobody else reads, or the view is refused.
        low: A x.
    """
    y.view(-1, y.shape[-1]).addmm_(low, _scaled(up, scale, low.dtype).T)
    return y


class _LoraMatmul(torch.autograd.Function):
    """A frozen Linear and its LoRA in one step, of which backward needs the input, the master weights and A x.

    Neither the dequantised weight nor the working copies of A and B are kept: they are made again. A x is the rank wide
    and would read all of x to be made again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: LoraLinear, down: Tensor, up: Tensor, scale: float) -> Tensor:
        (low,) = kept.once(lambda: (_low(x, down),))
        ctx.save_for_backward(x, low, down, up)
        ctx.layer, ctx.scale = layer, scale

        def make() -> Tensor:
            return _add_change(matmul(x, layer.base_layer), low, up, scale)

        return kept.output(layer, x, layer.out_features, make)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, low, down, up = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_low = grad @ _scaled(up, ctx.scale, grad.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = input_gradient(grad, ctx.layer.base_layer).addmm_(grad_low, down.to(grad.dtype)).view(x.shape)
        grad_down = (grad_low.T @ x.flatten(0, -2)).to(down.dtype)
        grad_up = (grad.T @ low).to(up.dtype)
        return grad_x, None, grad_down, grad_up if ctx.scale == 1 else ctx.scale * grad_up, None
