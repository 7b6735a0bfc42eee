"""Torch modules with Transformer Engine's parameter names, for machines without Transformer Engine.

Megatron's stock TE layer spec is built from these modules instead of TE's classes. Parameter names
(`linear_qkv.layer_norm_weight`, `mlp.experts.linear_fc1.weight3`) and checkpoints are therefore the
same with and without TE, and one HF map serves both.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.mcore.packed_attention import PackedAttention
from hybridflow.mcore.torch_functions import (
    SwiGlu,
    grouped_linear,
    permute,
    rms_norm,
    rotate,
)


class RMSNorm(nn.Module):
    """RMS norm whose weight is marked with `sequence_parallel`. Tensor-parallel MoE training
    requires sequence parallelism, which Megatron's WrappedTorchNorm does not support
    (torch_norm.py:32).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., hidden]."""
        return rms_norm(x, gain(self.weight, self.zero_centered), self.eps)


def gain(weight: Tensor, zero_centered: bool) -> Tensor:
    """Return the scale of a norm: its weight, plus 1 if the weight is zero-centered."""
    return weight + 1 if zero_centered else weight


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMS norm and column-parallel linear in one module, with the parameter names of
    TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Apply the norm and the linear to x [s, b, hidden].

        The norm runs on this rank's share of the sequence, before sequence parallelism gathers it.
        """
        weight = gain(self.layer_norm_weight, self.zero_centered)
        return super().forward(rms_norm(x, weight, self.eps), *args, **kwargs)


class DuplicatedLinear(nn.Module):
    """A linear replicated on every tensor-parallel rank (TELinear with parallel_mode "duplicated").

    Used for latent attention's down projections. Under sequence parallelism each rank applies it to
    its share of the sequence, so its gradient must be summed over the tensor-parallel ranks. The
    `sequence_parallel` mark requests this.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError("duplicated linears with bias require Transformer Engine")
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight.data)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Apply the linear to x [..., in]. Returns ([..., out], None for the bias)."""
        return F.linear(x, self.weight), None

    def backward_dw(self) -> None:
        """Megatron's hook for delayed weight gradients; a no-op here."""


class GroupedLinear(nn.Module):
    """One weight per local expert, applied to consecutive runs of rows.

    Parameters have TEGroupedLinear's names (weight0, weight1, ...). This is the experts' first
    linear, split by output rows.
    """

    split_dim = 0  # dimension of the weight split by expert tensor parallelism

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool = False,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise ValueError("experts with bias require Transformer Engine")
        self.num_gemms = num_gemms
        self.groups = pg_collection
        self.tp_group = pg_collection.expt_tp
        shape = [output_size, input_size]
        shape[self.split_dim] //= get_pg_size(self.tp_group)
        for index in range(num_gemms):
            weight = nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))
            if config.perform_initialization:
                init_method(weight.data)
            set_tensor_model_parallel_attributes(weight, True, self.split_dim, 1)
            setattr(self, f"weight{index}", weight)

    def forward(self, x: Tensor, m_splits: Any) -> tuple[Tensor, None]:
        """Apply expert i to the i-th run of rows of x [rows, in].

        `m_splits` contains the row count of each expert, as a list or `ExpertCounts`. Returns
        ([rows, out], None for the bias).
        """
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]
        return grouped_linear(x, m_splits, weights), None

    def backward_dw(self) -> None:
        """Megatron's hook for delayed weight gradients; a no-op here."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the checkpoint layout, with the same keys as TE's grouped linear."""
        experts = get_pg_size(self.groups.ep) * self.num_gemms
        first = get_pg_rank(self.groups.ep) * self.num_gemms
        state = self.state_dict(prefix="", keep_vars=True)
        sharded = {}
        for i in range(self.num_gemms):
            tensors = make_sharded_tensors_for_checkpoint(
                {f"{i}.weight": state[f"weight{i}"]},
                "",
                {f"{i}.weight": self.split_dim},
                (*sharded_offsets, (len(sharded_offsets), first + i, experts)),
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(tensors, f"{i}.", prefix)
            sharded[f"{prefix}weight{i}"] = tensors[f"{i}.weight"]
        for tensor in sharded.values():
            tensor.replica_id = (*tensor.replica_id[:2], get_pg_rank(self.groups.expt_dp))
        return sharded


class RowGroupedLinear(GroupedLinear):
    """The experts' second linear, split by input columns."""

    split_dim = 1


class TorchSpecProvider(BackendSpecProvider):
    """Provides this file's modules to Megatron's TE layer spec."""

    def linear(self) -> type:
        """Return the replicated linear (latent attention's down projections)."""
        return DuplicatedLinear

    def column_parallel_linear(self) -> type:
        """Return the linear split by output rows."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Return the linear split by input columns."""
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """Return True, because the norm is part of the linear, as in TE."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Return the linear split by output rows, with the preceding norm included."""
        return NormColumnParallelLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type:
        """Return RMSNorm, the only norm of the supported families."""
        return RMSNorm

    def core_attention(self) -> type:
        """Return the attention over packed sequences, which supports context parallelism."""
        return PackedAttention

    def grouped_mlp_modules(
        self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool = False
    ) -> Any:
        """Return TEGroupedMLP with this module's linears. The class itself does not depend on
        TE.
        """
        # 0.16: (class, submodules); the caller adds the activation
        if not hasattr(experts, "GroupedMLPSubmodules"):
            return experts.TEGroupedMLP, MLPSubmodules(
                linear_fc1=GroupedLinear, linear_fc2=RowGroupedLinear
            )
        parts = experts.GroupedMLPSubmodules(
            linear_fc1=GroupedLinear,
            linear_fc2=RowGroupedLinear,
            activation_func=self.activation_func(),
        )
        return functools.partial(experts.TEGroupedMLP, submodules=parts)  # 0.19: a factory

    def activation_func(self) -> type:
        """Return SwiGlu, the only gated activation of the supported families."""
        return SwiGlu


def install() -> None:
    """Make Megatron's TE layer spec use `TorchSpecProvider`, and fix code paths that fail without
    TE. Idempotent.

    Line numbers refer to Megatron-Core 0.16.1 unless another version is given.
    """
    import megatron.core.models.gpt.gpt_layer_specs as layer_specs
    import megatron.core.models.gpt.moe_module_specs as moe_specs
    from megatron.core.extensions import transformer_engine_spec_provider
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention, transformer_block
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    layer_specs.TESpecProvider = moe_specs.TESpecProvider = TorchSpecProvider
    # 0.19: backends.py:209, for latent attention
    transformer_engine_spec_provider.TESpecProvider = TorchSpecProvider
    layer_specs.TENorm = RMSNorm
    rope_utils.fused_apply_rotary_pos_emb_thd = rotate
    # transformer_block.py:66 falls back to WrappedTorchNorm
    transformer_block.LayerNormImpl = RMSNorm
    # multi_latent_attention.py:382 and 424 check for TELinear down projections; the name is None
    # there without TE
    multi_latent_attention.TELinear = DuplicatedLinear
    # without TE, random.py:636 treats every module discarded by selective recomputation as fp8 and
    # queries TE for its state
    if not random.HAVE_TE:
        random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
        random.activation_recompute_forward = random.fp8_autocast = _without_fp8
    if not hasattr(moe_utils, "te_general_gemm"):
        # moe_utils.py:34 imports it in a try; 1192 and 1225 then raise NameError
        moe_utils.te_general_gemm = None
    # 0.19 has its own version that does not sync either
    if "align_size" not in inspect.signature(moe_utils.permute).parameters:
        token_dispatcher.permute = functools.partial(permute, moe_utils.permute)
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    if not getattr(dispatcher._maybe_dtoh_and_synchronize, "from_hybridflow", False):
        dispatcher._maybe_dtoh_and_synchronize = _where_they_are(
            dispatcher._maybe_dtoh_and_synchronize
        )
        token_dispatcher.sort_chunks_by_idxs = functools.partial(
            _sorted_chunks, moe_utils.sort_chunks_by_idxs
        )
    if not getattr(token_dispatcher.maybe_move_tensor_to_cpu, "from_hybridflow", False):
        token_dispatcher.maybe_move_tensor_to_cpu = _to_host(
            token_dispatcher.maybe_move_tensor_to_cpu
        )


class ExpertCounts:
    """The number of rows for each local expert, int64 [experts] on the device."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    def tolist(self) -> ExpertCounts:
        """Return self. `TEGroupedMLP` passes the result of `tolist` to `GroupedLinear`, which needs
        no list.
        """
        return self


def _where_they_are(original: Any) -> Any:
    """Keep expert counts on the device if there is no expert parallelism.

    No other rank needs the row counts, so the host does not synchronise on them
    (token_dispatcher.py:803).
    """

    def _maybe_dtoh_and_synchronize(
        dispatcher: Any, point: str, tokens_per_expert: Any = None
    ) -> Any:
        if dispatcher.ep_size > 1 or dispatcher.tp_size > 1 or tokens_per_expert is None:
            return original(dispatcher, point, tokens_per_expert)
        return (
            tokens_per_expert
            if isinstance(tokens_per_expert, ExpertCounts)
            else ExpertCounts(tokens_per_expert)
        )

    _maybe_dtoh_and_synchronize.from_hybridflow = True  # type: ignore[attr-defined]
    return _maybe_dtoh_and_synchronize


def _sorted_chunks(
    original: Any,
    rows: Tensor,
    split_sizes: Any,
    order: Tensor,
    probs: Any = None,
    fused: bool = False,
) -> Any:
    """Same as Megatron's `sort_chunks_by_idxs`, but without copying chunks that are already in
    order, as with a single rank."""
    if torch.equal(order, torch.arange(len(order))):
        return rows, probs
    return original(rows, split_sizes, order, probs, fused)


def _without_fp8(**_: Any) -> contextlib.AbstractContextManager[None]:
    """No-op context manager that replaces TE's fp8 contexts around a forward pass and its
    recomputation."""
    return contextlib.nullcontext()


def _to_host(original: Any) -> Any:
    """Convert the all-to-all's split sizes to numpy, also on CPU.

    gloo's all_to_all_single expects a list, and moe_utils.py:1092 only converts CUDA tensors.
    """

    def maybe_move_tensor_to_cpu(
        tensor: Any, as_numpy: bool = False, record_stream: bool = False
    ) -> Any:
        moved = original(tensor, as_numpy, record_stream)
        if as_numpy and isinstance(moved, Tensor) and not moved.is_cuda:
            return moved.numpy()
        return moved

    maybe_move_tensor_to_cpu.from_hybridflow = True  # type: ignore[attr-defined]
    return maybe_move_tensor_to_cpu
