"""What one rank does in the tests of the workers of critic, reference, reward model and teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import Jagged
from hybridflow.config.schema import (
    ActorConfig,
    CriticConfig,
    ModelConfig,
    OffloadConfig,
    OptimConfig,
    ReferenceConfig,
    RunConfig,
    TeacherConfig,
)
from hybridflow.dispatch import WorkerContext
from tests.dist.cases.scalar import with_targets
from tests.dist.harness.policies import batch_of
from tests.models import TINY

OFFLOAD = OffloadConfig(weights=True, gradients=True, optimizer=True)


def _worker(role: str, trains: bool, path: str | None = None, **actor: Any) -> Any:
    from hybridflow.workers.model_role import ModelWorker
    from hybridflow.workers.role import RoleSpec

    config = RunConfig(
        model=ModelConfig(hf_config=TINY, dtype="float32"),
        actor=ActorConfig(**actor),
        critic=CriticConfig(placement="own"),
        reference=ReferenceConfig(placement="own", offload=OFFLOAD),
        teacher=TeacherConfig(path=path, top_k=4, offload=OFFLOAD),
    )
    context = WorkerContext(0, 1, 0, "127.0.0.1", 0, "127.0.0.1", Path("unused.log"))
    return ModelWorker(context, RoleSpec(config, role, TINY, path, None, trains))


def not_finite() -> dict[str, Any]:
    """A critic's update on a return that is NaN, where such updates are skipped: what it reports,
    and whether a weight has moved."""
    worker = _worker("critic", True, on_nonfinite="skip")
    worker.set_optimizer(OptimConfig(lr=1e-2))
    before = {name: tensor.clone() for name, tensor in worker.model.parameters().items()}
    batch = with_targets(batch_of(4, 0), 0)
    returns = batch.jagged("returns")
    batch = batch.with_columns(
        returns=Jagged(np.full_like(returns.values, np.nan), returns.offsets)
    )
    [report] = worker.update_critic(batch, 4)
    moved = [
        name for name, tensor in worker.model.parameters().items() if not tensor.equal(before[name])
    ]
    [after] = worker.update_critic(with_targets(batch_of(4, 1), 1), 4)
    return {"applied": report["info"]["applied"], "moved": moved, "after": after["info"]["applied"]}


def frozen(folder: str) -> dict[str, Any]:
    """A reference and a teacher that do not train, beside the same weights in a critic's buffers:
    bytes of each part, what sleep frees, and the log-probs before and after it."""
    found: dict[str, Any] = {}
    trained = _worker("critic", True)
    found["critic"] = trained.memory.residency.resident_bytes()
    reference = _worker("reference", False)
    found["reference"] = reference.memory.residency.resident_bytes()
    batch = batch_of(6, 2)
    first = reference.compute_ref_log_probs(batch)["ref_log_probs"].values
    found["freed"] = reference.sleep()
    again = reference.compute_ref_log_probs(batch)["ref_log_probs"].values
    found["asleep"] = sorted(reference.memory.residency.asleep)
    found["same"] = first.tolist() == again.tolist()
    reference.export(Path(folder))
    teacher = _worker("teacher", False, folder)
    found["teacher"] = teacher.memory.residency.resident_bytes()
    top = teacher.compute_teacher_top(batch)
    reference.fill(Path(folder))
    found["filled"] = (
        reference.compute_ref_log_probs(batch)["ref_log_probs"].values.tolist() == first.tolist()
    )
    found["likeliest"] = bool((top["teacher_top_log_probs"].values[:, 0] >= first - 1e-6).all())
    try:
        reference.set_optimizer(OptimConfig())
    except RuntimeError as error:
        found["refused"] = str(error)
    return found
