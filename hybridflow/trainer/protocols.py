"""The roles as the loop uses them. The composition root builds the real groups; tests of the loop's
logic build small ones without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridflow.batch import DataProto
from hybridflow.saving.store import Saves


@dataclass(frozen=True)
class Update:
    """One optimizer update, merged over data-parallel ranks: `means` of each metric, and grad_norm,
    lr, applied (1 or 0)."""

    means: Mapping[str, float]
    grad_norm: float
    lr: float
    applied: bool


class Role(Saves, Protocol):
    """The ranks of one role, called through the methods of its worker class
    (`workers.policy.PolicyWorker`, else `workers.model_role.ModelWorker`), which say what they read
    and write."""

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """The results of all ranks, in a list."""

    async def compute(self, method: Callable[..., Any], batch: DataProto) -> DataProto:
        """The columns that a data-parallel method writes, in the order of the batch."""

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        """All optimizer updates of a data-parallel method that trains, in order. With `seed`, the
        batch is cut into mini-batches that are drawn from it."""

    async def memory(self) -> Mapping[str, float]:
        """Peaks of the methods, and what lay off the device, since the last call:
        `observations.memory_metrics`."""


class Policy(Role, Protocol):
    """The role that is trained, and whose weights go to the engines."""

    async def log_probs(self, batch: DataProto) -> DataProto:
        """old_log_probs and entropys; with router replay the experts of each token."""

    async def later_log_probs(self, batch: DataProto, seed: int) -> DataProto:
        """old_log_probs and entropys of the rows that are not in the first mini-batch of `seed`,
        for `update_and_score`."""

    async def update_and_score(
        self, batch: DataProto, seed: int, later: DataProto | None = None
    ) -> tuple[Sequence[Update], DataProto]:
        """All updates of a step whose first mini-batch no pass has scored. Returns them, and rows
        in the order of `batch` with old_log_probs and entropys: those of the first mini-batch, as
        its update computed them, and with the `later_log_probs` of the same batch and seed all the
        others."""
