"""A trainable causal language model on this rank: Megatron model, optimizer, and the passes the roles are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hybridflow.config.schema import OptimConfig, ParallelConfig
from hybridflow.data.packing import pack_alike
from hybridflow.mcore import parallel
from hybridflow.mcore.model import DTYPES, build_model, load_weights, local_parameters, wrap_for_training
from hybridflow.mcore.optimizer import Optimizer
from hybridflow.mcore.packed import MicroBatch, build_micro_batches, sequence_lengths, unpack
from hybridflow.mcore.router_replay import RouterReplay
from hybridflow.mcore.step import LossFunction, all_ranks_max, backward, forward, metrics_to_floats
from hybridflow.models import Family
from hybridflow.models.weights import WeightSource
from hybridflow.protocol import DataProto, Jagged


class Policy:
    """Model and optimizer of one rank. Every method is a collective: all ranks call it in the same order."""

    def __init__(
        self, family: Family, parallel_config: ParallelConfig, dtype: str, source: WeightSource, expert_bias_update_rate: float = 0.0
    ) -> None:
        """Build the stage and fill it from `source`. Process groups exist already (`parallel.initialize`).

        Args:
            expert_bias_update_rate: how far an update moves the expert biases of a sigmoid router towards even load; 0: not at all.
        """
        self.family, self.config, self.dtype = family, parallel_config, DTYPES[dtype]
        self.stage = build_model(family, parallel_config, dtype)
        load_weights(self.stage, family, source)
        self.stage.config.moe_router_bias_update_rate = expert_bias_update_rate
        self.replay = RouterReplay([self.stage])
        self.model = wrap_for_training(self.stage, parallel_config.distributed_optimizer)
        self.optimizer: Optimizer | None = None
        self._reference: dict[str, torch.Tensor] | None = None

    # ---- passes -----------------------------------------------------------------------------------------------------------------------

    def log_probs(self, batch: DataProto, *, max_tokens: int, temperature: float, with_entropy: bool) -> tuple[Jagged, Jagged] | None:
        """(log-probs, entropies) of every response token, in the order of the batch; None on ranks that are not on the last stage.

        Without `with_entropy` the second is empty rows.
        """
        micro_batches = self._micro_batches(batch, max_tokens, ())
        self.model.eval()
        values, entropies = forward(
            self.model, micro_batches, vocab_size=self.family.vocab_size, temperature=temperature, with_entropy=with_entropy
        )
        self.model.train()
        if not parallel.is_last_stage():
            return None
        log_probs = unpack(values, micro_batches, len(batch))
        return log_probs, unpack(entropies, micro_batches, len(batch)) if with_entropy else log_probs

    def train_mini_batch(
        self, batch: DataProto, loss: LossFunction, *, columns: Sequence[str], max_tokens: int, temperature: float, with_entropy: bool
    ) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """One optimizer update on `batch` (this data-parallel rank's share of the mini-batch).

        Returns:
            Metric (sum, count) pairs (empty off the last stage), and {grad_norm, lr, applied}.
        """
        if self.optimizer is None:
            raise RuntimeError("train_mini_batch before set_optimizer")
        micro_batches = self._micro_batches(batch, max_tokens, columns)
        self.optimizer.zero_grad()
        metrics = backward(
            self.model, micro_batches, loss, vocab_size=self.family.vocab_size, temperature=temperature, with_entropy=with_entropy
        )
        applied, grad_norm, rate = self.optimizer.step()
        return metrics_to_floats(metrics), {"grad_norm": grad_norm, "lr": rate, "applied": float(applied)}

    def set_optimizer(self, config: OptimConfig) -> None:
        """A fresh optimizer (moments zero) over the present weights."""
        self.optimizer = Optimizer(self.model, config, distributed=self.config.distributed_optimizer, dtype=self.dtype)

    def _micro_batches(self, batch: DataProto, max_tokens: int, columns: Sequence[str]) -> list[MicroBatch]:
        bins = pack_alike(sequence_lengths(batch), max_tokens, all_ranks_max)
        multiple = self.config.tensor if self.config.sequence else 1
        return self.replay.attach(batch, build_micro_batches(batch, bins, columns, multiple_of=multiple))

    # ---- reference --------------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def freeze_reference(self) -> None:
        """Keep the present weights as the reference policy."""
        self._reference = {name: tensor.detach().clone() for name, tensor in held_weights(self.stage).items()}

    @property
    def has_reference(self) -> bool:
        """Whether `freeze_reference` has been called (or a reference was loaded)."""
        return self._reference is not None

    def reference_state(self) -> dict[str, torch.Tensor]:
        """The reference's local weights by Megatron name."""
        if self._reference is None:
            raise RuntimeError("no reference weights: freeze_reference was not called")
        return self._reference

    def as_reference(self) -> _ReferenceWeights:
        """`with policy.as_reference():` computes with the reference's weights (swapped in place, so no second model is held)."""
        return _ReferenceWeights(self.stage, self.reference_state())

    # ---- weights ----------------------------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, torch.Tensor]:
        """Local parameters by Megatron name, checked against the family's map."""
        return {name: parameter.detach() for name, (parameter, _) in local_parameters(self.stage, self.family).items()}


def held_weights(stage: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters by Megatron name, and the expert biases, which are buffers that training may move."""
    biases = {name: buffer for name, buffer in stage.named_buffers() if name.endswith(".expert_bias")}
    return dict(stage.named_parameters()) | biases


class _ReferenceWeights:
    """Exchanges the values of the live and the reference weights, and back."""

    def __init__(self, stage: torch.nn.Module, reference: dict[str, torch.Tensor]) -> None:
        self.stage, self.reference = stage, reference

    def __enter__(self) -> None:
        self._exchange()

    def __exit__(self, *_: Any) -> None:
        self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # values are exchanged, not storages: the distributed optimizer and the gradient buffers hold views of these parameters
        for name, tensor in held_weights(self.stage).items():
            held = self.reference[name]
            live = tensor.detach().clone()
            tensor.copy_(held)
            held.copy_(live)
