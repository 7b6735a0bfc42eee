"""SGLang's torch-native attention, batched instead of one sequence at a time. Imported only inside
SGLang processes.

Upstream loops over the sequences of a batch in Python, in every layer
(sglang/srt/layers/attention/torch_native_backend.py, `_run_sdpa_forward_extend` and
`_run_sdpa_forward_decode`). With a hundred short sequences that loop takes most of an engine's
time. Here sequences of similar length are padded into one block and computed in one call. Other
cases (cross attention, a separate cache for sliding windows, other cache dtypes, very long
sequences) are handled by upstream. Attention sinks (gpt-oss) are always computed here, because
upstream does not support them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

from hybridflow.engines.sglang.cpu_plugin.speculation import install as install_drafting
from hybridflow.engines.sglang.cpu_plugin.speculation import verifying

# sequences x queries x keys of one padded block; limits the mask and the padding waste
BLOCK_SCORES = 1 << 20
BLOCK_KEYS = 1 << 14  # sequences x keys; limits the copy of the KV cache


class BatchedAttention(TorchNativeAttnBackend):
    """Drop-in replacement for SGLang's "torch_native" attention backend."""

    # blocks of this forward pass, by sliding window
    _blocks: dict[int | None, list[Block]] | None = None
    # sinks of the layer that is being computed, `[heads]`
    _sinks: torch.Tensor | None = None
    # tokens of a draft that are in the cache, but not in the lengths of their requests
    drafted = 0

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Return the length of the dummy sequences with which data-parallel attention pads a batch
        so that all ranks run the same shape."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Discard the blocks of the last forward pass. Called once before each pass; all layers of
        the pass share the new blocks."""
        super().init_forward_metadata(forward_batch)
        self._blocks = None

    def forward_extend(
        self, *batch: Any, sinks: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Compute attention for new tokens. `sinks` contains one logit per head."""
        self._sinks = sinks
        if not batch[4].forward_mode.is_target_verify():
            return super().forward_extend(*batch, **options)
        with verifying(batch[4]):
            return super().forward_extend(*batch, **options)

    def forward_decode(
        self, *batch: Any, sinks: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """Compute attention for one new token per sequence. `sinks` contains one logit per head."""
        self._sinks = sinks
        return super().forward_decode(*batch, **options)

    # upstream passes tensors by position and options by name

    def _run_sdpa_forward_extend(
        self,
        query: Any,
        output: Any,
        k_cache: Any,
        v_cache: Any,
        *batch: Any,
        causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        table, requests, lengths, _, queries, encoder_lens = batch
        if causal and self._covered(
            query, k_cache, v_cache, encoder_lens, longest=int(lengths.max()), **options
        ):
            return self._run_blocks(
                query, output, k_cache, v_cache, (table, requests, queries, lengths), **options
            )
        return super()._run_sdpa_forward_extend(
            query, output, k_cache, v_cache, *batch, causal=causal, **options
        )

    def _run_sdpa_forward_decode(
        self, query: Any, output: Any, k_cache: Any, v_cache: Any, *batch: Any, **options: Any
    ) -> torch.Tensor:
        table, requests, lengths, encoder_lens = batch
        lengths = lengths + self.drafted
        batch = (table, requests, lengths, encoder_lens)
        if self._covered(query, k_cache, v_cache, encoder_lens, longest=1, **options):
            ones = torch.ones_like(lengths)
            return self._run_blocks(
                query, output, k_cache, v_cache, (table, requests, ones, lengths), **options
            )
        return super()._run_sdpa_forward_decode(query, output, k_cache, v_cache, *batch, **options)

    def _run_blocks(
        self,
        query: Any,
        output: Any,
        k_cache: Any,
        v_cache: Any,
        batch: tuple[Any, Any, Any, Any],
        *,
        scaling: float | None = None,
        sliding_window_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        if self._blocks is None:
            self._blocks = {}
        if sliding_window_size not in self._blocks:
            table, requests, queries, lengths = batch
            made = make_blocks(
                table, requests, queries.tolist(), lengths.tolist(), sliding_window_size
            )
            self._blocks[sliding_window_size] = made
        blocks = self._blocks[sliding_window_size]
        if query.shape[0] > (count := sum(block.queries for block in blocks)):
            # rows added by data-parallel attention as padding belong to no sequence
            output[count:].zero_()
        for block in blocks:
            block.attend(query, output, k_cache, v_cache, scaling, self._sinks)
        return output

    def _covered(
        self,
        query: Any,
        k_cache: Any,
        v_cache: Any,
        encoder_lens: Any,
        *,
        longest: int,
        **options: Any,
    ) -> bool:
        windowed = (
            options.get("sliding_window_size") is not None and self.use_sliding_window_kv_pool
        )
        plain = encoder_lens is None and not options.get("is_cross_attn") and not windowed
        plain = plain and query.dtype == k_cache.dtype == v_cache.dtype
        if self._sinks is not None and not plain:
            raise NotImplementedError(
                "attention sinks on CPU need one cache for all layers, in the model's dtype: "
                "remove kv_cache_dtype from rollout.extra_args"
            )
        return plain and (self._sinks is not None or longest * longest <= BLOCK_SCORES)


def create_batched_attention(runner: Any) -> BatchedAttention:
    """Create the attention backend. The signature is that of SGLang's registry."""
    if runner.use_mla_backend:
        use_absorbed_latents()
    use_host_copies()
    if not runner.spec_algorithm.is_none():
        install_drafting(create_batched_attention)
    return BatchedAttention(runner)


def use_host_copies() -> None:
    """Disable the triton kernel and the pinned memory with which data-parallel attention copies
    data if `is_cpu()` is False, as it is on this platform.

    See sglang/srt/layers/dp_attention.py:644, and sglang/srt/model_executor/forward_batch_info.py
    lines 1948 and 2015 (the only uses of the flag).
    """
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor import forward_batch_info

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    forward_batch_info._is_cpu = True


def use_absorbed_latents() -> None:
    """Make latent attention (DeepSeek) use the absorbed form for prompts too: a single key head of
    width latent + rotary, whose first columns are the values.

    For an unknown backend, SGLang applies the rule for "triton"
    (deepseek_common/attention_backend_handler.py:56), which passes the keys and values of all heads
    as arguments for a prompt without a cached prefix. "torch_native" ignores them and reads the
    cache, which contains latents.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register(
        "torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA
    )


class Block:
    """A group of sequences computed together: the indices of their queries and keys, and the
    visibility mask.

    Everything shared by all layers of a forward pass is prepared once. Each layer gathers its keys
    and values, makes one call, and scatters the rows back.

    Args:
        rows: `[n, t]` index of each query in the flat batch; padding repeats the sequence's last
            query.
        keys: `[n, l]` slot of each key in the KV cache; padding repeats the sequence's first key,
            so values of other sequences are never read.
        visible: `[n, t, l]` True if the query attends to the key.
        valid: `[n, t]` True if the query is not padding.
    """

    def __init__(
        self, rows: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, valid: torch.Tensor
    ) -> None:
        self.shape = rows.shape
        self.length = keys.shape[1]
        self._rows = rows.reshape(-1)
        self._keys = keys.reshape(-1)
        self._visible = visible
        self._masks = dict[tuple[int, torch.dtype], torch.Tensor]()
        self._valid = valid.reshape(-1).nonzero()[:, 0]
        self._targets = self._rows[self._valid]
        self.queries = len(self._targets)

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scaling: float | None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write the attention output of this block's queries to `output`.

        Query heads that share a key head are treated as additional queries of that head, so
        grouped-query attention needs no repeated keys.

        Args:
            query, output: `[tokens, heads, width]`.
            k_cache, v_cache: `[slots, kv heads, width]`; the values' width may differ from the
                keys' (latent attention).
            scaling: factor applied to the scores; None for 1 / sqrt(width).
            sinks: `[heads]` a logit per head that is included in the softmax but contributes no
                value (gpt-oss).
        """
        n, t = self.shape
        heads = query.shape[1]
        kv_heads = k_cache.shape[1]
        shared = heads // kv_heads
        q = query.index_select(0, self._rows).view(n, t, kv_heads, shared, -1)
        q = q.permute(0, 2, 3, 1, 4).reshape(n, kv_heads, shared * t, -1)
        k = self._gathered(k_cache)
        v = self._gathered(v_cache)
        mask = self._mask(shared, query.dtype)
        if sinks is None:
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        else:
            of_queries = sinks.view(kv_heads, shared).repeat_interleave(t, 1)
            out = _attention_with_sinks(q, k, v, mask, of_queries, scaling)
        out = out.view(n, kv_heads, shared, t, -1).permute(0, 3, 1, 2, 4)
        out = out.reshape(n * t, heads, -1)
        if len(out) > self.queries:
            out = out.index_select(0, self._valid)
        output.index_copy_(0, self._targets, out)

    def _gathered(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the block's keys or values, `[n, kv heads, l, width]`.

        Copies full rows of the cache, because indexing two axes takes about three times as long.
        """
        rows = cache.reshape(len(cache), -1).index_select(0, self._keys)
        return rows.view(self.shape[0], self.length, *cache.shape[1:]).transpose(1, 2)

    def _mask(self, shared: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask `[n, 1, shared * t, l]`: 0 for visible keys, else -inf."""
        key = (shared, dtype)
        if key not in self._masks:
            added = torch.zeros(self._visible.shape, dtype=dtype)
            added.masked_fill_(~self._visible, float("-inf"))
            self._masks[key] = added.repeat(1, shared, 1)[:, None]
        return self._masks[key]


def _attention_with_sinks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
    scaling: float | None,
) -> torch.Tensor:
    """Return the attention output `[n, kv heads, queries, width]`, computed in steps with a bounded
    number of scores each.

    Args:
        q: `[n, kv heads, queries, width]`.
        k, v: `[n, kv heads, l, width]`.
        mask: `[n, 1, queries, l]`, additive.
        sinks: `[kv heads, queries]`.
        scaling: factor applied to the scores; None for 1 / sqrt(width).
    """
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    step = max(1, BLOCK_SCORES // (len(q) * k.shape[2]))
    parts = []
    for first in range(0, q.shape[2], step):
        rows = slice(first, first + step)
        scores = torch.matmul(q[:, :, rows], k.mT) * scale + mask[:, :, rows]
        sink = sinks[None, :, rows, None].to(scores.dtype).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        parts.append(torch.matmul(weights, v))
    return torch.cat(parts, dim=2)


def group_by_length(queries: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Yield groups of sequence indices, longest sequences first. The padded size of a group is
    bounded, but a single sequence may exceed the bound."""
    order = [i for i in range(len(lengths)) if queries[i] > 0]
    order.sort(key=lambda i: (-lengths[i], -queries[i]))
    group: list[int] = []
    most_queries = 0
    for i in order:
        widest = max(most_queries, queries[i])
        longest = group[0] if group else i
        keys = (len(group) + 1) * lengths[longest]
        if group and (keys > BLOCK_KEYS or keys * widest > BLOCK_SCORES):
            yield group
            group = []
            widest = queries[i]
        group.append(i)
        most_queries = widest
    if group:
        yield group


def make_blocks(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    queries: list[int],
    lengths: list[int],
    window: int | None = None,
) -> list[Block]:
    """Build the blocks of a batch. Sequence i has `lengths[i]` keys, and queries at its last
    `queries[i]` positions.

    A query attends to its own key and to all earlier keys or, with `window`, only the last `window`
    earlier keys.
    """
    starts = torch.tensor([0, *queries]).cumsum(0)
    blocks = []
    for group in group_by_length(queries, lengths):
        chosen = torch.tensor(group)
        count = torch.tensor([queries[i] for i in group])[:, None]
        length = torch.tensor([lengths[i] for i in group])[:, None]
        step = torch.arange(int(count.max()))[None]
        key = torch.arange(int(length.max()))[None]
        slots = req_to_token[requests[chosen].long()]
        slots = slots[:, : key.shape[1]].long()
        query = step.minimum(count - 1)
        last = (length - count + query)[:, :, None]
        visible = key[:, None, :] <= last
        if window is not None:
            visible &= key[:, None, :] >= last - window
        rows = starts[chosen][:, None] + query
        keys = torch.where(key < length, slots, slots[:, :1])
        blocks.append(Block(rows=rows, keys=keys, visible=visible, valid=step < count))
    return blocks
