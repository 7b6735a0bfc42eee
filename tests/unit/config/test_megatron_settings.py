"""Fields of Megatron's configuration that `actor.megatron` takes, against Megatron's own classes."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any

import pytest
from megatron.core.transformer import MLATransformerConfig
from megatron.core.transformer.enums import AttnBackend

from hybridflow.config.check import check
from hybridflow.config.load import load_config
from hybridflow.config.megatron_settings import _ENUMS, _WHY, field_types, problems, refusal
from hybridflow.errors import ConfigError, ModelError
from hybridflow.mcore import torch_modules
from hybridflow.mcore.model import transformer_config
from hybridflow.models import family_of
from tests.models import FAMILIES

# every field of Megatron 0.16 that may be set; a new version's fields are decided here
ALLOWED = """
    activation_func_fp8_input_store apply_rope_fusion async_tensor_model_parallel_allreduce
    attention_backend attention_softmax_in_fp32 barrier_with_L1_time batch_invariant_mode
    batch_p2p_sync bias_activation_fusion bias_dropout_fusion clone_scatter_output_in_embedding
    deallocate_pipeline_outputs deterministic_mode disable_bf16_reduced_precision_matmul
    disable_parameter_transpose_cache distribute_saved_activations
    fine_grained_activation_offloading first_last_layers_bf16 fp4 fp4_recipe fp8
    fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention fp8_interval fp8_margin
    fp8_multi_head_attention fp8_recipe fp8_wgrad fused_single_qkv_rope
    gradient_accumulation_fusion masked_softmax_fusion memory_efficient_layer_norm
    min_offloaded_tensor_size moe_deepep_num_sms moe_hybridep_num_sms moe_permute_fusion
    moe_router_dtype moe_router_padding_for_fp8 moe_router_padding_for_quantization
    moe_shared_expert_overlap num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
    num_microbatches_with_partial_activation_checkpoints offload_modules persist_layer_norm
    recompute_method recompute_num_layers tp_only_amax_red use_fused_weighted_squared_relu
"""


def test_each_field_of_megatron_is_decided() -> None:
    fields = {one.name for one in dataclasses.fields(MLATransformerConfig)}
    assert set(field_types()) == fields
    assert {name for name in fields if not refusal(name)} == set(ALLOWED.split())
    rules = [pattern for patterns in _WHY.values() for pattern in patterns]
    assert [one for one in rules if not fnmatch.filter(fields, one)] == []


def test_members_of_enums_are_megatrons() -> None:
    assert set(_ENUMS["AttnBackend"]) == {one.name for one in AttnBackend}


GOOD: dict[str, Any] = {
    "moe_router_dtype": "fp32",
    "attention_backend": "unfused",
    "deterministic_mode": True,
    "recompute_num_layers": 2,
    "fp8_margin": 1,
    "offload_modules": ["core_attn"],
}
BAD: list[tuple[str, Any, str]] = [
    ("moe_router_dtyp", "fp32", "no such field; did you mean moe_router_dtype?"),
    ("moe_router_dtype", "fp16", "expected Optional[Literal['fp32', 'fp64']]"),
    ("attention_backend", "flsh", "expected AttnBackend"),
    ("deterministic_mode", 1, "expected bool"),
    ("fp8_margin", True, "expected int"),
    ("recompute_num_layers", "two", "expected Optional[int]"),
    ("offload_modules", [1], "expected Optional[list[str]]"),
    ("tensor_model_parallel_size", 2, "set actor.parallel.tensor instead"),
    ("param_offload", True, "set actor.offload.weights instead"),
    ("use_mbridge", True, "with one map for all layouts"),
    ("moe_aux_loss_coeff", 0.1, "set actor.router_aux_loss_coef instead"),
    ("hidden_size", 64, "config.json (model.path, model.hf_config) determines it"),
    ("q_lora_rank", 64, "config.json (model.path, model.hf_config) determines it"),
    ("hidden_dropout", 0.1, "log-probs would differ"),
    ("moe_grouped_gemm", False, "would not find the weights"),
    ("enable_cuda_graph", True, "only Megatron's own training program performs"),
    ("_cpu_offloading_context", None, "internal to Megatron"),
]


def test_values_of_the_fields_own_types_pass() -> None:
    assert list(problems(GOOD)) == []


@pytest.mark.parametrize(("name", "value", "why"), BAD)
def test_a_setting_that_cannot_be_is_refused_with_its_reason(
    name: str, value: object, why: str
) -> None:
    [line] = problems({name: value})
    assert line.startswith(f"actor.megatron.{name}={value}: ") and why in line


@pytest.mark.slow
def test_a_run_is_refused_before_it_starts_and_with_fsdp() -> None:
    words = ["+actor.megatron.context_parallel_size=2", "+actor.megatron.moe_router_dtyp=fp32"]
    with pytest.raises(ConfigError, match=r"(?s)actor\.parallel\.context.*moe_router_dtype\?"):
        check(load_config("tiny-moe-grpo", words))
    fsdp = ["actor=tiny", "model=tiny-dense", "actor.backend=fsdp", "+actor.megatron.fp8_margin=1"]
    with pytest.raises(ConfigError, match=r"actor\.megatron=.* is not supported with actor\.back"):
        check(load_config("tiny-moe-grpo", fsdp))


def test_fields_reach_megatron_and_its_refusal_is_one_message() -> None:
    torch_modules.install()  # as `build_model` does without Transformer Engine
    family = family_of(FAMILIES["qwen3_moe"])
    layout = load_config("tiny-moe-grpo").actor.parallel
    plain = transformer_config(family, layout, "float32")
    made = transformer_config(
        family,
        layout,
        "float32",
        further={"moe_router_dtype": "fp64", "attention_backend": "unfused"},
    )
    assert (made.moe_router_dtype, made.attention_backend) == ("fp64", AttnBackend.unfused)
    left = {"moe_router_dtype", "attention_backend"}
    assert all(
        vars(made)[name] == value or name in left or callable(value)
        for name, value in vars(plain).items()
    )
    further = {"recompute_num_layers": 0, "distribute_saved_activations": True}
    with pytest.raises(ModelError, match=r"actor\.megatron=\{'recompute_num_layers': 0.*rejects"):
        transformer_config(family, layout, "float32", "full", further=further)
