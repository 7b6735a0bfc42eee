"""The gated delta net of Qwen3-Next and Qwen3.5 as a layer of Megatron, over packed rows.

Megatron-Core 0.16.1 has a module of this kind that supports neither packed rows nor context
parallelism, and needs `fla`. `models.delta_net` describes the parameters.
"""

from __future__ import annotations

import itertools
from typing import Any

import megatron.core.models.gpt.gpt_layer_specs as layer_specs
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.device.platform import Platform
from hybridflow.mcore.delta_rule import convolved, delta_rule
from hybridflow.mcore.parallel import ZigZag
from hybridflow.mcore.torch_functions import rms_norm
from hybridflow.models.delta_net import DeltaNet

_SPLIT = {"conv1d.weight": 0, "dt_bias": 0, "A_log": 0}  # by tensor parallelism


class GatedDeltaNet(MegatronModule):
    """This rank's heads of a gated delta net.

    Under context parallelism, ranks exchange activations so that each computes whole rows for a
    share of the heads.
    """

    def __init__(
        self, config: TransformerConfig, *, block: DeltaNet, pg_collection: Any, **_: Any
    ) -> None:
        """`block` describes this block of the layer in the family's map."""
        super().__init__(config=config)
        self.block = block
        self.groups = pg_collection
        self.heads = block.key_heads // get_pg_size(pg_collection.tp)
        rank = get_pg_rank(pg_collection.cp)
        size = get_pg_size(pg_collection.cp)
        # key heads of each context-parallel rank
        bounds = [self.heads * number // size for number in range(size + 1)]
        self.shares = [high - low for low, high in itertools.pairwise(bounds)]
        self.mine = slice(bounds[rank], bounds[rank + 1])
        self.in_proj, self.out_proj = self._projections(config)
        dtype = config.params_dtype
        channels = self.heads * block.mixed
        self.conv1d = nn.Conv1d(
            channels, channels, block.kernel, groups=channels, bias=False, dtype=dtype
        )
        self.dt_bias = nn.Parameter(torch.ones(self.heads * block.ratio, dtype=dtype))
        self.A_log = nn.Parameter(torch.zeros(self.heads * block.ratio, dtype=dtype))
        self.out_norm = nn.RMSNorm(block.value_dim, config.layernorm_epsilon, dtype=dtype)
        for name in _SPLIT:
            set_tensor_model_parallel_attributes(self.get_parameter(name), True, 0, 1)

    def _projections(self, config: TransformerConfig) -> tuple[Any, Any]:
        """Build `in_proj`, which includes the norm before the block, and `out_proj`."""
        block = self.block
        kinds = layer_specs.TESpecProvider()
        linear = {
            "config": config,
            "bias": False,
            "is_expert": False,
            "tp_group": self.groups.tp,
        }
        in_proj = kinds.column_parallel_layer_norm_linear()(
            block.hidden,
            block.key_heads * block.rows,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **linear,
        )
        out_proj = kinds.row_parallel_linear()(
            block.key_heads * block.values,
            block.hidden,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **linear,
        )
        return in_proj, out_proj

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, **named: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map hidden states [t, 1, h] of packed rows to [t, 1, h], without a bias."""
        params = named["packed_seq_params"]
        projected, _ = self.in_proj(hidden_states)
        rows = projected.view(-1, self.heads, self.block.rows)
        if len(self.shares) == 1:
            gates = rows[..., -self.block.values :]
            mixed = self._mixed(rows, params)
        else:
            inner = self.block.rows - self.block.values
            inputs, gates = rows.split([inner, self.block.values], dim=-1)
            order, back = self._order(params)
            mixed = self._mixed(self._to_heads(inputs, order), params)
            mixed = self._to_tokens(mixed, back)
        heads = (len(rows), -1, self.block.value_dim)
        # each rank's heads contribute to the gradient of the norm, which all ranks have
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, group=self.groups.tp)
        normed = rms_norm(mixed.reshape(heads), weight, self.config.layernorm_epsilon)
        gated = normed * F.silu(gates.reshape(heads).float())
        gated = gated.to(hidden_states.dtype)
        output, bias = self.out_proj(gated.reshape(len(rows), 1, -1))
        return output, bias

    def _mixed(self, rows: Tensor, params: Any) -> Tensor:
        """Apply the convolution and the delta rule to `rows` [t, heads, n] of this rank's heads
        (`self.mine`). Returns [t, heads, values]."""
        block = self.block
        count = len(rows)
        ratio = block.ratio
        weight = self.conv1d.weight.view(self.heads, block.mixed, 1, -1)[self.mine]
        x = rows[..., : block.mixed].reshape(count, -1)
        x = F.silu(convolved(x, weight.flatten(0, 1), params))
        widths = [block.key_dim, block.key_dim, block.values]
        query, key, value = x.view(count, -1, block.mixed).split(widths, dim=-1)
        both = rows[..., block.mixed : block.mixed + 2 * ratio]
        betas, decays = (part.reshape(count, -1) for part in both.chunk(2, dim=-1))
        heads = slice(self.mine.start * ratio, self.mine.stop * ratio)
        rate = self.A_log[heads].float().exp()
        bias = self.dt_bias[heads].float()
        out = delta_rule(
            query.repeat_interleave(ratio, dim=1),
            key.repeat_interleave(ratio, dim=1),
            value.reshape(count, -1, block.value_dim),
            -rate * F.softplus(decays.float() + bias),
            betas.sigmoid().float(),
            params,
        )
        return out.reshape(count, -1, block.values)

    # ---- context parallelism

    def _order(self, params: Any) -> tuple[Tensor, Tensor]:
        """Return each packed row's index in the concatenation of all ranks' rows, and the inverse
        permutation."""
        found = getattr(params, "zigzag_order", None)
        if found is None:
            layout = ZigZag.of(params.bounds.numpy(), len(self.shares))
            share = int(params.bounds[-1]) // len(self.shares)
            order = torch.from_numpy(layout.owner * share + layout.local)
            upload = Platform.detect().upload
            found = params.zigzag_order = (upload(order), upload(order.argsort()))
        return found

    def _to_heads(self, rows: Tensor, order: Tensor) -> Tensor:
        """Redistribute from this rank's tokens with all heads, [t', heads, n], to all tokens in
        packed order with this rank's heads, [t, mine, n]."""
        mine = self.mine.stop - self.mine.start
        size = len(self.shares)
        sent = rows.transpose(0, 1).contiguous()
        found = all_to_all(self.groups.cp, sent, [mine] * size, self.shares)
        found = found.unflatten(0, (size, mine)).transpose(1, 2).flatten(0, 1)
        return found.index_select(0, order)

    def _to_tokens(self, rows: Tensor, back: Tensor) -> Tensor:
        """Inverse of `_to_heads`: [t, mine, n] to [t', heads, n]."""
        mine = self.mine.stop - self.mine.start
        size = len(self.shares)
        by_owner = rows.index_select(0, back).unflatten(0, (size, -1))
        sent = by_owner.transpose(1, 2).flatten(0, 1).contiguous()
        found = all_to_all(self.groups.cp, sent, self.shares, [mine] * size)
        moved: Tensor = found.transpose(0, 1)
        return moved

    # ---- checkpoints

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the checkpoint layout: heads are sharded across tensor-parallel ranks."""
        found: dict[str, Any] = {}
        for name in ("in_proj", "out_proj"):
            linear = getattr(self, name)
            found |= sharded_state_dict_default(
                linear, f"{prefix}{name}.", sharded_offsets, metadata
            )
        own = {name: self.get_parameter(name) for name in (*_SPLIT, "out_norm.weight")}
        return found | make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            _SPLIT,
            sharded_offsets,
            tp_group=self.groups.tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
