"""The teacher: another model of the policy's vocabulary, whose most likely tokens at every response token become
columns of the batch."""

from __future__ import annotations

from typing import Any

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.device.residency import PARTS, Part
from hybridflow.dispatch import Dispatch, MeshPosition, WorkerContext, register
from hybridflow.models import family_of
from hybridflow.models.weights import SafetensorsFolder
from hybridflow.workers.memory import needs
from hybridflow.workers.value_roles import ValueSpec
from hybridflow.workers.world import join_world, mesh_position, role_memory


class TeacherWorker:
    """One Megatron rank of the teacher; it never learns. Public methods are collectives."""

    def __init__(self, context: WorkerContext, spec: ValueSpec) -> None:
        from hybridflow.mcore.policy import Policy

        self.spec, self.config = spec, spec.config.teacher
        layout = derived.role_layout(spec.config, "teacher")
        join_world(context, spec.config, layout)
        assert spec.path is not None  # without a path there is no teacher (`derived.has_teacher`)
        self.teacher = Policy(family_of(spec.hf_config), layout, spec.config.model.dtype, SafetensorsFolder(spec.path))
        self.memory = role_memory(spec.config, "teacher", self.teacher)

    def mesh_position(self) -> MeshPosition:
        """Where this rank stands for data-parallel calls."""
        return mesh_position()

    @register(Dispatch.DP, reads=("prompt_ids", "response_ids"), writes=("teacher_top_log_probs", "teacher_top_ids"))
    @needs("weights")
    def compute_teacher_top(self, batch: DataProto) -> DataProto | None:
        """The `teacher.top_k` most likely tokens at every response token, jagged [t, k], likeliest first: log-probs
        over the whole vocabulary at the policy's sampling temperature, and token ids.
        """
        found = self.teacher.top_log_probs(
            batch,
            k=self.config.top_k,
            max_tokens=self.config.max_tokens_per_micro_batch,
            temperature=self.spec.config.rollout.sampling.temperature,
        )
        return (
            None
            if found is None
            else DataProto.from_columns({"teacher_top_log_probs": found[0], "teacher_top_ids": found[1]})
        )

    @register(Dispatch.ONE_TO_ALL)
    def sleep_teacher(self, parts: tuple[Part, ...] = PARTS) -> int:
        """Those of `parts` that `teacher.offload` names leave the device, until a method needs them. Returns the bytes
        freed."""
        return self.memory.sleep(parts)

    @register(Dispatch.ONE_TO_ALL)
    def take_teacher_memory(self) -> dict[str, Any]:
        """See `RoleMemory.take`."""
        return self.memory.take()
