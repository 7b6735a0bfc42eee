"""Sizes of published models, as their config.json give them: for plans and figures without a checkpoint at hand."""

from __future__ import annotations

from typing import Any

from hybridflow.errors import ModelError

_DEEPSEEK: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "kimi-k2": {
        "model_type": "kimi_k2",
        **_DEEPSEEK,
        **{"vocab_size": 163840, "num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1},
        **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **_DEEPSEEK,
        **{"vocab_size": 129280, "num_attention_heads": 128, "n_routed_experts": 256, "first_k_dense_replace": 3},
        **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1},
    },
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe",
        **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536},
        **{"num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128},
        **{
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
        },
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
        **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        **{
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
        },
    },
    "llama-3.1-70b": {
        "model_type": "llama",
        **{"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80},
        **{"num_attention_heads": 64, "num_key_value_heads": 8, "rope_theta": 500000.0},
    },
}


def published(name: str) -> dict[str, Any]:
    """The config of a published model.

    Raises:
        ModelError: there is none of this name here; lists those there are.
    """
    if name not in PUBLISHED:
        raise ModelError(
            f"no sizes of a model {name!r} are known here; there are {', '.join(sorted(PUBLISHED))}, or give a "
            "config.json"
        )
    return dict(PUBLISHED[name])
