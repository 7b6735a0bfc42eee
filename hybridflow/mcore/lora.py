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

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.errors import ModelError
from hybridflow.mcore.model import by_chunk
from hybridflow.mcore.parallel import coordinates
from hybridflow.models import Family
from hybridflow.models.layout import LocalTensor
from hybridflow.models.lora import AdaptedWeight, AdapterMap, merge
from hybridflow.reshard.layout import rank_tensors


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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the adapter's contribution to the linear's output. x [s, b, in] is the input
        passed to the linear."""
        if self._norm is not None:
            linear, epsilon = self._norm
            weight = linear.layer_norm_weight
            x = F.rms_norm(x, (x.shape[-1],), weight + 1 if self.zero_centered else weight, epsilon)
        return F.linear(self._between(F.linear(x, self.A)) * self.scale, self.B)

    def _between(self, low: torch.Tensor) -> torch.Tensor:
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
        self._merged: dict[str, torch.Tensor] = {}
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
                model.embedding.register_forward_hook(_start_gradient)
        for linear, one in self._linears:
            linear.lora = Adapter(linear, one, described.scale, models[0].config)
            linear.register_forward_hook(_add_adapter)
        self._fill()

    def facts(self) -> dict[str, Any]:
        """Return the adapter settings for a checkpoint's manifest."""
        return self.map.facts()

    def parameters(self) -> dict[str, tuple[torch.Tensor, LocalTensor]]:
        """Return the factors and their descriptions, keyed by Megatron name."""
        factors: dict[str, tuple[torch.Tensor, LocalTensor]] = {}
        for linear, one in self._linears:
            factors[one.a.name] = (linear.lora.A, one.a)
            factors[one.b.name] = (linear.lora.B, one.b)
        return factors

    @torch.no_grad()
    def merged(self) -> dict[str, torch.Tensor]:
        """Return W + scale * B A for every adapted weight, keyed by weight name.

        The returned buffers are reused: they are valid until the next call or `release`. A rank's
        region of W needs only its own regions of B and A.
        """
        for linear, one in self._linears:
            weight = linear.weight.detach()
            name = one.weight.name
            if name not in self._merged:
                self._merged[name] = torch.empty_like(weight)
            self._merged[name].untyped_storage().resize_(weight.nbytes)
            merge(
                weight,
                linear.lora.A.detach(),
                linear.lora.B.detach(),
                self.map.scale,
                self._merged[name],
            )
        return dict(self._merged)

    @property
    def merged_bytes(self) -> int:
        """Size in bytes of the merged copies on this rank. `merged` allocates them, `release` frees
        them.
        """
        return sum(linear.weight.nbytes for linear, _ in self._linears)

    def release(self) -> None:
        """Free the memory of the merged copies. Senders keep the tensors themselves, which stay
        empty until the next call of `merged`.
        """
        for tensor in self._merged.values():
            tensor.untyped_storage().resize_(0)

    @torch.no_grad()
    def _fill(self) -> None:
        for parameter, local in self.parameters().values():
            for piece in local.pieces:
                parameter[piece.slices()] = self.map.read(
                    piece.source, piece.source_start, piece.shape
                ).to(parameter.dtype)


def _mark_sequence_parallel(whole: Sequence[torch.nn.Parameter]) -> None:
    """Mark factors applied only to this rank's share of the sequence.

    finalize_model_grads.py:354 sums their gradients.
    """
    for factor in whole:
        factor.sequence_parallel = True  # type: ignore[attr-defined]


def _add_adapter(linear: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...]:
    return (output[0] + linear.lora(inputs[0]), *output[1:])


def _start_gradient(embedding: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Make the embedding output require a gradient.

    Nothing before the first adapter requires one, but a recomputed layer propagates a gradient only
    if its input requires one (random.py:564).
    """
    return output.requires_grad_() if torch.is_grad_enabled() else output
