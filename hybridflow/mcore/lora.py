"""Low-rank adapters on Megatron's linears: the base weights are frozen, and two small factors are
trained.

The linears keep their classes, names and weights; a forward hook adds the adapter's output. Family
maps, checkpoints and the weight sync plan are therefore unchanged. `models.lora` describes the
sharding of the factors, which determines the communication between ranks:

    weight split by   A [r, in]     B [out, r]   between A and B in the forward pass
    rows              whole         own rows     copy; under sequence parallelism gather
    columns           own columns   whole        sum; under sequence parallelism scatter
    nothing           whole         whole        nothing

If a replicated factor is applied only to a rank's share of the sequence, its gradient is summed
across ranks, as for a norm. Only [tokens, r] is communicated, never [tokens, hidden].

A grouped linear of routed experts has one A and one B for each local expert. Expert tensor
parallelism splits the factors in the same way. The token dispatcher already gathers the tokens of
the ranks that share an expert and sums their outputs, so there is no communication between A and B.
The gradients of whole factors are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.errors import ModelError
from hybridflow.mcore.model import by_chunk
from hybridflow.mcore.parallel import coordinates
from hybridflow.mcore.torch_functions import grouped_linear
from hybridflow.models import Family
from hybridflow.models.layout import LocalTensor
from hybridflow.models.lora import AdaptedWeight, AdapterMap, MergedCopies, start_gradient
from hybridflow.reshard.layout import rank_tensors

_OWN = {"A": "columns", "B": "rows"}  # the cut of the weight that also cuts this factor


class Adapter(torch.nn.Module):
    """The adapter of one linear: scale * B A."""

    def __init__(self, linear: Any, described: AdaptedWeight, scale: float, config: Any) -> None:
        """`linear` is the adapted module and `config` its TransformerConfig."""
        super().__init__()
        weight = linear.weight
        self.cut = described.cut
        self.scale = scale
        self.sequence_parallel = config.sequence_parallel
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.A = torch.nn.Parameter(
            torch.empty(described.a.shape, dtype=weight.dtype, device=weight.device)
        )
        self.B = torch.nn.Parameter(
            torch.empty(described.b.shape, dtype=weight.dtype, device=weight.device)
        )
        # TE's and our fused linears include the preceding norm, whose output is not stored, so it
        # is recomputed here. The linear is wrapped in a tuple so that it does not become a child of
        # its own child.
        self._norm = (linear, float(linear.eps)) if hasattr(linear, "layer_norm_weight") else None
        if self.cut == "rows":
            # otherwise the gradient norm would count the rows of only one rank
            set_tensor_model_parallel_attributes(self.B, True, 0, 1)
        if self.cut == "columns":
            set_tensor_model_parallel_attributes(self.A, True, 1, 1)
        if self.sequence_parallel:
            _mark_sequence_parallel(
                [
                    factor
                    for factor, cut in ((self.A, "columns"), (self.B, "rows"))
                    if self.cut != cut
                ]
            )

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """Return the adapter's contribution to the linear's output. x [s, b, in] is the linear's
        input."""
        if self._norm is not None:
            linear, epsilon = self._norm
            weight = linear.layer_norm_weight
            x = F.rms_norm(x, (x.shape[-1],), weight + 1 if self.zero_centered else weight, epsilon)
        return F.linear(self._between(F.linear(x, self.A)) * self.scale, self.B)

    def _between(self, low: Tensor) -> Tensor:
        """Communicate A's output [s, b, r] between ranks as needed for B's input."""
        group = parallel_state.get_tensor_model_parallel_group()
        if self.cut == "rows":
            if self.sequence_parallel:
                return gather_from_sequence_parallel_region(
                    low, tensor_parallel_output_grad=True, group=group
                )
            return copy_to_tensor_model_parallel_region(low, group=group)
        if self.cut == "columns":
            if self.sequence_parallel:
                return reduce_scatter_to_sequence_parallel_region(low, group=group)
            return reduce_from_tensor_model_parallel_region(low, group=group)
        return low


class ExpertAdapters(torch.nn.Module):
    """The adapters of a layer's local experts on one grouped linear: scale * B A, with factors
    `A0`, `B0`, `A1`, ... for the first, second, ... expert."""

    def __init__(self, linear: Any, described: Sequence[AdaptedWeight], scale: float) -> None:
        """`linear` is the grouped linear, and `described` describes its weights, in expert
        order."""
        super().__init__()
        self.cut = described[0].cut
        self.scale = scale
        self.experts = len(described)
        is_first = parallel_state.get_expert_tensor_parallel_rank() == 0
        for expert, one in enumerate(described):
            for which, local in (("A", one.a), ("B", one.b)):
                factor = torch.nn.Parameter(
                    torch.empty(
                        local.shape, dtype=linear.weight0.dtype, device=linear.weight0.device
                    )
                )
                self.register_parameter(f"{which}{expert}", factor)
                # Every rank's experts count in the gradient norm, whatever its tensor-parallel
                # rank. Of a factor that is whole on all ranks of an expert, one copy counts.
                set_tensor_model_parallel_attributes(factor, True, 1 if which == "A" else 0, 1)
                if self.cut != _OWN[which] and not is_first:
                    factor.shared = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor, m_splits: Any) -> Tensor:
        """Return the adapters' contribution to the linear's output [rows, out]. The arguments are
        the linear's arguments: x [rows, in], and the number of rows of each expert."""
        low = grouped_linear(x, m_splits, self._factors("A")) * self.scale
        return grouped_linear(low, m_splits, self._factors("B"))

    def _factors(self, which: str) -> Sequence[Tensor]:
        factors = [getattr(self, f"{which}{expert}") for expert in range(self.experts)]
        if self.cut in ("nothing", _OWN[which]):
            return factors
        return _sum_gradient(torch.stack(factors)).unbind(0)


def _sum_gradient(factors: Tensor) -> Tensor:
    """Return the factors unchanged; the backward pass sums their gradient over the ranks that share
    an expert.

    Each of these ranks computes only part of the output, and therefore only part of a whole
    factor's gradient.
    """
    return copy_to_tensor_model_parallel_region(
        factors, group=parallel_state.get_expert_tensor_parallel_group()
    )


class Adapters:
    """All adapters of this rank. Attaching them freezes all other parameters.

    Raises:
        ModelError: a stage on this rank has no adapter, and therefore nothing to train.
    """

    def __init__(
        self, described: AdapterMap, models: Sequence[torch.nn.Module], family: Family
    ) -> None:
        self.map = described
        modules = {
            prefix + name: module
            for prefix, model in by_chunk(models)
            for name, module in model.named_modules()
        }
        self._linears = [
            (modules[one.module], one)
            for one in described.local(rank_tensors(family, coordinates()))
        ]
        self._merged = MergedCopies()
        for prefix, model in by_chunk(models):
            model.requires_grad_(False)
            if not any(one.module.startswith(prefix) for _, one in self._linears):
                stage = coordinates().pp_rank
                targets = ", ".join(self.facts()["targets"])
                raise ModelError(
                    f"actor.lora.targets: no layer in pipeline stage {stage} has any of "
                    f"{targets}; add another target"
                )
            if model.pre_process:
                model.embedding.register_forward_hook(start_gradient)
        self._attach(models[0].config)
        self._fill()

    def _attach(self, config: Any) -> None:
        of_linear: dict[str, list[AdaptedWeight]] = {}  # an expert's linears are one module
        linears = {}
        for linear, one in self._linears:
            linears[one.module] = linear
            of_linear.setdefault(one.module, []).append(one)
        for name, ones in of_linear.items():
            linear = linears[name]
            if ones[0].is_routed:
                linear.lora = ExpertAdapters(linear, ones, self.map.scale)
            else:
                linear.lora = Adapter(linear, ones[0], self.map.scale, config)
            linear.register_forward_hook(_add_adapter)

    def facts(self) -> dict[str, Any]:
        """Return the adapter settings for a checkpoint's manifest."""
        return self.map.facts()

    def parameters(self) -> dict[str, tuple[Tensor, LocalTensor]]:
        """Return the factors and their descriptions, keyed by Megatron name."""
        factors: dict[str, tuple[Tensor, LocalTensor]] = {}
        for linear, one in self._linears:
            for local in (one.a, one.b):
                factors[local.name] = (_held(linear.lora, local), local)
        return factors

    def copies(self) -> dict[str, tuple[int, int]]:
        """Return the replica index of each factor on this rank, keyed by Megatron name: (index
        across tensor-parallel ranks, index across data-parallel ranks). The first index is 0 if the
        factor is sharded across the tensor-parallel ranks.
        """
        at = coordinates()
        dense = at.tp_rank, parallel_state.get_data_parallel_rank(with_context_parallel=True)
        expert = at.etp_rank, parallel_state.get_expert_data_parallel_rank()
        found: dict[str, tuple[int, int]] = {}
        for _, one in self._linears:
            tensor, data = expert if one.is_routed else dense
            for which, local in (("A", one.a), ("B", one.b)):
                found[local.name] = (0 if one.cut == _OWN[which] else tensor, data)
        return found

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """Return W + scale * B A for every adapted weight, keyed by weight name.

        The returned buffers are reused: they are valid until the next call or `release`. A rank's
        region of W needs only its own regions of B and A.
        """
        for linear, one in self._linears:
            weight = _held(linear, one.weight).detach()
            a = _held(linear.lora, one.a).detach()
            b = _held(linear.lora, one.b).detach()
            self._merged.add(one.weight.name, weight, a, b, self.map.scale)
        return self._merged.tensors()

    @property
    def merged_bytes(self) -> int:
        """Size in bytes of the merged copies on this rank. `merged` allocates them, `release` frees
        them.
        """
        return sum(_held(linear, one.weight).nbytes for linear, one in self._linears)

    def release(self) -> None:
        """Free the memory of the merged copies."""
        self._merged.release()

    @torch.no_grad()
    def _fill(self) -> None:
        for parameter, local in self.parameters().values():
            for piece in local.pieces:
                parameter[piece.slices()] = self.map.read(
                    piece.source, piece.source_start, piece.shape
                ).to(parameter.dtype)


def _held(module: Any, local: LocalTensor) -> Tensor:
    """Return the parameter of `module` that `local` describes."""
    held: Tensor = getattr(module, local.name.rpartition(".")[2])
    return held


def _mark_sequence_parallel(whole: Sequence[torch.nn.Parameter]) -> None:
    """Mark factors applied only to this rank's share of the sequence.

    finalize_model_grads.py:354 sums their gradients.
    """
    for factor in whole:
        factor.sequence_parallel = True  # type: ignore[attr-defined]


def _add_adapter(linear: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    return (output[0] + linear.lora(*inputs), *output[1:])
