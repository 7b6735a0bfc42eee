"""Log-probabilities, entropy and the most likely tokens from hidden states, where the output
layer's rows are split over tensor ranks.

Each rank sums over its own rows of the vocabulary (`hybridflow_kernels.linear_log_probs`): whole
logits never exist, forward or backward, so the memory they take is bounded by a chunk and not by
the batch. Shapes: n rows, h hidden size, v vocabulary rows of this rank (rank r holds [r v, (r + 1)
v), padding at the end). All arithmetic on logits in fp32.
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
    """All-reduce (sum) whose backward is the identity: every rank computes the same loss, so each
    keeps its own share of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        """The sum, equal on every rank."""
        total = tensor.clone().contiguous()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Unchanged."""
        return grad, None


@dataclass(frozen=True)
class Scoring:
    """How hidden states are scored.

    Attributes:
        vocab_size: rows of the output layer at or behind it are padding and take no probability.
        temperature: divides the logits, as the sampler did.
        with_entropy: whether the entropy of each row's distribution is wanted too.
        chunk: rows (tokens) whose logits exist at a time.
    """

    vocab_size: int
    temperature: float
    with_entropy: bool
    chunk: int = 1024


@dataclass(frozen=True)
class Support:
    """The tokens among which each of n targets was sampled, m in all; some targets may have no
    support.

    Attributes:
        rows, columns: [m] the target that each token belongs to, and its place among the tokens of
            that target.
        tokens: [m] global token ids.
        targets: [n] the column of each target itself, 0 without a support.
        width: columns of the largest support; known on the host, which would wait for it.
        whole: [w] targets without a support, sampled from the whole vocabulary; None where there
            are none.
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
        """The supports of these targets, on the device.

        Raises:
            ValueError: a target is not among the tokens of its support, or more than once.
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
                f"target {row} is {int(targets_N[row])}, which is {found[row]} times among the "
                f"{sizes[row]} tokens that its sampler chose from; the support is another token's"
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
    """log p(target) and, when asked for, the entropy of softmax(hidden weight^T / temperature).

    With a `support` both are of the distribution that the sampler took the target from: the softmax
    over its tokens alone, which are constants (DeepSeek-V3.2, arXiv 2512.02556, section 3.1, "Keep
    Sampling Mask"). Only their logits are computed, and the kernel is not used.

    Args:
        hidden_NH: [n, h], equal on all ranks of `group`; its gradient is this rank's share and must
            be summed over the group.
        weight_VH: [v, h], this rank's rows of the output layer. With the kernel, its gradient is
            added to Megatron's `main_grad` straight away, where it has one in fp32.
        targets_N: [n] global token ids.
        group: tensor-parallel group.
        support: the tokens that each target was sampled among; None: the whole vocabulary.

    Returns:
        [n] fp32 log-probs with gradient, [n] entropies (natural log, with gradient) or None. Equal
        on all ranks of the group.

    Raises:
        ValueError: a target is no token of the vocabulary, or the shard is another group's. On a
            GPU, where a look at the targets would wait for it, the log-prob of such a target is not
            a number (`check_token_ids` refuses the batch before it gets there).
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
    """`log_probs_and_entropy` over the tokens of the support."""
    logits = _Logits.apply(hidden, weight, support.rows, support.tokens, scoring, group)
    table = logits.new_full((len(hidden), support.width), -torch.inf)
    if support.whole is not None:
        table[support.whole] = 0.0  # any numbers: these rows are replaced below
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
    """[n, k] log-probs of k more tokens of each row, with gradient, from those of its target, which
    `log_probs_and_entropy` has found: they differ by the difference of the logits, so that no
    second pass over the vocabulary is needed. Arguments and gradients as there; `tokens_NK` int64
    in any order.
    """
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
    """The k most likely tokens of the whole vocabulary for each row: [n, k] log-probs in descending
    order, [n, k] int64 token ids.

    Raises:
        ValueError: the vocabulary has fewer than k tokens.
    """
    if not 1 <= k <= scoring.vocab_size:
        raise ValueError(
            f"the {k} most likely tokens of a vocabulary of {scoring.vocab_size} were asked for"
        )
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
    """This rank's real rows of the output layer."""

    def __init__(self, weight: torch.Tensor, scoring: Scoring, group: Any) -> None:
        held = dist.get_world_size(group) * len(weight)
        if held < scoring.vocab_size:
            raise ValueError(
                f"the output layer has {held} rows on the {dist.get_world_size(group)} ranks of "
                f"the group, {len(weight)} each, for a vocabulary of {scoring.vocab_size}: the "
                "shard is not this group's"
            )
        self.first = dist.get_rank(group) * len(weight)
        self.rows = max(0, min(len(weight), scoring.vocab_size - self.first))
        self.weight = weight[: self.rows]
        self.scoring = scoring
        self.group = group

    def local(self, targets: torch.Tensor) -> torch.Tensor:
        """Each target's row here, -1 where it is elsewhere."""
        local = targets - self.first
        return torch.where((local >= 0) & (local < self.rows), local, -1)

    def unknown(self, targets: torch.Tensor) -> torch.Tensor:
        """[n] bool: which targets are no tokens.

        Raises:
            ValueError: one is not, and they lie on the CPU.
        """
        unknown = (targets < 0) | (targets >= self.scoring.vocab_size)
        if targets.is_cpu and bool(unknown.any()):
            row = int(unknown.nonzero()[0])
            raise ValueError(
                f"target {row} is {int(targets[row])}; tokens of a vocabulary of "
                f"{self.scoring.vocab_size} are 0 to {self.scoring.vocab_size - 1}"
            )
        return unknown


def _normaliser(
    shard: _Shard,
    hidden: torch.Tensor,
    targets: torch.Tensor | None = None,
    best: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n] log of the sum of exponentials over the whole vocabulary, [n] logit of the target, [n]
    entropy (zeros unless asked for); `best` as `partial_sums` has it.

    Two small all-reduces however many chunks there are: latency is what tensor parallelism costs
    over gloo.
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
    """Log-probs and entropy; the backward computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scoring: Scoring,
        group: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[n] log-probs and [n] entropies; only each row's normaliser and entropy are kept for the
        backward."""
        # entropies that are only looked at have no gradient, and cost none
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
        """This rank's share of the hidden states' gradient, and its rows of the weight's; padding
        rows take none."""
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
            # Megatron's hook looks for a gradient, and adds it unless it is told that this has been
            # done
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
    """Logits of m pairs of a row and a token; the rows of the weight are gathered again in the
    backward, a chunk at a time."""

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
        """[m], in fp32 or what `hidden` has if that is more; equal on all ranks of the group."""
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
        """This rank's share of the hidden states' gradient, and its rows of the weight's."""
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
    """Pairs whose hidden states and rows of the weight take no more memory than the logits of a
    chunk."""
    size = max(1, scoring.chunk * len(weight) // (2 * weight.shape[1]))
    return [slice(start, start + size) for start in range(0, pairs, size)]


def _main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """The fp32 gradient that Megatron keeps for a parameter over micro-batches, where the kernel
    adds to it.

    None where the embedding is tied to the parameter, whose own gradient comes by way of autograd,
    and in the torch form, where chunks are summed before the sum is added.
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
