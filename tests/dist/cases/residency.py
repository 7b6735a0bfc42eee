"""What each rank does in the tests of residency and of running out of memory."""

from __future__ import annotations

import gc
import re
import resource
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.batch import DataProto
from hybridflow.config.schema import OffloadConfig, OptimConfig
from hybridflow.device.platform import Platform
from tests.dist.harness.policies import batch_of, policy_of, share_of

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1)


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    Platform("cpu").empty_cache()
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(re.search(r"^Anonymous:\s+(\d+)", rollup, re.MULTILINE)[1]) * 1024  # type: ignore[index]


def _step(policy: Any, batch: DataProto) -> float:
    from hybridflow.workers.losses import sft_loss

    _, info = policy.train_mini_batch(
        batch, sft_loss, columns=(), max_tokens=40, temperature=1.0, with_entropy=False
    )
    return float(info["grad_norm"])


def _value_step(model: Any, batch: DataProto) -> float:
    from hybridflow.config.schema import CriticConfig
    from hybridflow.workers.losses import ValueLoss
    from tests.dist.cases.scalar import with_targets

    loss = ValueLoss(CriticConfig())
    _, info = model.train_values(with_targets(batch, 1), loss, columns=loss.columns, max_tokens=40)
    return float(info["grad_norm"])


def _pair_step(model: Any, batch: DataProto) -> float:
    from hybridflow.workers.losses import PairLoss

    _, info = model.train_pairs(batch, PairLoss(), max_tokens=80)
    return float(info["grad_norm"])


STEPS = {"actor": _step, "critic": _value_step, "reward_model": _pair_step}


def _score(role: str, model: Any, batch: DataProto) -> None:
    """A pass without gradients: of a value role over its weights, of the policy over the
    reference's."""
    if role == "actor":
        with model.as_reference():
            model.log_probs(batch, max_tokens=40, temperature=1.0, with_entropy=False)
    elif role == "critic":
        model.values(batch, max_tokens=40)
    else:
        model.scores(batch, max_tokens=40)


def _everything(parts: Any) -> dict[str, torch.Tensor]:
    """A copy of every tensor of every part, views included."""
    return {
        f"{part}{i}": tensor.detach().clone()
        for part, listed in parts.items()
        for i, tensor in enumerate(listed())
    }


def _same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return before.keys() == after.keys() and all(
        before[name].dtype == after[name].dtype
        and before[name].shape == after[name].shape
        and torch.equal(
            before[name].view(bits[before[name].element_size()]),
            after[name].view(bits[before[name].element_size()]),
        )
        for name in before
    )


def offloaded_roles(
    parallel: dict[str, Any], models: dict[str, dict[str, Any]], dtype: str
) -> dict[str, Any]:
    """`offloaded` of each role with its model, one after another."""
    found = {}
    for role, hf in models.items():
        found[role] = offloaded(parallel, hf, dtype, role)
        gc.collect()
    return found


def offloaded(
    parallel: dict[str, Any], hf: dict[str, Any], dtype: str, role: str
) -> dict[str, Any]:
    """Bytes before, during and after sleep; and five steps of training with sleep between them
    against five without."""
    from hybridflow.device.residency import PARTS, Residency
    from hybridflow.mcore.model_parts import model_parts

    results = {}
    histories = []
    finals = []
    for sleeps in (False, True):
        policy = _model_of(role, parallel, hf, dtype)
        policy.set_optimizer(OPTIM)
        if role == "actor":
            policy.freeze_reference()
        parts = model_parts(policy)
        residency = Residency(parts, Platform("cpu"), role=role)
        history = []
        for step in range(5):
            if sleeps:
                residency.sleep(*PARTS)
            with residency.resident(weights=True, gradients=True, optimizer=True):
                history.append(STEPS[role](policy, share_of(batch_of(8, step))))
            with residency.resident(weights=True, reference=True):
                _score(role, policy, share_of(batch_of(8, step)))
            assert residency.asleep == (frozenset(PARTS) if sleeps else frozenset())
        histories.append(history)
        if not sleeps:
            results = _measured(policy, residency, parts)
        residency.wake(*PARTS)
        finals.append(_everything(parts))
        del policy, residency, parts
    return results | {"history": histories, "same_end": _same(*finals), "tensors": len(finals[0])}


def _model_of(role: str, parallel: dict[str, Any], hf: dict[str, Any], dtype: str) -> Any:
    from hybridflow.config.schema import ParallelConfig
    from hybridflow.mcore import parallel as groups
    from hybridflow.mcore.policy import Policy
    from hybridflow.mcore.value_model import ValueModel
    from hybridflow.models import family_of
    from hybridflow.models.scalar_head import SEQUENCE, TOKENS, FreshHead, ScalarHead
    from hybridflow.models.weights import RandomWeights

    if not dist.is_initialized():
        groups.initialize(ParallelConfig(**parallel), seed=1, backend="gloo", timeout_s=180)
    family = family_of(hf)
    layout = ParallelConfig(**parallel)
    source = RandomWeights(family.tensors(), 5, 0.2)
    if role == "actor":
        return Policy(family, layout, dtype, source)
    head = ScalarHead(family, TOKENS if role == "critic" else SEQUENCE, role == "critic")
    return ValueModel(head, layout, dtype, FreshHead(source, head, 5))


def _measured(policy: Any, residency: Any, parts: Any) -> dict[str, Any]:
    """One sleep of everything, and nested and partial residency."""
    from hybridflow.device.residency import PARTS

    before = _everything(parts)
    held = residency.resident_bytes()
    pointers = [parameter.data_ptr() for parameter in policy.stages[0].parameters()]
    awake = anonymous_bytes()
    freed = residency.sleep(*PARTS)
    assert freed == residency.asleep_bytes()
    asleep = anonymous_bytes()
    left = residency.resident_bytes()
    seen = []
    with residency.resident(weights=True):
        seen.append(sorted(residency.asleep))
        with residency.resident(weights=True, optimizer=True):
            seen.append(sorted(residency.asleep))
            with residency.resident(weights=True):
                pass
            seen.append(sorted(residency.asleep))
        seen.append(sorted(residency.asleep))
    seen.append(sorted(residency.asleep))
    residency.wake(*PARTS)
    moved = sum(
        a != b.data_ptr() for a, b in zip(pointers, policy.stages[0].parameters(), strict=True)
    )
    same = _same(before, _everything(parts))
    return {
        "held": held,
        "left": left,
        "freed": freed,
        "fell": awake - asleep,
        "same": same,
        "seen": seen,
        "moved": moved,
        "gradient": max(float(t.abs().max()) for t in parts["gradients"]()),
    }


def no_room(parallel: dict[str, Any], hf: dict[str, Any], folder: str) -> Any:
    """What is said when the offloaded bytes fit nowhere, and when a phase needs more memory than
    there is; and that both go on after."""
    import tempfile

    from hybridflow.device.residency import Residency
    from hybridflow.errors import MemoryExhaustedError, ResourceError
    from hybridflow.mcore.model_parts import model_parts
    from hybridflow.workers.role import RoleMemory, needs

    policy = policy_of(parallel, hf)
    policy.set_optimizer(OPTIM)
    parts = model_parts(policy)
    platform = Platform("cpu")
    memory = RoleMemory(
        Residency(parts, platform), platform, OffloadConfig(weights=True, gradients=True)
    )
    tempfile.tempdir = folder
    before = _everything(parts)
    said = {}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        memory.sleep(("weights",))
    except ResourceError as error:
        said["disk"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert memory.residency.asleep == frozenset() and _same(before, _everything(parts))

    class Worker:
        def __init__(self) -> None:
            self.memory = memory

        @needs("weights")
        def compute_log_probs(self, rows: int) -> int:
            assert memory.residency.asleep == {"gradients", "reference"}
            return len(torch.empty(rows, 1 << 20))

        @needs()
        def wrong(self) -> None:
            raise RuntimeError("something else")

    assert memory.sleep(("weights", "gradients", "optimizer", "reference")) > 0
    # the optimizer stays: it is not configured
    assert memory.residency.asleep == {"weights", "gradients", "reference"}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
    try:
        Worker().compute_log_probs(1 << 10)
    except MemoryExhaustedError as error:
        said["memory"] = str(error)
    assert memory.residency.asleep == {"weights", "gradients", "reference"}
    said["goes on"] = str(Worker().compute_log_probs(1))
    try:
        Worker().wrong()
    except RuntimeError as error:
        said["other"] = str(error)
    memory.residency.wake("weights", "gradients")
    assert _same(before, _everything(parts))
    dist.barrier()
    return {"said": said, "peaks": memory.take()["memory"], "again": memory.take()["memory"]}
