"""Whitening: shifts token values to mean 0 and scales them to variance 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def whiten(values_T: torch.Tensor, mask_T: torch.Tensor | None = None) -> torch.Tensor:
    """Return [T] (x - mean) / sqrt(variance + 1e-8) over the unmasked tokens, using the unbiased
    variance, and 0 for all others.

    A single token has no variance and becomes 0. The computation is in fp64, because with fp32,
    rounding errors of equal values would be amplified by 1e4.
    """
    import torch

    chosen = (values_T if mask_T is None else values_T[mask_T]).to(torch.float64, copy=True)
    if len(chosen):
        chosen -= chosen.mean()
    variance = chosen.square().sum() / max(len(chosen) - 1, 1)
    whitened = chosen.mul_((variance + 1e-8).rsqrt()).to(values_T.dtype)
    if mask_T is None:
        return whitened
    out = values_T.new_zeros(values_T.shape)
    out[mask_T] = whitened
    return out
