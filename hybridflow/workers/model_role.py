"""The worker for the critic, reference, reward model and teacher roles, in separate processes or
colocated with the policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hybridflow.batch import SUPPORT, DataProto
from hybridflow.config import derived
from hybridflow.config.role_table import ROLES, Head
from hybridflow.config.schema import DistillationConfig
from hybridflow.data.image_tokens import IMAGES
from hybridflow.device.platform import Platform
from hybridflow.dispatch import Dispatch, WorkerContext, register
from hybridflow.models import Family, family_of, use_family
from hybridflow.models.scalar_head import SEQUENCE, TOKENS, WEIGHT, FreshHead, ScalarHead
from hybridflow.models.weights import SafetensorsFolder, WeightSource, initial_weights
from hybridflow.workers.losses import PairLoss, ValueLoss
from hybridflow.workers.role import Report, RoleSpec, RoleWorker, needs, own_rows

# a scalar head is applied to each token, or once per sequence
_SCALAR_HEADS = {"value": TOKENS, "score": SEQUENCE}


class ModelWorker(RoleWorker):
    """One Megatron rank of a role other than the policy. Public methods are collectives."""

    def __init__(self, context: WorkerContext, spec: RoleSpec) -> None:
        from hybridflow.mcore import parallel
        from hybridflow.mcore.backend import MegatronPolicy
        from hybridflow.mcore.value_model import ValueModel

        config = spec.config
        platform = Platform.detect()
        layout = derived.role_layout(config, spec.role)
        platform.set_device(context.local_rank)
        if not parallel.is_initialized():  # another role in this process may have done it
            parallel.initialize(
                layout, config.seed, platform.collective_backend, config.cluster.call_timeout_s
            )
        head = _SCALAR_HEADS.get(ROLES[spec.role].head)
        use_family(config.model.family)
        family = role_family(spec.hf_config, head)
        model = ValueModel if head else MegatronPolicy
        self.model: Any = model(
            family,
            layout,
            config.model.dtype,
            _source(family, spec.path, config.seed),
            on_nonfinite=config.actor.on_nonfinite,
            trains=spec.trains,
        )
        super().__init__(spec, self.model, family.hf, platform)

    @register(Dispatch.ONE_TO_ALL)
    @needs("weights", "gradients", "optimizer")
    def fill(self, folder: Path) -> None:
        """Load the weights of a Hugging Face folder.

        If the role needs a head that the folder does not contain, a freshly initialised one is
        created. Call `set_optimizer` again afterwards.
        """
        self.model.load_from(_source(self.model.family, str(folder), self.spec.config.seed))

    @register(Dispatch.DP, reads=("prompt_ids", "response_ids"), writes=("values",))
    @needs("weights")
    def compute_values(self, batch: DataProto) -> DataProto | None:
        """Critic: return the value of the state before each response token."""
        found = self.model.values(batch, max_tokens=self.config.max_tokens_per_micro_batch)
        return None if found is None else DataProto.from_columns({"values": found})

    @register(Dispatch.DP, reads=("prompt_ids", "response_ids"), writes=("rm_scores",))
    @needs("weights")
    def compute_scores(self, batch: DataProto) -> DataProto | None:
        """Reward model: return the score [B] of each response to its prompt, computed at the last
        token.
        """
        found = self.model.scores(batch, max_tokens=self.config.max_tokens_per_micro_batch)
        return None if found is None else DataProto.from_columns({"rm_scores": found})

    @register(
        Dispatch.DP,
        reads=("prompt_ids", "response_ids"),
        writes=("ref_log_probs",),
        may_read=(*SUPPORT, *IMAGES),
    )
    @needs("weights")
    def compute_ref_log_probs(self, batch: DataProto) -> DataProto | None:
        """Reference: return the log-probs of the response tokens."""
        return self._log_probs(batch, "ref_log_probs")

    @register(
        Dispatch.DP,
        reads=("prompt_ids", "response_ids"),
        writes=("teacher_log_probs",),
        may_read=IMAGES,
    )
    @needs("weights")
    def compute_teacher_log_probs(self, batch: DataProto) -> DataProto | None:
        """Teacher: return the log-probs of the response tokens at the policy's sampling
        temperature."""
        return self._log_probs(batch, "teacher_log_probs")

    @register(
        Dispatch.DP,
        reads=("prompt_ids", "response_ids"),
        writes=("teacher_top_log_probs", "teacher_top_ids"),
        may_read=IMAGES,
    )
    @needs("weights")
    def compute_teacher_top(self, batch: DataProto) -> DataProto | None:
        """Teacher: return the log-probs and ids of the `teacher.top_k` most likely tokens at every
        response token.

        Both are jagged [t, k], sorted by decreasing probability. Log-probs are normalised over the
        whole vocabulary at the policy's sampling temperature.
        """
        found = self.model.top_log_probs(
            batch,
            k=self.config.top_k,
            max_tokens=self.config.max_tokens_per_micro_batch,
            temperature=self.spec.config.rollout.sampling.temperature,
        )
        if found is None:
            return None
        return DataProto.from_columns(
            {"teacher_top_log_probs": found[0], "teacher_top_ids": found[1]}
        )

    @register(Dispatch.DP_METRIC, reads=("prompt_ids", "response_ids", *ValueLoss.columns))
    @needs("weights", "gradients", "optimizer")
    def update_critic(self, batch: DataProto, rows_per_update: int) -> list[Report]:
        """Critic: run regression updates over this rank's rows in order, `rows_per_update` rows at
        a time.

        Returns one report per update.
        """
        config = self.config
        reports = []
        loss = ValueLoss(config)
        for mini_batch in batch.split(rows_per_update):
            sums, info = self.model.train_values(
                mini_batch, loss, columns=loss.columns, max_tokens=config.max_tokens_per_micro_batch
            )
            reports.append({"sums": sums, "info": info})
        return reports

    @register(Dispatch.DP_METRIC, reads=("prompt_ids", "chosen_ids", "rejected_ids"))
    @needs("weights", "gradients", "optimizer")
    def pair_step(self, batch: DataProto) -> list[Report]:
        """Reward model: run one update on [B] preference pairs."""
        rows = interleave_pairs(own_rows(batch))
        sums, info = self.model.train_pairs(
            rows, PairLoss(), max_tokens=self.config.max_tokens_per_micro_batch
        )
        return [{"sums": sums, "info": info}]


# forward method of each kind of role; a teacher's is returned by `teacher_method`
PASSES: dict[Head, Callable[..., DataProto | None]] = {
    "vocabulary": ModelWorker.compute_ref_log_probs,
    "value": ModelWorker.compute_values,
    "score": ModelWorker.compute_scores,
}


def teacher_method(config: DistillationConfig) -> Callable[..., DataProto | None]:
    """Return the teacher's forward method for the configured loss.

    It computes log-probs of the sampled tokens if the loss uses them, and otherwise the top-k
    tokens.
    """
    sampled = config.coef and config.loss != "forward_kl_topk"
    return ModelWorker.compute_teacher_log_probs if sampled else ModelWorker.compute_teacher_top


def interleave_pairs(batch: DataProto) -> DataProto:
    """Convert pairs [B] to rows [2 B] in the format of `ValueModel.train_pairs`: chosen, rejected,
    chosen, ..., each including the prompt.
    """
    prompts = batch.select(["prompt_ids"])
    chosen, rejected = (
        prompts.with_columns(response_ids=batch.jagged(name))
        for name in ("chosen_ids", "rejected_ids")
    )
    rows = DataProto.concat([chosen, rejected])
    count = len(batch)
    return rows.rows([i // 2 + (i % 2) * count for i in range(2 * count)])


def role_family(hf_config: Mapping[str, Any], head: str | None) -> Family:
    """Return the parameter map of a role's model, built from its config.json.

    For a scalar head, it wraps the causal model's map.
    """
    if head is None:
        return family_of(hf_config)
    architecture = str((hf_config.get("architectures") or [""])[0])
    bias = architecture.endswith(TOKENS) and bool(hf_config.get("token_classification_bias", True))
    return ScalarHead(family_of(hf_config), head, bias)


def _source(family: Family, path: str | None, seed: int) -> WeightSource:
    """Return the weights in the folder `path`, or random weights if it is None.

    A scalar head is freshly initialised if the weights do not include one.
    """
    scalar = family if isinstance(family, ScalarHead) else None
    if path is not None:
        folder = SafetensorsFolder(path)
        return FreshHead(folder, scalar, seed) if scalar and WEIGHT not in folder.files else folder
    random = initial_weights(scalar.backbone if scalar else family, seed)
    return FreshHead(random, scalar, seed) if scalar else random
