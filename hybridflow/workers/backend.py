"""The interface between workers and training backends; `mcore` and `fsdp` implement `Backend`, and mypy checks both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from hybridflow.algorithms.losses import LossFunction
from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import ActorConfig, RunConfig
from hybridflow.device.platform import Platform
from hybridflow.device.residency import Part
from hybridflow.models import Family, family_of, use_family
from hybridflow.models.lora import AdapterMap
from hybridflow.models.weights import RandomWeights, SafetensorsFolder, WeightSource
from hybridflow.process.rendezvous import join_world
from hybridflow.reshard.layout import Catalog, Layout
from hybridflow.saving.saver import Holder, Saver


class Replay(Protocol):
    """Router replay; backends that train dense models alone refuse it."""

    def during(self, action: Literal["replay", "record", "compare"]) -> AbstractContextManager[None]:
        """Forward passes inside replay, record or compare routes."""

    def recorded(self) -> Jagged:
        """The recorded experts of every token."""

    def take_counts(self) -> Mapping[str, int]:
        """Token-layers counted since the last call."""


class Model(Holder, Protocol):
    """The model of one rank of a role, with an optimizer where it trains. Every method is a collective: all ranks call
    it in the same order."""

    def mesh_position(self) -> tuple[int, int, bool]:
        """(data-parallel rank, size, whether this rank returns its group's results)."""

    def set_optimizer(self, config: Any) -> None:
        """A fresh optimizer over the present weights; `config` is an `OptimConfig`."""

    def settle(self) -> None:
        """Wait for communication that still writes to the weights."""

    def memory_parts(self) -> Mapping[Part, Callable[[], Iterable[torch.Tensor]]]:
        """For each part a function that lists its present tensors: an optimizer may be replaced, a reference appear."""

    def saver(self, timeout_s: float) -> Saver:
        """Writes checkpoints."""

    def load(self, folder: Path) -> None:
        """Restore a checkpoint in place. CheckpointError: it is missing, torn or of another model."""

    def export(
        self, folder: Path, hf_config: Mapping[str, Any], tokenizer: Path | None, *, source: Path | None = None
    ) -> list[str]:
        """Write a Hugging Face folder; the lines about `source` that `export_held` returns."""


class Backend(Model, Protocol):
    """The policy's model."""

    @property
    def replay(self) -> Replay:
        """Routes of a mixture of experts."""

    def describe(self) -> dict[str, str]:
        """Backend and versions, for the run's record."""

    def log_probs(
        self, batch: DataProto, *, max_tokens: int, temperature: float, with_entropy: bool
    ) -> tuple[Jagged, Jagged] | None:
        """(log-probs, entropies) of every response token of this rank's rows; None on ranks that return no results."""

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
        """One optimizer update on this rank's rows; metric (sum, count) pairs and {grad_norm, lr, applied}.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite, and the policy stops on that. On all ranks; no weight
            was changed.
        """

    def freeze_reference(self) -> None:
        """The present weights become the reference."""

    def as_reference(self) -> AbstractContextManager[Any]:
        """Forward passes inside use the reference's weights."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """This rank's tensors by the names of its layout, over live memory; with adapters merged copies, which
        `release_copies` frees."""

    def release_copies(self) -> None:
        """Give back the memory of copies that `parameters` has made; its tensors are empty until it is called again."""

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies that `parameters` makes on this rank; 0 where it makes none."""

    @property
    def trainable_parameters(self) -> int:
        """Number of trained parameters of the whole model."""

    def weight_layout(self) -> Callable[[Catalog], Layout]:
        """Asks all ranks where they stand; the returned function, which one rank needs, builds the layout from that."""


def open_backend(config: RunConfig, hf_config: Mapping[str, Any], platform: Platform, local_rank: int) -> Backend:
    """Join the world and build the policy that `actor.backend` names. Collective."""
    use_family(config.model.family)
    family = family_of(hf_config)
    source: WeightSource = RandomWeights(family.tensors(), config.seed, float(hf_config.get("initializer_range", 0.02)))
    if config.model.path is not None:
        source = SafetensorsFolder(config.model.path)
    if config.actor.backend == "fsdp":
        return _fsdp(config, family, source, platform, local_rank)
    return _megatron(config, family, source, platform)


def _megatron(config: RunConfig, family: Family, source: WeightSource, platform: Platform) -> Backend:
    from hybridflow.mcore import parallel
    from hybridflow.mcore.backend import MegatronPolicy

    actor: ActorConfig = config.actor
    parallel.initialize(actor.parallel, config.seed, platform.collective_backend, config.cluster.call_timeout_s)
    return MegatronPolicy(
        family,
        actor.parallel,
        config.model.dtype,
        source,
        expert_bias_update_rate=actor.expert_bias_update_rate,
        router_losses=(actor.router_aux_loss_coef, actor.router_z_loss_coef),
        recompute=actor.recompute,
        recompute_modules=actor.recompute_modules,
        logits_chunk_tokens=actor.logits_chunk_tokens,
        on_nonfinite=actor.on_nonfinite,
        lora=AdapterMap(family, actor.lora, config.seed) if actor.lora.rank else None,
    )


def _fsdp(config: RunConfig, family: Family, source: WeightSource, platform: Platform, local_rank: int) -> Backend:
    from hybridflow.fsdp.policy import FsdpPolicy

    join_world(platform.collective_backend, config.cluster.call_timeout_s)
    torch.manual_seed(config.seed)
    return FsdpPolicy(
        family,
        config.model.dtype,
        source,
        platform.device(local_rank),
        logits_chunk_tokens=config.actor.logits_chunk_tokens,
        on_nonfinite=config.actor.on_nonfinite,
    )
