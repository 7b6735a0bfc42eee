"""gpt-oss experts for Megatron's MoE layer, with or without Transformer Engine.

They replace `TEGroupedMLP`, which supports neither these biases under expert tensor parallelism nor
interleaved gate and up columns.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)

# parameter: dimension that expert tensor parallelism splits
_SPLIT: dict[str, int | None] = {
    "gate_up_proj": 2,
    "gate_up_proj_bias": 1,
    "down_proj": 1,
    "down_proj_bias": None,
}


class FusedExpertsMlp(MegatronModule):
    """The experts on this rank. Their parameters have the same layout as in the checkpoint."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        alpha: float,
        limit: float,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        """`alpha` and `limit` are taken from `models.fused_experts.FusedExperts`."""
        super().__init__(config=config)
        self.alpha = alpha
        self.limit = limit
        self.groups = pg_collection
        self.cuts = get_pg_size(pg_collection.expt_tp)
        ffn = int(config.moe_ffn_hidden_size) // self.cuts
        shapes = {
            "gate_up_proj": (num_local_experts, config.hidden_size, 2 * ffn),
            "gate_up_proj_bias": (num_local_experts, 2 * ffn),
            "down_proj": (num_local_experts, ffn, config.hidden_size),
            "down_proj_bias": (num_local_experts, config.hidden_size),
        }
        for name, shape in shapes.items():
            parameter = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
            # the gradient norm counts a replicated bias only on the first rank
            is_counted = _SPLIT[name] is not None or get_pg_rank(pg_collection.expt_tp) == 0
            set_tensor_model_parallel_attributes(parameter, is_counted, _SPLIT[name] or 0, 1)
            setattr(self, name, parameter)

    def forward(self, x: Tensor, tokens_per_expert: Any, probs: Tensor) -> tuple[Tensor, None]:
        """Apply expert i to the i-th run of rows in x [rows, hidden], and multiply the results by
        probs [rows].

        Returns ([rows, hidden], None for the bias).
        """
        counts = getattr(tokens_per_expert, "counts", tokens_per_expert).tolist()
        # each of the ranks that share an expert adds only a part of the bias, but gets the full
        # gradient
        bias = self.down_proj_bias
        if self.cuts > 1:
            bias = bias - bias.detach() * (1 - 1 / self.cuts)
        runs = x.split(counts)
        shares = probs.to(x.dtype).split(counts)
        outs = []
        for expert, (run, share) in enumerate(zip(runs, shares, strict=True)):
            wide = torch.addmm(self.gate_up_proj_bias[expert], run, self.gate_up_proj[expert])
            out = torch.addmm(bias[expert], self._gated(wide), self.down_proj[expert])
            outs.append(out * share[:, None])
        return torch.cat(outs), None

    def _gated(self, wide: Tensor) -> Tensor:
        """Apply the gated activation to interleaved gate and up columns: [rows, 2 f] -> [rows,
        f]."""
        gate = wide[:, ::2].clamp(max=self.limit)
        up = wide[:, 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    def backward_dw(self) -> None:
        """Megatron's hook for delayed weight gradients; a no-op here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the checkpoint layout: experts are sharded across expert-parallel ranks, and each
        parameter's split dimension across expert-tensor-parallel ranks."""
        lead = len(sharded_offsets)
        experts = (lead, get_pg_rank(self.groups.ep), get_pg_size(self.groups.ep))
        cut = get_pg_rank(self.groups.expt_tp)
        copy = get_pg_rank(self.groups.expt_dp)
        found = {}
        for name, dim in _SPLIT.items():
            offsets = [*sharded_offsets, experts]
            if dim is not None:
                offsets.append((lead + dim, cut, self.cuts))
            found[f"{prefix}{name}"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{name}",
                getattr(self, name),
                *offsets,
                replica_id=(0, cut if dim is None else 0, copy),
                prepend_axis_num=lead,
            )
        return found
