"""Validation of the fields of Megatron's TransformerConfig that are set in `actor.megatron`.

A field is rejected if another key controls it, if it is derived from config.json, or if HybridFlow
depends on the value that it sets itself. Names and types are read from Megatron's source file,
because importing Megatron would import torch.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hybridflow.config.verl_keys import ABSENT, RENAMED, counterpart
from hybridflow.errors import did_you_mean

# {our key: Megatron's fields that it sets}
_OUR_KEYS = {
    "actor.parallel.tensor": "tensor_model_parallel_size",
    "actor.parallel.pipeline": "pipeline_model_parallel_size",
    "actor.parallel.virtual_pipeline": "virtual_pipeline_model_parallel_size",
    "actor.parallel.layers_per_stage": (
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
        "pipeline_model_parallel_layout account_for_*"
    ),
    "actor.parallel.context": "context_parallel_size",
    "actor.parallel.expert": "expert_model_parallel_size",
    "actor.parallel.expert_tensor": "expert_tensor_parallel_size moe_extended_tp",
    "actor.parallel.sequence": "sequence_parallel",
    "actor.parallel.moe_dispatcher": (
        "moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend"
    ),
    "actor.recompute": "recompute_granularity moe_layer_recompute",
    "actor.recompute_modules": "recompute_modules",
    "actor.router_aux_loss_coef": "moe_aux_loss_coeff moe_router_load_balancing_type",
    "actor.router_z_loss_coef": "moe_z_loss_coeff",
    "actor.expert_bias_update_rate": "moe_router_bias_update_rate",
    "actor.router_replay": "moe_enable_routing_replay",
    "actor.logits_chunk_tokens": "cross_entropy_loss_fusion cross_entropy_fusion_impl",
    "model.dtype": "params_dtype pipeline_dtype *autocast* fp16 bf16",
}
# {reason for rejection: Megatron's fields}
_REFUSED = {
    "the model's config.json (model.path, model.hf_config) determines it": (
        "num_layers hidden_size num_attention_heads softmax_scale softmax_type num_query_groups "
        "ffn_hidden_size kv_channels apply_residual_connection_post_layernorm layernorm_* "
        "normalization add_bias_linear add_qkv_bias gated_linear_unit activation_func "
        "glu_linear_offset activation_func_clamp_value num_moe_experts window_* qk_layernorm "
        "qk_l2_norm attention_output_gate multi_latent_attention no_rope_freq "
        "experimental_attention_variant dsa_* linear_* apply_query_key_layer_scaling "
        "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq "
        "moe_ffn_hidden_size moe_router_topk* moe_router_num_groups moe_router_group_topk "
        "moe_router_pre_softmax moe_router_score_function moe_router_enable_expert_bias "
        "moe_latent_size mrope_section is_hybrid_model mamba_* use_mamba_mem_eff_path "
        "heterogeneous_block_specs q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim "
        "v_head_dim rope_type rotary_* original_max_position_embeddings beta_fast beta_slow "
        "mscale* mtp_*"
    ),
    "weights come from model.path, or are initialised from the job's seed": (
        "init_method* output_layer_init_method embedding_init_* perform_initialization "
        "use_cpu_initialization init_model_with_meta_device"
    ),
    "log-probs would differ from the engine's, or between two passes": (
        "hidden_dropout attention_dropout moe_input_jitter_eps moe_router_force_load_balancing "
        "moe_expert_capacity_factor moe_pad_expert_input_to_capacity moe_token_drop* "
        "moe_apply_probs_on_input"
    ),
    "syncs, checkpoints and exports would not find the weights under their names and addresses": (
        "moe_grouped_gemm moe_use_legacy_grouped_gemm transformer_impl use_kitchen* "
        "kitchen_attention_backend quant_recipe fp8_param fp4_param *_quantizer_factory "
        "cpu_offloading* "
        "hetereogenous_dist_checkpoint"
    ),
    "the job cuts and packs sequences, and schedules micro-batches, itself": (
        "hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank hybrid_context_parallel "
        "cp_comm_type calculate_per_token_loss variable_seq_lengths overlap_p2p_comm "
        "batch_p2p_comm overlap_p2p_comm_warmup_flush use_ring_exchange_p2p "
        "microbatch_group_size_per_vp_stage overlap_moe_expert_parallel_comm delay_wgrad_compute "
        "ep_overlap_early_attn_memory_release defer_embedding_wgrad_compute wgrad_deferral_limit "
        "moe_router_fusion use_te_activation_func fp32_residual_connection"
    ),
    "it requires setup that only Megatron's own training program performs": (
        "pipeline_model_parallel_comm_backend tp_comm_* *cuda_graph* qk_clip* "
        "log_max_attention_logit use_te_rng_tracker "
        "config_logger_dir test_mode timers *_func moe_per_layer_logging"
    ),
    "it is for inference": (
        "flash_decode inference_* use_inference_optimized_layers symmetric_ar_type "
        "mlp_chunks_for_prefill cache_mla_latents"
    ),
    "it is internal to Megatron": "_*",
}
_WHY: dict[str, list[str]] = {
    **{f"set {key} instead": names.split() for key, names in _OUR_KEYS.items()},
    **{f"{why}; remove it": names.split() for why, names in _REFUSED.items()},
}
_FILES = ("model_parallel_config.py", "transformer/transformer_config.py")
_CLASSES = ("ModelParallelConfig", "TransformerConfig", "MLATransformerConfig")
_SIMPLE: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
}
# names of members, which Megatron's command line accepts too (transformer/enums.py)
_ENUMS = {"AttnBackend": ("flash", "fused", "unfused", "local", "auto")}


def problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each rejected setting. If Megatron is not installed, only names that are
    never allowed are detected."""
    types = field_types()
    for name, value in settings.items():
        given = f"actor.megatron.{name}={value}"
        if why := refusal(name):
            yield f"{given}: {why}"
        elif types and name not in types:
            yield f"{given}: {_unknown(name)}"
        elif types and not _fits(value, types[name]):
            yield f"{given}: expected {ast.unparse(types[name])}"


def _unknown(name: str) -> str:
    """Return the remedy for an unknown field name, which may be one of verl's."""
    verl = f"actor.megatron.{name}"
    if f"ROLE.megatron.{name}" in {**RENAMED, **ABSENT}:
        key, note = counterpart(verl)
        return f"set {key} instead" if key else note
    hint = did_you_mean(name, field_types())
    return f"Megatron's TransformerConfig has no such field{hint}"


def refusal(name: str) -> str:
    """Return the reason why `actor.megatron` must not set this field, or an empty string if it
    may.
    """
    for why, patterns in _WHY.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return why
    return ""


@functools.cache
def field_types() -> Mapping[str, ast.expr]:
    """Return the annotation of each field; empty if Megatron is not installed."""
    spec = PathFinder.find_spec("megatron", sys.path)
    found: dict[str, ast.expr] = {}
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in _FILES:
            path = Path(folder) / "core" / file
            if path.is_file():
                found |= _annotations(path)
    return found


def _annotations(path: Path) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name in _CLASSES:
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                    found[line.target.id] = line.annotation
    return found


def _fits(value: Any, kind: ast.expr) -> bool:
    """Return True if a value read from YAML matches an annotation. Any value matches an annotation
    of an unsupported form; Megatron itself checks such fields.
    """
    match kind:
        case ast.Constant(value=str(text)):
            fits = _fits(value, ast.parse(text, mode="eval").body)
        case ast.Constant():
            fits = value == kind.value
        case ast.Name(id=name) if name in _SIMPLE:
            fits = isinstance(value, _SIMPLE[name]) and isinstance(value, bool) == (name == "bool")
        case ast.Name(id=name):
            fits = value in _ENUMS.get(name, (value,))
        case ast.Subscript(value=ast.Name(id="Optional"), slice=of):
            fits = value is None or _fits(value, of)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=of):
            choices = of.elts if isinstance(of, ast.Tuple) else [of]
            fits = value in list(map(ast.literal_eval, choices))
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=kinds)):
            fits = any(_fits(value, one) for one in kinds)
        case ast.Subscript(value=ast.Name(id="List" | "list"), slice=of):
            fits = isinstance(value, list) and all(_fits(item, of) for item in value)
        case _:
            fits = True
    return fits
