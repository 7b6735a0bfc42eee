"""Rotary embedding, SwiGLU and RMS norm for machines without Transformer Engine.

These functions compute the same results as Megatron's and torch's operators (the first two bitwise,
the norm up to rounding), but with fewer passes over memory and without a loop over the sequences of
a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hybridflow.device.platform import Platform


def rotate(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
) -> Tensor:
    """Rotate t [t, heads, d] of packed sequences by the angles of each token's position in its
    sequence.

    Replaces Transformer Engine's `fused_apply_rotary_pos_emb_thd` in Megatron.

    Args:
        t: queries or keys of this rank's tokens.
        cu_seqlens: [s + 1] bounds of the whole sequences, over all context-parallel ranks.
        freqs: [longest, 1, 1, r] angles of the positions; components from index r (r <= d) on are
            not rotated.
        cp_size, cp_rank: size and rank of the context-parallel group.
        interleaved: whether adjacent components are rotated in pairs; passed by Megatron 0.19. No
            supported family uses it.

    Raises:
        ValueError: `interleaved` is set.
    """
    if interleaved:
        raise ValueError("rotary_interleaved needs Transformer Engine")
    # all layers of a micro-batch, for queries and keys, use the same angles
    known = getattr(cu_seqlens, "rotation", None)
    if known is None or known[0] is not freqs or known[1].dtype != t.dtype:
        angles = freqs[positions_of(cu_seqlens, len(t), cp_size, cp_rank), 0]
        known = freqs, angles.cos().to(t.dtype), angles.sin().to(t.dtype)
        cu_seqlens.rotation = known  # type: ignore[attr-defined]
    rotated: Tensor = _Rotation.apply(t, known[1], known[2])
    return rotated


def rotate_unfused(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    *settings: Any,
    cp_group: Any,
    **named: Any,
) -> Tensor:
    """Rotate t [t, heads, d] of packed sequences with Megatron's own formula.

    Replaces Megatron's `_apply_rotary_pos_emb_thd`, which loops over the sequences and synchronises
    on their lengths in every layer.

    Args:
        t, cu_seqlens, freqs: as for `rotate`.
        cp_group: the context-parallel group.
        settings, named: positional and keyword arguments passed on to Megatron's formula.

    If `cu_seqlens.angles` [t, 1, 1, r] is set, it contains the angles of each token and is used
    instead of `freqs`.
    """
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    angles = getattr(cu_seqlens, "angles", None)
    if angles is None:
        angles = freqs[positions_of(cu_seqlens, len(t), cp_group.size(), cp_group.rank())]
    rotated: Tensor = _apply_rotary_pos_emb_bshd(
        t.unsqueeze(1), angles, *settings, **named
    ).squeeze(1)
    return rotated


def positions_of(cu_seqlens: Tensor, tokens: int, cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions [t] of this rank's `tokens` tokens.

    Each sequence is split into 2 cp_size equal pieces, and each rank has two of them.

    The number of tokens is an argument because reading it from the bounds would force a device
    sync.
    """
    here = cu_seqlens.to(torch.int64) // cp_size
    lengths = here.diff()
    starts = here[:-1].repeat_interleave(lengths, output_size=tokens)
    step = torch.arange(tokens, device=here.device) - starts
    if cp_size == 1:
        return step
    piece = (lengths // 2).repeat_interleave(lengths, output_size=tokens)
    return torch.where(
        step < piece, step + cp_rank * piece, step + (2 * cp_size - 2 - cp_rank) * piece
    )


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate t [t, heads, d] by cos and sin [t, 1, r]."""
        ctx.save_for_backward(cos, sin)
        out = _scaled(t, cos)
        half = cos.shape[-1] // 2
        first = t[..., :half]
        second = t[..., half : 2 * half]
        out[..., :half].sub_(second * sin[..., :half])
        out[..., half : 2 * half].add_(first * sin[..., half:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Apply the transposed rotation."""
        cos, sin = ctx.saved_tensors
        out = _scaled(grad, cos)
        half = cos.shape[-1] // 2
        first = grad[..., :half]
        second = grad[..., half : 2 * half]
        out[..., :half].add_(second * sin[..., half:])
        out[..., half : 2 * half].sub_(first * sin[..., :half])
        return out, None, None


def _scaled(t: Tensor, cos: Tensor) -> Tensor:
    turned = cos.shape[-1]
    if turned == t.shape[-1]:
        return t * cos
    return torch.cat((t[..., :turned] * cos, t[..., turned:]), dim=-1)


def swiglu(x: Tensor) -> Tensor:
    """Map [..., 2 f] to [..., f]: silu of the first half times the second half."""
    if not torch.is_grad_enabled():
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    out: Tensor = _SwiGlu.apply(x)
    return out


class SwiGlu(nn.Module):
    """Module wrapper of `swiglu` for the layer spec, constructed by Megatron with its config."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., 2 f] to [..., f]."""
        return swiglu(x)

    def sharded_state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        """Return an empty state, because Megatron 0.16's `MLP` calls this on all its submodules
        (mlp.py:260).
        """
        return {}


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute the product, and save silu(gate) for the backward pass."""
        gate, up = x.chunk(2, dim=-1)
        opened = F.silu(gate)
        ctx.save_for_backward(x, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Write the gradients of both halves directly into one tensor."""
        x, opened = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        found = torch.empty_like(x)
        of_gate, of_up = found.chunk(2, dim=-1)
        torch.mul(grad, opened, out=of_up)
        torch.mul(grad, up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return found


def takes_grouped_product(x: Tensor, weight: Tensor) -> bool:
    """Return True if `GroupedProduct` supports rows [t, in] with weights [out, in].

    torch's kernel requires a GPU, bfloat16 and rows that are multiples of 16 bytes.
    """
    on_device = x.device.type != "cpu" and x.dtype == weight.dtype == torch.bfloat16
    return on_device and len(x) > 0 and not any(size % 8 for size in weight.shape)


def grouped_linear(x: Tensor, m_splits: Any, weights: Sequence[Tensor]) -> Tensor:
    """Apply weight i [out, in] to the i-th run of rows of x [rows, in]. Returns [rows, out].

    `m_splits` contains the number of rows of each run, as a list or `torch_modules.ExpertCounts`.
    """
    counts = getattr(m_splits, "counts", None)
    if takes_grouped_product(x, weights[0]):
        if counts is None:
            counts = Platform.detect().upload(torch.tensor(list(m_splits)))
        product: Tensor = GroupedProduct.apply(x, counts.cumsum(0, dtype=torch.int32), *weights)
        return product
    runs = torch.split(x, list(m_splits) if counts is None else counts.tolist())
    return torch.cat([F.linear(run, weight) for run, weight in zip(runs, weights, strict=True)])


def permute(
    original: Any,
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: Any = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Any:
    """Sort tokens [t, h] by expert, like Megatron's `moe_utils.permute`, but without a device sync.
    Calls without the number of output tokens (`num_out_tokens`), and other unsupported calls, are
    forwarded to `original`.
    """
    if fused or drop_and_pad or not isinstance(num_out_tokens, int):
        return original(tokens, routing_map, probs, num_out_tokens, fused, drop_and_pad)
    chosen = torch.nonzero_static(routing_map.t().reshape(-1), size=num_out_tokens)[:, 0]
    order = chosen % len(tokens)
    permuted_probs = None if probs is None else probs.t().reshape(-1).index_select(0, chosen)
    return tokens.index_select(0, order), permuted_probs, order


class GroupedProduct(torch.autograd.Function):
    """Grouped matrix product in one kernel: each consecutive run of rows is multiplied by a
    separate weight.

    The kernel requires the weights in one tensor. They are restacked in the backward pass, so that
    no copy of a layer's experts is kept in between.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        """Map x [t, in] to [t, out] with g weights [out, in]; `ends` [g] int32 contains the
        exclusive end row of each run."""
        ctx.save_for_backward(x, ends, *weights)
        return F.grouped_mm(x, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute only the gradients that are needed, because frozen experts have none."""
        x, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = (
            F.grouped_mm(grad, torch.stack(weights), offs=ends) if ctx.needs_input_grad[0] else None
        )
        of_weights: tuple[Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[2:]):
            of_weights = F.grouped_mm(grad.t(), x, offs=ends).unbind(0)
        return of_x, None, *of_weights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide x [..., n] by its root mean square (plus `eps`) and multiply by weight [n]."""
    if x.dtype not in (torch.float32, torch.float64):  # torch's own norm computes in float32
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    out: Tensor = _RmsNorm.apply(x, weight, eps)
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Compute the norm, and save the input and one scale [..., 1] per row for the backward
        pass.
        """
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """Compute the gradients of input and weight.

        The sum over rows for the weight and the sum within a row for the scale are both
        matrix-vector products of the elementwise product of gradient and input.
        """
        x, weight, scale = ctx.saved_tensors
        products = (grad * x).view(-1, x.shape[-1])
        scales = scale.view(-1)
        of_weight = torch.mv(products.t(), scales)
        along = torch.mv(products, weight).mul_(scales**3).div_(-x.shape[-1]).view(scale.shape)
        # reuses the buffer of `products`
        found = torch.mul(grad, weight, out=products.view(x.shape))
        return found.mul_(scale).addcmul_(x, along), of_weight, None
