"""Whitening: token values are shifted to mean 0 and scaled to variance 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def whiten(values_T: torch.Tensor, mask_T: torch.Tensor | None = None) -> torch.Tensor:
    """Return [T] (x - mean) / sqrt(variance + 1e-8) over the masked-in tokens, with the unbiased
    variance; 0 for the others.

    A single token has no variance and becomes 0. Computed in fp64, because fp32 would amplify
    rounding errors of equal values by 1e4.
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
