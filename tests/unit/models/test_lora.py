"""Adapters as data: what each family has to adapt, how ranks cut the factors, first values that no
cut changes, merging, PEFT's names."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch

from hybridflow.config import derived
from hybridflow.config.schema import LoraConfig
from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.layout import Coordinates
from hybridflow.models.lora import (
    AdapterMap,
    is_a,
    merge,
    module_of,
    names_of,
    peft_config,
)
from hybridflow.models.lora_targets import targets_of
from hybridflow.models.stored_names import multimodal_name
from hybridflow.reshard.layout import rank_tensors
from tests.models import DEEPSEEK, FAMILIES, GLM4, LLAMA, MIXTRAL, MOONLIGHT, QWEN2, SIZES, TINY

DENSE = {**SIZES, "model_type": "qwen3"}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": DENSE,
    "qwen3_moe": TINY,
    "mixtral": MIXTRAL,
    "glm4_moe": GLM4,
    "deepseek_v3": DEEPSEEK,
    "moonlight": MOONLIGHT,
}
RANK = 3


def adapters(hf: dict[str, Any], *targets: str, **settings: Any) -> AdapterMap:
    return AdapterMap(
        family_of(hf),
        LoraConfig(**{"rank": RANK, "alpha": 6.0, **settings}, targets=targets),
        seed=7,
    )


@pytest.mark.parametrize("model", FAMILIES)
def test_the_configuration_knows_the_linears_that_the_family_has(model: str) -> None:
    """`config` may not import `models`: the two say the same."""
    hf = {"vocab_size": 64, **FAMILIES[model]}
    assert set(targets_of(family_of(hf))) == set(derived.lora_targets(hf))
    for target in derived.lora_targets(hf):
        assert adapters(hf, target).facts()["targets"] == [target]


@pytest.mark.parametrize("model", MODELS)
def test_routed_experts_are_adapted_only_if_they_are_listed(model: str) -> None:
    has = derived.lora_targets(MODELS[model])
    by_default = [target for target in has if not target.startswith("experts.")]
    assert set(adapters(MODELS[model]).facts()["targets"]) == set(by_default)
    assert not any(".experts." in name for name in adapters(MODELS[model]).tensors())


def test_each_expert_has_its_own_factors() -> None:
    """fc1 32 -> 64 and fc2 32 -> 32 of 4 experts in 4 layers; gate and up share an A."""
    routed = adapters(TINY, "experts.linear_fc1", "experts.linear_fc2")
    assert routed.num_parameters() == 4 * 4 * RANK * ((32 + 64) + (32 + 32))
    expert = "model.layers.2.mlp.experts.3."
    assert {name: shape for name, shape in routed.tensors().items() if expert in name} == {
        f"{expert}gate_proj.lora_A.weight": (RANK, 32),
        f"{expert}gate_proj.lora_B.weight": (32, RANK),
        f"{expert}up_proj.lora_B.weight": (32, RANK),
        f"{expert}down_proj.lora_A.weight": (RANK, 32),
        f"{expert}down_proj.lora_B.weight": (32, RANK),
    }
    assert routed.aliases()[f"{expert}up_proj.lora_A.weight"] == f"{expert}gate_proj.lora_A.weight"
    # the second expert-parallel rank of two has experts 2 and 3, as its first and second
    at = Coordinates(ep_rank=1, ep_size=2, etp_size=1)
    [one] = [
        found
        for found in routed.local(rank_tensors(family_of(TINY), at))
        if found.weight.name == "decoder.layers.2.mlp.experts.linear_fc2.weight1"
    ]
    assert (one.module, one.a.name, one.b.name) == (
        "decoder.layers.2.mlp.experts.linear_fc2",
        "decoder.layers.2.mlp.experts.linear_fc2.lora.A1",
        "decoder.layers.2.mlp.experts.linear_fc2.lora.B1",
    )
    assert one.b.pieces[0].source == f"{expert}down_proj.lora_B.weight"


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "sizes",
    [
        (1, 1, 1, 1, 1),
        (2, 1, 1, 1, 1),
        (2, 2, 1, 2, 1),
        (4, 1, 1, 1, 2),
        (1, 2, 2, 2, 2),
    ],
)
def test_ranks_hold_every_factor_and_their_product_is_the_weights_rectangle(
    model: str, sizes: tuple[int, int, int, int, int]
) -> None:
    """The oracle: deltas made of whole HF factors, cut by the family's map of the weights."""
    tp, pp, vpp, ep, etp = sizes
    family = family_of(MODELS[model])
    whole = adapters(MODELS[model], *targets_of(family))
    values = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(i))
        for i, (name, shape) in enumerate(whole.tensors().items())
    }
    shared = values | {alias: values[kept] for alias, kept in whole.aliases().items()}
    seen: dict[str, torch.Tensor] = {
        name: torch.zeros_like(value) for name, value in values.items()
    }
    adapted = set()
    for tp_rank, pp_rank, ep_rank, etp_rank in product(*map(range, (tp, pp, ep, etp))):
        at = Coordinates(
            tp_rank=tp_rank,
            tp_size=tp,
            pp_rank=pp_rank,
            pp_size=pp,
            vpp_size=vpp,
            ep_rank=ep_rank,
            ep_size=ep,
            etp_rank=etp_rank,
            etp_size=etp,
        )
        for one in whole.local(rank_tensors(family, at)):
            factors = {}
            for which, local in (("a", one.a), ("b", one.b)):
                factors[which] = torch.full(local.shape, torch.nan)
                for piece in local.pieces:
                    region = tuple(
                        slice(s, s + n)
                        for s, n in zip(piece.source_start, piece.shape, strict=True)
                    )
                    factors[which][piece.slices()] = values[piece.source][region]
                    seen[piece.source][region] = 1.0
            delta = factors["b"] @ factors["a"]
            for piece in one.weight.pieces:
                a, b = (shared[name] for name in names_of(piece.source))
                rows, columns = (
                    slice(s, s + n) for s, n in zip(piece.source_start, piece.shape, strict=True)
                )
                torch.testing.assert_close(delta[piece.slices()], b[rows] @ a[:, columns])
                adapted.add(piece.source)
            assert one.cut == "nothing" or (etp if one.is_routed else tp) > 1
    assert all(bool((hit == 1).all()) for hit in seen.values())
    assert adapted == {f"{module_of(name)}.weight" for name in shared}


def test_fused_linears_share_one_a() -> None:
    layer = "model.layers.0."
    shares = {
        name: kept for name, kept in adapters(DENSE).aliases().items() if name.startswith(layer)
    }
    names = {
        "self_attn.k_proj": "self_attn.q_proj",
        "self_attn.v_proj": "self_attn.q_proj",
        "mlp.up_proj": "mlp.gate_proj",
    }
    assert shares == {
        f"{layer}{name}.lora_A.weight": f"{layer}{kept}.lora_A.weight"
        for name, kept in names.items()
    }
    assert adapters(LLAMA).num_parameters() == sum(
        prod(shape) for shape in adapters(LLAMA).tensors().values()
    )


def test_initial_values_do_not_depend_on_the_cut_and_the_product_is_zero() -> None:
    whole = adapters(LLAMA)
    for name, shape in whole.tensors().items():
        full = whole.read(name, (0, 0), shape)
        rows = shape[0] // 2 + 1
        columns = shape[1] // 2
        assert torch.equal(
            whole.read(name, (0, columns), (rows, shape[1] - columns)), full[:rows, columns:]
        )
        assert bool(full.any()) == is_a(name)
    noise = torch.cat(
        [
            whole.read(name, (0, 0), shape).flatten() * (3 * shape[1]) ** 0.5
            for name, shape in whole.tensors().items()
            if is_a(name)
        ]
    )
    assert abs(float(noise.std()) - 1) < 0.05 and abs(float(noise.mean())) < 0.05
    other = AdapterMap(family_of(LLAMA), LoraConfig(rank=RANK), seed=8)
    name = next(iter(whole.tensors()))
    assert not torch.equal(
        other.read(name, (0, 0), (RANK, 32)), whole.read(name, (0, 0), (RANK, 32))
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_is_rounded_once_whatever_the_strips(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    w, a, b = (
        torch.randn(*shape, generator=generator).to(dtype)
        for shape in ((37, 20), (RANK, 20), (37, RANK))
    )
    exact = w.double() + 1.5 * b.double() @ a.double()
    before = w.clone()
    found = merge(w, a, b, 1.5)
    assert found.dtype is dtype and torch.equal(w, before)
    # half a unit in the last place of the result, and fp32's own error
    assert float(((found.double() - exact).abs() / exact.abs().clamp(min=1.0)).max()) <= (
        2.0**-8 if dtype is torch.bfloat16 else 1e-6
    )
    monkeypatch.setattr("hybridflow.models.lora._STRIP", 100)
    torch.testing.assert_close(merge(w, a, b, 1.5), found)


def test_targets_that_a_model_lacks_are_refused() -> None:
    with pytest.raises(ModelError, match=r"has no linear_qkv; choose from linear_q_down_proj"):
        adapters(DEEPSEEK, "linear_qkv")
    with pytest.raises(ModelError, match=r"no linear_fc1; choose from .*experts\.linear_fc1"):
        adapters(TINY, "linear_proj", "linear_fc1")
    with pytest.raises(ModelError, match=r"no experts\.linear_fc2; choose from linear_qkv"):
        adapters(LLAMA, "experts.linear_fc2")


def test_peft_names_modules_in_full_where_others_have_the_same_last_name() -> None:
    dense = adapters(DENSE, "linear_qkv", "linear_fc2")
    modules = {module_of(name) for name in (*dense.tensors(), *dense.aliases())}
    config = peft_config(dense.facts(), modules, family_of(DENSE).tensors())
    assert config["target_modules"] == ["down_proj", "k_proj", "q_proj", "v_proj"]
    assert (config["r"], config["lora_alpha"]) == (RANK, 6.0)
    # a first dense layer and shared experts beside routed ones
    glm = adapters(GLM4, "linear_proj", "linear_fc2")
    modules = {module_of(name) for name in glm.tensors()}
    targets = peft_config(glm.facts(), modules, family_of(GLM4).tensors())["target_modules"]
    assert set(targets) == {
        "o_proj",
        "model.layers.0.mlp.down_proj",
        *(f"model.layers.{n}.mlp.shared_experts.down_proj" for n in (1, 2, 3)),
    }


def test_peft_names_all_modules_in_full_next_to_a_tower() -> None:
    dense = adapters(DENSE, "linear_proj")
    modules = {multimodal_name(module_of(name)) for name in dense.tensors()}
    config = peft_config(dense.facts(), modules, family_of(DENSE).tensors(), in_full=True)
    assert config["target_modules"] == [
        f"model.language_model.layers.{layer}.self_attn.o_proj" for layer in range(4)
    ]


def test_peft_finds_experts_by_the_names_of_their_linears() -> None:
    routed = adapters(TINY, "linear_proj", "experts.linear_fc1", "experts.linear_fc2")
    modules = {module_of(name) for name in (*routed.tensors(), *routed.aliases())}
    targets = peft_config(routed.facts(), modules, family_of(TINY).tensors())["target_modules"]
    assert targets == ["down_proj", "gate_proj", "o_proj", "up_proj"]


def test_facts_are_what_makes_adapters_equal() -> None:
    config = LoraConfig(rank=2, alpha=4.0, targets=("linear_proj", "linear_qkv"))
    assert AdapterMap(family_of(LLAMA), config, 1).facts() == {
        "rank": 2,
        "alpha": 4.0,
        "targets": ["linear_qkv", "linear_proj"],
    }
