"""The roles with a scalar head: critic and reward model. In processes of their own, or beside the policy in its."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import OptimConfig, ParallelConfig, RunConfig
from hybridflow.device.residency import PARTS, Part
from hybridflow.dispatch import PADDING_META, Dispatch, MeshPosition, WorkerContext, register
from hybridflow.models import family_of
from hybridflow.models.scalar_head import SEQUENCE, TOKENS, WEIGHT, FreshHead, ScalarHead
from hybridflow.models.weights import RandomWeights, SafetensorsFolder, WeightSource
from hybridflow.workers.losses import PairLoss, ValueLoss
from hybridflow.workers.memory import needs
from hybridflow.workers.world import join_world, mesh_position, role_memory

if TYPE_CHECKING:
    from hybridflow.mcore.checkpoint import Saver
    from hybridflow.mcore.value_model import ValueModel

Report = dict[str, Any]


@dataclass(frozen=True)
class ValueSpec:
    """What every rank of a role is told: the run's configuration, the Hugging Face config of the role's model, its
    weights.

    `path` is a Hugging Face folder: with a head of the role's kind, or a causal model, which gets a fresh one. None:
        random weights.
    """

    config: RunConfig
    hf_config: Mapping[str, Any]
    path: str | None
    tokenizer: Path | None


class CriticWorker:
    """One Megatron rank of the critic. Public methods are collectives: the controller calls them on all ranks."""

    def __init__(self, context: WorkerContext, spec: ValueSpec) -> None:
        self.spec, self.config = spec, spec.config.critic
        layout = derived.role_layout(spec.config, "critic")
        join_world(context, spec.config, layout)
        self.critic = _value_model(spec, TOKENS, layout)
        self.memory = role_memory(spec.config, "critic", self.critic)
        self._saver = _saver(self.critic, spec.config.trainer.checkpoint_timeout_s)

    def mesh_position(self) -> MeshPosition:
        """Where this rank stands for data-parallel calls."""
        return mesh_position()

    @register(Dispatch.ONE_TO_ALL)
    def sleep_critic(self, parts: tuple[Part, ...] = PARTS) -> int:
        """Those of `parts` that `critic.offload` names leave the device, until a method needs them. Returns the bytes
        freed."""
        return self.memory.sleep(parts)

    @register(Dispatch.ONE_TO_ALL)
    def take_critic_memory(self) -> dict[str, Any]:
        """See `RoleMemory.take`."""
        return self.memory.take()

    @register(Dispatch.ONE_TO_ALL)
    @needs("weights", "gradients", "optimizer")
    def start_critic(self, optim: OptimConfig, folder: Path) -> None:
        """Begin a run: a fresh optimizer over the weights of a Hugging Face folder, with a fresh head if that has
        none."""
        self.critic.load_from(_source(self.critic.family, str(folder), self.spec.config.seed))
        self.critic.set_optimizer(optim)

    @register(Dispatch.DP, reads=("prompt_ids", "response_ids"), writes=("values",))
    @needs("weights")
    def compute_values(self, batch: DataProto) -> DataProto | None:
        """The value of the state each response token was sampled in."""
        found = self.critic.values(batch, max_tokens=self.config.max_tokens_per_micro_batch)
        return None if found is None else DataProto.from_columns({"values": found})

    @register(Dispatch.DP_METRIC, reads=("prompt_ids", "response_ids", *ValueLoss.columns))
    @needs("weights", "gradients", "optimizer")
    def update_critic(self, batch: DataProto, rows_per_update: int) -> list[Report]:
        """Regression over this rank's share in its order, `rows_per_update` of its rows an optimizer update. One report
        an update."""
        config, reports = self.config, []
        loss = ValueLoss(config)
        for mini_batch in batch.mini_batches(rows_per_update):
            sums, info = self.critic.train_values(
                mini_batch, loss, columns=loss.columns, max_tokens=config.max_tokens_per_micro_batch
            )
            reports.append({"sums": sums, "info": info})
        return reports

    @register(Dispatch.ONE_TO_ALL)
    @needs(*PARTS)
    def save_critic(self, folder: Path, phase: str, step: int, background: bool) -> None:
        """Write model, optimizer and random state; in the background, return when they have been copied."""
        (self._saver.start if background else self._saver.save)(folder, phase=phase, step=step)

    @register(Dispatch.ONE_TO_ALL)
    def is_critic_written(self) -> bool:
        """Whether this rank has nothing left to write. CheckpointError when the last background save failed."""
        return self._saver.done()

    @register(Dispatch.ONE_TO_ALL)
    @needs(*PARTS)
    def load_critic(self, folder: Path, optim: OptimConfig) -> None:
        """Restore what `save_critic` wrote (`optim` as it was then)."""
        self.critic.set_optimizer(optim)
        _load(self.critic, folder)

    @register(Dispatch.ONE_TO_ALL)
    @needs("weights")
    def export_critic(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        _export(self.critic, folder, self.spec)


class RewardModelWorker:
    """One Megatron rank of the reward model: scores in reinforcement learning, or learns from pairs. Methods are
    collectives."""

    def __init__(self, context: WorkerContext, spec: ValueSpec) -> None:
        self.spec, self.config = spec, spec.config.reward_model
        layout = derived.role_layout(spec.config, "reward_model")
        join_world(context, spec.config, layout)
        self.reward_model = _value_model(spec, SEQUENCE, layout)
        self.memory = role_memory(spec.config, "reward_model", self.reward_model)
        self._saver = _saver(self.reward_model, spec.config.trainer.checkpoint_timeout_s)

    def mesh_position(self) -> MeshPosition:
        """Where this rank stands for data-parallel calls."""
        return mesh_position()

    @register(Dispatch.ONE_TO_ALL)
    def sleep_reward_model(self, parts: tuple[Part, ...] = PARTS) -> int:
        """Those of `parts` that `reward_model.offload` names leave the device, until a method needs them. Returns the
        bytes freed."""
        return self.memory.sleep(parts)

    @register(Dispatch.ONE_TO_ALL)
    def take_reward_model_memory(self) -> dict[str, Any]:
        """See `RoleMemory.take`."""
        return self.memory.take()

    @register(Dispatch.DP, reads=("prompt_ids", "response_ids"), writes=("rm_scores",))
    @needs("weights")
    def compute_scores(self, batch: DataProto) -> DataProto | None:
        """[B] the score of prompt and response together, read at the last token."""
        found = self.reward_model.scores(batch, max_tokens=self.config.max_tokens_per_micro_batch)
        return None if found is None else DataProto.from_columns({"rm_scores": found})

    @register(Dispatch.ONE_TO_ALL)
    @needs("weights", "gradients", "optimizer")
    def start_reward_model(self, optim: OptimConfig, folder: Path | None) -> None:
        """Begin training: a fresh optimizer over the weights of `folder` (a Hugging Face folder), or over the present
        ones."""
        if folder is not None:
            self.reward_model.load_from(_source(self.reward_model.family, str(folder), self.spec.config.seed))
        self.reward_model.set_optimizer(optim)

    @register(Dispatch.DP_METRIC, reads=("prompt_ids", "chosen_ids", "rejected_ids"))
    @needs("weights", "gradients", "optimizer")
    def pair_step(self, batch: DataProto) -> Report:
        """One update on pairs [B] of answers to one prompt each."""
        rows = interleave_pairs(_own_rows(batch))
        sums, info = self.reward_model.train_pairs(rows, PairLoss(), max_tokens=self.config.max_tokens_per_micro_batch)
        return {"sums": sums, "info": info}

    @register(Dispatch.ONE_TO_ALL)
    @needs(*PARTS)
    def save_reward_model(self, folder: Path, phase: str, step: int, background: bool) -> None:
        """Write model, optimizer and random state; in the background, return when they have been copied."""
        (self._saver.start if background else self._saver.save)(folder, phase=phase, step=step)

    @register(Dispatch.ONE_TO_ALL)
    def is_reward_model_written(self) -> bool:
        """Whether this rank has nothing left to write. CheckpointError when the last background save failed."""
        return self._saver.done()

    @register(Dispatch.ONE_TO_ALL)
    @needs(*PARTS)
    def load_reward_model(self, folder: Path, optim: OptimConfig) -> None:
        """Restore what `save_reward_model` wrote (`optim` as it was then)."""
        self.reward_model.set_optimizer(optim)
        _load(self.reward_model, folder)

    @register(Dispatch.ONE_TO_ALL)
    @needs("weights")
    def export_reward_model(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        _export(self.reward_model, folder, self.spec)


def interleave_pairs(batch: DataProto) -> DataProto:
    """Pairs [B] as rows [2 B]: chosen, rejected, chosen, ..., each behind its prompt, as `ValueModel.train_pairs` takes
    them."""
    prompts = batch.select(["prompt_ids"])
    chosen, rejected = (
        prompts.with_columns(response_ids=batch.jagged(name)) for name in ("chosen_ids", "rejected_ids")
    )
    rows = DataProto.concat([chosen, rejected])
    count = len(batch)
    return rows.rows([i // 2 + (i % 2) * count for i in range(2 * count)])


def scalar_family(hf_config: Mapping[str, Any], task: str) -> ScalarHead:
    """The map of a model with a scalar head, from its own config.json or that of a causal model."""
    architecture = str((hf_config.get("architectures") or [""])[0])
    bias = architecture.endswith(TOKENS) and bool(hf_config.get("token_classification_bias", True))
    return ScalarHead(family_of(hf_config), task, bias)


def _value_model(spec: ValueSpec, task: str, layout: ParallelConfig) -> ValueModel:
    from hybridflow.mcore.value_model import ValueModel

    family = scalar_family(spec.hf_config, task)
    return ValueModel(family, layout, spec.config.model.dtype, _source(family, spec.path, spec.config.seed))


def _saver(model: ValueModel, timeout_s: float) -> Saver:
    from hybridflow.mcore import checkpoint

    return checkpoint.Saver(model, timeout_s)


def _load(model: ValueModel, folder: Path) -> None:
    from hybridflow.mcore import checkpoint

    checkpoint.load(model, folder)


def _export(model: ValueModel, folder: Path, spec: ValueSpec) -> None:
    from hybridflow.mcore import hf_export

    hf_export.export(model, folder, model.family.hf, spec.tokenizer)


def _source(family: ScalarHead, path: str | None, seed: int) -> WeightSource:
    if path is None:
        backbone = RandomWeights(family.backbone.tensors(), seed, float(family.hf.get("initializer_range", 0.02)))
        return FreshHead(backbone, family, seed)
    folder = SafetensorsFolder(path)
    return folder if WEIGHT in folder.files else FreshHead(folder, family, seed)


def _own_rows(batch: DataProto) -> DataProto:
    """Without the rows that the controller added to make the batch divisible: training on them twice would be wrong."""
    return batch.unpad(int(batch.meta.get(PADDING_META, 0)))
