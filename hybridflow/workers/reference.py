"""The reference in processes of its own: the policy as it was when reinforcement learning began, or another model (a
teacher)."""

from __future__ import annotations

from pathlib import Path

from hybridflow.batch import DataProto
from hybridflow.dispatch import Dispatch, MeshPosition, WorkerContext, register
from hybridflow.models import family_of
from hybridflow.models.weights import RandomWeights, SafetensorsFolder, WeightSource
from hybridflow.workers.value_roles import ValueSpec
from hybridflow.workers.world import join_world, mesh_position


class ReferenceWorker:
    """One Megatron rank that only scores. Public methods are collectives."""

    def __init__(self, context: WorkerContext, spec: ValueSpec) -> None:
        from hybridflow.mcore.policy import Policy

        self.spec, self.reference = spec, spec.config.reference
        join_world(context, spec.config, self.reference.parallel)
        family = family_of(spec.hf_config)
        source: WeightSource = RandomWeights(family.tensors(), spec.config.seed, 0.02)
        if spec.path is not None:
            source = SafetensorsFolder(spec.path)
        self.model = Policy(family, self.reference.parallel, spec.config.model.dtype, source)

    def mesh_position(self) -> MeshPosition:
        """Where this rank stands for data-parallel calls."""
        return mesh_position()

    @register(Dispatch.ONE_TO_ALL)
    def fill_reference(self, folder: Path) -> None:
        """Take the weights of a Hugging Face folder."""
        from hybridflow.mcore.model import load_weights

        load_weights(self.model.stages, self.model.family, SafetensorsFolder(folder))

    @register(Dispatch.DP, reads=("prompt_ids", "response_ids"), writes=("ref_log_probs",))
    def compute_ref_log_probs(self, batch: DataProto) -> DataProto | None:
        """Log-probs of the response tokens under the reference."""
        found = self.model.log_probs(
            batch,
            max_tokens=self.reference.max_tokens_per_micro_batch,
            temperature=self.spec.config.rollout.sampling.temperature,
            with_entropy=False,
        )
        return None if found is None else DataProto.from_columns({"ref_log_probs": found[0]})
