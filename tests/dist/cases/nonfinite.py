"""NaN and infinity put into a loss, into its gradient and into a layer's gradient, on one rank of
four, on each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.dist.harness.policies import batch_of, digest, policy_of, share_of
from tests.models import TINY

PARALLEL = {"pipeline": 2}  # and DP2: ranks 0, 1 hold the first stage, 2, 3 the second


def nonfinite(worlds: Any) -> dict[str, Any]:
    """What each kind does to a policy that skips, and what one that stops says."""
    worlds.mine(range(4))
    with worlds.world(range(4)):
        result: dict[str, Any] = {"skip": {}, "stop": ""}
        policy = _watched("skip")
        result["rate"] = _step(policy, 0)[1]["lr"]
        before = _state(policy)
        for kind in ("loss", "gradient", "layer", "weight"):
            sums, info = _step(policy, 1, kind)
            result["skip"][kind] = {
                "info": info,
                "sums": sums,
                "untouched": _state(policy) == before,
                "said": policy.said[-1],
            }
        result["after"] = _step(policy, 1)[1]
        plain = _watched("skip")
        _step(plain, 0)
        result["expected"] = _step(plain, 1)[1]
        result["equal"] = _state(plain) == _state(policy)
    worlds.mine(range(4))
    with worlds.world(range(4)):
        policy = _watched("stop")
        before = _state(policy)
        from hybridflow.errors import NonFiniteError

        try:
            _step(policy, 1, "loss")
        except NonFiniteError as error:
            result["stop"] = str(error)
        result["stop_untouched"] = _state(policy) == before
    return result


def _watched(on_nonfinite: str) -> Any:
    import logging

    from hybridflow.config.schema import OptimConfig

    policy = policy_of(PARALLEL, TINY, on_nonfinite=on_nonfinite)
    policy.set_optimizer(OptimConfig(lr=1e-2, lr_decay_style="linear", lr_decay_steps=9))
    policy.said = []
    handler = logging.Handler()
    handler.emit = lambda record: policy.said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hybridflow").handlers = [handler]
    return policy


def _step(policy: Any, seed: int, kind: str = "") -> Any:
    """A step of three or more micro-batches; `kind` goes wrong in micro-batch 1 of data-parallel
    rank 1 (ranks 1 and 3)."""
    from hybridflow.workers.losses import sft_loss

    calls = [0]
    is_bad = dist.get_rank() % 2 == 1

    def loss(log_probs: torch.Tensor, entropy: Any, micro: Any) -> Any:
        calls[0] += 1
        if is_bad and calls[0] == 2 and kind == "loss":
            log_probs = log_probs * torch.nan
        # 0 * inf in the backward pass; the value is finite
        if is_bad and calls[0] == 2 and kind == "gradient":
            log_probs = log_probs + (log_probs * 0.0).clamp(min=0).sqrt()
        return sft_loss(log_probs, entropy, micro)

    handles = []
    backwards = [0]

    def poison(module: Any, inputs: Any, outputs: Any) -> None:
        hidden = outputs[0]

        def spoil(grad: torch.Tensor) -> torch.Tensor:
            backwards[0] += 1
            return grad / 0.0 if backwards[0] == 2 else grad

        if hidden.requires_grad:
            hidden.register_hook(spoil)

    if kind == "layer" and dist.get_rank() == 1:
        handles.append(policy.stages[0].decoder.layers[0].register_forward_hook(poison))
    if kind == "weight" and dist.get_rank() == 3:  # as if the gradient of a weight alone overflowed
        handles.append(
            policy.stages[0].decoder.final_layernorm.weight.register_hook(lambda grad: grad / 0.0)
        )
    result = policy.train_mini_batch(
        share_of(batch_of(12, seed)),
        loss,
        columns=(),
        max_tokens=24,
        temperature=1.0,
        with_entropy=False,
    )
    for handle in handles:
        handle.remove()
    return result


def _state(policy: Any) -> Any:
    """Weights and the optimizer's state, bit for bit."""
    moments = [
        float(value.double().sum())
        for inner in policy.optimizer.inner.chained_optimizers
        for state in inner.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    return [
        digest(policy),
        moments,
        {name: tensor.double().sum().item() for name, tensor in policy.weights().items()},
    ]
