"""Low-rank arithmetic: other kinds of change as a LoRA, norms of products, and the best LoRA of a given rank."""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor

from .canonical import Change, Factor, LohaModule, LokrModule, LoraModule
from .errors import CannotConvertError
from .passes import largest

MAGNITUDES = tuple(field.name for field in fields(Change))
"""The lengths of a DoRA, by the names of `Change`."""

_ROWS = 256
"""Rows of dW that stand at a time: 16 MiB in fp32 at most."""


def magnitudes(change: Change) -> dict[str, Tensor | None]:
    """Those that a change has, to hand on to another of the same module."""
    return {name: getattr(change, name) for name in MAGNITUDES}


def narrow(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype` where that loses nothing, otherwise as it is."""
    narrowed = exact.to(dtype)
    return narrowed if torch.equal(narrowed.to(exact.dtype), exact) else exact


def alpha_at(alpha: float, rank: int, new_rank: int) -> float:
    """The alpha that keeps alpha / rank at another rank.

    Files hold alpha in fp32. A result within the rounding of fp64 of an fp32 number is that number: so alpha comes back
    the same after a change of rank and its reverse.
    """
    if new_rank == rank:
        return alpha
    moved = alpha * new_rank / rank
    single = torch.tensor(moved, dtype=torch.float32).item()
    return single if math.isclose(single, moved, rel_tol=2.0**-51) else moved


def as_lora(change: Change, copies: int = 1) -> LoraModule | None:
    """The same dW as a LoRA, exact up to fp32 rounding; None where with so many copies of A it is no smaller than dW.

    A Kronecker product is (l₁ r₁) ⊗ (l₂ r₂) = (l₁ ⊗ l₂)(r₁ ⊗ r₂), where a factor that is whole takes the identity as
    its narrower side: with a decomposed w2 the rank is min(out₁, in₁) · rank. A Hadamard product of two matrices of
    rank r has rank r² (row-wise and column-wise Kronecker products of the factors). Products are kept in the dtype of
    the file where they fit it exactly, otherwise in fp32. Magnitudes are handed on.

    Raises:
        CannotConvertError: products that fp32 cannot hold.
    """
    if isinstance(change, LoraModule):
        return change
    if isinstance(change, LokrModule):
        (left_1, right_1), (left_2, right_2) = _both_sides(change.w1), _both_sides(change.w2)
        rank = left_1.shape[1] * left_2.shape[1]
        if not _smaller(rank, change.shape, copies):
            return None
        dtype = _first(change.w2).dtype
        up, down = (
            narrow(torch.kron(one.float(), two.float()), dtype) for one, two in ((left_1, left_2), (right_1, right_2))
        )
    elif isinstance(change, LohaModule):
        rank = change.w1_b.shape[0] * change.w2_b.shape[0]
        if not _smaller(rank, change.shape, copies):
            return None
        up = (change.w1_a.float()[:, :, None] * change.w2_a.float()[:, None, :]).flatten(1)
        down = (change.w1_b.float()[:, None, :] * change.w2_b.float()[None, :, :]).flatten(0, 1)
    else:
        return None
    _check_range(up, down)
    alpha = change.alpha if change.rank is not None else 1.0
    return LoraModule(down, up, alpha_at(alpha, change.rank or 1, rank), **magnitudes(change))


def _check_range(*products: Tensor) -> None:
    if not all(math.isfinite(largest(product)) for product in products):
        raise CannotConvertError(
            "the products of its factors are beyond what fp32 can hold, as no change of a model is; is it broken? take "
            "an earlier save"
        )


def product_norm(left: Tensor, right: Tensor) -> float:
    """‖left @ right‖ (Frobenius) of (m, r) and (r, n), from their Gram matrices in fp64, without the product.

    Exact to about 1e-8 of ‖left‖ ‖right‖; where the product is a small difference of large terms, use `stacked_norm`.
    """
    left, right = left.double(), right.double()
    return math.sqrt(max(((left.T @ left) * (right @ right.T)).sum().item(), 0.0))


def stacked_norm(left: Tensor, right: Tensor) -> float:
    """The same by QR of both, in fp64: exact to about 1e-15 of ‖left‖ ‖right‖, and some ten times slower."""
    _, left_r = torch.linalg.qr(left.double(), mode="r")
    _, right_r = torch.linalg.qr(right.double().T, mode="r")
    return (left_r @ right_r.T).norm().item()


def norm(change: Change) -> float:
    """‖dW‖ (Frobenius): of a LoRA from Gram matrices, of a Kronecker product ‖w1‖ ‖w2‖; else in chunks of rows.

    Exact to about 1e-7, relative. The lengths of a DoRA have no part in it.
    """
    if isinstance(change, LoraModule):
        return abs(change.scale) * product_norm(change.up, change.down)
    if isinstance(change, LokrModule):
        return abs(change.scale) * math.prod(_factor_norm(factor) for factor in (change.w1, change.w2))
    chunks = (change.delta(slice(row, row + _ROWS)) for row in range(0, change.shape[0], _ROWS))
    return math.sqrt(sum(torch.linalg.vector_norm(rows, dtype=torch.float64).item() ** 2 for rows in chunks))


def _factor_norm(factor: Factor) -> float:
    if isinstance(factor, tuple):
        return product_norm(*factor)
    return torch.linalg.vector_norm(factor, dtype=torch.float64).item()


def truncate(change: Change, rank: int) -> tuple[LoraModule, float]:
    """The best LoRA of at most this rank (Eckart–Young), and its error ‖dW − dW'‖ / ‖dW‖ (Frobenius).

    With the right singular vectors V of dW the best one is (dW V) Vᵀ. Of a LoRA they come from a QR of A and the Gram
    matrix of B, both fp64 (the roles are exchanged where `out` is the smaller side); of a Kronecker product from the
    singular vectors of its factors; of a LoHa from its form as a LoRA of rank². Only what is not low-rank asks for the
    eigenvectors of dW dWᵀ: exact too, but minutes for a module of 6144 × 6144 on two cores.

    The scale is in the factors, so that alpha is the rank; they are balanced, and in fp32. A LoRA that has no more than
    this rank is returned as it is. Magnitudes of a DoRA are handed on: they are lengths of W + dW, not of dW.

    Raises:
        ValueError: a rank below 1, a change of a vector.
        CannotConvertError: products that fp32 cannot hold.
    """
    if rank < 1:
        raise ValueError(f"rank {rank} is not possible; wanted 1 or more")
    if len(change.shape) != 2:
        raise ValueError(f"the change of a vector {list(change.shape)} has no rank; leave it as it is")
    if isinstance(change, LoraModule) and change.rank <= rank:
        return change, 0.0
    low = None if isinstance(change, LokrModule) else as_lora(change)
    if isinstance(change, LokrModule):
        up, down, kept, dropped = _best_of_kronecker(change, rank)
    elif low is not None:
        up, down, kept, dropped = _best_of_product(low.up.double() * low.scale, low.down.double(), rank)
    else:
        delta = change.delta()
        _check_range(delta)
        up, down, kept, dropped = _best_of_dense(delta.double(), rank)
    _check_range(up.float(), down.float())
    module = LoraModule(down.float(), up.float(), float(len(kept)), **magnitudes(change))
    whole = math.hypot(kept.norm().item(), dropped)
    return module, dropped / whole if whole else 0.0


_Best = tuple[Tensor, Tensor, Tensor, float]
"""Balanced factors (out, k) and (k, in), the singular values (k,) and the norm of the dropped ones, in fp64."""


def _best_of_product(up: Tensor, down: Tensor, rank: int) -> _Best:
    """Of up @ down: (out, R) and (R, in)."""
    if up.shape[0] < down.shape[1]:
        return _transposed(_best_of_product(down.T, up.T, rank))
    q, r = torch.linalg.qr(down.T)
    kept, dropped, chosen = _largest(r @ (up.T @ up) @ r.T, rank)
    return *_balanced(up @ (r.T @ chosen), (q @ chosen).T, kept), kept, dropped


def _best_of_dense(delta: Tensor, rank: int) -> _Best:
    if delta.shape[0] < delta.shape[1]:
        return _transposed(_best_of_dense(delta.T, rank))
    kept, dropped, chosen = _largest(delta.T @ delta, rank)
    return *_balanced(delta @ chosen, chosen.T, kept), kept, dropped


def _best_of_kronecker(change: LokrModule, rank: int) -> _Best:
    """The singular values of a Kronecker product are the products of those of its factors, and so are the vectors."""
    (u_1, s_1, v_1), (u_2, s_2, v_2) = _svd(change.w1), _svd(change.w2)
    values, order = (abs(change.scale) * torch.outer(s_1, s_2).flatten()).sort(descending=True)
    kept, first, second = values[:rank], order[:rank] // len(s_2), order[:rank] % len(s_2)
    up = (u_1[:, None, first] * u_2[None, :, second]).flatten(0, 1)
    down = (v_1[first][:, :, None] * v_2[second][:, None, :]).flatten(1)
    signed = kept * math.copysign(1.0, change.scale)
    return *_balanced(up * signed, down, kept), kept, values[rank:].norm().item()


def _svd(factor: Factor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S and Vᵀ of a factor in fp64."""
    if not isinstance(factor, tuple):
        return torch.linalg.svd(factor.double(), full_matrices=False)
    q_1, r_1 = torch.linalg.qr(factor[0].double())
    q_2, r_2 = torch.linalg.qr(factor[1].double().T)
    u, s, v = torch.linalg.svd(r_1 @ r_2.T, full_matrices=False)
    return q_1 @ u, s, v @ q_2.T


def _largest(gram: Tensor, rank: int) -> tuple[Tensor, float, Tensor]:
    """Of a Gram matrix: the largest `rank` singular values, the norm of the others, the vectors of the first."""
    squares, vectors = torch.linalg.eigh(gram)
    squares = squares.flip(0).clamp_min(0)
    return squares[:rank].sqrt(), math.sqrt(squares[rank:].sum().item()), vectors.flip(1)[:, :rank]


def _balanced(up: Tensor, down: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The singular values, which `up` carries, shared between both, so that neither leaves the range of a narrow dtype.

    The clamp spares directions whose singular value is rounding alone.
    """
    root = values.clamp_min(1e-8 * values[0].item()).clamp_min(torch.finfo(torch.float64).tiny).sqrt()
    return up / root, root[:, None] * down


def _transposed(best: _Best) -> _Best:
    up, down, values, dropped = best
    return down.T, up.T, values, dropped


def _both_sides(factor: Factor) -> tuple[Tensor, Tensor]:
    """A factor as a product; a whole one with the identity on its narrower side."""
    if isinstance(factor, tuple):
        return factor
    rows, columns = factor.shape
    eye = torch.eye(min(rows, columns), dtype=factor.dtype, device=factor.device)
    return (factor, eye) if columns <= rows else (eye, factor)


def _first(factor: Factor) -> Tensor:
    return factor[0] if isinstance(factor, tuple) else factor


def _smaller(rank: int, shape: tuple[int, ...], copies: int) -> bool:
    return rank * (shape[0] + copies * shape[1]) < shape[0] * shape[1]
