"""The one attention function of both transformers.

SDPA refuses queries, keys and values of different dtypes, and nothing upstream makes them agree: a norm returns the
dtype that it was given, v passes no norm, and an adapter may compute in its own dtype. So the cast stands here, where
it holds in the forward and in the recomputation alike.

Shape suffixes: B batch, L tokens, H query heads, G key/value heads, K head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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
    groups = q_BLHK.shape[2] // k_BLGK.shape[2]
    k_BLGK = k_BLGK.to(q_BLHK.dtype)
    v_BLGK = v_BLGK.to(q_BLHK.dtype)
    if groups > 1:
        # Repeated rather than `enable_gqa`: that argument together with a mask leaves only the math kernel, about
        # seven times slower (reference: training-practice.md).
        k_BLGK = k_BLGK.repeat_interleave(groups, dim=2)
        v_BLGK = v_BLGK.repeat_interleave(groups, dim=2)
    mask = None if key_mask_BL is None else key_mask_BL[:, None, None, :]
    out_BHLK = _sdpa(q_BLHK.transpose(1, 2), k_BLGK.transpose(1, 2), v_BLGK.transpose(1, 2), mask)
    return out_BHLK.transpose(1, 2).flatten(2)
