"""Model, reference, optimizer, schedule and random state as row shards of the Hugging Face tensors, one file a rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybridflow.errors import CheckpointError
from hybridflow.fsdp.optimizer import Optimizer
from hybridflow.process.exchange import Exchange, shared_exchange
from hybridflow.reshard.fsdp_layout import shard_rows
from hybridflow.saving.checkpoint_source import CheckpointFolder
from hybridflow.saving.files import Chunk, HfSlice, Rectangle, check_cover
from hybridflow.saving.manifest import INDEX, FileRecord, digest_of, sync_folder, write_json
from hybridflow.saving.saver import Holder, Job, checked_manifest, manifest_of

TRAINING = "training.json"
_RANDOM = "rng_state"


class Sharded(Holder, Protocol):
    """A policy, as far as a checkpoint holds it."""

    @property
    def optimizer(self) -> Optimizer | None:
        """None before `set_optimizer`."""
        ...

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """This rank's rows of every tensor, by Hugging Face name."""
        ...

    def reference_state(self) -> Mapping[str, torch.Tensor]:
        """The reference's rows by the same names."""
        ...


class ShardedState:
    """The rectangles of one policy over its live memory."""

    def __init__(self, policy: Sharded) -> None:
        self.contains, self._tensors = ["model"], policy.family.tensors()
        self._model = self._rectangles("", policy.parameters())
        self.tensors = list(self._model)
        if policy.optimizer is not None:
            self.contains.append("optimizer")
            for kind, moments in policy.optimizer.moments().items():
                self.tensors += self._rectangles(f"optimizer.state.{kind}.", moments)
        if policy.has_reference:
            self.contains.append("reference")
            self.tensors += self._rectangles("reference.", policy.reference_state())
        self.contains.append("rng")
        state = torch.get_rng_state()
        self.random = Rectangle(
            _RANDOM, state, (dist.get_world_size(), len(state)), (dist.get_rank(), 0), prepend_axis_num=1
        )

    def owned(self) -> Sequence[Rectangle]:
        """What this rank writes: all that it holds, since nothing is replicated."""
        return [*self.tensors, self.random]

    def hf(self) -> Iterator[HfSlice]:
        """The model's tensors are the Hugging Face tensors."""
        for one in self._model:
            yield HfSlice(one.key, one.global_offset, one.local_shape, one.key, one.global_offset)

    def _rectangles(self, prefix: str, held: Mapping[str, torch.Tensor]) -> list[Rectangle]:
        rank, ranks, found = dist.get_rank(), dist.get_world_size(), []
        for name, shape in self._tensors.items():
            start, rows = shard_rows(shape[0], rank, ranks)
            if rows:
                found.append(Rectangle(prefix + name, held[name], shape, (start, *(0,) * (len(shape) - 1))))
        return found


def job(policy: Sharded, folder: Path, phase: str, step: int, exchange: Exchange) -> Job:
    """One save; everything but the tensors' data is taken now."""
    state = ShardedState(policy)
    training = {"updates": policy.optimizer.updates if policy.optimizer else 0}
    manifest = manifest_of(policy, state.contains, {"world": dist.get_world_size()}, phase, step, {})

    def write_index(to: Path, chunks: Sequence[Chunk], hf: Sequence[Any]) -> dict[str, FileRecord]:
        check_cover(chunks)
        write_json(to / INDEX, {"chunks": list(chunks), "hf": list(hf)})
        write_json(to / TRAINING, training)
        sync_folder(to)
        return {name: digest_of(to / name) for name in (INDEX, TRAINING)}

    return Job(state, manifest, write_index, folder, exchange)


@torch.no_grad()
def load(policy: Sharded, folder: Path) -> None:
    """Restore what was saved, in place, whatever the number of ranks was then. Collective.

    The random state comes back where the number of ranks is the same.

    Raises:
        CheckpointError: the folder is missing, torn, foreign, of another backend, or of another model; nothing has been
        loaded then.
    """
    manifest = checked_manifest(policy, folder, shared_exchange(), TRAINING)
    source, state = CheckpointFolder(folder), ShardedState(policy)
    for one in state.tensors:
        one.data.copy_(source.region(one.key, one.global_offset, one.local_shape))
    if policy.optimizer is not None:
        policy.optimizer.resume(_updates(folder / TRAINING))
    if manifest.layout["world"] == dist.get_world_size():
        torch.set_rng_state(source.region(_RANDOM, state.random.global_offset, (1, len(state.random.data)))[0])


def _updates(file: Path) -> int:
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["updates"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); `hybridflow checkpoint verify` says more") from error
