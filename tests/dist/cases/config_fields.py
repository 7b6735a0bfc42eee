"""Tiny configs of every family, other legal values of all their fields, and Megatron's log-probs
for each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.errors import ModelError
from tests.models import FIELD_MODELS

# another legal value of every field of the config classes; a tuple: several
_OTHER_DEPTH = {"num_hidden_layers": 3}
OTHER: dict[str, Any] = _OTHER_DEPTH | {
    "vocab_size": 53,
    "hidden_size": 48,
    "intermediate_size": 40,
    "moe_intermediate_size": 20,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "hidden_act": "gelu",
    "max_position_embeddings": 16,
    "rms_norm_eps": 0.1,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "attention_dropout": 0.5,
    "use_sliding_window": True,
    "layer_types": (
        ["sliding_attention", "full_attention"],
        ["full_attention", "linear_attention"],
    ),
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 7,
    "linear_num_key_heads": (1, 4),
    "linear_num_value_heads": (2, 3),
    "decoder_sparse_step": 2,
    "mlp_only_layers": [0],
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 12,
    "num_experts_per_tok": (1, 3),
    "norm_topk_prob": (True, False),
    "router_jitter_noise": 0.5,
    "n_shared_experts": 2,
    "routed_scaling_factor": 3.0,
    "n_group": (1, 2),
    "topk_group": (1, 4),
    "first_k_dense_replace": (0, 2),
    "use_qk_norm": True,
    "rope_interleave": False,
    "q_lora_rank": (None, 16),
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "partial_rotary_factor": 0.25,
    "rope_theta": 500.5,
    "original_max_position_embeddings": 8,
    "mlp_layer_types": (["sparse", "sparse"], ["dense", "dense"], ["sparse", "dense"]),
    "attention_out_bias": True,
    "residual_dropout": 0.5,
    "shared_expert_intermediate_size": 24,
    "qkv_bias": False,
    "use_bias": True,
    "moe_k": (1, 3),
    "moe_num_experts": 8,
    "moe_num_shared_experts": (0, 1),
    "moe_layer_start_index": (0, 2),
    "moe_layer_end_index": 0,
    "moe_layer_interval": 2,
    "moe_norm_min": 0.5,
    "swiglu_alpha": 1.0,
    "swiglu_limit": 0.25,
    "query_pre_attn_scalar": 11,
    "hidden_activation": "gelu",
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 5.0,
    "use_bidirectional_attention": True,
}
# families whose layers have a window by default, or by `sliding_window` alone
WINDOWED = ("mistral", "mixtral", "ministral3", "olmo3", "gemma3_text", "gpt_oss")
BY_KIND = ("olmo3", "gemma3_text")  # rotary settings for each kind of layer
# fields whose values change no log-prob: all of them at once
WITHOUT_INFLUENCE: dict[str, Any] = {
    "architectures": ["Another"],
    "transformers_version": "4.1.0",
    "dtype": "bfloat16",
    "initializer_range": 0.5,
    "use_cache": False,
    "pad_token_id": 3,
    "bos_token_id": 4,
    "eos_token_id": 5,
    "output_hidden_states": True,
    "chunk_size_feed_forward": 2,
    "is_encoder_decoder": True,
    "id2label": {"0": "a", "1": "b"},
    "label2id": {"a": 0, "b": 1},
    "problem_type": "regression",
    "pretraining_tp": 2,
    "sliding_window": 4,
    "max_window_layers": 1,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
    "num_mtp_layers": 3,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROTARY: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "yarn": {"rope_parameters": {**_YARN, "rope_theta": 777.5}},
    "yarn, its old name, another base": {
        "rope_theta": 500,
        "rope_scaling": {"type": "yarn", **_YARN, "beta_fast": 4},
    },
    "yarn with mscale": {
        "rope_scaling": {**_YARN, "mscale": 2.0, "mscale_all_dim": 0.5, "truncate": False}
    },
    "yarn with mscale_all_dim alone": {"rope_scaling": {**_YARN, "mscale_all_dim": 0.5}},
    "yarn with a factor of attention": {
        "rope_parameters": {**_YARN, "attention_factor": 1.7, "beta_slow": 0.5}
    },
    "yarn of the longest position": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "yarn, original length outside": {
        "rope_scaling": _YARN,
        "original_max_position_embeddings": 16,
    },
    "llama3": {"rope_scaling": {**_LLAMA3, "original_max_position_embeddings": 8}},
    "both places": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": _YARN},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "longrope": {
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    },
}


def fields_of(family: str) -> set[str]:
    """Every field of the family's config class in transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return {field.name for field in dataclasses.fields(CONFIG_MAPPING[family])}


def changes_of(family: str, fields: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, config.json) of the family's cases: each field changed, each left out, rotary
    settings."""
    base = {"model_type": family, **FIELD_MODELS[family]}
    yield "as it is", base
    of_influence = {"sliding_window"} if family in WINDOWED else set()
    yield (
        "without influence",
        base
        | {
            name: WITHOUT_INFLUENCE[name]
            for name in fields & WITHOUT_INFLUENCE.keys() - of_influence
        },
    )
    extra = {"head_dim", "partial_rotary_factor", "rope_theta", "original_max_position_embeddings"}
    for name in sorted(fields & OTHER.keys() | extra):
        values = OTHER[name] if isinstance(OTHER[name], tuple) else (OTHER[name],)
        for value in values:
            yield f"{name}={value}", {**base, name: value}
    for name in sorted(of_influence):
        yield f"{name}={WITHOUT_INFLUENCE[name]}", {**base, name: WITHOUT_INFLUENCE[name]}
    # GLM-4's own padding token is beyond these vocabularies, which transformers refuses
    for name in FIELD_MODELS[family].keys() - {"pad_token_id"}:
        yield f"no {name}", {key: value for key, value in base.items() if key != name}
    for name, settings in ROTARY.items():
        yield name, {**base, **_rotary_of(family, settings)}


def _rotary_of(family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings in the form of the family."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if family == "ministral3" and isinstance(value, dict):
            growing = {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 8}
            found[name] = {**growing, **value}
        elif family in BY_KIND and name == "rope_parameters":
            found[name] = {"full_attention": value}
        elif family in BY_KIND and name == "rope_scaling":
            # the old name of the type alone is refused
            found[name] = {"rope_type" if key == "type" else key: value[key] for key in value}
        else:
            found[name] = value
    return found


def batch() -> DataProto:
    """Four sequences, two of them longer than the `original_max_position_embeddings` of the rotary
    cases."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, 51, length) for length in (3, 9, 20, 1)]
    responses = [rng.integers(2, 51, length) for length in (5, 2, 18, 4)]
    return DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_rows(prompts, np.int64),
            "response_ids": Jagged.from_rows(responses, np.int64),
        }
    )


def log_probs(
    cases: dict[str, dict[str, Any]], folder: str, backend: str = "megatron"
) -> dict[str, Any]:
    """For each config: the log-probs of `batch`, its weights being in the folder of that name; or
    why it is refused."""
    return {name: _one(hf, Path(folder, name), backend) for name, hf in cases.items()}


def _one(hf: dict[str, Any], folder: Path, backend: str) -> Any:
    from safetensors.torch import save_file

    from tests.dist.cases.backend import open_policy
    from tests.dist.harness.policies import policy_of, weights_of

    try:
        policy = open_policy(backend, hf) if backend == "fsdp" else policy_of({}, hf)
    except ModelError as error:
        return str(error)
    found = policy.log_probs(batch(), max_tokens=4096, temperature=1.0, with_entropy=False)
    source = weights_of(policy.family)
    shapes = policy.family.tensors()
    folder.mkdir(parents=True)
    tensors = {name: source.read(name, (0,) * len(shape), shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf))
    return found[0].values.tolist()
