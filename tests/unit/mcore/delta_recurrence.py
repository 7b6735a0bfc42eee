"""The gated delta rule token by token, as an oracle, and what it is given."""

from __future__ import annotations

import torch
import torch.nn.functional as F

HEADS, KEY, VALUE = 3, 6, 10


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    decay = -F.softplus(normal(tokens, HEADS)) * torch.tensor([0.01, 1.0, 16.0], dtype=dtype)
    beta = normal(tokens, HEADS).sigmoid()
    rows = [normal(tokens, HEADS, width) for width in (KEY, KEY, VALUE)]
    return [*rows, decay, beta]


def recurrent(parts: list[torch.Tensor]) -> torch.Tensor:
    """One row after another: decay the state, replace a share of the value under the key, read."""
    query, key, value, decay, beta = parts
    query = query / (query.square().sum(-1, keepdim=True) + 1e-6).sqrt() / KEY**0.5
    key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    state = value.new_zeros(HEADS, KEY, VALUE)
    outs = []
    for q, k, v, g, b in zip(query, key, value, decay, beta, strict=True):
        state = state * g.exp()[:, None, None]
        held = torch.einsum("hk,hkv->hv", k, state)
        state = state + torch.einsum("hk,hv->hkv", k, b[:, None] * (v - held))
        outs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outs)
