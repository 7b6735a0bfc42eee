"""Checkpoints of an FSDP policy: model, reference, optimizer, schedule and random state.

Each rank writes one file with its row shards of the Hugging Face tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.fsdp.lora import Adapters
from hybridflow.fsdp.optimizer import Optimizer
from hybridflow.process.exchange import Exchange, shared_exchange
from hybridflow.reshard.fsdp_layout import fsdp_rows
from hybridflow.saving.rectangles import HfSlice, Rectangle
from hybridflow.saving.saver import (
    Holder,
    Job,
    check_adapters,
    checked_manifest,
    manifest_of,
    restore,
)

_BACKEND = "fsdp"
_RANDOM = "rng_state"


class Sharded(Holder, Protocol):
    """The parts of a policy that are stored in a checkpoint."""

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer; None before `set_optimizer`."""

    @property
    def adapters(self) -> Adapters | None:
        """The adapters that are trained instead of the weights; None if the weights are trained."""

    def held(self) -> Mapping[str, Tensor]:
        """Return this rank's rows of every tensor, keyed by Hugging Face name: the weights and the
        adapters' factors.
        """

    def moments(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return this rank's rows of the optimizer state: {kind of state: {name of trained tensor:
        rows}}."""

    def reference_state(self) -> Mapping[str, Tensor]:
        """Return this rank's rows of the reference's copies of the trained tensors."""


class ShardedState:
    """One policy's checkpoint rectangles, backed by its live memory."""

    def __init__(self, policy: Sharded) -> None:
        self.contains = ["model"]
        self._tensors = dict(policy.family.tensors())
        self._aliases: dict[str, list[str]] = {}
        if policy.adapters is not None:
            self.contains.append("adapters")
            self._tensors |= policy.adapters.map.tensors()
            for alias, kept in policy.adapters.map.aliases().items():
                self._aliases.setdefault(kept, []).append(alias)
        self._model = self._rectangles("", policy.held())
        self.tensors = list(self._model)
        if policy.optimizer is not None:
            self.contains.append("optimizer")
            for kind, moments in policy.moments().items():
                self.tensors += self._rectangles(f"optimizer.state.{kind}.", moments)
        if policy.has_reference:
            self.contains.append("reference")
            self.tensors += self._rectangles("reference.", policy.reference_state())
        self.contains.append("rng")
        state = torch.get_rng_state()
        self.random = Rectangle(
            _RANDOM,
            state,
            (dist.get_world_size(), len(state)),
            (dist.get_rank(), 0),
            prepend_axis_num=1,
        )

    def owned(self) -> Sequence[Rectangle]:
        """Return the rectangles that this rank writes. Nothing is replicated, so these are all of
        its rectangles.
        """
        return [*self.tensors, self.random]

    def hf(self) -> Iterator[HfSlice]:
        """Yield the location of each Hugging Face tensor, and of each adapter factor under its PEFT
        names. The checkpoint already uses the Hugging Face names and shapes.
        """
        for one in self._model:
            for name in (one.key, *self._aliases.get(one.key, ())):
                yield HfSlice(name, one.global_offset, one.local_shape, one.key, one.global_offset)

    def _rectangles(self, prefix: str, held: Mapping[str, Tensor]) -> list[Rectangle]:
        found = []
        shards = fsdp_rows(self._tensors, dist.get_rank(), dist.get_world_size())
        for name, (start, rows) in shards.items():
            shape = self._tensors[name]
            if rows and name in held:
                found.append(
                    Rectangle(prefix + name, held[name], shape, (start, *(0,) * (len(shape) - 1)))
                )
        return found


def job(policy: Sharded, folder: Path, phase: str, step: int, exchange: Exchange) -> Job:
    """Prepare one save. Everything except the tensors' data is captured immediately."""
    state = ShardedState(policy)
    training: dict[str, Any] = {}
    if policy.optimizer is not None:
        training = {
            "updates": policy.optimizer.updates,
            "settings": asdict(policy.optimizer.config),
        }
    layout = {"world": dist.get_world_size()}
    lora = policy.adapters.facts() if policy.adapters else {}
    manifest = manifest_of(
        policy, _BACKEND, state.contains, layout, phase, step, training=training, lora=lora
    )
    return Job(state, manifest, folder, exchange)


@torch.no_grad()
def load(policy: Sharded, folder: Path) -> None:
    """Restore a checkpoint in place, regardless of the number of ranks that saved it. Collective.

    The random state is restored only if the number of ranks is the same.

    Raises:
        CheckpointError: the folder is missing, is incomplete, is not a checkpoint, belongs to
            another backend or model, or contains different adapters. Nothing has been loaded in
            that case.
    """
    exchange = shared_exchange()
    manifest = checked_manifest(policy, folder, exchange, _BACKEND)
    check_adapters(manifest, policy.adapters.facts() if policy.adapters else {}, folder)
    state = ShardedState(policy)
    same_ranks = manifest.layout["world"] == dist.get_world_size()
    restore(folder, state.owned() if same_ranks else state.tensors, exchange)
    if policy.optimizer is not None:
        policy.optimizer.resume(int(manifest.training["updates"]))
    if same_ranks:
        torch.set_rng_state(state.random.data.view(-1))
