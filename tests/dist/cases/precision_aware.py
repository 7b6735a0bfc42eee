"""A policy whose Adam keeps its state in lower precision: trained, saved, loaded and trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybridflow.config.schema import OptimConfig
from tests.dist.harness import fused_adam
from tests.dist.harness.policies import batch_of, policy_of, share_of
from tests.models import TINY

# of the moments; the main weights are float16 with the second
KINDS = ("bfloat16", "float16", "float32")


def run(folder: str) -> list[dict[str, Any]]:
    """For each kind: how a run that was saved and loaded after two updates differs from one that
    was not."""
    fused_adam.install()
    return [_resume(kind, Path(folder) / kind) for kind in KINDS]


def _resume(kind: str, folder: Path) -> dict[str, Any]:
    from hybridflow.mcore.checkpoint import load, save
    from hybridflow.mcore.optimizer import adam_step, inner_optimizers

    first = _policy(kind)
    second = _policy(kind)
    for step in range(2):
        _update(first, step)
    save(first, folder)
    load(second, folder)
    (inner,) = {id(one): one for one in inner_optimizers(second.optimizer.inner)[:1]}.values()
    state = next(iter(inner.optimizer.state.values()))
    loaded = _state(second)
    found = {
        "kind": kind,
        "step": adam_step(second.optimizer.inner),
        "dtypes": {
            name: str(tensor.dtype).removeprefix("torch.") for name, tensor in state.items()
        },
        "loaded": _differing(_state(first), loaded),
        "moments": max(
            float(tensor.abs().max()) for name, tensor in loaded.items() if "exp_avg" in name
        ),
    }
    norms = [_update(policy, 2) for policy in (first, second)]
    return found | {"norms": norms, "after": _differing(_state(first), _state(second))}


def _policy(kind: str) -> Any:
    policy = policy_of({}, TINY, dtype="bfloat16")
    main = "float16" if kind == "float16" else "float32"
    policy.set_optimizer(
        OptimConfig(
            lr=1e-2,
            precision_aware=True,
            main_params_dtype=main,
            exp_avg_dtype=kind,
            exp_avg_sq_dtype=kind,
        )  # type: ignore[arg-type]
    )
    return policy


def _update(policy: Any, step: int) -> float:
    from hybridflow.workers.losses import sft_loss

    _, info = policy.train_mini_batch(
        share_of(batch_of(16, step)),
        sft_loss,
        columns=(),
        max_tokens=64,
        temperature=1.0,
        with_entropy=False,
    )
    return float(info["grad_norm"])


def _state(policy: Any) -> dict[str, torch.Tensor]:
    """Weights, and the optimizer's state by its own reading of it."""
    from hybridflow.mcore.optimizer import inner_optimizers

    found = {name: tensor.clone() for name, tensor in policy.parameters().items()}
    for number, inner in enumerate(inner_optimizers(policy.optimizer.inner)):
        for index, param in enumerate(
            p for group in inner.optimizer.param_groups for p in group["params"]
        ):
            for name in inner.optimizer.state[param]:
                found[f"{number}.{index}.{name}"] = inner.optimizer.get_unscaled_state(
                    param, name
                ).clone()
    return found


def _differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]
