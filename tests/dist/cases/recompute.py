"""Gradients with and without recomputation by module, and how often what is recomputed runs."""

from __future__ import annotations

from typing import Any

import torch

from hybridflow.config.schema import OptimConfig
from tests.dist.harness.policies import batch_of, policy_of, share_of
from tests.models import DEEPSEEK, DENSE, GLM4, TINY

# model, layout, modules
CASES: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ("dense", DENSE, {}, ("core_attn",)),
    ("dense", DENSE, {}, ("mlp",)),
    ("moe", TINY, {}, ("moe_act",)),
    ("moe", TINY, {}, ("layernorm",)),
    ("moe", TINY, {}, ("moe",)),
    ("glm", GLM4, {}, ("mlp", "shared_experts", "moe_act")),
    ("deepseek", DEEPSEEK, {}, ("mla_up_proj",)),
    ("deepseek", DEEPSEEK, {}, ("layernorm",)),
    (
        "deepseek",
        DEEPSEEK,
        {},
        ("core_attn", "mla_up_proj", "layernorm", "moe_act", "mlp", "shared_experts"),
    ),
    ("deepseek", DEEPSEEK, {}, ("moe", "mlp", "mla_up_proj")),
]
PARALLEL = {"tensor": 2, "sequence": True, "expert": 2}
PARALLEL_CASES: list[tuple[str, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (
        "deepseek",
        DEEPSEEK,
        PARALLEL,
        ("mla_up_proj", "layernorm", "moe_act", "mlp", "shared_experts"),
    ),
    (
        "deepseek",
        DEEPSEEK,
        {"pipeline": 2, "virtual_pipeline": 2},
        ("moe", "mla_up_proj", "layernorm"),
    ),
]
# what runs again, by a part of its name in the model
SEEN = {
    "core_attn": "core_attention",
    "mlp": "mlp.linear_fc1",  # the first dense layer's
    "moe": "mlp.router",
    "moe_act": "",  # a function of the config, not a module
    "shared_experts": "shared_experts.linear_fc1",
    "mla_up_proj": "linear_kv_up_proj",
    "layernorm": "pre_mlp_layernorm",
}


def run() -> list[dict[str, Any]]:
    """Every case on this rank."""
    return [_compare(*case) for case in CASES]


def run_parallel() -> list[dict[str, Any]]:
    """Every case of two ranks."""
    from tests.dist.harness.worlds import Worlds

    worlds = Worlds()
    found = []
    for case in PARALLEL_CASES:
        assert worlds.mine(range(2))
        with worlds.world(range(2)):
            found.append(_compare(*case))
    worlds.finish()
    return found


def run_fields() -> dict[str, Any]:
    """Fields of `actor.megatron`: one layer of several recomputed, and a router in float64."""
    kept, plain = _gradients(TINY, {})
    block = {"recompute_method": "block", "recompute_num_layers": 1}
    again, one_more = _gradients(TINY, {}, recompute="full", megatron=block)
    exact, _ = _gradients(TINY, {}, megatron={"moe_router_dtype": "fp64"})
    return {
        "differing": [key for key, value in kept.items() if not torch.equal(value, again[key])],
        "routers": (plain["moe"], one_more["moe"], TINY["num_hidden_layers"]),
        "exact": max(float((exact[key] - value).abs().max()) for key, value in kept.items()),
    }


def _compare(
    name: str, hf: dict[str, Any], parallel: dict[str, Any], modules: tuple[str, ...]
) -> dict[str, Any]:
    kept, plain = _gradients(hf, parallel)
    again, twice = _gradients(hf, parallel, recompute="selective", recompute_modules=modules)
    return {
        "name": f"{name} {parallel} {modules}",
        "modules": modules,
        "differing": [key for key, value in kept.items() if not torch.equal(value, again[key])],
        "same_keys": kept.keys() == again.keys(),
        "nonzero": sum(bool(value.any()) for value in kept.values()) / len(kept),
        "calls": {module: (plain[module], twice[module]) for module in modules},
    }


def _gradients(
    hf: dict[str, Any], parallel: dict[str, Any], **options: Any
) -> tuple[dict[str, Any], dict[str, int]]:
    """(each parameter's gradient after an update, how often each kind of module has run)."""
    from megatron.core.transformer.identity_op import IdentityOp

    from hybridflow.workers.losses import sft_loss

    policy = policy_of(parallel, hf, **options)
    calls = dict.fromkeys(SEEN, 0)

    def count(kind: str) -> Any:
        def hook(*_: Any) -> None:
            calls[kind] += 1

        return hook

    for stage in policy.stages:
        for name, module in stage.named_modules():
            for kind, part in SEEN.items():
                if part and name.endswith(part) and not isinstance(module, IdentityOp):
                    module.register_forward_pre_hook(count(kind))
            if name.endswith("mlp.experts"):
                module.activation_func.register_forward_pre_hook(count("moe_act"))
    policy.set_optimizer(OptimConfig(lr=1e-2, clip_grad=0.0))
    policy.train_mini_batch(
        share_of(batch_of(16, 3)),
        sft_loss,
        columns=(),
        max_tokens=64,
        temperature=1.0,
        with_entropy=False,
    )
    found = {
        f"{chunk}.{name}": parameter.main_grad.clone()
        for chunk, model in enumerate(policy.chunks)
        for name, parameter in model.named_parameters()
    }
    return found, calls
