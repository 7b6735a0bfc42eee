"""A trainable causal language model with parameters sharded across all ranks.

The FSDP2 implementation of `workers.backend.Backend`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.algorithms.losses import (
    OF_TEACHER,
    LossFunction,
    Metrics,
    NonfiniteWatch,
    not_applied,
)
from hybridflow.algorithms.vocab_parallel import Scoring
from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import OptimConfig
from hybridflow.data.packing import (
    check_token_ids,
    lengths_read,
    pack_alike,
    sequence_lengths,
    unpack,
)
from hybridflow.device.residency import HoldsReference, Part
from hybridflow.errors import ModelError
from hybridflow.fsdp import checkpoint
from hybridflow.fsdp.lora import Adapters
from hybridflow.fsdp.model import build_model, fill, local_tensors, shards, weights_and_factors
from hybridflow.fsdp.optimizer import Optimizer
from hybridflow.fsdp.packed import MicroBatch, build_micro_batches
from hybridflow.models import Family
from hybridflow.models.check import check_fsdp
from hybridflow.models.family import num_parameters
from hybridflow.models.lora import AdapterMap
from hybridflow.models.weights import WeightSource
from hybridflow.reshard.fsdp_layout import fsdp_layout
from hybridflow.reshard.layout import Catalog, Layout
from hybridflow.saving.hf_export import Held, export_held
from hybridflow.saving.ownership import fsdp_owners
from hybridflow.saving.saver import Saver


class NoReplay:
    """Stand-in for router replay, which is not supported. transformers' routers are used
    unchanged.
    """

    def during(self, action: str) -> AbstractContextManager[None]:
        """Raise ModelError, because no routes are recorded or replayed."""
        raise ModelError(
            f"router replay ({action}) is not supported by actor.backend=fsdp; set "
            "actor.backend=megatron"
        )

    def recorded(self) -> Jagged:
        """Raise ModelError, because no routes are recorded."""
        raise ModelError("actor.backend=fsdp does not record routes; set actor.backend=megatron")

    def take_counts(self) -> Mapping[str, int]:
        """Return no counts."""
        return {}


class FsdpPolicy(HoldsReference):
    """One rank's model and optimizer. Every method is a collective: all ranks must call the methods
    in the same order.
    """

    def __init__(
        self,
        family: Family,
        dtype: str,
        source: WeightSource,
        device: torch.device,
        *,
        recompute: str,
        lora: AdapterMap | None,
        logits_chunk_tokens: int,
        on_nonfinite: str,
    ) -> None:
        """Shard the model across all ranks (`rendezvous.join_world`) and load it from `source`.

        Args:
            family: the architecture.
            dtype: compute precision; weights, gradients and moments are kept in fp32.
            source: the weights to load.
            device: the device of this rank.
            recompute: "none" or "full", see `ActorConfig`.
            lora: adapters to train instead of the weights.
            logits_chunk_tokens, on_nonfinite: see `ActorConfig`.
        """
        check_fsdp(family)
        self.family = family
        self.dtype = torch.bfloat16 if dtype == "bfloat16" else torch.float32
        self.device = device
        self.logits_chunk_tokens = logits_chunk_tokens
        self.on_nonfinite = on_nonfinite
        self.model = build_model(family, self.dtype, source, device, recompute == "full", lora)
        self.optimizer: Optimizer | None = None
        self.replay = NoReplay()
        # FSDP2 pads uneven shards in the first forward pass, which moves them; run one now so that
        # they stay in place
        nothing = DataProto.from_columns(
            {name: Jagged.from_rows([], np.int64) for name in ("prompt_ids", "response_ids")}
        )
        self._forward(
            build_micro_batches(nothing, [np.zeros(0, np.int64)], (), device),
            self._scoring(1.0, False),
        )

    # ---- passes

    def log_probs(
        self, batch: DataProto, *, max_tokens: int, temperature: float, with_entropy: bool
    ) -> tuple[Jagged, Jagged] | None:
        """Compute (log-probs, entropies) of every response token of this rank's rows, in order.

        Without `with_entropy`, the log-probs are also returned in place of the entropies.
        """
        micro_batches = self._micro_batches(batch, max_tokens, ())
        values, entropies = self._forward(micro_batches, self._scoring(temperature, with_entropy))
        log_probs = unpack(values, micro_batches, len(batch))
        return log_probs, unpack(
            entropies, micro_batches, len(batch)
        ) if with_entropy else log_probs

    def train_mini_batch(
        self,
        batch: DataProto,
        loss: LossFunction,
        *,
        columns: Sequence[str],
        max_tokens: int,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Run one optimizer update on `batch`, this rank's share of the mini-batch."""
        if self.optimizer is None:
            raise RuntimeError("update called before set_optimizer")
        micro_batches = self._micro_batches(batch, max_tokens, columns)
        watch = NonfiniteWatch(len(micro_batches), self.device)
        self.optimizer.zero_grad()
        merged = self.accumulate(
            micro_batches, loss, self._scoring(temperature, with_entropy), watch
        )
        metrics = {}
        for name, (total, count) in merged.items():
            metrics[name] = (float(total), float(count))
        if problem := watch.report_of(self.optimizer.gradients()):
            return not_applied(problem, self.on_nonfinite, metrics, self.optimizer.learning_rate())
        norm, rate = self.optimizer.step()
        return metrics, {"grad_norm": norm, "lr": rate, "applied": 1.0}

    def accumulate(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: LossFunction,
        scoring: Scoring,
        watch: NonfiniteWatch,
    ) -> Metrics:
        """Run the forward and backward passes of one mini-batch.

        Leaves the gradients in the shards, summed over ranks and divided by the global count.

        Returns:
            Metric sums and counts over this rank's micro-batches.
        """
        merged: Metrics = {}
        counts = torch.zeros((), dtype=torch.float64, device=self.device)
        for number, micro in enumerate(micro_batches):
            with self._watched(watch, number):
                log_probs, entropy, of_teacher = self.model(micro, scoring)
            seen = (
                micro
                if of_teacher is None
                else replace(micro, columns={**micro.columns, OF_TEACHER: of_teacher})
            )
            watch.gradient_of(log_probs, number)
            total, count, metrics = loss(log_probs, entropy, seen)
            watch.loss(number, total.detach())
            total.backward()
            counts += count
            for name, (one, of) in ({"loss": (total, count)} | metrics).items():
                seen_total, seen_count = merged.get(name, (torch.zeros(()), torch.zeros(())))
                merged[name] = (seen_total + one.detach().float().cpu(), seen_count + of.cpu())
        dist.all_reduce(counts)
        scale = 1.0 / max(float(counts), 1.0)
        for shard in self.shards().values():
            if shard.grad is not None:
                shard.grad.mul_(scale)
        return merged

    def set_optimizer(self, config: OptimConfig) -> None:
        """Create a fresh optimizer for the current weights, with zero moments."""
        self.optimizer = Optimizer(self.trained(), config)

    def _scoring(self, temperature: float, with_entropy: bool) -> Scoring:
        return Scoring(self.family.vocab_size, temperature, with_entropy, self.logits_chunk_tokens)

    @torch.no_grad()
    def _forward(
        self, micro_batches: Sequence[MicroBatch], scoring: Scoring
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        found = [self.model(micro, scoring) for micro in micro_batches]
        return [values.cpu().numpy() for values, _, _ in found], [
            spread.cpu().numpy() for _, spread, _ in found if spread is not None
        ]

    @contextmanager
    def _watched(self, watch: NonfiniteWatch, number: int) -> Iterator[None]:
        embedding = self.model.causal.model.embed_tokens
        handle = embedding.register_forward_hook(
            lambda module, inputs, output: watch.gradient_of(output, number)
        )
        try:
            yield
        finally:
            handle.remove()

    def _micro_batches(
        self, batch: DataProto, max_tokens: int, columns: Sequence[str]
    ) -> list[MicroBatch]:
        """Pack the batch into the same number of micro-batches on all ranks.

        The counts must match, since every pass gathers shards from all ranks.
        """
        check_token_ids(batch, self.family.vocab_size)
        bins = pack_alike(
            lengths_read(sequence_lengths(batch)),
            max_tokens,
            lambda bins: self._all_ranks_max(max(bins, 1)),
        )
        return build_micro_batches(batch, bins, columns, self.device)

    def _all_ranks_max(self, value: int) -> int:
        tensor = torch.tensor([value], dtype=torch.int64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    # ---- weights

    def shards(self) -> dict[str, Any]:
        """Return the sharded parameters, keyed by their names in transformers."""
        return dict(shards(self.model))

    def trained(self) -> dict[str, Any]:
        """Return the trained parameters: the adapter factors if there are adapters, otherwise all
        parameters.
        """
        weights, factors = weights_and_factors(self.model)
        return factors if self.adapters else weights

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that are trained instead of the weights."""
        return self.model.adapters

    def held(self) -> dict[str, Tensor]:
        """Return this rank's rows of weights and factors as views of live memory, keyed by Hugging
        Face and PEFT name.

        Tensors without rows on this rank are omitted.
        """
        return local_tensors(self.model, self.shards())

    def parameters(self) -> dict[str, Tensor]:
        """Return this rank's rows as views of live memory, keyed by Hugging Face name. Adapters are
        merged into copies of their weights. Collective.

        Tensors without rows on this rank are omitted.
        """
        weights, factors = weights_and_factors(self.model)
        base = local_tensors(self.model, weights)
        if self.adapters is None:
            return base
        held = local_tensors(self.model, factors)
        return base | self.adapters.merged(base, held, factors)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's rows of Adam's moments: {"exp_avg" or "exp_avg_sq": {tensor name:
        rows}}."""
        moments = self.optimizer.moments() if self.optimizer else {}
        return {kind: local_tensors(self.model, held) for kind, held in moments.items()}

    def sent_tensors(self) -> dict[str, Tensor]:
        """Return `parameters`."""
        return self.parameters()

    @property
    def served_adapters(self) -> None:
        """Always None, because engines receive merged weights."""
        return None

    def release_copies(self) -> None:
        """Free the copies made by `parameters`."""
        if self.adapters:
            self.adapters.release()

    @property
    def copied_bytes(self) -> int:
        """Size in bytes of the copies that `parameters` makes on this rank."""
        if self.adapters is None:
            return 0
        weights, _ = weights_and_factors(self.model)
        return self.adapters.merged_bytes(local_tensors(self.model, weights))

    @functools.cached_property
    def trainable_parameters(self) -> int:
        """Number of trainable parameters in the whole model. Cached, since every step reports
        it."""
        return self.adapters.map.num_parameters() if self.adapters else num_parameters(self.family)

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's rows of the trained tensors. A reference is created by copying these
        tensors."""
        return local_tensors(self.model, self.trained())

    @property
    def served(self) -> Family:
        """The model family whose tensors the engines store."""
        return self.family

    def weight_layout(self) -> Callable[[Catalog], Layout]:
        """Return a function that builds the layout of `parameters` across all ranks."""
        return lambda catalog: fsdp_layout(self.family, dist.get_world_size(), "float32", catalog)

    def settle(self) -> None:
        """Do nothing, because no communication is in flight between methods."""

    def memory_parts(self) -> Mapping[Part, Callable[[], Iterable[Tensor]]]:
        """Return, for each part, a function that lists its tensors, for `Residency`.

        The lists change when the optimizer is replaced or a reference is added.
        """
        return {
            "weights": lambda: [
                *(shard.detach().to_local() for shard in self.shards().values()),
                *self.model.buffers(),
            ],
            "gradients": lambda: self.optimizer.gradients() if self.optimizer else (),
            "optimizer": self._moments,
            "reference": lambda: self.reference_state().values() if self.has_reference else (),
        }

    def _moments(self) -> list[Tensor]:
        moments = self.optimizer.moments() if self.optimizer else {}
        tensors: list[Tensor] = []
        for kind in moments.values():
            tensors.extend(moment.to_local() for moment in kind.values())
        return tensors

    # ---- process and disk

    def mesh_position(self) -> tuple[int, int, bool]:
        """Return this rank's position. Every rank is a separate data-parallel rank."""
        return dist.get_rank(), dist.get_world_size(), True

    def describe(self) -> dict[str, str]:
        """Return the backend's name and versions, for the run's environment record."""
        import transformers

        found = {
            "backend": f"fsdp2 ({self.device.type})",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        return found | ({"lora": self.adapters.map.describe()} if self.adapters else {})

    def saver(self, timeout_s: float) -> Saver:
        """Return the object that saves this policy's sharded state."""
        return Saver(
            lambda folder, phase, step, exchange: checkpoint.job(
                self, folder, phase, step, exchange
            ),
            timeout_s,
        )

    def load(self, folder: Path) -> None:
        """Restore a checkpoint in place, regardless of the number of ranks that saved it.

        Raises CheckpointError in the same cases as `checkpoint.load`.
        """
        checkpoint.load(self, folder)

    def load_from(self, source: WeightSource) -> None:
        """Replace all weights. Call `set_optimizer` again afterwards."""
        fill(self.model, self.family, source)

    def export(
        self,
        folder: Path,
        hf_config: Mapping[str, Any],
        tokenizer: Path | None,
        *,
        source: Path | None = None,
    ) -> list[str]:
        """Export the model to a folder in Hugging Face format. Collective."""
        held = Held(
            self.family,
            self.dtype,
            fsdp_owners(self.family, dist.get_world_size()),
            self.parameters(),
        )
        try:
            return export_held(held, folder, hf_config, tokenizer, source=source)
        finally:
            self.release_copies()
