"""What the loop sees of rollouts: engines that answer prompts, and the sync that brings them weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridflow.batch import DataProto

ROOM = "room"  # column of prompts that may not be answered with as many tokens as others [B]: the most


class RolloutService(Protocol):
    """Engines that answer prompts, each on its own. What a caller has submitted moves on while it calls `poll`, or
    another `poll`s for it; what an engine was asked goes on there meanwhile."""

    def submit(self, prompts: DataProto, *, training: bool, begun: DataProto | None = None) -> list[int]:
        """Take requests in, and return a ticket for each row.

        Args:
            prompts: with prompt_ids; rows of one `uid` are the samples of one prompt, which one engine gets. With
                `ROOM` where answers have less room than `data.max_response_length`.
            training: sample as `rollout.sampling` says, with routed_experts when they are replayed; else as
                `rollout.val_sampling` says, or with a column `VAL_SET` as the entries of `data.val_sets` say that it
                names.
            begun: what `begun` returned of requests like these, perhaps of another process, with `row` [b], their row
                of `prompts`: they go on from there.
        """

    def begun(self, tickets: Sequence[int]) -> DataProto | None:
        """What has come of these requests, which go on: rows with their `ticket`, for `submit`; None where nothing
        has."""

    def poll(self) -> None:
        """Move all requests on: wait a moment for answers, and send what engines have room for."""

    def ended(self, tickets: Iterable[int]) -> bool:
        """Whether all of these requests have ended."""

    def take(self, tickets: Sequence[int]) -> DataProto:
        """The answers of requests that have ended, in the order of the tickets; they can be taken once. response_ids,
        response_mask, rollout_log_probs, response_versions, finish_reason, weight_version; of conversations also
        `conversations.COLUMNS`."""

    def shown(self, tickets: Sequence[int]) -> DataProto:
        """What `take` will return of requests that have ended, as far as a reward reads it."""

    def abort(self, tickets: Sequence[int], *, keep: bool = False) -> None:
        """End these requests wherever they are, and give their places at the engines to others. With `keep` they have
        then ended, soon, with the finish reason `abort` and what had come of them; otherwise their tickets mean nothing
        any longer."""

    def forget(self) -> None:
        """Give up all requests, waiting, under way or ended; their tickets mean nothing any longer."""

    def sleep(self) -> None:
        """Give the device memory away."""

    def wake(self, tags: Sequence[str]) -> None:
        """Take the memory of `weights` or `kv_cache` again; weights come with the next sync."""


def answers(service: RolloutService, prompts: DataProto, *, training: bool) -> DataProto:
    """The answers to the prompts, in their order, once all have ended."""
    return taken(service, service.submit(prompts, training=training))


def taken(service: RolloutService, tickets: Sequence[int]) -> DataProto:
    """The answers of these requests, in their order, once all have ended."""
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
