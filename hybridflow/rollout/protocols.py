"""What the loop sees of rollouts: engines that answer prompts, and the sync that brings them
weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hybridflow.batch import DataProto

# column of prompts that may not be answered with as many tokens as others [B]: the most
ROOM = "room"


class Sample(Protocol):
    """An answer to a prompt that was begun."""

    def done(self) -> bool:
        """Return whether it has ended."""


class Rollouts(Protocol):
    """Engines that answer prompts; methods take the samples that `begin` returned.

    Engines work on what they were asked by themselves. They are asked for more, and their answers
    come in, while somebody waits in `advance` or `answers`.
    """

    def begin(
        self, prompts: DataProto, *, training: bool, begun: DataProto | None = None
    ) -> Sequence[Sample]:
        """Begin an answer to each row.

        Args:
            prompts: with prompt_ids; rows of one `uid` are the samples of one prompt, which one
                engine gets. With `ROOM` where answers have less room than
                `data.max_response_length`.
            training: sample as `rollout.sampling` says, with routed_experts when they are replayed;
                else as `rollout.val_sampling` says, or with a column `VAL_SET` as the entries of
                `data.val_sets` say that it names.
            begun: what `begun` returned of samples like these, perhaps in another process, with
                `row` [b], their row of `prompts`: they go on from there.
        """

    async def advance(self) -> None:
        """Wait a moment for answers, and send what engines have room for."""

    async def answers(self, samples: Sequence[Any]) -> DataProto:
        """`batch`, once all of the samples have ended."""

    def batch(self, samples: Sequence[Any]) -> DataProto:
        """The answers of samples that have ended, in their order: response_ids, response_mask,
        rollout_log_probs, response_versions, finish_reason, weight_version; of conversations also
        `conversations.COLUMNS`."""

    def shown(self, samples: Sequence[Any]) -> DataProto:
        """What `batch` returns of samples that have ended, as far as a reward reads it."""

    async def begun(self, samples: Sequence[Any]) -> DataProto | None:
        """The answers so far of samples that go on, for `begin`: rows with `sample` [b], their
        place among the samples. None where no answer has begun."""

    async def abort(self, samples: Sequence[Any]) -> None:
        """End these samples, and give their places at the engines to others. Their answers are
        lost."""

    async def forget(self) -> None:
        """End all samples."""

    async def sleep(self) -> None:
        """Release the device memory."""

    async def wake(self, tags: Sequence[str]) -> None:
        """Reallocate the memory of `weights` or `kv_cache`; weights come with the next sync."""

    async def close(self) -> None:
        """End the tasks of this process; engines are not told."""


@dataclass(frozen=True)
class SyncReport:
    """What a sync did: seconds, bytes of weights that reached engines, and for each engine that was
    left out, why."""

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

    async def sync(self, version: int) -> SyncReport:
        """After it returns, every engine that gets requests answers with these weights, and says so
        in weight_version.

        Raises:
            WeightSyncError: no engine could take them.
        """


class Engines(Rollouts, WeightSync, Protocol):
    """What answers the prompts of a run, with weights that the run brings it."""
