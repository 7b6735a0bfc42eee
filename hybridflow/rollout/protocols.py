"""What the loop sees of rollouts: engines that answer prompts, and the sync that brings them weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridflow.batch import DataProto

ROOM = "room"  # column of prompts that may not be answered with as many tokens as others [B]: the most


class RolloutService(Protocol):
    """Engines that answer prompts."""

    def generate(self, prompts: DataProto, *, training: bool) -> DataProto:
        """response_ids, response_mask, rollout_log_probs, response_versions, finish_reason, weight_version; of
        conversations also what `conversations.COLUMNS` says.

        Args:
            training: sample as `rollout.sampling` says, with routed_experts when they are replayed; else as
                `rollout.val_sampling` says.
        """
        ...

    def sleep(self) -> None:
        """Give the device memory away."""
        ...

    def wake(self, tags: Sequence[str]) -> None:
        """Take the memory of `weights` or `kv_cache` again; weights come with the next sync."""
        ...


@dataclass(frozen=True)
class SyncReport:
    """What a sync did: seconds, bytes of weights that reached engines, and for each engine that was left out, why."""

    version: int
    seconds: float
    nbytes: int
    stale: Mapping[str, str]

    def metrics(self) -> dict[str, float]:
        """The metrics of this sync for the step's record."""
        return {
            "sync/seconds": self.seconds,
            "sync/bytes": float(self.nbytes),
            "sync/engines_stale": float(len(self.stale)),
        }


class WeightSync(Protocol):
    """Brings the policy's weights to the engines."""

    def sync(self, version: int) -> SyncReport:
        """After it returns, every engine that gets requests answers with these weights, and says so in weight_version.

        Raises:
            WeightSyncError: no engine could take them.
        """
        ...
