"""Core attention over packed sequences with torch's SDPA, for machines without Transformer Engine.

Megatron's DotProductAttention takes no packed sequences (dot_product_attention.py:59, 154). Segments are grouped by length class
(powers of two), each class runs as one padded causal batch: a padded key lies behind every real query, so the causal mask alone hides it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)


class SegmentClasses:
    """For each length class: `gather` [n, longest] row numbers (clamped inside the segment), `real` [n, longest] true where not padding."""

    def __init__(self, cu_seqlens: torch.Tensor) -> None:
        bounds = cu_seqlens.to(torch.int64)
        starts, lengths = bounds[:-1], bounds[1:] - bounds[:-1]
        starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        classes = torch.ceil(torch.log2(lengths.double())).long()
        self.groups: list[tuple[torch.Tensor, torch.Tensor]] = []
        for value in classes.unique().tolist():
            chosen = classes == value
            start, length = starts[chosen, None], lengths[chosen, None]
            step = torch.arange(int(length.max()), device=bounds.device)[None, :]
            self.groups.append((start + torch.minimum(step, length - 1), step < length))
        # where each packed row stands in the concatenation of the classes' real rows
        order = torch.cat([gather[real] for gather, real in self.groups]) if self.groups else bounds.new_zeros(0)
        self.restore = torch.empty_like(order)
        self.restore[order] = torch.arange(len(order), device=bounds.device)


class PackedAttention(MegatronModule):
    """Causal grouped-query attention on `thd` (packed) or `sbhd` inputs; a drop-in for DotProductAttention."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError("context parallelism needs Transformer Engine's attention for now")
        self.layer_number, self.scale = layer_number, softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """thd: query, key [t, (kv) heads, d], value [t, kv heads, v] -> [t, 1, heads*v]. sbhd: [s, b, ...] -> [s, b, heads*v].

        v may differ from d (latent attention).
        """
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            return self._packed(query, key, value, packed_seq_params)
        out = self._causal(*(t.permute(1, 2, 0, 3) for t in (query, key, value)))
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _packed(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: Any) -> torch.Tensor:
        classes = getattr(params, "segment_classes", None)
        if classes is None:
            classes = params.segment_classes = SegmentClasses(params.cu_seqlens_q)
        outs = []
        for gather, real in classes.groups:
            out = self._causal(*(t[gather].transpose(1, 2) for t in (query, key, value)))
            outs.append(out.transpose(1, 2)[real])
        packed = torch.cat(outs)[classes.restore]
        return packed.reshape(packed.shape[0], 1, -1)

    def _causal(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query, key [b, (kv) heads, s, d], value [b, kv heads, s, v] -> [b, heads, s, v]."""
        gqa = key.shape[1] != query.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale, enable_gqa=gqa)
