"""HybridFlow: a Megatron-first trainer for reinforcement learning of large language models.

The names below are for use in your own programs and files: the run, the decorators that register
algorithms, rewards and agents, and the batch type passed to them. Each is imported on first access,
so that `import hybridflow` loads neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "DataProto": "hybridflow.batch",
    "HybridFlowError": "hybridflow.errors",
    "Jagged": "hybridflow.batch",
    "Run": "hybridflow.api.run",
    "agent_loop": "hybridflow.agents.loops.base",
    "environment": "hybridflow.agents.environments.base",
    "estimator": "hybridflow.algorithms.estimators.base",
    "flow": "hybridflow.flows.base",
    "policy_loss": "hybridflow.algorithms.policy_losses.base",
    "tool": "hybridflow.agents.tools.base",
    "tracker": "hybridflow.observe.trackers.base",
    "verifier": "hybridflow.rewards.verifiers.base",
}
__all__ = [*_MODULES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hybridflow' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
