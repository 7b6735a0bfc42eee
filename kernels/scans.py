"""Reverse scans over the rows of a packed batch: discounted rewards, generalised advantage
estimation and V-trace.

T tokens of S rows are concatenated without padding. Each scan is a recurrence y_t = d_t + c_t
y_{t+1} within a row, with y = 0 after its end. Tokens outside the mask are skipped: the recurrence
continues across them, and their own result is 0. The kernel uses one launch per batch and one
program per row. The torch implementation pads rows of similar length into groups, so that a step
over a group is one addition. A row's result is bitwise independent of the other rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from hybridflow_kernels import INTERPRETED, TRITON, check, uses_triton

BLOCK = 4 if INTERPRETED else 1024  # tokens per block of the kernel's scan
FLOAT = (torch.float32,)


def discounted_sums(
    rewards_T: torch.Tensor,
    lengths_S: torch.Tensor,
    *,
    gamma: float,
    mask_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [T] fp32 sums of gamma^i rewards[t + i] over the rest of the row, where i counts
    unmasked tokens.

    Args:
        rewards_T: [T].
        lengths_S: [S] int64 number of tokens of each row.
        mask_T: [T] bool, False for tokens to skip. None: no token is skipped.

    Raises:
        ValueError: lengths do not sum to T, or a column has the wrong length, device or dtype.
    """
    rewards = rewards_T.float()
    _check({"rewards": rewards}, lengths_S, mask_T)
    if uses_triton(rewards):
        return _launch(rewards, None, None, lengths_S, mask_T, gamma, gamma)[0]
    kept = _Kept(lengths_S, mask_T)
    return kept.put(_scan(kept.take(rewards), gamma, kept.lengths))


def gae(
    rewards_T: torch.Tensor,
    values_T: torch.Tensor,
    lengths_S: torch.Tensor,
    *,
    gamma: float,
    lam: float | torch.Tensor,
    mask_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns (arXiv 1506.02438, eq. 16), not whitened.

    delta_t = r_t + gamma V_{t+1} - V_t with V = 0 after the end of a row; A_t = delta_t + gamma lam
    A_{t+1}; return_t = A_t + V_t.

    Args:
        rewards_T, values_T: [T] reward of each token, and value of the state in which it was
            sampled.
        lengths_S: [S] int64 number of tokens of each row.
        lam: one value for all rows, or [S], one per row; only the torch implementation supports the
            latter.
        mask_T: [T] bool, False for tokens that the policy did not sample (observations). They are
            skipped: the next value and the running sum carry across them, and their own advantage
            and return are 0. None: all were sampled.

    Returns:
        [T] advantages, [T] returns; fp32.

    Raises:
        ValueError: lengths do not sum to T, or a column has the wrong length, device or dtype.
    """
    rewards = rewards_T.float()
    values = values_T.float()
    _check({"rewards": rewards, "values": values}, lengths_S, mask_T)
    if uses_triton(values) and not isinstance(lam, torch.Tensor):
        advantages, returns, _ = _launch(
            rewards, values, None, lengths_S, mask_T, gamma, gamma * lam
        )
        return advantages, returns
    kept = _Kept(lengths_S, mask_T)
    rewards = kept.take(rewards)
    values = kept.take(values)
    factor = (
        (gamma * lam).float().repeat_interleave(kept.lengths)
        if isinstance(lam, torch.Tensor)
        else gamma * lam
    )
    advantages = _scan(_deltas(rewards, values, kept.lengths, gamma), factor, kept.lengths)
    return kept.put(advantages), kept.put(advantages + values)


def vtrace(
    rewards_T: torch.Tensor,
    values_T: torch.Tensor,
    log_ratios_T: torch.Tensor,
    lengths_S: torch.Tensor,
    *,
    gamma: float,
    lam: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    mask_T: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return policy-gradient advantages and value targets (IMPALA, arXiv 1802.01561, section 4.1).

    With rho_t = min(rho_clip, ratio_t) and c_t = lam min(c_clip, ratio_t): v_t - V_t = delta_t +
    gamma c_t (v_{t+1} - V_{t+1}), delta_t = rho_t (r_t + gamma V_{t+1} - V_t); the advantage is
    rho_t (r_t + gamma v_{t+1} - V_t).

    Args:
        log_ratios_T: [T] log of the policy's probability divided by the sampler's. Other arguments
            are the same as for `gae`.

    Returns:
        [T] advantages, [T] targets v; fp32.

    Raises:
        ValueError: lengths do not sum to T, or a column has the wrong length, device or dtype.
    """
    rewards = rewards_T.float()
    values = values_T.float()
    log_ratios = log_ratios_T.float()
    _check({"rewards": rewards, "values": values, "log_ratios": log_ratios}, lengths_S, mask_T)
    if uses_triton(values):
        _, targets, advantages = _launch(
            rewards, values, log_ratios, lengths_S, mask_T, gamma, gamma * lam, rho_clip, c_clip
        )
        return advantages, targets
    kept = _Kept(lengths_S, mask_T)
    rewards = kept.take(rewards)
    values = kept.take(values)
    ratios = kept.take(log_ratios).exp()
    rho = ratios.clamp(max=rho_clip)
    deltas = _deltas(rewards, values, kept.lengths, gamma).mul_(rho)
    corrections = _scan(deltas, ratios.clamp_(max=c_clip).mul_(gamma * lam), kept.lengths)
    targets = corrections + values
    return kept.put(_deltas(rewards, values, kept.lengths, gamma, targets).mul_(rho)), kept.put(
        targets
    )


def _check(
    columns: dict[str, torch.Tensor], lengths: torch.Tensor, mask: torch.Tensor | None
) -> None:
    given = {**columns, "lengths": lengths} | ({} if mask is None else {"mask": mask})
    check(given, {"lengths": (torch.int64,), "mask": (torch.bool,)})
    total = int(lengths.sum())
    for name, column in given.items():
        if column.dim() != 1:
            raise ValueError(f"{name} has shape {tuple(column.shape)}; it must have one dimension")
        if name != "lengths" and len(column) != total:
            raise ValueError(
                f"{name} has {len(column)} tokens, but the {len(lengths)} rows have {total}"
            )
    if len(lengths) and int(lengths.min()) < 0:
        raise ValueError(f"lengths must not be negative, got {int(lengths.min())}")


class _Kept:
    """Selects the unmasked tokens and scatters results back to their positions."""

    def __init__(self, lengths: torch.Tensor, mask: torch.Tensor | None) -> None:
        self.mask = None if mask is None or bool(mask.all()) else mask
        self.lengths = lengths
        if self.mask is not None:
            row = (lengths.new_ones(len(lengths)).cumsum(0) - 1).repeat_interleave(lengths)
            self.lengths = row[self.mask].bincount(minlength=len(lengths))

    def take(self, column: torch.Tensor) -> torch.Tensor:
        return column if self.mask is None else column[self.mask]

    def put(self, column: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            return column
        out = column.new_zeros(self.mask.shape)
        out[self.mask] = column
        return out


def _deltas(
    rewards: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    gamma: float,
    following: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [T] r_t + gamma following_{t+1} - V_t. `following` defaults to the values."""
    deltas = rewards - values
    last = (lengths.cumsum(0) - 1)[lengths > 0]
    at_end = deltas[last]
    deltas[:-1].add_((values if following is None else following)[1:], alpha=gamma)
    deltas[last] = at_end
    return deltas


def _scan(
    deltas: torch.Tensor, factors: torch.Tensor | float, lengths: torch.Tensor
) -> torch.Tensor:
    """Return [T] y_t = deltas_t + factors_t y_{t+1} within each row."""
    sizes = lengths.tolist()
    sums = torch.empty_like(deltas)
    rows = deltas.split(sizes)
    results = sums.split(sizes)
    factor_rows = factors.split(sizes) if isinstance(factors, torch.Tensor) else None
    for group in _groups(sizes):
        steps = pad_sequence([rows[i] for i in group], batch_first=True).t().contiguous()
        running = steps[-1]
        parts = steps.unbind(0)
        if factor_rows is None:
            for part in parts[-2::-1]:
                running = torch.add(part, running, alpha=factors, out=part)  # type: ignore[arg-type]
        else:
            by_step = (
                pad_sequence([factor_rows[i] for i in group], batch_first=True)
                .t()
                .contiguous()
                .unbind(0)
            )
            for part, factor in zip(parts[-2::-1], by_step[-2::-1], strict=True):
                running = torch.addcmul(part, factor, running, out=part)
        by_row = steps.t().contiguous().unbind(0)
        torch._foreach_copy_(
            [results[i] for i in group],
            [row[: sizes[i]] for row, i in zip(by_row, group, strict=True)],
        )
    return sums


def _groups(sizes: Sequence[int]) -> list[list[int]]:
    """Divide the rows into groups, each padded to its longest row. Longer rows come first.

    A group contains at most as many padding tokens as real tokens. Empty rows are omitted.
    """
    groups: list[list[int]] = []
    longest = held = 0
    for row in sorted((row for row, size in enumerate(sizes) if size), key=lambda row: -sizes[row]):
        if not groups or longest * (len(groups[-1]) + 1) > 2 * (held + sizes[row]):
            groups.append([])
            longest = sizes[row]
            held = 0
        groups[-1].append(row)
        held += sizes[row]
    return groups


def _launch(
    rewards: torch.Tensor,
    values: torch.Tensor | None,
    log_ratios: torch.Tensor | None,
    lengths: torch.Tensor,
    mask: torch.Tensor | None,
    gamma: float,
    factor: float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sums y, y + V, and the V-trace policy-gradient advantages. Outputs whose inputs
    are None are not computed."""
    sums, targets, advantages = (
        torch.empty_like(rewards) if wanted else rewards
        for wanted in (True, values is not None, log_ratios is not None)
    )
    if len(rewards):
        _scan_kernel[(len(lengths),)](
            rewards,
            rewards if values is None else values,
            rewards if log_ratios is None else log_ratios,
            rewards if mask is None else mask,
            lengths,
            lengths.cumsum(0),
            sums,
            targets,
            advantages,
            # floats, because Triton would make an integer 1 a constant and specialise on other
            # integers
            float(gamma),
            float(factor),
            float(rho_clip),
            float(c_clip),
            VALUES=values is not None,
            RATIOS=log_ratios is not None,
            MASKED=mask is not None,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return sums, targets, advantages


if TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _after(later_factor, later, factor, value):  # type: ignore[no-untyped-def]
        """Compose the step y -> value + factor y with the combined step of the later tokens."""
        return factor * later_factor, value + factor * later

    @triton.jit
    def _scan_kernel(  # type: ignore[no-untyped-def]
        rewards,
        values,
        log_ratios,
        mask,
        lengths,
        ends,
        sums,
        targets,
        advantages,
        gamma,
        factor,
        rho_clip,
        c_clip,
        VALUES: tl.constexpr,
        RATIOS: tl.constexpr,
        MASKED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """Scan one row in blocks from its end. Each block passes its first token's sum and value to
        the block before it."""
        row = tl.program_id(0)
        end = tl.load(ends + row)
        start = end - tl.load(lengths + row)
        lane = tl.arange(0, BLOCK)
        later = 0.0
        later_value = 0.0
        for block in range(0, tl.cdiv(end - start, BLOCK)):
            # the row's first block may start before the row
            token = end - (block + 1) * BLOCK + lane
            inside = token >= start
            kept = inside
            if MASKED:
                kept = tl.load(mask + token, mask=inside, other=0).to(tl.int1) & inside
            delta = tl.load(rewards + token, mask=inside, other=0.0)
            value = tl.zeros((BLOCK,), dtype=tl.float32)
            step = tl.where(kept, factor, 1.0)
            rho = tl.full((BLOCK,), 1.0, dtype=tl.float32)
            if VALUES:
                value = tl.load(values + token, mask=inside, other=0.0)
                # the value of the next unmasked token: a scan over the tokens shifted by one
                has_next = inside & (token + 1 < end)
                next_kept = has_next
                if MASKED:
                    next_kept = (
                        tl.load(mask + token + 1, mask=has_next, other=0).to(tl.int1) & has_next
                    )
                next_value = tl.load(values + token + 1, mask=next_kept, other=0.0)
                reach, found = tl.associative_scan(
                    (tl.where(next_kept, 0.0, 1.0), next_value), 0, _after, reverse=True
                )
                following = found + reach * later_value
                delta += gamma * following - value
                later_value = tl.sum(tl.where(lane == 0, following, 0.0))
            if RATIOS:
                ratio = tl.exp(tl.load(log_ratios + token, mask=inside, other=0.0))
                rho = tl.minimum(ratio, rho_clip)
                delta = delta * rho
                step = tl.where(kept, factor * tl.minimum(ratio, c_clip), 1.0)
            reach, found = tl.associative_scan(
                (step, tl.where(kept, delta, 0.0)), 0, _after, reverse=True
            )
            total = found + reach * later
            if RATIOS:
                # the sum of the next token is in another lane, so it goes through memory
                tl.store(advantages + token, total, mask=inside)
                tl.debug_barrier()
                following_total = tl.load(
                    advantages + token + 1, mask=inside & (lane < BLOCK - 1), other=0.0
                )
                following_total = tl.where(lane < BLOCK - 1, following_total, later)
                tl.debug_barrier()
                tl.store(
                    advantages + token,
                    tl.where(kept, delta + rho * gamma * following_total, 0.0),
                    mask=inside,
                )
            if VALUES:
                tl.store(targets + token, tl.where(kept, total + value, 0.0), mask=inside)
            tl.store(sums + token, tl.where(kept, total, 0.0), mask=inside)
            later = tl.sum(tl.where(lane == 0, total, 0.0))
