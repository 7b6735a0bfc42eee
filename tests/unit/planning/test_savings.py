"""What the memory planner counts less: the tensors of what is recomputed, and no other, and an
optimizer in lower precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridflow.config.schema import ActorConfig, OptimConfig, RunConfig
from hybridflow.models.published import published
from hybridflow.planning.devices import DEVICES
from hybridflow.planning.job import recomputed
from hybridflow.planning.sizes import decoder_of, layer_shapes
from hybridflow.planning.training import Cut, Practice, Precision, Training

TOKENS = 4096.0


def layer_bytes(model: str, layer: int, *modules: str) -> tuple[float, Any]:
    training = Training(
        decoder_of(published(model)),
        Cut(1),
        DEVICES["H100"],
        practice=Practice(frozenset(modules), even_routing=True),
    )
    shape = layer_shapes(training.decoder)[layer]
    return training.layer_activations(shape, TOKENS) / TOKENS, shape


@pytest.mark.parametrize(
    ("model", "layer", "module", "freed"),
    [
        ("qwen3-8b", 0, "mlp", lambda s: 6 * s.ffn),  # gate, up and their product in bfloat16
        ("qwen3-30b-a3b", 0, "moe_act", lambda s: 2 * s.routed_ffn),
        # one of two: the other is part of a linear
        ("qwen3-30b-a3b", 0, "layernorm", lambda s: 2 * s.hidden),
        (
            "qwen3-30b-a3b",
            0,
            "moe",
            lambda s: 2 * s.topk * s.hidden + 6 * s.routed_ffn + 8 * s.experts,
        ),
        ("deepseek-v3", 5, "layernorm", lambda s: 4 * s.hidden),
        ("deepseek-v3", 5, "shared_experts", lambda s: 6 * s.ffn),
        ("deepseek-v3", 5, "mlp", lambda s: 0),  # a layer of experts has none
        ("deepseek-v3", 0, "mlp", lambda s: 6 * s.ffn),
        ("deepseek-v3", 0, "moe", lambda s: 0),
        ("deepseek-v3", 5, "mla_up_proj", lambda s: 2 * s.expanded),
    ],
)
def test_a_layer_keeps_less_by_the_tensors_of_the_module(
    model: str, layer: int, module: str, freed: Any
) -> None:
    kept, shape = layer_bytes(model, layer)
    less, _ = layer_bytes(model, layer, module)
    assert kept - less == pytest.approx(freed(shape))


def test_an_optimizer_in_lower_precision_is_counted() -> None:
    plain = Precision.of("bfloat16")
    optim = OptimConfig(precision_aware=True, exp_avg_dtype="bfloat16")
    assert (plain.main, plain.moments) == (4, 8)
    half = Precision.of("bfloat16", replace(optim, main_params_dtype="float16"))
    assert (half.main, half.moments) == (2, 2 + 4)
    training = Training(
        decoder_of(published("qwen3-8b")), Cut(8), DEVICES["H100"], Precision.of("bfloat16", optim)
    )
    numbers = training.numbers[0].total
    assert training.optimizer(0) == pytest.approx(numbers / 8 * (4 + 2 + 4))


def test_the_plan_of_a_run_reads_the_keys() -> None:
    actor = ActorConfig(recompute="selective", recompute_modules=("moe", "mla_up_proj"))
    config = RunConfig()
    assert recomputed(config) == frozenset()
    assert recomputed(replace(config, actor=actor)) == {"moe", "mla_up_proj"}
    assert recomputed(replace(config, actor=replace(actor, recompute="full"))) == {"full"}
