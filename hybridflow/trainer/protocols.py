"""What the loop sees. The composition root builds the real ones; tests of the loop's logic build small ones without
Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hybridflow.batch import DataProto
from hybridflow.config.schema import OptimConfig
from hybridflow.device.residency import Part


@dataclass(frozen=True)
class Update:
    """One optimizer update, merged over data-parallel ranks: `means` of each metric, and grad_norm, lr, applied (1 or
    0)."""

    means: Mapping[str, float]
    grad_norm: float
    lr: float
    applied: bool


class TrainGroup(Protocol):
    """The policy: a group of ranks that train and score. Columns are those of `docs/design.md`."""

    def set_optimizer(self, config: OptimConfig) -> None:
        """A fresh optimizer over the present weights."""
        ...

    def sft_step(self, batch: DataProto) -> Update:
        """One supervised update."""
        ...

    def log_probs(self, batch: DataProto) -> DataProto:
        """old_log_probs and entropys."""
        ...

    def ref_log_probs(self, batch: DataProto) -> DataProto:
        """ref_log_probs."""
        ...

    def update(self, batch: DataProto, seed: int) -> Sequence[Update]:
        """All mini-batches of one step, in order."""
        ...

    def freeze_reference(self) -> None:
        """The present weights become the reference."""
        ...

    def sleep(self, parts: tuple[Part, ...]) -> None:
        """Those of weights, gradients, optimizer and reference that `actor.offload` names leave the device."""
        ...

    def wake(self, parts: tuple[Part, ...]) -> None:
        """They come back, and stay until `sleep`."""
        ...

    def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        """Write the state to a new folder; in the background, return when it has been copied."""
        ...

    def is_saved(self) -> bool:
        """Whether no rank is writing. CheckpointError when the last background save failed."""
        ...

    def load(self, folder: Path, optim: OptimConfig, with_reference: bool) -> None:
        """Restore it."""
        ...

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        ...


class Sleeper(Protocol):
    """A role beside the policy whose memory leaves the device when it is idle. Each of its methods brings in what it
    needs."""

    def sleep(self, parts: tuple[Part, ...]) -> None:
        """Those of `parts` that the role's `offload` names leave the device, until a method needs them."""
        ...

    def memory(self) -> Mapping[str, float]:
        """Peaks of its methods, and what lay off the device, since the last call; see `observations.memory_metrics`."""
        ...


class ValueGroup(Sleeper, Protocol):
    """The critic: a group of ranks that value the states in which tokens were sampled, and learn from returns."""

    def start(self, optim: OptimConfig, folder: Path) -> None:
        """Begin a run: a fresh optimizer over the weights of a Hugging Face folder."""
        ...

    def values(self, batch: DataProto) -> DataProto:
        """values, a number for every response token."""
        ...

    def update(self, batch: DataProto, seed: int) -> Sequence[Update]:
        """All mini-batches of one step, in order."""
        ...

    def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        """Write the state to a new folder; in the background, return when it has been copied."""
        ...

    def is_saved(self) -> bool:
        """Whether no rank is writing. CheckpointError when the last background save failed."""
        ...

    def load(self, folder: Path, optim: OptimConfig) -> None:
        """Restore it."""
        ...

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        ...


class Reference(Protocol):
    """The model KL terms compare with, in processes of its own."""

    def start(self, folder: Path) -> None:
        """Take the weights of a Hugging Face folder."""
        ...

    def ref_log_probs(self, batch: DataProto) -> DataProto:
        """ref_log_probs."""
        ...


class Teacher(Sleeper, Protocol):
    """A model whose most likely tokens the policy may be compared with."""

    def top_log_probs(self, batch: DataProto) -> DataProto:
        """teacher_top_log_probs and teacher_top_ids, [k] at every response token."""
        ...


class RewardModel(Sleeper, Protocol):
    """A trained model that scores responses."""

    def scores(self, batch: DataProto) -> DataProto:
        """rm_scores [B] f32."""
        ...
