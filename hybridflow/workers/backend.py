"""The interface between workers and training backends. `mcore` and `fsdp` implement `Backend`; mypy
checks both."""

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
from hybridflow.models.served_adapters import ServedAdapters
from hybridflow.models.weights import SafetensorsFolder, WeightSource, initial_weights
from hybridflow.process.rendezvous import join_world
from hybridflow.reshard.layout import Catalog, Layout
from hybridflow.saving.saver import Holder, Saver


class Replay(Protocol):
    """The router-replay interface. Backends that support only dense models raise an error."""

    def during(
        self, action: Literal["replay", "record", "compare"]
    ) -> AbstractContextManager[None]:
        """Context manager that replays, records or compares routes during the forward passes in its
        block.
        """

    def recorded(self) -> Jagged:
        """Return the recorded experts of every token."""

    def take_counts(self) -> Mapping[str, int]:
        """Return the token-layer counts accumulated since the last call."""


class Model(Holder, Protocol):
    """One rank's share of a role's model, with an optimizer if the role trains. Every method is a
    collective: all ranks must call the methods in the same order.
    """

    def mesh_position(self) -> tuple[int, int, bool]:
        """Return (data-parallel rank, data-parallel size, whether this rank returns its group's
        results)."""

    def set_optimizer(self, config: Any) -> None:
        """Create a fresh optimizer for the current weights. `config` is an `OptimConfig`."""

    def settle(self) -> None:
        """Wait until no pending communication writes to the weights any more."""

    def memory_parts(self) -> Mapping[Part, Callable[[], Iterable[torch.Tensor]]]:
        """Return, for each memory part, a function that lists the part's current tensors. The
        tensors change when the optimizer is replaced or a reference is added.
        """

    def saver(self, timeout_s: float) -> Saver:
        """Return the object that writes this rank's checkpoints."""

    def load(self, folder: Path) -> None:
        """Restore a checkpoint in place. Raises CheckpointError if it is missing, incomplete or
        from another model."""

    def export(
        self,
        folder: Path,
        hf_config: Mapping[str, Any],
        tokenizer: Path | None,
        *,
        source: Path | None = None,
    ) -> list[str]:
        """Export the model to a Hugging Face folder. Returns log lines about the tensors and files
        taken from `source` (see `export_held`).
        """


class Backend(Model, Protocol):
    """The policy's model."""

    @property
    def served(self) -> Family:
        """The model family that the engines serve."""

    @property
    def replay(self) -> Replay:
        """The router-replay interface of a mixture-of-experts policy."""

    def describe(self) -> dict[str, str]:
        """Return the backend's name and versions, for the run's environment record."""

    def log_probs(
        self, batch: DataProto, *, max_tokens: int, temperature: float, with_entropy: bool
    ) -> tuple[Jagged, Jagged] | None:
        """Return (log-probs, entropies) for every response token in this rank's rows.

        Returns None on ranks that return no results.
        """

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
        """Run one optimizer update on this rank's rows.

        Returns metrics as (sum, count) pairs, and {grad_norm, lr, applied}.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite and the policy is configured to
                stop. Raised on all ranks, before any weight is changed.
        """

    def load_from(self, source: WeightSource) -> None:
        """Replace all weights. Call `set_optimizer` again afterwards."""

    def take_trained(self, other: Any) -> None:
        """Copy the weights that training may change (only the adapters, if there are any) from
        another policy with the same parameters, and drop the optimizer. Call `set_optimizer` again
        afterwards.
        """

    def freeze_reference(self) -> None:
        """Save a copy of the current weights as the reference."""

    def as_reference(self) -> AbstractContextManager[Any]:
        """Context manager that makes forward passes in its block use the reference weights."""

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's tensors, keyed by layout name. They are views of live memory. Weights
        with adapters are copies into which the adapters are merged; free these copies with
        `release_copies`.
        """

    def sent_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors from which a weight sync sends, keyed by layout name: `parameters` or,
        if engines serve the adapters separately, the unmerged weights and the adapter factors.
        """

    def release_copies(self) -> None:
        """Free the copies made by `parameters`. Tensors that it has returned are empty until
        `parameters` is called again.
        """

    @property
    def copied_bytes(self) -> int:
        """Size in bytes of the copies made for a weight sync on this rank; 0 if there are none."""

    @property
    def served_adapters(self) -> ServedAdapters | None:
        """The adapters that engines serve separately; None if they are merged or there are none."""

    @property
    def trainable_parameters(self) -> int:
        """Number of trainable parameters in the whole model."""

    def weight_layout(self) -> Callable[[Catalog], Layout]:
        """Gather the mesh positions of all ranks, and return a function that builds the weight
        layout from them. Only one rank needs to call that function.
        """


def open_backend(
    config: RunConfig,
    hf_config: Mapping[str, Any],
    platform: Platform,
    local_rank: int,
    trains: bool = True,
    base: Backend | None = None,
) -> Backend:
    """Join the process group and build the policy with the backend selected by `actor.backend`.
    Collective.

    Args:
        trains: if False, the policy cannot have an optimizer.
        base: the policy whose frozen weights this one shares. Both must have the same model and
            layout, and use the Megatron backend.
    """
    use_family(config.model.family)
    family = family_of(hf_config, mtp=config.actor.mtp.train and trains)
    source: WeightSource = initial_weights(family, config.seed)
    if config.model.path is not None:
        source = SafetensorsFolder(config.model.path)
    if config.actor.backend == "fsdp":
        return _fsdp(config, family, source, platform, local_rank, trains)
    return _megatron(config, family, source, platform, trains, base)


def _megatron(
    config: RunConfig,
    family: Family,
    source: WeightSource,
    platform: Platform,
    trains: bool,
    base: Any,
) -> Backend:
    from hybridflow.mcore import parallel
    from hybridflow.mcore.backend import MegatronPolicy
    from hybridflow.mcore.head_training import HeadSettings

    actor: ActorConfig = config.actor
    if not parallel.is_initialized():  # another role in this process may have done it
        parallel.initialize(
            actor.parallel, config.seed, platform.collective_backend, config.cluster.call_timeout_s
        )
    policy = MegatronPolicy(
        family,
        actor.parallel,
        config.model.dtype,
        source,
        expert_bias_update_rate=actor.expert_bias_update_rate,
        router_losses=(actor.router_aux_loss_coef, actor.router_z_loss_coef),
        recompute=actor.recompute,
        recompute_modules=actor.recompute_modules,
        megatron=actor.megatron,
        logits_chunk_tokens=actor.logits_chunk_tokens,
        on_nonfinite=actor.on_nonfinite,
        lora=_adapters(config, family, trains or base is not None),
        heads=HeadSettings(actor.mtp.coef, actor.mtp.lr),
        freeze_vision_tower=actor.freeze_vision_tower,
        trains=trains,
        base=base,
    )
    policy.serves_heads = config.rollout.speculative.method is not None
    return policy


def _adapters(config: RunConfig, family: Family, is_adapted: bool) -> AdapterMap | None:
    lora = config.actor.lora
    return AdapterMap(family, lora, config.seed) if lora.rank and is_adapted else None


def _fsdp(
    config: RunConfig,
    family: Family,
    source: WeightSource,
    platform: Platform,
    local_rank: int,
    trains: bool,
) -> Backend:
    from hybridflow.fsdp.policy import FsdpPolicy

    join_world(platform.collective_backend, config.cluster.call_timeout_s)
    torch.manual_seed(config.seed)
    return FsdpPolicy(
        family,
        config.model.dtype,
        source,
        platform.device(local_rank),
        recompute=config.actor.recompute,
        lora=_adapters(config, family, trains),
        logits_chunk_tokens=config.actor.logits_chunk_tokens,
        on_nonfinite=config.actor.on_nonfinite,
    )
