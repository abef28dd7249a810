"""The one attention function of both transformers.

SDPA refuses queries, keys and values of different dtypes, and nothing upstream makes them agree: a norm returns the
dtype that it was given, v passes no norm, and an adapter may compute in its own dtype. So the cast stands here, where
it holds in the forward and in the recomputation alike.

Shape suffixes: B batch, L tokens, H query heads, G key/value heads, K head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import kept

# The operator itself rather than `torch.nn.functional`'s name for it: other packs put inference kernels without a
# backward (SageAttention, for one) under that name.
_sdpa = torch.ops.aten.scaled_dot_product_attention.default

# Every kernel here has a backward and takes a mask or leaves it to the next. cuDNN is left out: its training graph was
# seen to fail on shapes like these (reference: training-practice.md).
TRAINING_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@contextmanager
def training_backends() -> Iterator[None]:
    """Pins the SDPA kernels for a whole run and restores the former choice at the end, also after an exception.

    Forward and recomputation must choose the same kernel: two kernels save different tensors for backward.
    """
    with sdpa_kernel(TRAINING_BACKENDS):
        yield


def attention(q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, key_mask_BL: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention over the whole sequence, with grouped keys and values.

    Args:
        q_BLHK: queries of any floating dtype; this dtype is the one that attention runs in.
        k_BLGK: keys, cast to the queries' dtype. G divides H.
        v_BLGK: values, cast likewise.
        key_mask_BL: bool, True where a token may be attended to. None, the faster choice, where all may.

    Returns:
        (B, L, H·K) in the queries' dtype.
    """
    k_BLGK = k_BLGK.to(q_BLHK.dtype)
    v_BLGK = v_BLGK.to(q_BLHK.dtype)
    mask = None if key_mask_BL is None else key_mask_BL[:, None, None, :]
    if torch.is_grad_enabled() and (q_BLHK.requires_grad or k_BLGK.requires_grad or v_BLGK.requires_grad):
        kernel = _kernel(q_BLHK, k_BLGK, v_BLGK, mask)
        if kernel is not None:
            return _Attention.apply(q_BLHK, k_BLGK, v_BLGK, mask, kernel)
    return _sdpa(*_by_head(q_BLHK, k_BLGK, v_BLGK), mask).transpose(1, 2).flatten(2)


def _by_head(q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, L, K) each, as SDPA takes them, keys and values repeated for the query heads that share them."""
    groups = q_BLHK.shape[2] // k_BLGK.shape[2]
    if groups > 1:
        # Repeated rather than `enable_gqa`: that argument together with a mask leaves only the math kernel, about
        # seven times slower (reference: training-practice.md).
        k_BLGK, v_BLGK = (tensor.repeat_interleave(groups, dim=2) for tensor in (k_BLGK, v_BLGK))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BLHK, k_BLGK, v_BLGK))
    return q, k, v


# --- with a backward that keeps little --------------------------------------------------------------------------------


class Kernel(NamedTuple):
    """One of SDPA's kernels and its backward.

    Attributes:
        forward: (q, k, v, mask) → the output (B, H, L, K), and what else the backward takes.
        backward: (gradient, q, k, v, mask, what forward gave) → the gradients of q, k and v.
    """

    forward: Callable[..., tuple[Any, ...]]
    backward: Callable[..., tuple[Tensor, ...]]


_aten = torch.ops.aten


def _cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
    return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask)


def _cpu_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, made: Any) -> tuple[Tensor, ...]:
    out, lse = made
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, False, attn_mask=mask
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
    return _aten._scaled_dot_product_flash_attention(q, k, v)[:8]  # the last is for debugging


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, made: Any
) -> tuple[Tensor, ...]:
    out, lse, starts_q, starts_k, most_q, most_k, *seed = made
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, starts_q, starts_k, most_q, most_k, 0.0, False, *seed
    )


def _efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Any, ...]:
    return _aten._scaled_dot_product_efficient_attention(q, k, v, None, compute_log_sumexp=True)


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, made: Any
) -> tuple[Tensor, ...]:
    wanted = [True, True, True, False]  # the last is the mask's
    return _aten._scaled_dot_product_efficient_attention_backward(grad, q, k, v, None, *made, 0.0, wanted)[:3]


# By device and by what SDPA itself would choose.
KERNELS = {
    ("cpu", SDPBackend.FLASH_ATTENTION): Kernel(_cpu, _cpu_backward),
    ("cuda", SDPBackend.FLASH_ATTENTION): Kernel(_flash, _flash_backward),
    ("cuda", SDPBackend.EFFICIENT_ATTENTION): Kernel(_efficient, _efficient_backward),
}


# Kernels that gave something else than SDPA when they were tried.
_REFUSED: set[tuple[str, SDPBackend]] = set()
TRIED_LENGTH, TRIED_ERROR = 64, 0.05  # tokens; of the whole tensor, several times what bf16 rounds


def try_kernels(device: torch.device, dtype: torch.dtype, head_width: int) -> list[str]:
    """Tries each kernel of a device against SDPA's own backward; one that differs or fails is not used any more.

    Returns:
        A sentence for each of those: SDPA's own graph takes its place, which keeps more.
    """
    said = []
    for key, kernel in KERNELS.items():
        if (
            key[0] == device.type
            and key not in _REFUSED
            and (fault := _fault(key[1], kernel, device, dtype, head_width))
        ):
            _REFUSED.add(key)
            said.append(f"{key[1].name} keeps what SDPA itself would: its backward {fault} on {device}")
    return said


def _fault(
    backend: SDPBackend, kernel: Kernel, device: torch.device, dtype: torch.dtype, head_width: int
) -> str | None:
    """What is wrong with a kernel; also None where SDPA would not choose it."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad():
        q, k, v, grad = (
            torch.randn(1, 2, TRIED_LENGTH, head_width, generator=generator).to(device, dtype) for _ in range(4)
        )
        inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
        try:
            with sdpa_kernel([backend]):
                out = _sdpa(q, k, v)
                wanted = torch.autograd.grad(out, inputs, grad)
        except RuntimeError:
            return None  # not for this device, dtype or width
        try:
            with torch.no_grad():
                made = kernel.forward(q, k, v, None)
                found = kernel.backward(grad, q, k, v, None, made)
        except (RuntimeError, TypeError, ValueError) as error:
            return f"fails ({str(error).splitlines()[0]})"
    worst = max(float((one - other).norm() / other.norm()) for one, other in zip(found, wanted, strict=True))
    return None if worst < TRIED_ERROR else f"is {worst:.0%} off"


def _kernel(q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, mask: Tensor | None) -> Kernel | None:
    """The kernel that SDPA would take, where it can be called so that little is kept; else None.

    On CUDA not with a mask: SDPA aligns it in memory in ways of its own.
    """
    device = q_BLHK.device.type
    if device == "cpu":
        # The one kernel for all shapes and masks here. Not asked, since tensors without data get another answer.
        return _usable(device, SDPBackend.FLASH_ATTENTION) if torch.backends.cuda.flash_sdp_enabled() else None
    if mask is not None:
        return None
    # As many query heads as there are of the others: nothing has to be repeated to ask.
    q, k, v = _by_head(q_BLHK[:, :, : k_BLGK.shape[2]], k_BLGK, v_BLGK)
    choice = torch._fused_sdp_choice(q, k, v, mask, 0.0, False)
    return _usable(device, SDPBackend(choice))


def _usable(device: str, backend: SDPBackend) -> Kernel | None:
    return None if (device, backend) in _REFUSED else KERNELS.get((device, backend))


class _Attention(torch.autograd.Function):
    """Attention that keeps q, k and v as they came, k and v not repeated, the output and the log of the sums.

    SDPA itself would keep k and v repeated. In a slim block not even q, k and v stay until the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, q_BLHK: Tensor, k_BLGK: Tensor, v_BLGK: Tensor, mask: Tensor | None, kernel: Kernel
    ) -> Tensor:
        def make() -> tuple[Any, ...]:
            added = None if mask is None else _added(mask, q_BLHK.dtype)
            return kernel.forward(*_by_head(q_BLHK, k_BLGK, v_BLGK), added)

        made = kept.once(make)
        # A kernel also gives numbers, and None where it has no tensor.
        _save(ctx, (q_BLHK, k_BLGK, v_BLGK, mask, *made))
        ctx.kernel = kernel
        # A view of the output would be a view of a kept tensor, which autograd does not let a Function return.
        return made[0].detach().transpose(1, 2).flatten(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_BLHK, k_BLGK, v_BLGK, mask, *made = _saved(ctx)
        heads, groups = q_BLHK.shape[2], q_BLHK.shape[2] // k_BLGK.shape[2]
        grad = grads[0].unflatten(-1, (heads, -1)).transpose(1, 2)
        added = None if mask is None else _added(mask, q_BLHK.dtype)
        by_head = ctx.kernel.backward(grad, *_by_head(q_BLHK, k_BLGK, v_BLGK), added, made)
        grad_q, grad_k, grad_v = (tensor.transpose(1, 2) for tensor in by_head)
        if groups > 1:
            grad_k, grad_v = (tensor.unflatten(2, (-1, groups)).sum(3) for tensor in (grad_k, grad_v))
        return grad_q, grad_k, grad_v, None, None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as what is added to the scores: 0, or minus infinity."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


_TENSOR = object()


def _save(ctx: Any, values: Iterable[Any]) -> None:
    """Keeps values of which any may be a tensor: autograd counts and checkpoints what it saves itself, which is tensors
    alone; the others stay on the context.
    """
    values = tuple(values)
    ctx.save_for_backward(*(value for value in values if isinstance(value, Tensor)))
    ctx.values = [_TENSOR if isinstance(value, Tensor) else value for value in values]


def _saved(ctx: Any) -> list[Any]:
    """The same values, in the backward."""
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if value is _TENSOR else value for value in ctx.values]
