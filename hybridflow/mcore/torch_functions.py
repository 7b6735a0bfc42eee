"""Rotary embedding, SwiGLU and RMS norm without Transformer Engine: what Megatron's and torch's own operators compute,
in fewer passes over memory and without a loop over the sequences of a micro-batch. The first two are equal to the bit,
the norm up to rounding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def rotate(
    t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, cp_size: int = 1, cp_rank: int = 0
) -> torch.Tensor:
    """t [t, heads, d] of packed sequences, rotated by the angles of each token's position in its sequence; stands where
    Megatron expects Transformer Engine's `fused_apply_rotary_pos_emb_thd`.

    Args:
        cu_seqlens: [s + 1] bounds of the whole sequences, over all context-parallel ranks.
        freqs: [longest, 1, 1, r] angles of the positions; the components behind r <= d stay as they are.
        cp_size, cp_rank: of the context-parallel group.
    """
    # all layers of a micro-batch, queries and keys, turn by the same angles
    known = getattr(cu_seqlens, "rotation", None)
    if known is None or known[0] is not freqs or known[1].dtype != t.dtype:
        angles = freqs[_positions(cu_seqlens.to(torch.int64), cp_size, cp_rank), 0]
        known = freqs, angles.cos().to(t.dtype), angles.sin().to(t.dtype)
        cu_seqlens.rotation = known  # type: ignore[attr-defined]
    rotated: torch.Tensor = _Rotation.apply(t, known[1], known[2])
    return rotated


def _positions(bounds: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """[t] the position of each token of this rank, which holds two of the 2 cp_size equal pieces of a sequence."""
    here = bounds // cp_size
    lengths = here.diff()
    step = torch.arange(int(here[-1]), device=bounds.device) - here[:-1].repeat_interleave(lengths)
    if cp_size == 1:
        return step
    piece = (lengths // 2).repeat_interleave(lengths)
    return torch.where(step < piece, step + cp_rank * piece, step + (2 * cp_size - 2 - cp_rank) * piece)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """t [t, heads, d], cos and sin [t, 1, r]."""
        ctx.save_for_backward(cos, sin)
        out, half = _scaled(t, cos), cos.shape[-1] // 2
        first, second = t[..., :half], t[..., half : 2 * half]
        out[..., :half].sub_(second * sin[..., :half])
        out[..., half : 2 * half].add_(first * sin[..., half:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The transposed rotation."""
        cos, sin = ctx.saved_tensors
        out, half = _scaled(grad, cos), cos.shape[-1] // 2
        first, second = grad[..., :half], grad[..., half : 2 * half]
        out[..., :half].add_(second * sin[..., half:])
        out[..., half : 2 * half].sub_(first * sin[..., :half])
        return out, None, None


def _scaled(t: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    turned = cos.shape[-1]
    if turned == t.shape[-1]:
        return t * cos
    return torch.cat((t[..., :turned] * cos, t[..., turned:]), dim=-1)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """[..., 2 f] -> [..., f]: silu of the first half times the second."""
    if not torch.is_grad_enabled():
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
    out: torch.Tensor = _SwiGlu.apply(x)
    return out


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """silu of the gate is kept for the backward."""
        gate, up = x.chunk(2, dim=-1)
        opened = F.silu(gate)
        ctx.save_for_backward(x, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Both halves are written to their places at once."""
        x, opened = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        found = torch.empty_like(x)
        of_gate, of_up = found.chunk(2, dim=-1)
        torch.mul(grad, opened, out=of_up)
        torch.mul(grad, up, out=of_gate)
        torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
        return found


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., n] over the root of its mean square (plus `eps`), times weight [n]."""
    if x.dtype not in (torch.float32, torch.float64):  # torch's own norm computes in float32
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    out: torch.Tensor = _RmsNorm.apply(x, weight, eps)
    return out


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Keeps its input and one scale [..., 1] of each row."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Both sums over the products of gradient and input, that over rows for the weight and that within a row for
        the scale, are products of that matrix with a vector."""
        x, weight, scale = ctx.saved_tensors
        products, scales = (grad * x).view(-1, x.shape[-1]), scale.view(-1)
        of_weight = torch.mv(products.t(), scales)
        along = torch.mv(products, weight).mul_(scales**3).div_(-x.shape[-1]).view(scale.shape)
        found = torch.mul(grad, weight, out=products.view(x.shape))  # the products are no longer needed
        return found.mul_(scale).addcmul_(x, along), of_weight, None
