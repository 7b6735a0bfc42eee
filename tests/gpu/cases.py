"""What one rank does in the checks for a GPU; the same code on the CPU gives what it is compared
with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybridflow.config.schema import OptimConfig
from hybridflow.device.platform import Platform
from hybridflow.device.residency import PARTS, Residency
from tests import models
from tests.dist.harness.policies import batch_of, policy_of


def scores(hf: str, dtype: str, torch_modules: bool) -> list[float]:
    """Log-probabilities of one batch under the same weights; `torch_modules` leaves Transformer
    Engine out."""
    return _log_probs(_policy(hf, dtype, torch_modules))


def offloaded(hf: str) -> dict[str, Any]:
    """Log-probabilities and allocated bytes before all parts leave the device, while they are away,
    and after."""
    from hybridflow.mcore.model_parts import model_parts

    policy = _policy(hf, "float32", True)
    platform = Platform.detect()
    residency = Residency(model_parts(policy), platform, policy.settle)
    before = _log_probs(policy)
    held = platform.memory_bytes()
    freed = residency.sleep(*PARTS)
    away = platform.memory_bytes()
    residency.wake(*PARTS)
    return {
        "before": before,
        "after": _log_probs(policy),
        "freed": freed,
        "held": held,
        "away": away,
    }


def resumed(hf: str, dtype: str, torch_modules: bool, folder: str) -> dict[str, Any]:
    """Two updates, a save, and a third update by the same policy and by one that was loaded."""
    from hybridflow.mcore.checkpoint import load, save
    from hybridflow.mcore.optimizer import adam_step, inner_optimizers

    first, second = (_policy(hf, dtype, torch_modules) for _ in range(2))
    for policy in (first, second):
        policy.set_optimizer(OptimConfig(lr=1e-3))
    for step in range(2):
        _update(first, step)
    save(first, Path(folder))
    load(second, Path(folder))
    counted = adam_step(second.optimizer.inner)
    norms = [_update(policy, 2) for policy in (first, second)]
    mine = first.parameters()
    theirs = second.parameters()
    return {
        "adam": type(inner_optimizers(first.optimizer.inner)[0].optimizer).__module__,
        "steps": [counted, adam_step(first.optimizer.inner), adam_step(second.optimizer.inner)],
        "norms": norms,
        "off": max(float((mine[name] - theirs[name]).abs().max()) for name in mine),
    }


def slept(hf: str, count: int) -> dict[str, Any]:
    """Log-probabilities and allocated bytes while everything is away, after each of `count`
    updates."""
    from hybridflow.mcore.model_parts import model_parts

    policy = _policy(hf, "float32", True)
    platform = Platform.detect()
    policy.set_optimizer(OptimConfig(lr=1e-3))
    residency = Residency(model_parts(policy), platform, policy.settle)
    away = []
    same = []
    parts = [part for part in PARTS if part != "reference"]
    for step in range(count):
        _update(policy, step)
        before = _log_probs(policy)
        residency.sleep(*parts)
        away.append(platform.memory_bytes())
        residency.wake(*parts)
        same.append(_log_probs(policy) == before)
    return {"away": away, "same": same}


def _update(policy: Any, seed: int) -> float:
    from hybridflow.workers.losses import sft_loss

    _, info = policy.train_mini_batch(
        batch_of(8, seed), sft_loss, columns=(), max_tokens=64, temperature=1.0, with_entropy=False
    )
    return float(info["grad_norm"])


def _policy(hf: str, dtype: str, torch_modules: bool) -> Any:
    from hybridflow.mcore import bootstrap

    Platform.detect().set_device(0)
    if torch_modules:
        bootstrap.HAVE_TRANSFORMER_ENGINE = False
    assert bootstrap.HAVE_TRANSFORMER_ENGINE is not torch_modules, "cannot be imported here"
    return policy_of({}, getattr(models, hf), dtype=dtype)


def _log_probs(policy: Any) -> list[float]:
    found, _ = policy.log_probs(batch_of(6, 1), max_tokens=40, temperature=1.0, with_entropy=False)
    return [float(value) for value in torch.as_tensor(found.values)]
