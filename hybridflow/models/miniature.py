"""Scaled-down copies of a model's architecture.

They preserve the behaviour of a checkpoint's config at sizes that a laptop can handle.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.config.model_config import MULTIMODAL
from hybridflow.models.family import family_of
from hybridflow.models.vision import Tower, tower_of
from hybridflow.models.windows import FULL

_VOCABULARY = 160
_HEAD = 16
_EXPERTS = 8
_WIDTHS: Mapping[str, int] = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "head_dim": _HEAD,
    "rotary_dim": _HEAD // 2,
    "sliding_window": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
}
_TOWER: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 16,
}
_SECTIONS = (4, 2, 2)  # in sum, half the elements of a head
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "moe_k")
# these refer to other sizes, to code, or to parts that the copy does not have
_DROPPED = (
    *("auto_map", "quantization_config", "num_nextn_predict_layers", "num_mtp_layers"),
    MULTIMODAL,
)


def miniature(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with widths, layers, heads, experts and vocabulary reduced.

    Everything else is unchanged: rotary settings, norms, biases, the router, and which layers are
    dense.

    Args:
        hf: the contents of a config.json.
    """
    small = {key: value for key, value in hf.items() if key not in _DROPPED}
    for key, width in _WIDTHS.items():
        if small.get(key) is not None:
            small[key] = width
    small |= _layers(small) | _heads(small) | _experts(small)
    tower = tower_of(family_of({"vocab_size": 1, **hf}))
    small |= _vision(small, tower)
    small |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return small | {"vocab_size": _VOCABULARY, "dtype": "float32", "torch_dtype": "float32"}


def _layers(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reduced layer count: at most one dense layer, plus two more. With gated delta
    nets, all layers up to and including the first attention layer are kept.
    """
    dense = min(1, int(hf.get("first_k_dense_replace") or 0))
    count = dense + 2
    if hf.get("linear_num_key_heads") is not None:
        kinds = hf.get("layer_types") or []
        interval = int(hf.get("full_attention_interval") or 4)
        count = kinds.index(FULL) + 1 if FULL in kinds else interval
    found: dict[str, Any] = {"num_hidden_layers": count}
    if "first_k_dense_replace" in hf:
        found["first_k_dense_replace"] = dense
    if "moe_layer_end_index" in hf:
        found["moe_layer_end_index"] = -1
    for key in ("layer_types", "mlp_layer_types"):
        kinds_of_layers = hf.get(key)
        if isinstance(kinds_of_layers, list):
            found[key] = kinds_of_layers[:count]
    layers = hf.get("mlp_only_layers")
    if isinstance(layers, list):
        found["mlp_only_layers"] = [layer for layer in layers if layer < count]
    return found


def _heads(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce the head counts, keeping the ratio of query heads to key heads (at most eight). Latent
    attention has one key per head."""
    heads = int(hf.get("num_attention_heads") or 1)
    groups = int(hf.get("num_key_value_heads") or heads)
    few = 4 if groups == heads else min(2, groups)
    many = few if groups == heads else few * min(8, heads // groups)
    hidden = 64
    if hf.get("head_dim") is None and hf.get("kv_lora_rank") is None:
        hidden = (
            many * _HEAD
        )  # without these, a head has hidden_size / num_attention_heads elements
    found = {"num_attention_heads": many, "hidden_size": hidden}
    linear_keys = hf.get("linear_num_key_heads")
    linear_values = hf.get("linear_num_value_heads")
    if linear_keys is not None and linear_values is not None:
        ratio = int(linear_values) // int(linear_keys)
        found["linear_num_key_heads"] = 2
        found["linear_num_value_heads"] = 2 * min(4, ratio)
    if hf.get("num_key_value_heads") is not None:
        found["num_key_value_heads"] = few
    return found


def _experts(hf: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in _EXPERT_COUNTS:
        if hf.get(key) is not None:
            found[key] = _EXPERTS
    if not found:
        return {}
    given = next((hf[key] for key in _CHOSEN if hf.get(key)), 2)
    chosen = min(4, int(given))
    if int(hf.get("n_group") or 1) > 1:  # published models select twice as many experts as groups
        found["n_group"] = 4
        found["topk_group"] = 2
        chosen = 4
    for key in _CHOSEN:
        if key in hf:
            found[key] = chosen
    return found


def _vision(hf: Mapping[str, Any], tower: Tower | None) -> dict[str, Any]:
    """Reduce the vision tower to two blocks, with DeepStack, if any, only from the first block to
    the first decoder layer. Adjust the split of rotary frequencies among the position axes to the
    smaller heads.
    """
    if tower is None:
        return {}
    smaller = {**tower.config, **_TOWER, "out_hidden_size": hf["hidden_size"]}
    smaller["deepstack_visual_indexes"] = [0] if tower.deepstack else []
    found: dict[str, Any] = {"vision_config": smaller}
    for key in ("rope_scaling", "rope_parameters"):
        settings = hf.get(key)
        if isinstance(settings, Mapping) and settings.get("mrope_section"):
            found[key] = {**settings, "mrope_section": list(_SECTIONS)}
    return found
