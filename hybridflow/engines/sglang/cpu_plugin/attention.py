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

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from hybridflow.engines.sglang.cpu_plugin.padded import BLOCK_SCORES, Block, make_blocks
from hybridflow.engines.sglang.cpu_plugin.speculation import install as install_drafting
from hybridflow.engines.sglang.cpu_plugin.speculation import verifying


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
