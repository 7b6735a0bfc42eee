"""What the loop sees of rollouts: engines that answer prompts, and the sync that brings them weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridflow.batch import DataProto


class RolloutService(Protocol):
    """Engines that answer prompts, each on its own. What a caller has submitted moves on while it calls `poll`, or
    another `poll`s for it; what an engine was asked goes on there meanwhile."""

    def submit(self, prompts: DataProto, *, training: bool) -> list[int]:
        """Take requests in, and return a ticket for each row.

        Args:
            prompts: with prompt_ids; rows of one `uid` are the samples of one prompt, which one engine gets.
            training: sample as `rollout.sampling` says, with routed_experts when they are replayed; else as
                `rollout.val_sampling` says.
        """
        ...

    def poll(self) -> None:
        """Move all requests on: wait a moment for answers, and send what engines have room for."""
        ...

    def ended(self, tickets: Iterable[int]) -> bool:
        """Whether all of these requests have ended."""
        ...

    def take(self, tickets: Sequence[int]) -> DataProto:
        """The answers of requests that have ended, in the order of the tickets; they can be taken once. response_ids,
        response_mask, rollout_log_probs, response_versions, finish_reason, weight_version."""
        ...

    def forget(self) -> None:
        """Give up all requests, waiting, under way or ended; their tickets mean nothing any longer."""
        ...

    def sleep(self) -> None:
        """Give the device memory away."""
        ...

    def wake(self, tags: Sequence[str]) -> None:
        """Take the memory of `weights` or `kv_cache` again; weights come with the next sync."""
        ...


def answers(service: RolloutService, prompts: DataProto, *, training: bool) -> DataProto:
    """The answers to the prompts, in their order, once all have ended."""
    tickets = service.submit(prompts, training=training)
    while not service.ended(tickets):
        service.poll()
    return service.take(tickets)


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
