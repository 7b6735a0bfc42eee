"""The training loop's interface to rollouts: engines that answer prompts, and their weight sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridflow.batch import DataProto

# optional column [B]: per-prompt limit on response tokens
ROOM = "room"


class Sample(Protocol):
    """A handle for the answer to one prompt, which may still be in progress."""

    def done(self) -> bool:
        """Return True if the answer is complete."""


class Rollouts(Protocol):
    """Engines that answer prompts. Methods expect the samples returned by `begin`. Engines work in
    the background. Requests are sent and answers are received only while a caller awaits `advance`
    or `answers`.
    """

    def begin(
        self, prompts: DataProto, *, training: bool, begun: DataProto | None = None
    ) -> Sequence[Sample]:
        """Start an answer for each row.

        Args:
            prompts: a batch with prompt_ids. Rows with the same `uid` are samples of one prompt and
                are sent to the same engine. The column `ROOM` can lower the limit
                `data.max_response_length` per row.
            training: if True, sample with `rollout.sampling`, and return routed_experts if they are
                replayed. Otherwise, sample with `rollout.val_sampling`, or with the entry of
                `data.val_sets` named in the column `VAL_SET`.
            begun: partial answers to continue, as returned by `begun`, possibly in another process.
                `row` [b] is each answer's row in `prompts`.
        """

    async def advance(self) -> None:
        """Send as many requests as the engines can accept, and wait briefly for answers."""

    async def answers(self, samples: Sequence[Any]) -> DataProto:
        """Wait until all samples have finished, and return their answers, in order: response_ids,
        response_mask, rollout_log_probs, response_versions, finish_reason, weight_version; for
        conversations also `conversations.COLUMNS`."""

    def shown(self, samples: Sequence[Any]) -> DataProto:
        """Return only those columns of `answers` that are needed for computing rewards."""

    async def begun(self, samples: Sequence[Any]) -> DataProto | None:
        """Return the partial answers of unfinished samples, for `begin`. `sample` [b] is the
        position of each answer's sample among `samples`. Returns None if no answer has started.
        """

    async def abort(self, samples: Sequence[Any]) -> None:
        """Abort these samples and free their slots in the engines. Their answers are discarded."""

    async def forget(self) -> None:
        """Abort all samples."""

    async def sleep(self) -> None:
        """Release the engines' device memory."""

    async def wake(self, tags: Sequence[str]) -> None:
        """Reallocate memory for `weights` or `kv_cache`. Weights are uninitialised until the next
        sync."""

    async def load_metrics(self) -> dict[str, float]:
        """Return the engines' load since the last call, as metrics `engine/...`; empty if no engine
        runs in a separate process.
        """

    async def close(self) -> None:
        """Stop the tasks of this process. The engines are not notified."""


@dataclass(frozen=True)
class SyncReport:
    """The result of a sync: its duration in seconds, the bytes of weights that engines received,
    and why any engines were excluded.
    """

    version: int
    seconds: float
    nbytes: int
    stale: Mapping[str, str]

    def metrics(self) -> dict[str, float]:
        """The metrics of this sync, which are recorded with the step."""
        return {
            "sync/seconds": self.seconds,
            "sync/bytes": float(self.nbytes),
            "sync/engines_stale": float(len(self.stale)),
        }


class WeightSync(Protocol):
    """Transfers the policy's weights to the engines."""

    async def sync(self, version: int) -> SyncReport:
        """Transfer the weights. Afterwards, every engine that serves requests uses the new weights
        and reports their version as weight_version.

        Raises:
            WeightSyncError: no engine could load them.
        """


class Engines(Rollouts, WeightSync, Protocol):
    """Engines that answer a run's prompts and receive its weights."""
