"""Modules to compute again: those that a model has pass, others are refused with the reason."""

from __future__ import annotations

import pytest

from hybridflow.errors import ModelError
from hybridflow.models.family import family_of
from hybridflow.models.published import published
from hybridflow.models.recompute import check_recompute


@pytest.mark.parametrize(
    ("model", "modules"),
    [
        ("qwen3-8b", ("core_attn", "mlp")),
        ("qwen3-30b-a3b", ("core_attn", "moe_act", "layernorm")),
        ("qwen3-30b-a3b", ("moe", "layernorm")),
        ("deepseek-v3", ("mla_up_proj", "mlp", "moe_act", "layernorm", "shared_experts")),
        ("glm-4.5-air", ("mlp", "moe")),
    ],
)
def test_modules_that_a_model_has_pass(model: str, modules: tuple[str, ...]) -> None:
    check_recompute(family_of({"vocab_size": 8, **published(model)}), "selective", modules)


@pytest.mark.parametrize(
    ("model", "recompute", "modules", "message"),
    [
        (
            "qwen3-8b",
            "selective",
            ("moe_act",),
            r"\['moe_act'\].* have no experts; remove moe_act",
        ),
        (
            "qwen3-8b",
            "selective",
            ("layernorm",),
            "no separate norms: they are part of the following linears",
        ),
        ("qwen3-8b", "selective", ("mla_up_proj",), "no multi-head latent attention"),
        ("qwen3-30b-a3b", "selective", ("mlp",), "no dense MLPs .moe recomputes"),
        ("qwen3-30b-a3b", "selective", ("shared_experts",), "no shared experts"),
        (
            "deepseek-v3",
            "selective",
            ("moe", "moe_act"),
            "moe recomputes the whole expert layer, including moe_act",
        ),
        ("deepseek-v3", "selective", (), "recomputes nothing"),
        ("deepseek-v3", "full", ("moe",), "requires actor.recompute=selective, got full"),
    ],
)
def test_others_are_refused_with_the_reason(
    model: str, recompute: str, modules: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        check_recompute(family_of({"vocab_size": 8, **published(model)}), recompute, modules)
