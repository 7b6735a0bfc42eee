"""What one rank does in the checks for a GPU; the same code on the CPU gives what it is compared with."""

from __future__ import annotations

from typing import Any

import torch

from hybridflow.device.platform import Platform
from hybridflow.device.residency import PARTS, Residency
from tests import models
from tests.dist.harness.policies import batch_of, policy_of


def scores(hf: str, dtype: str, torch_modules: bool) -> list[float]:
    """Log-probabilities of one batch under the same weights; `torch_modules` leaves Transformer Engine out."""
    return _log_probs(_policy(hf, dtype, torch_modules))


def offloaded(hf: str) -> dict[str, Any]:
    """Log-probabilities and allocated bytes before all parts leave the device, while they are away, and after."""
    policy, platform = _policy(hf, "float32", True), Platform.detect()
    residency = Residency(policy.memory_parts(), platform, policy.settle)
    before, held = _log_probs(policy), platform.memory_bytes()
    freed = residency.sleep(*PARTS)
    away = platform.memory_bytes()
    residency.wake(*PARTS)
    return {"before": before, "after": _log_probs(policy), "freed": freed, "held": held, "away": away}


def has_transformer_engine() -> bool:
    """Whether Megatron could import it."""
    from hybridflow.mcore import bootstrap

    return bootstrap.HAVE_TRANSFORMER_ENGINE


def _policy(hf: str, dtype: str, torch_modules: bool) -> Any:
    from hybridflow.mcore import bootstrap

    Platform.detect().set_device(0)
    bootstrap.HAVE_TRANSFORMER_ENGINE = bootstrap.HAVE_TRANSFORMER_ENGINE and not torch_modules
    return policy_of({}, getattr(models, hf), dtype=dtype)


def _log_probs(policy: Any) -> list[float]:
    found, _ = policy.log_probs(batch_of(6, 1), max_tokens=40, temperature=1.0, with_entropy=False)
    return [float(value) for value in torch.as_tensor(found.values)]
