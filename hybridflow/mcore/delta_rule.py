"""The gated delta rule over packed rows, and the causal convolution before it.

Every segment starts with an empty state. The rule is computed in float32: by the kernel of `fla` on
CUDA if that package is installed, else in chunks with torch (arXiv 2406.06484, 2412.06464).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.device.platform import Platform
from hybridflow.mcore.packed_attention import SegmentClasses

CHUNK = 64  # tokens that are multiplied at once
_EPS = 1e-6  # of the norms of queries and keys, as in fla


def convolved(x: Tensor, weight: Tensor, params: Any) -> Tensor:
    """Convolve each channel of x [t, c] with the tokens before it in its segment.

    weight is [c, 1, k]; `params` are the bounds of the packed rows (`mcore.packed`).
    """
    before = weight.shape[-1] - 1
    places = _places(params, before)
    count, channels = x.shape
    segments = len(params.bounds) - 1
    # a gap of zeros before each segment, so that no token reads the segment before its own
    longer = x.new_zeros(count + before * segments, channels)
    longer = longer.index_copy(0, places, x)
    out = F.conv1d(longer.t()[None], weight, groups=channels)[0]
    return out.t().index_select(0, places - before)


def _places(params: Any, before: int) -> Tensor:
    """Return the index of each packed row after `before` rows have been inserted in front of every
    segment."""
    found = getattr(params, "spread_places", None)
    if found is None or found[0] != before:
        lengths = params.bounds.diff()
        segments = torch.arange(1, len(lengths) + 1)
        number = torch.repeat_interleave(segments, lengths)
        places = torch.arange(len(number)) + before * number
        found = params.spread_places = (before, Platform.detect().upload(places))
    return found[1]


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    params: Any,
) -> Tensor:
    """Return, for each token and head, the product of the query and the segment's state.

    Each token first multiplies the state S [k, v] by exp(decay), and then adds key (beta (value -
    key S)) to it. Queries and keys are normalised, queries also scaled by 1 / sqrt(k).

    Args:
        query, key: [t, h, k].
        value: [t, h, v].
        decay, beta: [t, h], float32. Decays are logarithms.
        params: the bounds of the packed rows (`mcore.packed`).

    Returns:
        [t, h, v] in the dtype of `value`.
    """
    kernel = _kernel()
    if kernel is not None:
        named = {"q": query, "k": key, "v": value, "g": decay, "beta": beta.to(value.dtype)}
        batch = {name: part[None].contiguous() for name, part in named.items()}
        results = kernel(
            **batch, cu_seqlens=params.cu_seqlens_q.long(), use_qk_l2norm_in_kernel=True
        )
        out: Tensor = results[0][0]
        return out.to(value.dtype)
    query = _normalised(query.float()) * query.shape[-1] ** -0.5
    parts = (query, _normalised(key.float()), value.float(), decay[..., None], beta[..., None])
    sizes = [part.shape[-1] for part in parts]
    classes = SegmentClasses.of(params)
    rows = classes.pad(torch.cat(parts, dim=-1))
    outs = []
    for group in classes.split(rows):
        q, k, v, g, b = group.transpose(1, 2).split(sizes, dim=-1)
        sequences = chunked_delta_rule(q, k, v, g[..., 0], b[..., 0])
        outs.append(sequences.transpose(1, 2).flatten(0, 1))
    return classes.pack(torch.cat(outs)).to(value.dtype)


def _normalised(x: Tensor) -> Tensor:
    squares = x.square().sum(-1, keepdim=True)
    return x * (squares + _EPS).rsqrt()


def chunked_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunk: int = CHUNK,
) -> Tensor:
    """Apply the gated delta rule to sequences of equal length, in float32.

    Within a chunk, the values that its tokens add are the solution of a triangular system (the UT
    transform), so that only one step per chunk is sequential.

    Args:
        query, key: [b, h, s, k], normalised.
        value: [b, h, s, v].
        decay, beta: [b, h, s].
        chunk: number of tokens in a chunk.

    Returns:
        [b, h, s, v].
    """
    length = query.shape[2]
    size = min(chunk, length)
    extra = -length % size

    def in_chunks(part: Tensor, *vector: int) -> Tensor:
        return F.pad(part, (*vector, 0, extra)).unflatten(2, (-1, size))

    query, key, value = (in_chunks(part, 0, 0) for part in (query, key, value))
    decay, beta = map(in_chunks, (decay, beta))
    total = decay.cumsum(-1)  # log of the decay from the start of the chunk to each token
    new, old, inside = _within_chunks(query, key, value, total, beta)
    query = query * total.exp()[..., None]
    key = key * (total[..., -1:] - total).exp()[..., None]
    kept = total[..., -1].exp()[..., None, None]
    state = value.new_zeros(*value.shape[:2], key.shape[-1], value.shape[-1])
    outs = []
    for number in range(query.shape[2]):
        asked = query[:, :, number]
        added = new[:, :, number] - old[:, :, number] @ state
        outs.append(asked @ state + inside[:, :, number] @ added)
        state = state * kept[:, :, number] + key[:, :, number].mT @ added
    return torch.cat(outs, dim=2)[:, :, :length]


def _within_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    total: Tensor,
    beta: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Solve the triangular systems of all chunks [b, h, chunks, s, ...].

    Returns:
        The values that tokens would add to an empty state, the keys with which tokens read the
        state before the chunk, and the weights [..., s, s] with which queries read the values added
        in their chunk.
    """
    size = total.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=key.device).triu(1)
    between = total[..., :, None] - total[..., None, :]
    between = between.masked_fill(later, -torch.inf).exp()
    weighted = key * beta[..., None]
    system = weighted @ key.mT * between
    right = torch.cat([value * beta[..., None], weighted * total.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, old = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    return new, old, query @ key.mT * between


@functools.cache
def _kernel() -> Any:
    """Return fla's chunked kernel, or None without CUDA or without the package."""
    if Platform.detect().kind != "cuda" or importlib.util.find_spec("fla") is None:
        return None
    return importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
