"""SGLang's torch-native attention with a batch at a time instead of a sequence at a time. Imported only inside SGLang
processes.

Upstream loops over the sequences of a batch in Python, in every layer
(sglang/srt/layers/attention/torch_native_backend.py, `_run_sdpa_forward_extend` and `_run_sdpa_forward_decode`): with a
hundred short sequences that loop is most of an engine's time. Here sequences of similar length are padded to one block
and go through one call. What the padded form does not cover (cross attention, sliding windows, other cache dtypes, very
long sequences) is left to upstream.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

BLOCK_SCORES = 1 << 20  # sequences x queries x keys of one padded block; bounds the mask and what padding wastes
BLOCK_KEYS = 1 << 14  # sequences x keys; bounds the copy of the KV cache


class Block:
    """Sequences computed together: where their queries are, where their keys are, who sees whom.

    Args:
        rows: `[n, t]` index of each query in the flat batch; padding repeats the sequence's last query.
        keys: `[n, l]` slot of each key in the KV cache; padding repeats the sequence's first key, so no foreign value
            is ever read.
        mask: `[n, t, l]` True where a query sees a key.
        valid: `[n, t]` True where a query is not padding.
    """

    def __init__(self, rows: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor, valid: torch.Tensor) -> None:
        self.rows, self.keys, self.mask, self.valid = rows, keys, mask, valid

    def attend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scaling: float | None,
    ) -> None:
        """Write the attention of this block's queries to `output`.

        The query heads that share a key head are laid out as further queries of it: nothing is repeated for
        grouped-query attention.

        Args:
            query, output: `[tokens, heads, width]`.
            k_cache, v_cache: `[slots, kv heads, width]`; the values' width may differ from the keys' (latent
                attention).
            scaling: factor on the scores; None: 1 / sqrt(width).
        """
        n, t = self.rows.shape
        heads, kv_heads = query.shape[1], k_cache.shape[1]
        shared = heads // kv_heads
        q = (
            query[self.rows]
            .view(n, t, kv_heads, shared, -1)
            .permute(0, 2, 3, 1, 4)
            .reshape(n, kv_heads, shared * t, -1)
        )
        k, v = k_cache[self.keys].transpose(1, 2), v_cache[self.keys].transpose(1, 2)
        mask = self.mask.repeat(1, shared, 1)[:, None]
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        out = out.view(n, kv_heads, shared, t, -1).permute(0, 3, 1, 2, 4).reshape(n, t, heads, -1)
        output[self.rows[self.valid]] = out[self.valid]


def group_by_length(queries: list[int], lengths: list[int]) -> Iterator[list[int]]:
    """Indices of sequences, longest first, in groups of bounded padded size (one sequence always fits)."""
    order = sorted((i for i in range(len(lengths)) if queries[i] > 0), key=lambda i: (-lengths[i], -queries[i]))
    group: list[int] = []
    most_queries = 0
    for i in order:
        widest = max(most_queries, queries[i])
        keys = (len(group) + 1) * lengths[group[0] if group else i]
        if group and (keys > BLOCK_KEYS or keys * widest > BLOCK_SCORES):
            yield group
            group, widest = [], queries[i]
        group.append(i)
        most_queries = widest
    if group:
        yield group


def make_blocks(
    req_to_token: torch.Tensor, requests: torch.Tensor, queries: list[int], lengths: list[int]
) -> list[Block]:
    """Blocks for a batch whose sequence i has `lengths[i]` keys, the last `queries[i]` of which are its queries."""
    starts = torch.tensor([0, *queries]).cumsum(0)
    blocks = []
    for group in group_by_length(queries, lengths):
        chosen = torch.tensor(group)
        count = torch.tensor([queries[i] for i in group])[:, None]
        length = torch.tensor([lengths[i] for i in group])[:, None]
        step, key = torch.arange(int(count.max()))[None], torch.arange(int(length.max()))[None]
        slots = req_to_token[requests[chosen].long()][:, : key.shape[1]].long()
        last_visible = length - count + step.minimum(count - 1)
        blocks.append(
            Block(
                rows=starts[chosen][:, None] + step.minimum(count - 1),
                keys=torch.where(key < length, slots, slots[:, :1]),
                mask=key[:, None, :] <= last_visible[:, :, None],
                valid=step < count,
            )
        )
    return blocks


class BatchedAttention(TorchNativeAttnBackend):
    """Drop-in for "torch_native"."""

    _blocks: list[Block] | None = None

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        """Length of the sequences that data-parallel attention pads a batch with, so that all ranks run the same
        shape."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Called once before each forward pass: the blocks of the last one are forgotten, its layers share the new
        ones."""
        super().init_forward_metadata(forward_batch)
        self._blocks = None

    def _run_sdpa_forward_extend(
        self,
        query: Any,
        output: Any,
        k_cache: Any,
        v_cache: Any,
        req_to_token: Any,
        req_pool_indices: Any,
        seq_lens: Any,
        extend_prefix_lens: Any,
        extend_seq_lens: Any,
        encoder_lens: Any = None,
        *,
        causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        if causal and self._covered(query, k_cache, v_cache, encoder_lens, longest=int(seq_lens.max()), **options):
            if self._blocks is None:
                self._blocks = make_blocks(req_to_token, req_pool_indices, extend_seq_lens.tolist(), seq_lens.tolist())
            return self._run_blocks(query, output, k_cache, v_cache, options)
        return super()._run_sdpa_forward_extend(
            query,
            output,
            k_cache,
            v_cache,
            req_to_token,
            req_pool_indices,
            seq_lens,
            extend_prefix_lens,
            extend_seq_lens,
            encoder_lens,
            causal=causal,
            **options,
        )

    def _run_sdpa_forward_decode(
        self,
        query: Any,
        output: Any,
        k_cache: Any,
        v_cache: Any,
        req_to_token: Any,
        req_pool_indices: Any,
        seq_lens: Any,
        encoder_lens: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        if self._covered(query, k_cache, v_cache, encoder_lens, longest=1, **options):
            if self._blocks is None:
                self._blocks = make_blocks(req_to_token, req_pool_indices, [1] * len(seq_lens), seq_lens.tolist())
            return self._run_blocks(query, output, k_cache, v_cache, options)
        return super()._run_sdpa_forward_decode(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, **options
        )

    def _run_blocks(self, query: Any, output: Any, k_cache: Any, v_cache: Any, options: dict[str, Any]) -> torch.Tensor:
        blocks = self._blocks or []
        if query.shape[0] > (count := sum(int(block.valid.sum()) for block in blocks)):
            output[count:].zero_()  # rows that data-parallel attention pads a prompt with belong to no sequence
        for block in blocks:
            block.attend(query, output, k_cache, v_cache, options.get("scaling"))
        return output

    @staticmethod
    def _covered(query: Any, k_cache: Any, v_cache: Any, encoder_lens: Any, *, longest: int, **options: Any) -> bool:
        plain = encoder_lens is None and not options.get("is_cross_attn") and options.get("sliding_window_size") is None
        return plain and query.dtype == k_cache.dtype == v_cache.dtype and longest * longest <= BLOCK_SCORES


def create_batched_attention(runner: Any) -> BatchedAttention:
    """Factory in the form SGLang's registry wants."""
    if runner.use_mla_backend:
        use_absorbed_latents()
    use_host_copies()
    return BatchedAttention(runner)


def use_host_copies() -> None:
    """Data-parallel attention copies by a triton kernel and through pinned memory unless `is_cpu()`, which this
    platform is not.

    sglang/srt/layers/dp_attention.py:644, sglang/srt/model_executor/forward_batch_info.py:1948 and 2015 (the only
    readers of the flag).
    """
    from sglang.srt.layers import dp_attention
    from sglang.srt.model_executor import forward_batch_info

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    forward_batch_info._is_cpu = True


def use_absorbed_latents() -> None:
    """Let latent attention (DeepSeek) run absorbed, prompts too: one key head of latent + rotary width, values its
    first columns.

    For a backend that it does not know SGLang takes the rule of "triton"
    (deepseek_common/attention_backend_handler.py:56): a prompt without cached prefix goes to attention with keys and
    values of all heads as arguments, which "torch_native" ignores, since it reads the cache, and the cache has latents.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)
