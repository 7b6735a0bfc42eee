"""The role interfaces used by the loop. Jobs implement them with worker groups, and tests of the
loop's logic with small classes that do not need Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hybridflow.batch import DataProto
from hybridflow.saving.store import Saves


@dataclass(frozen=True)
class Update:
    """One optimizer update, merged over data-parallel ranks. `means` maps each metric to its mean;
    `applied` is False if the update was skipped.
    """

    means: Mapping[str, float]
    grad_norm: float
    lr: float
    applied: bool


class Role(Saves, Protocol):
    """The ranks of one role, called through the methods of its worker class
    (`workers.policy.PolicyWorker` for the policy, `workers.model_role.ModelWorker` for the others),
    which declare the columns that they read and write."""

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        """Call a method on all ranks and return the list of their results."""

    async def compute(self, method: Callable[..., Any], batch: DataProto) -> DataProto:
        """Call a data-parallel method and return the columns that it writes, in the order of the
        batch."""

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        """Call a data-parallel training method and return all its optimizer updates, in order. If
        `seed` is given, mini-batches are drawn from the batch."""

    async def memory(self) -> Mapping[str, float]:
        """Return the memory metrics collected since the last call: peaks per method, and offloaded
        bytes (`observations.memory_metrics`)."""


class Policy(Role, Protocol):
    """The trained role whose weights are sent to the engines."""

    async def start_profile(self) -> None:
        """Start profiling a step on the ranks listed in `trainer.profile`."""

    async def stop_profile(self, folder: Path) -> Sequence[str]:
        """Write the profiles to `folder`. Returns one error message for each profile that could not
        be written.
        """

    async def log_probs(self, batch: DataProto) -> DataProto:
        """Return old_log_probs and entropys; with router replay, also each token's experts."""

    async def later_log_probs(self, batch: DataProto, seed: int) -> DataProto:
        """Return old_log_probs and entropys for the rows outside the first mini-batch of `seed`,
        for `update_and_score`."""

    async def update_and_score(
        self, batch: DataProto, seed: int, later: DataProto | None = None
    ) -> tuple[Sequence[Update], DataProto]:
        """Run all updates of a step whose first mini-batch has no old log-probs yet. Returns the
        updates, and rows with old_log_probs and entropys, in the order of `batch`. These are the
        rows of the first mini-batch, whose values are computed by its update, and, if the
        `later_log_probs` of the same batch and seed are given, all other rows.
        """
