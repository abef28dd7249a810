"""Cards that are not there: what torch would say of them, and a product that they alone have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch

GIB = 2**30


class Card(NamedTuple):
    """What torch reports: the capability, whether it is AMD's under ROCm, and its own word on bf16."""

    name: str
    capability: tuple[int, int]
    rocm: bool = False
    claims_bf16: bool = True  # torch counts emulation


T4 = Card("Tesla T4", (7, 5))
RTX_2080_TI = Card("NVIDIA GeForce RTX 2080 Ti", (7, 5))
RTX_3090 = Card("NVIDIA GeForce RTX 3090", (8, 6))
RTX_4090 = Card("NVIDIA GeForce RTX 4090", (8, 9))
B200 = Card("NVIDIA B200", (10, 0))
RX_7900 = Card("AMD Radeon RX 7900 XTX", (11, 0), rocm=True)
RADEON_VII = Card("AMD Radeon VII", (9, 0), rocm=True, claims_bf16=False)


def insert(monkeypatch, card: Card | None, total: int = 24 * GIB, free: int = 22 * GIB) -> None:
    """Lets torch see this card, or none."""
    for name, value in (
        ("is_available", card is not None),
        ("device_count", int(card is not None)),
        ("is_bf16_supported", card is not None and card.claims_bf16),
        ("mem_get_info", (free, total)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *a, value=value, **k: value)
    monkeypatch.setattr(torch.version, "hip", "6.4" if card is not None and card.rocm else None)
    if card is not None:
        properties = SimpleNamespace(name=card.name, major=card.capability[0], minor=card.capability[1])
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)


def block_scaled_mm(a, b, scale_a, scale_b, out_dtype=None):
    """`torch._scaled_mm` with a scale for 32 numbers, which Blackwell alone has.

    It does what cuBLAS's documentation says of the operands, and reads their scales with torchao's own function: what
    is handed over must be right for it.
    """
    from torchao.prototype.mx_formats.mx_tensor import to_dtype
    from torchao.prototype.mx_formats.utils import from_blocked

    def dequantised(data, scale):
        bits = from_blocked(scale.view(torch.uint8), len(data), data.shape[1] // 32)
        scales = bits.contiguous().view(torch.float8_e8m0fnu)
        return to_dtype(data, scales, torch.float8_e4m3fn, 32, torch.float32)

    return (dequantised(a, scale_a) @ dequantised(b.T.contiguous(), scale_b).T).to(out_dtype)
