"""Critic, reference, teacher, reward model on the driver's side: the loop's protocols over worker groups of their own
or the policy's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import OptimConfig, RunConfig
from hybridflow.data.balancing import SequenceCost
from hybridflow.data.packing import balanced_order
from hybridflow.device.residency import Part
from hybridflow.single_controller import WorkerGroup
from hybridflow.trainer.groups import merge
from hybridflow.trainer.observations import memory_metrics
from hybridflow.trainer.protocols import Update
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.teacher import TeacherWorker
from hybridflow.workers.value_roles import CriticWorker, RewardModelWorker


class CriticGroup:
    """`ValueGroup` over Megatron ranks."""

    def __init__(self, group: WorkerGroup, config: RunConfig) -> None:
        self.group, self.config = group, config
        self._shares = _Shares(config, "critic")

    def start(self, optim: OptimConfig, folder: Path) -> None:
        """See ValueGroup."""
        self.group.run(CriticWorker.start_critic, optim, folder.resolve())

    def values(self, batch: DataProto) -> DataProto:
        """See ValueGroup."""
        return self._shares.run(self.group, CriticWorker.compute_values, batch)

    def update(self, batch: DataProto, seed: int) -> Sequence[Update]:
        """See ValueGroup."""
        rows = derived.critic_samples_per_mini_batch(self.config) // derived.role_data_parallel_size(
            self.config, "critic"
        )
        share = batch.select(["prompt_ids", "response_ids", "values", "returns"]).reorder(self._shares.order(batch))
        reports = self.group.run(CriticWorker.update_critic, share, rows, seed)
        return [merge(rank_reports) for rank_reports in zip(*reports, strict=True)]

    def sleep(self, parts: tuple[Part, ...]) -> None:
        """See Sleeper."""
        self.group.run(CriticWorker.sleep_critic, parts)

    def memory(self) -> Mapping[str, float]:
        """See Sleeper."""
        return memory_metrics(self.group.run(CriticWorker.take_critic_memory), "critic")

    def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        """See ValueGroup."""
        self.group.run(CriticWorker.save_critic, folder.resolve(), phase, step, background)

    def is_saved(self) -> bool:
        """See ValueGroup."""
        return all(self.group.run(CriticWorker.is_critic_written))

    def load(self, folder: Path, optim: OptimConfig) -> None:
        """See ValueGroup."""
        self.group.run(CriticWorker.load_critic, folder.resolve(), optim)

    def export(self, folder: Path) -> None:
        """See ValueGroup."""
        self.group.run(CriticWorker.export_critic, folder.resolve())


class ReferenceGroup:
    """`Reference` over Megatron ranks of its own."""

    def __init__(self, group: WorkerGroup, config: RunConfig) -> None:
        self.group = group
        self._shares = _Shares(config, "reference")

    def start(self, folder: Path) -> None:
        """See Reference."""
        self.group.run(ReferenceWorker.fill_reference, folder.resolve())

    def ref_log_probs(self, batch: DataProto) -> DataProto:
        """See Reference."""
        return self._shares.run(self.group, ReferenceWorker.compute_ref_log_probs, batch)


class TeacherGroup:
    """`Teacher` over Megatron ranks."""

    def __init__(self, group: WorkerGroup, config: RunConfig) -> None:
        self.group = group
        self._shares = _Shares(config, "teacher")

    def top_log_probs(self, batch: DataProto) -> DataProto:
        """See Teacher."""
        return self._shares.run(self.group, TeacherWorker.compute_teacher_top, batch)

    def sleep(self, parts: tuple[Part, ...]) -> None:
        """See Sleeper."""
        self.group.run(TeacherWorker.sleep_teacher, parts)

    def memory(self) -> Mapping[str, float]:
        """See Sleeper."""
        return memory_metrics(self.group.run(TeacherWorker.take_teacher_memory), "teacher")


class RewardModelGroup:
    """Scores responses for the loop (`RewardModel`), and learns from pairs for `RewardTrainer`."""

    def __init__(self, group: WorkerGroup, config: RunConfig) -> None:
        self.group = group
        self._shares = _Shares(config, "reward_model")

    def scores(self, batch: DataProto) -> DataProto:
        """rm_scores [B] f32."""
        return self._shares.run(self.group, RewardModelWorker.compute_scores, batch)

    def sleep(self, parts: tuple[Part, ...]) -> None:
        """See Sleeper."""
        self.group.run(RewardModelWorker.sleep_reward_model, parts)

    def memory(self) -> Mapping[str, float]:
        """See Sleeper."""
        return memory_metrics(self.group.run(RewardModelWorker.take_reward_model_memory), "reward_model")

    def start(self, optim: OptimConfig, folder: Path | None) -> None:
        """Fresh optimizer; over the weights of a Hugging Face folder, if there is one."""
        self.group.run(RewardModelWorker.start_reward_model, optim, folder.resolve() if folder else None)

    def pair_step(self, batch: DataProto) -> Update:
        """One update on pairs."""
        return merge(self.group.run(RewardModelWorker.pair_step, batch))

    def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        """Write the state to a new folder; in the background, return when it has been copied."""
        self.group.run(RewardModelWorker.save_reward_model, folder.resolve(), phase, step, background)

    def is_saved(self) -> bool:
        """Whether no rank is writing. CheckpointError when the last background save failed."""
        return all(self.group.run(RewardModelWorker.is_reward_model_written))

    def load(self, folder: Path, optim: OptimConfig) -> None:
        """Restore it."""
        self.group.run(RewardModelWorker.load_reward_model, folder.resolve(), optim)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        self.group.run(RewardModelWorker.export_reward_model, folder.resolve())


class _Shares:
    """Orders a batch so that the data-parallel ranks of a role get rows of equal cost."""

    def __init__(self, config: RunConfig, role: str) -> None:
        self._cost = SequenceCost.of_model(derived.hf_config(config.model))
        self._ranks = derived.role_data_parallel_size(config, role)

    def order(self, batch: DataProto) -> np.ndarray:
        """[B] rows in the order in which they are cut."""
        return balanced_order(self._cost(batch.lengths("prompt_ids") + batch.lengths("response_ids")), self._ranks)

    def run(self, group: WorkerGroup, method: Callable[..., Any], batch: DataProto) -> DataProto:
        """A call in that order, its result in the order of `batch`."""
        order = self.order(batch)
        found = group.run(method, batch.reorder(order))
        assert isinstance(found, DataProto), type(found)
        return found.reorder(np.argsort(order))
