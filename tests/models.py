"""Every tiny model of the tests: Hugging Face configurations, each small enough for two cores.

Models without a prefix are compared with transformers. A prefix names the tests that use the
others: `MAP_` for the map between Hugging Face and Megatron, `FAMILIES` for planning, tracing and
streaming (one model of each family), `ENGINE_` for SGLang, `STREAM_` for the transports, `SYNC_`
for whole weight syncs, `FIELD_` for the sweep over configs, `FP8_` for engines in fp8.
"""

from __future__ import annotations

from typing import Any

HfConfig = dict[str, Any]

# ---- training, compared with transformers

TINY: HfConfig = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "vocab_size": 51,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}
DENSE: HfConfig = {**TINY, "model_type": "qwen3", "tie_word_embeddings": True}
DENSE_UNTIED: HfConfig = {**TINY, "model_type": "qwen3"}
SIZES: HfConfig = {
    key: value
    for key, value in TINY.items()
    if "expert" not in key and key not in ("decoder_sparse_step", "mlp_only_layers")
}
LLAMA: HfConfig = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}
QWEN2: HfConfig = {**SIZES, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MIXTRAL: HfConfig = {
    **SIZES,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
GLM4: HfConfig = {
    **SIZES,
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "attention_bias": True,
}
# the published shape of a config: yarn, groups of experts, a first dense layer; head widths differ
# for keys and values
DEEPSEEK: HfConfig = {
    **SIZES,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "rope_interleave": True,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}
del DEEPSEEK["head_dim"]
MOONLIGHT: HfConfig = {
    **DEEPSEEK,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": None,
}
GLM_FLASH: HfConfig = {
    **MOONLIGHT,
    "model_type": "glm4_moe_lite",
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "q_lora_rank": 24,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}
MISTRAL: HfConfig = {
    **SIZES,
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "sliding_window": None,
}
SEED_OSS: HfConfig = {
    **SIZES,
    "model_type": "seed_oss",
    "architectures": ["SeedOssForCausalLM"],
    "attention_dropout": 0.1,
    "residual_dropout": 0.1,
}
QWEN2_MOE: HfConfig = {
    **TINY,
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "norm_topk_prob": False,
    "shared_expert_intermediate_size": 48,
}

# a vision-language model, as published: DeepStack's features of two of three blocks
IMAGE_TOKEN = 47
VISION: HfConfig = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 48,
    "vision_start_token_id": 49,
    "vision_end_token_id": 50,
    "tie_word_embeddings": False,
    "text_config": {
        **{key: SIZES[key] for key in SIZES if key not in ("model_type", "rope_theta")},
        "model_type": "qwen3_vl_text",
        "head_dim": 16,
        "rope_theta": 777.5,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 2],
    },
}

# folders whose text model is trained alone, next to a vision tower
_QWEN35_TEXT: HfConfig = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 331,
    "max_position_embeddings": 256,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 777.5,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}
_QWEN35_TOWER: HfConfig = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_TOWER_SIZES: HfConfig = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_MISTRAL_TEXT: HfConfig = {**SIZES, "vocab_size": 331, "head_dim": 8}
_MISTRAL3: HfConfig = {
    "model_type": "mistral3",
    "architectures": ["Mistral3ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "image_token_index": 10,
    "vision_config": {**_TOWER_SIZES, "model_type": "pixtral", "head_dim": 8},
}
MULTIMODAL: dict[str, HfConfig] = {
    "qwen3_5": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": {
            **_QWEN35_TEXT,
            "model_type": "qwen3_5_text",
            "intermediate_size": 48,
            "mtp_num_hidden_layers": 1,
        },
        "vision_config": {**_QWEN35_TOWER, "model_type": "qwen3_5"},
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "tie_word_embeddings": False,
        "text_config": {
            **_QWEN35_TEXT,
            "model_type": "qwen3_5_moe_text",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
        },
        "vision_config": {**_QWEN35_TOWER, "model_type": "qwen3_5_moe"},
    },
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "mm_tokens_per_image": 4,
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 331,
            "max_position_embeddings": 256,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "vision_config": {**_TOWER_SIZES, "model_type": "siglip_vision_model"},
    },
    "mistral3": {
        **_MISTRAL3,
        "text_config": {**_MISTRAL_TEXT, "model_type": "mistral", "sliding_window": None},
    },
    "ministral3": {
        **_MISTRAL3,
        "text_config": {
            **{key: _MISTRAL_TEXT[key] for key in _MISTRAL_TEXT if key != "rope_theta"},
            "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    },
}


# models that read images
def _with_images(kind: str) -> HfConfig:
    hf = MULTIMODAL[kind]
    return {
        **hf,
        **{key: VISION[key] for key in VISION if key.endswith("_token_id")},
        # see _DELTA_NETS
        "text_config": {**hf["text_config"], "vocab_size": 51, "rms_norm_eps": 1e-2},
        "vision_config": {**hf["vision_config"], "depth": 2},
    }


VISIONS: dict[str, HfConfig] = {
    "qwen3_vl": VISION,
    "qwen3_vl_moe": {
        **VISION,
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": {
            **VISION["text_config"],
            "model_type": "qwen3_vl_moe_text",
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
        },
        "vision_config": {**VISION["vision_config"], "model_type": "qwen3_vl_moe"},
    },
    "qwen3_5": _with_images("qwen3_5"),
    "qwen3_5_moe": _with_images("qwen3_5_moe"),
}

# large enough that what stays (a Python process) does not drown what goes
LARGE: HfConfig = {
    **TINY,
    "hidden_size": 256,
    "head_dim": 64,
    "moe_intermediate_size": 256,
    "intermediate_size": 512,
    "vocab_size": 4096,
}
# the last stage of a value role has no output layer
WITHOUT_VOCABULARY: HfConfig = {**LARGE, "moe_intermediate_size": 1024}
# checkpoints that take a moment to write
WIDE: HfConfig = {
    **TINY,
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 32,
}
# an export whose memory can be measured
BIG: HfConfig = {
    **{key: value for key, value in TINY.items() if "expert" not in key},
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "intermediate_size": 2048,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}

# ---- the map between Hugging Face and Megatron

MAP_MOE: HfConfig = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "intermediate_size": 24,
    "norm_topk_prob": True,
    "vocab_size": 51,
}
MAP_DENSE: HfConfig = {**MAP_MOE, "model_type": "qwen3", "tie_word_embeddings": True}
MAP_MODELS: dict[str, HfConfig] = {
    "moe": MAP_MOE,
    "dense-tied": MAP_DENSE,
    "dense": {**MAP_DENSE, "tie_word_embeddings": False},
}

# ---- planning, tracing, streaming: one of each family

FAMILY_SIZES: HfConfig = {
    "vocab_size": 331,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}
FAMILY_SPARSE = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
FAMILY_LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
}
FAMILY_HYBRID = {
    "rms_norm_eps": 1e-3,  # see _DELTA_NETS
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
}
FAMILY_GATED = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
FAMILY_DEEPSEEK = {
    "model_type": "deepseek_v3",
    **FAMILY_SIZES,
    **FAMILY_SPARSE,
    **FAMILY_LATENT,
    "num_key_value_heads": 8,
}
FAMILIES: dict[str, HfConfig] = {
    "llama": {"model_type": "llama", **FAMILY_SIZES, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", **FAMILY_SIZES, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **FAMILY_SIZES, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **FAMILY_SIZES,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mixtral": {
        "model_type": "mixtral",
        **FAMILY_SIZES,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": {**FAMILY_DEEPSEEK, "q_lora_rank": 24, "num_nextn_predict_layers": 1},
    "moonlight": {**FAMILY_DEEPSEEK, "q_lora_rank": None},
    "glm4_moe": {
        "model_type": "glm4_moe",
        **FAMILY_SIZES,
        **FAMILY_SPARSE,
        "head_dim": 16,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "glm4_moe_lite": {
        **{key: value for key, value in FAMILY_DEEPSEEK.items() if key != "first_k_dense_replace"},
        "model_type": "glm4_moe_lite",
        "q_lora_rank": 24,
    },
    "mistral": {"model_type": "mistral", **FAMILY_SIZES, "head_dim": 16, "sliding_window": None},
    "seed_oss": {"model_type": "seed_oss", **FAMILY_SIZES, "head_dim": 16},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **FAMILY_SIZES,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    # transformers' padding token is beyond this vocabulary
    "glm4": {"model_type": "glm4", **FAMILY_SIZES, "head_dim": 16, "pad_token_id": None},
    "minimax_m2": {
        "model_type": "minimax_m2",
        **FAMILY_SIZES,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
    },
    "ministral3": {"model_type": "ministral3", **FAMILY_SIZES, "head_dim": 16},
    "ernie4_5": {
        "model_type": "ernie4_5",
        **FAMILY_SIZES,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        **FAMILY_SIZES,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "tie_word_embeddings": True,
    },
    "olmo2": {"model_type": "olmo2", **FAMILY_SIZES},
    "olmo3": {"model_type": "olmo3", **FAMILY_SIZES, "sliding_window": 16},
    "gemma3_text": {
        "model_type": "gemma3_text",
        **FAMILY_SIZES,
        "head_dim": 16,
        "sliding_window": 16,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **FAMILY_SIZES,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "qwen3_next": {"model_type": "qwen3_next", **FAMILY_SIZES, **FAMILY_HYBRID, **FAMILY_GATED},
    "qwen3_5_text": {"model_type": "qwen3_5_text", **FAMILY_SIZES, **FAMILY_HYBRID},
    "qwen3_5_moe_text": {
        **{key: value for key, value in FAMILY_SIZES.items() if key != "intermediate_size"},
        "model_type": "qwen3_5_moe_text",
        **FAMILY_HYBRID,
        **FAMILY_GATED,
    },
}

# whose weights no test brings into SGLang, because its gated delta net needs a GPU
NOT_SYNCED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
SYNCED = {name: hf for name, hf in FAMILIES.items() if name not in NOT_SYNCED}
# whose long tests `make test` leaves to `make test-full`
LONG_TESTS_FULL = (
    *("glm4_moe_lite", "mistral", "qwen2_moe", "seed_oss"),
    *("glm4", "minimax_m2", "ministral3", "ernie4_5", "ernie4_5_moe", "olmo2", "olmo3"),
    *("gemma3_text", "gpt_oss", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)

# ---- engines

_ENGINE_SIZES: HfConfig = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
ENGINE_MOE: HfConfig = {
    **_ENGINE_SIZES,
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
ENGINE_DEEPSEEK: HfConfig = {
    **_ENGINE_SIZES,
    # At 0.2, float32 alone moves a log-prob of this model by up to 1.3e-5 (engine against float64,
    # eight seeds): more than the bound of 1e-5. At 0.15 it is 4.2e-6, and a norm's epsilon that is
    # wrong by 1e-6 still moves 1.3e-4.
    "initializer_range": 0.15,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
ENGINE_MOONLIGHT: HfConfig = {
    **ENGINE_DEEPSEEK,
    "q_lora_rank": None,
    "n_group": 1,
    "topk_group": 1,
    "rope_scaling": None,
}

# ---- transports, whole syncs, engines in fp8

STREAM_MOE: HfConfig = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "vocab_size": 331,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
}
SYNC_MOE: HfConfig = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "vocab_size": 331,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": None,
    "hidden_act": "silu",
}
FP8_MOE: HfConfig = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
# the folder of a reader of the README, whose vocabulary is the byte-level tokenizer's
STRANGER: HfConfig = {
    "vocab_size": 262,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}

# ---- every field of a config, followed or refused: required fields and small sizes alone

_FIELD_SIZES: HfConfig = {
    "vocab_size": 51,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
_FIELD_GROUPS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_FIELD_SPARSE = {"moe_intermediate_size": 24}
_FIELD_LATENT = {
    "num_key_value_heads": 4,
    **{
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
    },
    **{"n_group": 4, "topk_group": 2},
}
_FIELD_HYBRID = {
    "head_dim": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_FIELD_GATED = {
    **_FIELD_SPARSE,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 40,
}
_FIELD_KINDS = {"layer_types": ["full_attention", "sliding_attention"]}
FIELD_MODELS: dict[str, HfConfig] = {
    "llama": _FIELD_SIZES,
    "qwen2": _FIELD_SIZES,
    "qwen3": {**_FIELD_SIZES, "head_dim": 8},
    "qwen3_moe": {**_FIELD_SIZES, **_FIELD_SPARSE, "num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {**_FIELD_SIZES, "head_dim": 8, "num_local_experts": 4},
    "glm4_moe": {**_FIELD_SIZES, **_FIELD_SPARSE, **_FIELD_GROUPS},
    "deepseek_v3": {**_FIELD_SIZES, **_FIELD_SPARSE, **_FIELD_GROUPS, **_FIELD_LATENT},
    "glm4_moe_lite": {
        **_FIELD_SIZES,
        **_FIELD_SPARSE,
        **{key: value for key, value in _FIELD_GROUPS.items() if key != "first_k_dense_replace"},
        **_FIELD_LATENT,
    },
    "mistral": {**_FIELD_SIZES, "sliding_window": None},
    "seed_oss": {**_FIELD_SIZES, "head_dim": 8},
    "qwen2_moe": {
        **_FIELD_SIZES,
        **_FIELD_SPARSE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 40,
    },
    "glm4": {**_FIELD_SIZES, "head_dim": 8, "pad_token_id": 0},
    "minimax_m2": {
        **_FIELD_SIZES,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "ministral3": {**_FIELD_SIZES, "head_dim": 8},
    "ernie4_5": {**_FIELD_SIZES, "head_dim": 8},
    "ernie4_5_moe": {**_FIELD_SIZES, **_FIELD_SPARSE, "moe_num_experts": 4, "moe_k": 2},
    "olmo2": _FIELD_SIZES,
    "olmo3": {**_FIELD_SIZES, **_FIELD_KINDS},
    "gemma3_text": {**_FIELD_SIZES, **_FIELD_KINDS, "head_dim": 8},
    "gpt_oss": {
        **_FIELD_SIZES,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {**_FIELD_SIZES, **_FIELD_HYBRID, **_FIELD_GATED},
    "qwen3_5_text": {**_FIELD_SIZES, **_FIELD_HYBRID},
    "qwen3_5_moe_text": {
        **{key: value for key, value in _FIELD_SIZES.items() if key != "intermediate_size"},
        **_FIELD_HYBRID,
        **_FIELD_GATED,
    },
}

# ---- families against transformers in every layout: three configurations each, of sizes that divide
# badly

_ODD: tuple[HfConfig, ...] = (
    SIZES,
    {
        **SIZES,
        "hidden_size": 40,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 44,
        "vocab_size": 53,
        "rms_norm_eps": 0.01,
        "rope_theta": 777.5,
        "tie_word_embeddings": True,
    },
    {
        **SIZES,
        "num_hidden_layers": 2,
        "hidden_size": 36,
        "num_key_value_heads": 1,
        "head_dim": 20,
        "intermediate_size": 38,
        "vocab_size": 67,
    },
)


def _odd(model_type: str, *changes: HfConfig, **always: Any) -> tuple[HfConfig, ...]:
    """The odd sizes with what a family needs always, and in each of them."""
    return tuple(
        {**sizes, "model_type": model_type, **always, **change}
        for sizes, change in zip(_ODD, changes, strict=True)
    )


_YARN = {"rope_type": "yarn", "original_max_position_embeddings": 8, "attention_factor": 1.3}
_YARN_OF_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# The norm after a delta net divides a head's first output, value x (key . query), by its size. The
# product is often near zero: at an epsilon of 1e-6, float32 alone moves transformers' log-probs by
# 4.6e-5. Heads of 128 are no better than these.
_DELTA_NETS: tuple[HfConfig, ...] = (
    {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6}
    | {"linear_value_head_dim": 10, "rms_norm_eps": 1e-3},
    {"linear_num_key_heads": 6, "linear_num_value_heads": 6, "linear_key_head_dim": 5}
    | {"linear_value_head_dim": 3, "linear_conv_kernel_dim": 2, "partial_rotary_factor": 0.5}
    | {"layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"]},
    {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 9}
    | {"linear_value_head_dim": 7, "linear_conv_kernel_dim": 5, "full_attention_interval": 2}
    | {"rms_norm_eps": 2e-3}
    | {"rope_parameters": {"rope_theta": 500.5, "partial_rotary_factor": 0.6}},
)
_GATED: tuple[HfConfig, ...] = (
    {"num_experts": 4, "num_experts_per_tok": 2},
    {"num_experts": 6, "num_experts_per_tok": 3},
    {"num_experts": 2, "num_experts_per_tok": 2},
)
_GATED_SIZES = {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
_SPARSE: tuple[HfConfig, ...] = (
    {},
    {"mlp_only_layers": [1], "norm_topk_prob": False},
    {"decoder_sparse_step": 2},
)
ODD_FAMILIES: dict[str, tuple[HfConfig, ...]] = {
    "glm4": _odd(
        "glm4",
        {},
        {"attention_bias": False, "partial_rotary_factor": 1.0},
        {"rope_parameters": {"rope_theta": 500.5, "partial_rotary_factor": 0.6}},
    ),
    "minimax_m2": _odd(
        "minimax_m2",
        {"rotary_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"partial_rotary_factor": 0.5, "num_local_experts": 6, "num_experts_per_tok": 3},
        {"num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "ministral3": _odd(
        "ministral3",
        {"rope_parameters": _GROWING},
        {"rope_parameters": {**_GROWING, "original_max_position_embeddings": 3, "mscale": 0.5}},
        {"rope_parameters": {**_GROWING, "llama_4_scaling_beta": 0.7, "factor": 2.0}},
    ),
    "ernie4_5": _odd("ernie4_5", {}, {}, {"tie_word_embeddings": True}),
    "ernie4_5_moe": _odd(
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2},
        {"moe_num_experts": 6, "moe_k": 3, "moe_num_shared_experts": 1, "moe_layer_interval": 2},
        {"moe_num_experts": 2, "moe_k": 2, "moe_num_shared_experts": 0, "moe_layer_end_index": 0}
        | {"moe_layer_start_index": 0},
        moe_intermediate_size=12,
    ),
    "olmo2": _odd("olmo2", {}, {}, {}),
    "olmo3": _odd(
        "olmo3",
        {"sliding_window": 5},
        {"sliding_window": 3, "rope_scaling": {"factor": 4.0, **_YARN}},
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_theta": 77.0, "rope_type": "linear", "factor": 2.0},
                "sliding_attention": {"rope_theta": 555.0, "rope_type": "default"},
            },
        },
    ),
    "gemma3_text": _odd(
        "gemma3_text",
        {"sliding_window": 5, "sliding_window_pattern": 2, "query_pre_attn_scalar": 11},
        {"sliding_window": 3, "hidden_size": 48, "rope_local_base_freq": 55.0}
        | {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
    ),
    "gpt_oss": _odd(
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": _YARN_OF_GPT_OSS},
        {"num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_alpha": 0.7},
        {"num_local_experts": 2, "num_experts_per_tok": 2, "swiglu_limit": 0.5}
        | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 2},
        sliding_window=6,
    ),
    "mistral": _odd("mistral", {"sliding_window": 5}, {"sliding_window": 1}, {}),
    "qwen2": _odd(
        "qwen2",
        {"max_window_layers": 1},
        {"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"]},
        {"max_window_layers": 0},
        use_sliding_window=True,
        sliding_window=7,
    ),
    "qwen3_next": _odd(
        "qwen3_next",
        *(a | b | c for a, b, c in zip(_DELTA_NETS, _GATED, _SPARSE, strict=True)),
        **_GATED_SIZES,
    ),
    "qwen3_5_text": _odd("qwen3_5_text", *_DELTA_NETS),
    "qwen3_5_moe_text": _odd(
        "qwen3_5_moe_text",
        *(a | b for a, b in zip(_DELTA_NETS, _GATED, strict=True)),
        **_GATED_SIZES,
    ),
    "glm4_moe_lite": tuple(
        {key: value for key, value in hf.items() if key != "head_dim"}
        for hf in _odd(
            "glm4_moe_lite",
            {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
            {"num_key_value_heads": 6, "n_routed_experts": 6, "num_experts_per_tok": 4}
            | {"n_group": 3, "topk_group": 2, "n_shared_experts": 2, "v_head_dim": 14}
            | {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"]},
            {"num_key_value_heads": 4, "n_routed_experts": 2, "num_experts_per_tok": 2}
            | {"q_lora_rank": None, "routed_scaling_factor": 1.3},
            **{"moe_intermediate_size": 12, "q_lora_rank": 22, "kv_lora_rank": 18},
            **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10},
        )
    ),
    "qwen2_moe": _odd(
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2},
        {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "qkv_bias": False},
        {"num_experts": 2, "num_experts_per_tok": 2, "use_sliding_window": True}
        | {"sliding_window": 7, "max_window_layers": 1},
        **_GATED_SIZES,
    ),
    "seed_oss": _odd(
        "seed_oss",
        {"attention_dropout": 0.1, "residual_dropout": 0.1},
        {"attention_bias": False},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.5}},
    ),
}
