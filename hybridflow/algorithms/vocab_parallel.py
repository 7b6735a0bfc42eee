"""Log-probabilities, entropies and the most likely tokens from hidden states, for an output layer
whose rows are sharded across tensor-parallel ranks.

Each rank processes only its own vocabulary rows (`hybridflow_kernels.linear_log_probs`). The full
logits are never materialised in either pass, so their memory is bounded by the chunk size instead
of the batch size. Shapes: n rows, h hidden size, v vocabulary rows on this rank (rank r has rows [r
v, (r + 1) v), with padding at the end). All arithmetic on logits is fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.batch import Supports
from hybridflow_kernels import uses_triton
from hybridflow_kernels.linear_log_probs import Upstream, gradients, partial_sums


class SumOverGroup(torch.autograd.Function):
    """An all-reduce (sum) whose backward is the identity. Every rank computes the same loss, so
    each keeps only its share of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        """Return the sum, which is the same on every rank."""
        total = tensor.clone().contiguous()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient unchanged."""
        return grad, None


@dataclass(frozen=True)
class Scoring:
    """Options for scoring hidden states.

    Attributes:
        vocab_size: number of real tokens; all further rows of the output layer are padding and get
            zero probability.
        temperature: divides the logits, as in the sampler.
        with_entropy: also compute the entropy of each row's distribution.
        chunk: number of rows (tokens) for which logits are materialised at a time.
    """

    vocab_size: int
    temperature: float
    with_entropy: bool
    chunk: int = 1024


@dataclass(frozen=True)
class Support:
    """The candidate tokens from which each of n targets was sampled, m in total. Some targets may
    have no support.

    Attributes:
        rows, columns: [m] for each token, the index of its target and its position among the
            candidates for that target.
        tokens: [m] global token ids.
        targets: [n] position of the target among its own candidates; 0 if it has no support.
        width: size of the largest support; stored on the host to avoid a synchronisation.
        whole: [w] targets without a support, sampled from the whole vocabulary; None if there are
            none.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    tokens: torch.Tensor
    targets: torch.Tensor
    width: int
    whole: torch.Tensor | None

    @classmethod
    def of(
        cls,
        supports: Supports,
        targets_N: np.ndarray,
        upload: Callable[[torch.Tensor], torch.Tensor],
    ) -> Support:
        """Build the supports for these targets on the device.

        Raises:
            ValueError: a target does not occur in its support, or occurs more than once.
        """
        sizes = supports.sizes.astype(np.int64)
        starts = np.cumsum(sizes) - sizes
        rows = np.repeat(np.arange(len(sizes)), sizes)
        columns = np.arange(len(rows)) - starts[rows]
        hits = np.flatnonzero(supports.ids == targets_N[rows])
        found = np.bincount(rows[hits], minlength=len(sizes))
        if len(wrong := np.flatnonzero(found != (sizes > 0))):
            row = int(wrong[0])
            raise ValueError(
                f"target {row} is {int(targets_N[row])}, which occurs {found[row]} times among the "
                f"{sizes[row]} tokens in its support instead of once; the support belongs to "
                "another token"
            )
        places = np.zeros(len(sizes), np.int64)
        places[rows[hits]] = columns[hits]
        whole = np.flatnonzero(sizes == 0)
        arrays = rows, columns, supports.ids.astype(np.int64), places, whole
        of_rows, of_columns, tokens, targets, rest = (
            upload(torch.from_numpy(one)) for one in arrays
        )
        return cls(
            of_rows,
            of_columns,
            tokens,
            targets,
            int(sizes.max(initial=1)),
            rest if len(whole) else None,
        )


def log_probs_and_entropy(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    scoring: Scoring,
    group: Any,
    support: Support | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log p(target) and, if requested, the entropy of softmax(hidden weight^T /
    temperature).

    If `support` is set, both refer to the distribution from which the sampler drew the target: the
    softmax over the tokens in the support, which is treated as constant (DeepSeek-V3.2, arXiv
    2512.02556, section 3.1, "Keep Sampling Mask"). Only the logits of these tokens are computed,
    without the kernel.

    Args:
        hidden_NH: [n, h], the same on all ranks in `group`. Its gradient is only this rank's share
            and must be summed over the group.
        weight_VH: [v, h], this rank's rows of the output layer. With the kernel, its gradient is
            added directly to Megatron's `main_grad` if it has one in fp32.
        targets_N: [n] global token ids.
        group: tensor-parallel group.
        support: the tokens from which each target was sampled; None means the whole vocabulary.

    Returns:
        [n] fp32 log-probs with gradient, [n] entropies (natural log, with gradient) or None. They
        are the same on all ranks in the group.

    Raises:
        ValueError: a target is not in the vocabulary, or the shard belongs to another group. On a
            GPU, targets are not checked, to avoid a synchronisation; the log-prob of an invalid
            target is NaN (`check_token_ids` rejects the batch earlier).
    """
    if support is not None:
        return _over_support(hidden_NH, weight_VH, targets_N, scoring, group, support)
    log_probs, entropy = _Scores.apply(hidden_NH, weight_VH, targets_N, scoring, group)
    return log_probs, entropy if scoring.with_entropy else None


def _over_support(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    scoring: Scoring,
    group: Any,
    support: Support,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Implement `log_probs_and_entropy` for targets with a support."""
    logits = _Logits.apply(hidden, weight, support.rows, support.tokens, scoring, group)
    table = logits.new_full((len(hidden), support.width), -torch.inf)
    if support.whole is not None:
        table[support.whole] = 0.0  # arbitrary finite values: these rows are replaced below
    table = table.index_put((support.rows, support.columns), logits)
    log_probs_NK = table.log_softmax(-1)
    log_probs = log_probs_NK.gather(1, support.targets[:, None])[:, 0]
    entropy = None
    if scoring.with_entropy:
        entropy = -(log_probs_NK.exp() * log_probs_NK.masked_fill(table == -torch.inf, 0.0)).sum(-1)
    if support.whole is None:
        return log_probs, entropy
    whole = log_probs_and_entropy(
        hidden[support.whole], weight, targets[support.whole], scoring, group
    )
    log_probs = log_probs.index_copy(0, support.whole, whole[0].to(log_probs.dtype))
    if entropy is not None and whole[1] is not None:
        entropy = entropy.index_copy(0, support.whole, whole[1].to(entropy.dtype))
    return log_probs, entropy


def log_probs_of_tokens(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    tokens_NK: torch.Tensor,
    targets_N: torch.Tensor,
    log_probs_N: torch.Tensor,
    scoring: Scoring,
    group: Any,
) -> torch.Tensor:
    """Return [n, k] log-probs of k additional tokens per row, with gradient. They differ from the
    target's log-prob (`log_probs_N`, returned by `log_probs_and_entropy`) by the difference between
    the logits, so no second pass over the vocabulary is needed. Arguments and gradients are as in
    `log_probs_and_entropy`; `tokens_NK` is int64, in any order."""
    tokens = torch.cat([targets_N[:, None], tokens_NK], 1)
    rows = torch.arange(len(tokens), device=tokens.device).repeat_interleave(tokens.shape[1])
    logits = _Logits.apply(hidden_NH, weight_VH, rows, tokens.reshape(-1), scoring, group).view(
        tokens.shape
    )
    return log_probs_N[:, None] + logits[:, 1:] - logits[:, :1]


@torch.no_grad()
def top_log_probs(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, k: int, scoring: Scoring, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k most likely tokens of the whole vocabulary for each row: [n, k] log-probs in
    descending order and [n, k] int64 token ids.

    Raises:
        ValueError: the vocabulary has fewer than k tokens.
    """
    if not 1 <= k <= scoring.vocab_size:
        raise ValueError(f"k={k} exceeds the vocabulary size of {scoring.vocab_size}")
    shard = _Shard(weight_VH, scoring, group)
    values = hidden_NH.new_full((len(hidden_NH), k), -torch.inf, dtype=torch.float32)
    tokens = torch.zeros(values.shape, dtype=torch.int64, device=values.device)
    mine = min(k, shard.rows)
    best = values[:, :mine].contiguous(), tokens[:, :mine].contiguous()
    log_z = _normaliser(shard, hidden_NH, best=best if mine else None)[0]
    values[:, :mine], tokens[:, :mine] = best[0], best[1] + shard.first
    world = dist.get_world_size(group)
    all_values = [torch.empty_like(values) for _ in range(world)]
    all_tokens = [torch.empty_like(tokens) for _ in range(world)]
    dist.all_gather(all_values, values, group=group)
    dist.all_gather(all_tokens, tokens, group=group)
    best = torch.cat(all_values, -1).topk(k, dim=-1)
    return best.values - log_z[:, None], torch.cat(all_tokens, -1).gather(-1, best.indices)


class _Shard:
    """This rank's rows of the output layer, without padding."""

    def __init__(self, weight: torch.Tensor, scoring: Scoring, group: Any) -> None:
        held = dist.get_world_size(group) * len(weight)
        if held < scoring.vocab_size:
            raise ValueError(
                f"the output layer has {held} rows across the {dist.get_world_size(group)} ranks "
                f"of the group ({len(weight)} each), but the vocabulary has {scoring.vocab_size} "
                "tokens; the shard belongs to another group"
            )
        self.first = dist.get_rank(group) * len(weight)
        self.rows = max(0, min(len(weight), scoring.vocab_size - self.first))
        self.weight = weight[: self.rows]
        self.scoring = scoring
        self.group = group

    def local(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the local row of each target, or -1 if it is on another rank."""
        local = targets - self.first
        return torch.where((local >= 0) & (local < self.rows), local, -1)

    def unknown(self, targets: torch.Tensor) -> torch.Tensor:
        """Return [n] bool: True for targets outside the vocabulary.

        Raises:
            ValueError: a target is outside the vocabulary, and the targets are on the CPU.
        """
        unknown = (targets < 0) | (targets >= self.scoring.vocab_size)
        if targets.is_cpu and bool(unknown.any()):
            row = int(unknown.nonzero()[0])
            raise ValueError(
                f"target {row} is {int(targets[row])}; with a vocabulary of "
                f"{self.scoring.vocab_size} tokens, ids are 0 to {self.scoring.vocab_size - 1}"
            )
        return unknown


def _normaliser(
    shard: _Shard,
    hidden: torch.Tensor,
    targets: torch.Tensor | None = None,
    best: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, for each row [n], the log of the sum of exponentials over the whole vocabulary, the
    logit of the target, and the entropy (zeros unless requested). `best` is filled in, as in
    `partial_sums`.

    Uses two small all-reduces regardless of the number of chunks, because latency dominates the
    cost of tensor parallelism over gloo.
    """
    entropy = shard.scoring.with_entropy and targets is not None
    local = (
        hidden.new_full((len(hidden),), -1, dtype=torch.int64)
        if targets is None
        else shard.local(targets)
    )
    tops, sums = partial_sums(
        hidden,
        shard.weight,
        local,
        temperature=shard.scoring.temperature,
        with_entropy=entropy,
        chunk=shard.scoring.chunk,
        best=best,
    )
    highest = tops.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=shard.group)
    if shard.rows:
        scale = (tops - highest).exp()
        shift = tops - highest
        sums[2] = scale * (sums[2] + shift * sums[0])
        sums[0] *= scale
    dist.all_reduce(sums, group=shard.group)
    log_sum = sums[0].log()
    # H = log Z - E[x], both relative to the highest logit
    return highest + log_sum, sums[1], log_sum - sums[2] / sums[0] if entropy else sums[2]


class _Scores(torch.autograd.Function):
    """Autograd function for log-probs and entropies that recomputes the logits in the backward
    pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scoring: Scoring,
        group: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [n] log-probs and [n] entropies. Only the normaliser and entropy of each row are
        saved for the backward pass."""
        # without a gradient, entropies that are only reported cost nothing in the backward
        ctx.set_materialize_grads(False)
        hidden = hidden.contiguous()
        shard = _Shard(weight, scoring, group)
        unknown = shard.unknown(targets)
        log_z, picked, entropy = _normaliser(shard, hidden, targets)
        if not targets.is_cpu:
            picked.masked_fill_(unknown, torch.nan)
        ctx.save_for_backward(hidden, weight, targets, log_z, entropy)
        ctx.scoring = scoring
        ctx.group = group
        ctx.parameter = weight
        return picked - log_z, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Return this rank's share of the gradient of the hidden states, and the gradient of its
        weight rows; padding rows get no gradient."""
        hidden, weight, targets, log_z, entropy = ctx.saved_tensors
        shard = _Shard(weight, ctx.scoring, ctx.group)
        main_grad = _main_grad(ctx.parameter) if ctx.needs_input_grad[1] else None
        grad_weight = main_grad
        if ctx.needs_input_grad[1] and main_grad is None:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_z)
        grad_hidden = gradients(
            hidden,
            shard.weight,
            shard.local(targets),
            Upstream(grad_log_probs, grad_entropy, log_z, entropy),
            temperature=ctx.scoring.temperature,
            chunk=ctx.scoring.chunk,
            of_hidden=ctx.needs_input_grad[0],
            grad_weight_VH=None if grad_weight is None else grad_weight[: shard.rows],
        )
        if main_grad is not None:
            # Megatron's hook adds the parameter's gradient unless this flag marks it as already
            # added
            ctx.parameter.grad_added_to_main_grad = True
            return grad_hidden, torch.empty_like(weight), None, None, None
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
            None,
        )


class _Logits(torch.autograd.Function):
    """Autograd function for the logits of m (row, token) pairs. The backward pass re-gathers the
    weight rows, one chunk at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        scoring: Scoring,
        group: Any,
    ) -> torch.Tensor:
        """Return [m] logits in fp32, or in the dtype of `hidden` if it is wider; the same on all
        ranks in the group."""
        local = _Shard(weight, scoring, group).local(tokens)
        logits = hidden.new_zeros(len(rows), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for part in _pair_chunks(len(rows), weight, scoring):
            gathered = weight[local[part].clamp(min=0)].to(logits.dtype)
            logits[part] = torch.linalg.vecdot(gathered, hidden[rows[part]].to(logits.dtype))
        logits.div_(scoring.temperature).masked_fill_(local < 0, 0.0)
        dist.all_reduce(logits, group=group)
        ctx.save_for_backward(hidden, weight, rows, local)
        ctx.scoring = scoring
        ctx.parameter = weight
        return logits

    @staticmethod
    def backward(ctx: Any, grad_logits: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return this rank's share of the gradient of the hidden states, and the gradient of its
        weight rows."""
        hidden, weight, rows, local = ctx.saved_tensors
        grad_logits = (grad_logits / ctx.scoring.temperature).masked_fill(local < 0, 0.0)
        main_grad = _main_grad(ctx.parameter) if ctx.needs_input_grad[1] else None
        grad_hidden = hidden.new_zeros(hidden.shape, dtype=grad_logits.dtype)
        grad_weight = main_grad
        if ctx.needs_input_grad[1] and main_grad is None:
            grad_weight = weight.new_zeros(weight.shape, dtype=grad_logits.dtype)
        for part in _pair_chunks(len(rows), weight, ctx.scoring):
            index = local[part].clamp(min=0)
            row = rows[part]
            grad = grad_logits[part, None]
            grad_hidden.index_add_(0, row, grad * weight[index].to(grad.dtype))
            if grad_weight is not None:
                grad_weight.index_add_(0, index, grad * hidden[row].to(grad.dtype))
        if main_grad is not None:
            ctx.parameter.grad_added_to_main_grad = True  # as for `_Scores`
            return grad_hidden.to(hidden.dtype), torch.empty_like(weight), None, None, None, None
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, None


def _pair_chunks(pairs: int, weight: torch.Tensor, scoring: Scoring) -> list[slice]:
    """Split the pairs into slices whose hidden states and weight rows take no more memory than the
    logits of a chunk."""
    size = max(1, scoring.chunk * len(weight) // (2 * weight.shape[1]))
    return [slice(start, start + size) for start in range(0, pairs, size)]


def _main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the fp32 buffer in which Megatron accumulates a parameter's gradient, so that the
    kernel can add to it.

    None if the parameter is tied to the embedding, whose gradient arrives through autograd, or with
    the torch implementation, which adds the gradient once, summed over all chunks.
    """
    if not uses_triton(weight):
        return None
    main_grad: torch.Tensor | None = getattr(weight, "main_grad", None)
    fits = (
        main_grad is not None
        and main_grad.dtype == torch.float32
        and main_grad.shape == weight.shape
    )
    return main_grad if fits and not getattr(weight, "zero_out_wgrad", False) else None
