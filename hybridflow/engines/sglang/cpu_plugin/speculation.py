"""Drafting with a multi-token-prediction head (SGLang's EAGLE worker) in torch. Imported only
inside SGLang processes.

Upstream implements these functions only for CUDA, in triton and sgl_kernel. Each draft is a chain
(top-k 1) with one token per step; a single pass of the model verifies all of its tokens. Shapes: b
requests, d = steps + 1 tokens verified per request (the last accepted token and the draft), v
vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def install(create: Any) -> None:
    """Replace upstream's kernels in this process. `create(runner)` creates an attention backend."""
    from sglang.kernels.ops.speculative import cache_locs
    from sglang.srt.mem_cache import allocation
    from sglang.srt.speculative import draft_utils, eagle_utils, eagle_worker_common

    # plans of cache locations need a triton kernel
    eagle_worker_common._is_cpu = True
    eagle_worker_common.assign_draft_cache_locs_contiguous_func = draft_locations
    eagle_worker_common.fill_bonus_tokens_func = fill_bonus_tokens
    eagle_utils.build_tree_kernel_efficient_func = build_chain
    eagle_utils.verify_tree_greedy_func = verify_greedy
    eagle_utils.tree_speculative_sampling_target_only = verify_sampled
    cache_locs.assign_extend_cache_locs_func = extend_locations
    allocation.assign_req_to_token_pool_func = assign_slots
    factory = draft_utils.DraftBackendFactory
    factory.create_draft_extend_backend = lambda made: create(made.draft_model_runner)
    factory.create_decode_backend = lambda made: (
        DraftSteps(create, made.draft_model_runner, made.speculative_num_steps - 1)
        if made.speculative_num_steps > 1
        else None
    )


class DraftSteps:
    """The attention backends for drafting, one for each step after the first drafted token. Each
    step attends to one more token than the previous step.
    """

    def __init__(self, create: Any, runner: Any, steps: int) -> None:
        self.attn_backends = [create(runner) for _ in range(steps)]
        for step, backend in enumerate(self.attn_backends, 1):
            backend.drafted = step

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare all steps."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


@contextmanager
def verifying(forward_batch: Any) -> Iterator[None]:
    """Context manager for a pass that verifies drafts: inside the block, `forward_batch` describes
    the drafts as new tokens of their requests.
    """
    lengths = forward_batch.seq_lens
    count = forward_batch.spec_info.draft_token_num
    forward_batch.extend_prefix_lens = lengths
    forward_batch.extend_seq_lens = torch.full_like(lengths, count)
    forward_batch.seq_lens = lengths + count
    try:
        yield
    finally:
        forward_batch.seq_lens = lengths
        forward_batch.extend_prefix_lens = forward_batch.extend_seq_lens = None


def draft_locations(
    requests: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    topk: int,
    columns: int,
    positions: Any = None,
    mrope: Any = None,
) -> None:
    """Write the cache locations of the next `columns` tokens of each request to `out`."""
    out.copy_(_window(requests, table, lengths, topk * columns).reshape(-1))


def extend_locations(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """Return the cache locations [b d] of the tokens to verify."""
    found = _window(req_pool_indices, req_to_token, start_offset, draft_token_num)
    return found.reshape(-1).to(torch.int64)


def _window(
    requests: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, columns: int
) -> torch.Tensor:
    places = starts.long()[:, None] + torch.arange(columns)
    return table[requests.long()].gather(1, places)


def assign_slots(
    requests: torch.Tensor,
    table: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    slots: torch.Tensor,
    batch_size: int,
) -> None:
    """Write the cache slots of each request's next tokens to the request's row of the table."""
    first = 0
    for row, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        table[row, start:end] = slots[first : first + end - start].to(table.dtype)
        first += end - start


def fill_bonus_tokens(
    accepted: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, stride: int, batch_size: int
) -> None:
    """Write the last accepted token of each request to `out` [b]."""
    rows = accepted.view(batch_size, stride)
    out.copy_(rows.gather(1, counts.long()[:, None] - 1)[:, 0])


def build_chain(
    parents: torch.Tensor,
    scores: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    steps: int,
    count: int,
    mask_mode: Any,
) -> None:
    """Describe each draft as a chain, in which every token's only child is the next token. No mask
    is built, because the attention is causal.
    """
    if topk != 1:
        raise NotImplementedError("drafts on CPU must be chains: set speculative-eagle-topk to 1")
    steps_of = torch.arange(count)
    positions.copy_((lengths.long()[:, None] + steps_of).reshape(-1))
    index.copy_(torch.arange(index.numel()).view(index.shape))
    next_token.copy_(torch.where(steps_of + 1 < count, steps_of + 1, -1).expand_as(next_token))


def verify_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the drafted tokens before the first one that is not the model's most likely token."""
    right = (candidates[:, 1:] == target_predict[:, :-1]).long().cumprod(1).sum(1)
    _accept(predicts, accept_index, accept_token_num, right, target_predict)
    return predicts, accept_index, accept_token_num


def verify_sampled(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    **_: Any,
) -> None:
    """Accept each drafted token with the probability that the model assigns to it. After a
    rejection, sample from the other tokens; if all are accepted, sample the next token from the
    whole vocabulary.

    The resulting tokens follow the model's distribution, whatever was drafted. `target_probs` is
    [b, d, v].
    """
    drafted = candidates[:, 1:].long()
    chances = target_probs[:, :-1].gather(2, drafted[..., None])[..., 0]
    right = (uniform_samples[:, : drafted.shape[1]] < chances).long().cumprod(1).sum(1)
    rows = torch.arange(len(candidates))
    last = target_probs[rows, right].clone()
    is_rejected = right < drafted.shape[1]
    refused = drafted[rows, right.clamp(max=drafted.shape[1] - 1)]
    last[rows[is_rejected], refused[is_rejected]] = 0.0
    sums = last.cumsum(-1)
    coins = uniform_samples_for_final_sampling[:, None] * sums[:, -1:]
    sampled = torch.searchsorted(sums, coins, right=True)[:, 0].clamp(max=last.shape[-1] - 1)
    tokens = torch.cat([drafted, drafted[:, :1]], 1)
    tokens[rows, right] = sampled
    _accept(predicts, accept_index, accept_token_num, right, tokens)


def _accept(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    right: torch.Tensor,
    tokens: torch.Tensor,
) -> None:
    """Write the accepted tokens of each request: its first `right` [b] drafted tokens and the token
    after them. `tokens` [b, d] contains the token that follows each verified token.
    """
    count, width = tokens.shape
    kept = torch.arange(width) <= right[:, None]
    places = torch.arange(count * width).view(count, width)
    predicts.copy_(torch.where(kept, tokens, 0).reshape(-1))
    accept_index.copy_(torch.where(kept, places, -1)[:, : accept_index.shape[1]])
    accept_token_num.copy_(right)
