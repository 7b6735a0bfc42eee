"""Vocabulary sums for log-probabilities and entropies, and their gradients, computed from hidden
states and the output layer's weights.

Shapes: n rows, h hidden size, v vocabulary rows of this rank. A logit is hidden . weight /
temperature; all arithmetic on logits is fp32. The torch implementation materialises the logits of
`chunk` rows at a time. The kernel computes them tile by tile and stores none. For the backward pass
it writes the gradient of the logits, [n, COLUMNS] at a time, as input to the two matrix products
that follow. On a GPU, a row's forward result is bitwise independent of the other rows, because its
tiles and their order depend only on v and h.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from hybridflow_kernels import INTERPRETED, LARGEST, TRITON, check, uses_triton

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = 8192  # vocabulary rows per block of logit gradients in the backward pass on a GPU
# Whether the forward pass reads tiles with tensor descriptors (TMA) if everything is 16-byte
# aligned; not measured yet.
DESCRIPTORS = False
_VECTOR = 16
LOWEST = -3.0e38  # initial maximum; finite, so that differences with it are not NaN


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of the kernels.

    Attributes:
        rows: rows per tile.
        columns: vocabulary columns per tile.
        depth: inner dimension of a product.
        split: columns per program of the forward pass.
        group: row tiles that share columns in the cache.
        warps, stages: launch options of Triton.
    """

    rows: int
    columns: int
    depth: int
    split: int
    group: int
    warps: int = 8
    stages: int = 3


def tiles_for(dtype: torch.dtype, h: int, best: int = 0) -> Tiles:
    """Return the tiles for this dtype and hidden size.

    The interpreter uses small tiles, so that test inputs span several tiles in each dimension.
    Tiles are also small if registers are needed elsewhere: for fp32, for finding the highest
    logits, or for a hidden size that is not a multiple of the depth.
    """
    if INTERPRETED:
        return Tiles(rows=8, columns=16, depth=8, split=32, group=2)
    large = Tiles(rows=128, columns=256, depth=64, split=8192, group=8)
    small = Tiles(rows=64, columns=128, depth=32, split=8192, group=8)
    if best and dtype == torch.float32:
        return replace(small, rows=16, stages=2)
    if best > 32:  # half of the rows, whose products use older tensor core instructions
        return replace(small, rows=32, warps=16 if best > 64 else 8)
    if best or dtype == torch.float32 or h % large.depth:
        return small
    return large


def partial_sums(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    chunk: int,
    best: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the contribution of this rank's vocabulary rows to each row's normaliser.

    Args:
        hidden_NH, weight_VH: [n, h] and [v, h], of the same dtype.
        targets_N: [n] int64, each target's row in `weight_VH`; -1 if the target is on another rank.
        temperature: divisor of the logits.
        with_entropy: whether to compute the third sum.
        chunk: rows whose logits are materialised at a time in the torch implementation.
        best: [n, k] fp32 and [n, k] int64, outputs for the k highest logits in descending order and
            their rows in `weight_VH`. k is at most v. None: not computed.

    Returns:
        [n] fp32 highest logit t (-inf if v is 0), [3, n] fp32: the sum of exp(x - t), the target's
        logit (0 if it is not among these rows), the sum of exp(x - t) (x - t) (0 unless requested).

    Raises:
        ValueError: mismatched shapes, an unsupported dtype, several devices, or a non-contiguous
            tensor.
    """
    _check(hidden_NH, weight_VH, targets_N)
    if best is not None:
        _check_best(hidden_NH, weight_VH, best)
    if not len(weight_VH) or not len(hidden_NH):
        return hidden_NH.new_full(
            (len(hidden_NH),), -torch.inf, dtype=torch.float32
        ), hidden_NH.new_zeros((3, len(hidden_NH)), dtype=torch.float32)
    if uses_triton(hidden_NH) and (best is None or best[0].shape[1] <= _most(hidden_NH)):
        return _triton_sums(hidden_NH, weight_VH, targets_N, temperature, with_entropy, best)
    tops = hidden_NH.new_full((len(hidden_NH),), -torch.inf, dtype=torch.float32)
    sums = tops.new_zeros((3, len(hidden_NH)))
    for start in range(0, len(hidden_NH), chunk):
        rows = slice(start, min(start + chunk, len(hidden_NH)))
        logits = _divided(F.linear(hidden_NH[rows], weight_VH).float(), temperature)
        tops[rows] = top = logits.amax(-1)
        if best is not None:
            best[0][rows], best[1][rows] = logits.topk(best[0].shape[1], dim=-1)
        index = targets_N[rows].clamp(min=0)
        mine = targets_N[rows] >= 0
        sums[1, rows] = torch.where(mine, logits.gather(-1, index[:, None])[:, 0], 0.0)
        shifted = logits.sub_(top[:, None])
        if with_entropy:
            exponentials = shifted.exp()
            sums[0, rows], sums[2, rows] = exponentials.sum(-1), exponentials.mul_(shifted).sum(-1)
        else:
            sums[0, rows] = shifted.exp_().sum(-1)
    return tops, sums


def _divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide the logits by the temperature in place. A temperature of 1 skips the pass over the
    logits."""
    return logits if temperature == 1.0 else logits.div_(temperature)


@dataclass(frozen=True)
class Upstream:
    """Inputs for the gradient of a row's logits, [n] fp32 each.

    Attributes:
        log_probs: gradient of the log-probability.
        entropy: gradient of the entropy; None if the entropy has no gradient.
        log_z: normaliser log Z.
        entropies: the entropy.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None
    log_z: torch.Tensor
    entropies: torch.Tensor


def gradients(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    upstream: Upstream,
    *,
    temperature: float,
    chunk: int,
    of_hidden: bool = True,
    grad_weight_VH: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return the [n, h] gradient of the hidden states in their dtype, from this rank's columns
    only; None unless requested.

    d log p / dx = onehot - p; dH / dx = -p (log p + H). The other arguments and the errors are the
    same as for `partial_sums`.

    Args:
        of_hidden: whether to compute the gradient of the hidden states.
        grad_weight_VH: [v, h] fp32 to which the weight's gradient is added, for example the main
            gradient. None: not computed.
    """
    _check(hidden_NH, weight_VH, targets_N, grad_weight_VH)
    grad_hidden = torch.zeros_like(hidden_NH) if of_hidden else None
    if not len(weight_VH) or not len(hidden_NH):
        return grad_hidden
    if uses_triton(hidden_NH):
        return _triton_gradients(
            hidden_NH, weight_VH, targets_N, upstream, temperature, of_hidden, grad_weight_VH
        )
    for start in range(0, len(hidden_NH), chunk):
        rows = slice(start, min(start + chunk, len(hidden_NH)))
        logits = _divided(F.linear(hidden_NH[rows], weight_VH).float(), temperature)
        log_p = logits.sub_(upstream.log_z[rows, None])
        index = targets_N[rows].clamp(min=0)
        mine = targets_N[rows] >= 0
        from_log_probs = upstream.log_probs[rows]
        if upstream.entropy is not None:
            factor = log_p + upstream.entropies[rows, None]
            factor.mul_(upstream.entropy[rows, None]).add_(from_log_probs[:, None])
            grad = log_p.exp_().mul_(factor).neg_()
        else:
            grad = log_p.exp_().mul_(-from_log_probs[:, None])
        grad.scatter_add_(-1, index[:, None], torch.where(mine, from_log_probs, 0.0)[:, None])
        grad = _divided(grad, temperature).to(hidden_NH.dtype)
        if grad_hidden is not None:
            grad_hidden[rows] = grad @ weight_VH
        if grad_weight_VH is not None:
            grad_weight_VH += grad.t() @ hidden_NH[rows]
    return grad_hidden


def _check(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    grad_weight: torch.Tensor | None = None,
) -> None:
    check(
        {"hidden": hidden, "weight": weight, "targets": targets},
        {"hidden": FLOATS, "weight": (hidden.dtype,), "targets": (torch.int64,)},
    )
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden and weight must have shapes [n, h] and [v, h], got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)}, but hidden has {len(hidden)} rows"
        )
    if grad_weight is not None:
        check({"hidden": hidden, "grad_weight": grad_weight}, {"grad_weight": (torch.float32,)})
        if grad_weight.shape != weight.shape:
            raise ValueError(
                f"grad_weight has shape {tuple(grad_weight.shape)}, but weight has "
                f"{tuple(weight.shape)}"
            )


def _check_best(
    hidden: torch.Tensor, weight: torch.Tensor, best: tuple[torch.Tensor, torch.Tensor]
) -> None:
    logits, rows = best
    check(
        {"hidden": hidden, "logits": logits, "rows": rows},
        {"logits": (torch.float32,), "rows": (torch.int64,)},
    )
    k = logits.shape[-1]
    if logits.shape != (len(hidden), k) or rows.shape != logits.shape or not 1 <= k <= len(weight):
        raise ValueError(
            "best must be two outputs [n, k] with 1 <= k <= v for the highest logits of "
            f"{len(hidden)} rows over {len(weight)} columns, got {tuple(logits.shape)} and "
            f"{tuple(rows.shape)}"
        )


def _most(hidden: torch.Tensor) -> int:
    """Return the maximum number of highest logits that the kernel supports."""
    return tiles_for(hidden.dtype, hidden.shape[1], best=1).columns


def _triton_sums(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    with_entropy: bool,
    best: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    n, h = hidden.shape
    v = len(weight)
    kept = 0 if best is None else 1 << (best[0].shape[1] - 1).bit_length()
    tiles = tiles_for(hidden.dtype, h, kept)
    splits = -(-v // tiles.split)
    keys = hidden.new_empty((n, splits, kept), dtype=torch.int64)
    found = hidden.new_empty((3, splits, n), dtype=torch.float32)
    picked = hidden.new_zeros(n, dtype=torch.float32)
    described = _described(hidden, weight, tiles)
    _sums_kernel[(-(-n // tiles.rows) * splits,)](
        *(described or (hidden, weight)),
        targets,
        found,
        picked,
        keys,
        n,
        v,
        h,
        splits,
        temperature,
        **_constants(tiles, hidden),
        DESCRIPTORS=described is not None,
        BEST=kept,
        SPLIT=tiles.split,
        ENTROPY=with_entropy,
        LOWEST=LOWEST,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if best is not None:
        _read_keys(keys.view(n, -1), best)
    tops, exponentials, products = found
    top = tops.amax(0)
    shift = tops - top
    scale = shift.exp()
    entropy_part = (
        (scale * (products + shift * exponentials)).sum(0)
        if with_entropy
        else torch.zeros_like(top)
    )
    return top, torch.stack([(scale * exponentials).sum(0), picked, entropy_part])


def _read_keys(keys: torch.Tensor, best: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Fill `best` from the keys [n, total number of keys] that all programs have written.

    A key stores the logit's bits, mapped to integer order, in its upper half and the vocabulary
    row, counted from the end, in its lower half. Among equal logits the first row therefore comes
    first.
    """
    highest = keys.topk(best[0].shape[1], dim=-1).values
    bits = (highest >> 32).int()
    best[0].copy_((bits ^ ((bits >> 31) & LARGEST)).view(torch.float32))
    best[1].copy_(LARGEST - (highest & 0xFFFFFFFF))


def _triton_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    upstream: Upstream,
    temperature: float,
    of_hidden: bool,
    grad_weight: torch.Tensor | None,
) -> torch.Tensor | None:
    n, h = hidden.shape
    v = len(weight)
    tiles = tiles_for(hidden.dtype, h)
    columns = min(2 * tiles.split if INTERPRETED else COLUMNS, v)
    constants = _constants(tiles, hidden)
    # pad rows to multiples of 16 columns for 16-byte writes; the padding is never read
    buffer = hidden.new_empty((n, -(-columns // 16) * 16))
    total = hidden.new_zeros((n, h), dtype=torch.float32) if of_hidden else None
    with_entropy = upstream.entropy is not None
    for first in range(0, v, columns):
        part = weight[first : first + columns]
        grad = buffer[:, : len(part)]
        _logit_gradients_kernel[(-(-n // tiles.rows) * -(-len(part) // tiles.columns),)](
            hidden,
            part,
            targets,
            upstream.log_probs.contiguous(),
            upstream.entropy.contiguous() if upstream.entropy is not None else upstream.log_probs,
            upstream.log_z,
            upstream.entropies,
            buffer,
            n,
            len(part),
            h,
            buffer.shape[1],
            first,
            temperature,
            **constants,
            ENTROPY=with_entropy,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        if total is not None:
            _add_product(total, grad, part)
        if grad_weight is not None:
            _add_product(grad_weight[first : first + columns], grad.t(), hidden)
    return None if total is None else total.to(hidden.dtype)


@torch.no_grad()
def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute total += left @ right, summed in fp32.

    On a GPU the product accumulates into `total` directly. Nothing is rounded to the operands'
    dtype, and no further pass over `total` is needed.
    """
    if total.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(left.float(), right.float())


def _described(hidden: torch.Tensor, weight: torch.Tensor, tiles: Tiles) -> tuple[Any, Any] | None:
    """Return tensor descriptors for both operands, or None if descriptors are disabled or
    unsupported."""
    places = hidden.data_ptr(), weight.data_ptr(), hidden.shape[1] * hidden.itemsize
    if not DESCRIPTORS or any(place % _VECTOR for place in places):
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    rows = TensorDescriptor.from_tensor(hidden, [tiles.rows, tiles.depth])
    return rows, TensorDescriptor.from_tensor(weight, [tiles.columns, tiles.depth])


def _constants(tiles: Tiles, hidden: torch.Tensor) -> dict[str, object]:
    # the interpreter of Triton 3.7.1 computes bf16 products incorrectly, so operands are widened
    return {
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "DEPTH": tiles.depth,
        "GROUP": tiles.group,
        "WIDEN": INTERPRETED and hidden.dtype != torch.float32,
        "EVEN": hidden.shape[1] % tiles.depth == 0,
    }


if TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _place(program, num_row_tiles, num_others, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
        """Return (row tile, index along the other axis) of a program. GROUP row tiles traverse that
        axis together."""
        first = program // (GROUP * num_others) * GROUP
        size = tl.minimum(num_row_tiles - first, GROUP)
        inside = program % (GROUP * num_others)
        return first + inside % size, inside // size

    @triton.jit
    def _logits(  # type: ignore[no-untyped-def]
        hidden,
        weight,
        row,
        column,
        n,
        v,
        h,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr,
        WIDEN: tl.constexpr,
        EVEN: tl.constexpr,
        DESCRIPTORS: tl.constexpr,
    ):
        """Return the [ROWS, COLUMNS] fp32 products of the tile that starts at this row and
        column."""
        products = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        if DESCRIPTORS:
            for start in range(0, h, DEPTH):
                x = hidden.load([row, start])
                y = weight.load([column, start])
                if WIDEN:
                    x = x.to(tl.float32)
                    y = y.to(tl.float32)
                products = tl.dot(x, y.T, products, input_precision="ieee")
        else:
            # Clamp to the last row and column instead of masking; the surplus results are not used.
            rows = tl.minimum(row + tl.arange(0, ROWS), n - 1)
            columns = tl.minimum(column + tl.arange(0, COLUMNS), v - 1)
            depth = tl.arange(0, DEPTH)
            a = hidden + rows.to(tl.int64)[:, None] * h + depth[None, :]
            b = weight + columns.to(tl.int64)[None, :] * h + depth[:, None]
            for start in range(0, h, DEPTH):
                if EVEN:
                    x = tl.load(a)
                    y = tl.load(b)
                else:
                    inside = depth < h - start
                    x = tl.load(a, mask=inside[None, :], other=0.0)
                    y = tl.load(b, mask=inside[:, None], other=0.0)
                if WIDEN:
                    x = x.to(tl.float32)
                    y = y.to(tl.float32)
                products = tl.dot(x, y, products, input_precision="ieee")
                a += DEPTH
                b += DEPTH
        return products

    # An argument of 1 becomes a constant, and multiples of 16 trigger another compilation; only h
    # benefits from it.
    @triton.jit(do_not_specialize=["n", "v", "splits", "temperature"])
    def _sums_kernel(  # type: ignore[no-untyped-def]
        hidden,
        weight,
        targets,
        found,
        picked,
        keys,
        n,
        v,
        h,
        splits,
        temperature,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr,
        GROUP: tl.constexpr,
        WIDEN: tl.constexpr,
        EVEN: tl.constexpr,
        DESCRIPTORS: tl.constexpr,
        BEST: tl.constexpr,
        SPLIT: tl.constexpr,
        ENTROPY: tl.constexpr,
        LOWEST: tl.constexpr,
    ):
        """Compute the three sums of ROWS rows over SPLIT vocabulary columns, and the keys of the
        BEST highest logits.

        Each sum is relative to the row's maximum in this split.
        """
        tile, split = _place(tl.program_id(0), tl.cdiv(n, ROWS), splits, GROUP)
        rows = tile * ROWS + tl.arange(0, ROWS)
        target = tl.load(targets + rows, mask=rows < n, other=-1).to(tl.int32)
        inverse = 1.0 / temperature
        top = tl.full((ROWS,), LOWEST, dtype=tl.float32)
        exponentials = tl.zeros((ROWS,), dtype=tl.float32)
        products = tl.zeros((ROWS,), dtype=tl.float32)
        at_target = tl.zeros((ROWS,), dtype=tl.float32)
        if BEST > 0:
            best = tl.full((ROWS, BEST), -0x7FFFFFFFFFFFFFFF, dtype=tl.int64)
        for start in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, v), COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            x = inverse * _logits(
                hidden,
                weight,
                tile * ROWS,
                start,
                n,
                v,
                h,
                ROWS,
                COLUMNS,
                DEPTH,
                WIDEN,
                EVEN,
                DESCRIPTORS,
            )
            real = (columns < v)[None, :]
            x = tl.where(real, x, LOWEST)
            if BEST > 0:
                bits = x.to(tl.int32, bitcast=True)
                ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32
                key = ordered | (0x7FFFFFFF - columns.to(tl.int64))[None, :]
                highest_keys = tl.topk(tl.where(real, key, -0x7FFFFFFFFFFFFFFF), BEST)
                best = tl.topk(tl.reshape(tl.join(best, highest_keys), (ROWS, 2 * BEST)), BEST)
            at_target += tl.sum(tl.where(columns[None, :] == target[:, None], x, 0.0), 1)
            highest = tl.maximum(top, tl.max(x, 1))
            shifted = x - highest[:, None]
            exponential = tl.exp(shifted)
            shift = top - highest
            scale = tl.exp(shift)
            if ENTROPY:
                # relative to the new maximum: exp(x - t') (x - t') = exp(t - t') exp(x - t) ((x -
                # t) + (t - t'))
                products = scale * (products + shift * exponentials) + tl.sum(
                    exponential * shifted, 1
                )
            exponentials = scale * exponentials + tl.sum(exponential, 1)
            top = highest
        place = found + split.to(tl.int64) * n + rows
        plane = splits.to(tl.int64) * n
        tl.store(place, top, mask=rows < n)
        tl.store(place + plane, exponentials, mask=rows < n)
        tl.store(place + 2 * plane, products, mask=rows < n)
        # exactly one program has a row's target
        here = (target >= split * SPLIT) & (target < (split + 1) * SPLIT)
        tl.store(picked + rows, at_target, mask=(rows < n) & here)
        if BEST > 0:
            place = (
                keys
                + (rows.to(tl.int64) * splits + split)[:, None] * BEST
                + tl.arange(0, BEST)[None, :]
            )
            tl.store(place, best, mask=(rows < n)[:, None])

    @triton.jit(do_not_specialize=["n", "v", "first", "temperature"])
    def _logit_gradients_kernel(  # type: ignore[no-untyped-def]
        hidden,
        weight,
        targets,
        from_log_probs,
        from_entropy,
        log_z,
        entropies,
        out,
        n,
        v,
        h,
        stride,
        first,
        temperature,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPTH: tl.constexpr,
        GROUP: tl.constexpr,
        WIDEN: tl.constexpr,
        EVEN: tl.constexpr,
        ENTROPY: tl.constexpr,
    ):
        """Compute one tile of the gradient of the products [n, v], where column 0 is vocabulary row
        `first`.

        Arbitrary values are written to columns from v to `stride`.
        """
        tile, other = _place(tl.program_id(0), tl.cdiv(n, ROWS), tl.cdiv(v, COLUMNS), GROUP)
        rows = tile * ROWS + tl.arange(0, ROWS)
        columns = other * COLUMNS + tl.arange(0, COLUMNS)
        inverse = 1.0 / temperature
        x = inverse * _logits(
            hidden,
            weight,
            tile * ROWS,
            other * COLUMNS,
            n,
            v,
            h,
            ROWS,
            COLUMNS,
            DEPTH,
            WIDEN,
            EVEN,
            False,
        )
        real = rows < n
        log_p = x - tl.load(log_z + rows, mask=real, other=0.0)[:, None]
        upstream = tl.load(from_log_probs + rows, mask=real, other=0.0) * inverse
        target = tl.load(targets + rows, mask=real, other=-1).to(tl.int32) - first
        if ENTROPY:
            entropy = tl.load(entropies + rows, mask=real, other=0.0)
            of_entropy = tl.load(from_entropy + rows, mask=real, other=0.0) * inverse
            minus = tl.exp(log_p) * (
                upstream[:, None] + of_entropy[:, None] * (log_p + entropy[:, None])
            )
        else:
            minus = tl.exp(log_p) * (
                tl.zeros((ROWS, COLUMNS), dtype=tl.float32) + upstream[:, None]
            )
        grad = tl.where(columns[None, :] == target[:, None], upstream[:, None], 0.0) - minus
        place = out + rows.to(tl.int64)[:, None] * stride + columns[None, :]
        tl.store(
            place, grad.to(out.dtype.element_ty), mask=real[:, None] & (columns < stride)[None, :]
        )
