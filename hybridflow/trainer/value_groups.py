"""Critic, reference, teacher, reward model on the driver's side: the loop's protocols over worker groups of their own
or the policy's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import OptimConfig, RunConfig
from hybridflow.device.residency import Part
from hybridflow.dispatch import method_spec
from hybridflow.single_controller import WorkerGroup
from hybridflow.trainer.groups import Shares, epoch_seeds, merge
from hybridflow.trainer.observations import memory_metrics
from hybridflow.trainer.protocols import Update
from hybridflow.workers.reference import ReferenceWorker
from hybridflow.workers.teacher import TeacherWorker
from hybridflow.workers.value_roles import CriticWorker, RewardModelWorker


class CriticGroup:
    """`ValueGroup` over Megatron ranks."""

    def __init__(self, group: WorkerGroup, config: RunConfig) -> None:
        self.group, self.config = group, config
        self._shares = _shares(config, "critic")

    def start(self, optim: OptimConfig, folder: Path) -> None:
        """See ValueGroup."""
        self.group.run(CriticWorker.start_critic, optim, folder.resolve())

    def values(self, batch: DataProto) -> DataProto:
        """See ValueGroup."""
        return self._shares.run(self.group, CriticWorker.compute_values, batch)

    def update(self, batch: DataProto, seed: int) -> Sequence[Update]:
        """See ValueGroup."""
        config, reads = self.config, method_spec(CriticWorker.update_critic).reads
        rows, seeds = derived.critic_samples_per_mini_batch(config), epoch_seeds(seed, config.critic.ppo_epochs)
        found = self._shares.updates(self.group, CriticWorker.update_critic, batch.select(reads), rows, seeds)
        return [merge(of_ranks) for of_ranks in found]

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
        self._shares = _shares(config, "reference")

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
        self._shares = _shares(config, "teacher")

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
        self._shares = _shares(config, "reward_model")

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


def _shares(config: RunConfig, role: str) -> Shares:
    return Shares(config, derived.role_data_parallel_size(config, role))
