"""Reader of a model's config.json. The type and range of every field used for layouts and plans are
checked, so that an untrusted or corrupt file causes a one-line error and cannot exhaust memory.

The config of a model with a vision tower has its language model's fields in `text_config`. All
other code reads them at the top level: `flattened` moves them there, `published_form` moves them
back when a config.json is written.

Only the text model is trained if the folder's model_type is in `TEXT_TYPES`. `flattened` then
returns the text model's config, with the fields of the whole model under `MULTIMODAL`;
`folder_form` is the inverse (ADR 0070). For a run with images, `with_tower` restores the whole
model if its model_type is in `VISION_TYPES` (ADR 0072).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridflow.config.outside_json import read_outside_json

_COUNT = (1, 1 << 16)
_COUNT_OR_0 = (0, 1 << 16)
# {field: (least, most)}; the upper bounds are far above any published model's sizes
_SIZES: Mapping[str, tuple[int, int]] = {
    "num_hidden_layers": (1, 10_000),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 22),
    "moe_intermediate_size": (1, 1 << 22),
    "shared_expert_intermediate_size": (1, 1 << 22),
    "num_attention_heads": _COUNT,
    "num_key_value_heads": _COUNT,
    "head_dim": _COUNT,
    "qk_nope_head_dim": _COUNT,
    "qk_rope_head_dim": _COUNT,
    "v_head_dim": _COUNT,
    "q_lora_rank": (1, 1 << 20),
    "kv_lora_rank": (1, 1 << 20),
    "vocab_size": (1, 1 << 26),
    "num_experts": _COUNT,
    "num_local_experts": _COUNT,
    "n_routed_experts": _COUNT,
    "moe_num_experts": _COUNT,
    "num_experts_per_tok": _COUNT,
    "moe_k": _COUNT,
    "n_group": _COUNT,
    "topk_group": _COUNT,
    "n_shared_experts": _COUNT_OR_0,
    "moe_num_shared_experts": _COUNT_OR_0,
    "first_k_dense_replace": _COUNT_OR_0,
    "moe_layer_start_index": _COUNT_OR_0,
    "moe_layer_end_index": (-1, 1 << 16),
    "moe_layer_interval": _COUNT,
    "rotary_dim": (2, 1 << 16),
    "sliding_window": (0, 1 << 40),
    "max_window_layers": _COUNT_OR_0,
    "sliding_window_pattern": _COUNT,
    "linear_num_key_heads": (1, 1 << 12),
    "linear_num_value_heads": (1, 1 << 12),
    "linear_key_head_dim": _COUNT,
    "linear_value_head_dim": _COUNT,
    "linear_conv_kernel_dim": (1, 1 << 10),
    "full_attention_interval": _COUNT,
    "decoder_sparse_step": _COUNT,
    "num_nextn_predict_layers": (0, 64),
    "max_position_embeddings": (1, 1 << 40),
    "original_max_position_embeddings": (1, 1 << 40),
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MOST_EXPERTS = 1 << 18  # over all layers; Kimi-K2 has 23,000
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "rms_norm_eps": (0.0, 1.0),
    "swiglu_alpha": (0.0, 1e6),
    "swiglu_limit": (0.0, 1e6),
    "query_pre_attn_scalar": (1e-6, 1e9),
    "rope_local_base_freq": (1.1, 1e18),
    "rope_theta": (1.1, 1e18),
    "partial_rotary_factor": (0.01, 1.0),
    "routed_scaling_factor": (0.0, 1e6),
    "factor": (0.001, 1e9),
    "low_freq_factor": (0.001, 1e9),
    "high_freq_factor": (0.001, 1e9),
    "beta_fast": (0.001, 1e9),
    "beta_slow": (0.001, 1e9),
    "attention_factor": (0.001, 1e9),
    "mscale": (0.0, 1e9),
    "mscale_all_dim": (0.0, 1e9),
    "llama_4_scaling_beta": (0.0, 1e9),
}
_FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "qkv_bias",
    "use_qk_norm",
    "norm_topk_prob",
    "use_sliding_window",
)
_LISTS = ("mlp_layer_types", "layer_types")
_ROTARY = ("rope_scaling", "rope_parameters")
_QUANTISATION = "quantization_config"
_TEXT = "text_config"
_VISION = "vision_config"
# {model_type of a folder whose text model is trained alone: its text_config's default model_type}
TEXT_TYPES: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
MULTIMODAL = "multimodal_config"  # the folder's config without that of its text model
# model_types that read images, and their name in messages
VISION_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
VISION_MODELS = f"a vision-language model (model_type {', '.join(VISION_TYPES)})"
# fields that published configs leave to transformers' defaults (Gemma3TextConfig)
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    }
}
# fields that hold for the text model where the folder's config has them
_SHARED = ("dtype", "torch_dtype", "tie_word_embeddings", _QUANTISATION)
# fields of a config with a vision tower that are not its language model's
_OF_THE_WHOLE = frozenset(
    {
        "architectures",
        "auto_map",
        "dtype",
        "torch_dtype",
        "model_type",
        "transformers_version",
        "image_token_id",
        "video_token_id",
        "vision_start_token_id",
        "vision_end_token_id",
        "tie_word_embeddings",
        _QUANTISATION,
        _VISION,
    }
)


def read_model_config(file: Path) -> dict[str, Any]:
    """Return the contents of a config.json, `flattened`.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: as for `read_outside_json`, or a field has the wrong type or an absurd value.
            The message names the field but not the file.
    """
    given = read_outside_json(file)
    given.pop(MULTIMODAL, None)  # only `flattened` writes it
    values = flattened(given)
    wrong = wrong_fields(values)
    if wrong:
        raise ValueError(f"not a model config: {wrong[0]}")
    return values


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with the fields of its `text_config`, if any, at the top level. If a field
    occurs in both places, the top-level value is kept, as in transformers. If only the text model
    is trained (`TEXT_TYPES`), return its config, with the fields of the whole model under
    `MULTIMODAL`.
    """
    text = values.get(_TEXT)
    if not isinstance(text, Mapping):
        return dict(values)
    kind = str(values.get("model_type"))
    if kind not in TEXT_TYPES:
        return {**text, **_without((_TEXT,), values)}
    shared = {name: values[name] for name in _SHARED if values.get(name) is not None}
    whole = _without((_TEXT, _QUANTISATION, "auto_map"), values)
    default = {"model_type": TEXT_TYPES[kind], **_DEFAULTS.get(kind, {})}
    return {**default, **text, **shared, MULTIMODAL: whole}


def _without(names: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def with_tower(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, `flattened`, of the whole model with its vision tower, if a run with images
    can use it. Other configs are only flattened."""
    text = flattened(values)
    whole = text.get(MULTIMODAL)
    if not isinstance(whole, Mapping) or whole.get("model_type") not in VISION_TYPES:
        return text
    return {**_without((MULTIMODAL,), text), **whole}


def published_form(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in the form of a published config.json, which transformers and the engines
    expect. Inverse of `flattened`, except for fields that occur in both places. If only the text
    model is trained, return the text model's config.
    """
    values = flattened(values)
    values.pop(MULTIMODAL, None)
    if _VISION not in values:
        return values
    whole = {name: values[name] for name in values if name in _OF_THE_WHOLE}
    text = _without(_OF_THE_WHOLE, values)
    # some readers look for these in the language model's fields
    both = ("dtype", "torch_dtype", "tie_word_embeddings")
    text |= {name: values[name] for name in both if name in values}
    return {**whole, _TEXT: {"model_type": f"{values['model_type']}_text", **text}}


def folder_form(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json for a folder that also contains the weights of the vision tower:
    `published_form`, but with the fields under `MULTIMODAL` (if any) restored.
    """
    values = flattened(values)
    whole = values.pop(MULTIMODAL, None)
    if not isinstance(whole, Mapping):
        return published_form(values)
    shared = {name: values[name] for name in _SHARED if name in values}
    return {**whole, **shared, _TEXT: _without((_QUANTISATION,), values)}


def wrong_fields(values: Mapping[str, Any]) -> list[str]:
    """Return one line for each invalid field. Missing and null fields are handled by the model
    family.
    """
    return [*_wrong_scalars(values), *_wrong_groups(values)] or _wrong_products(values)


def _wrong_scalars(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if value is None:
            continue
        if name in _SIZES:
            least, most = _SIZES[name]
            if type(value) is not int or not least <= value <= most:
                yield _line(name, value, f"a whole number from {least} to {most}")
        elif name in _NUMBERS:
            low, high = _NUMBERS[name]
            if type(value) not in (int, float) or not low <= value <= high:
                yield _line(name, value, f"a number from {low:g} to {high:g}")
        elif name in _FLAGS and not isinstance(value, bool):
            yield _line(name, value, "true or false")


def _wrong_groups(values: Mapping[str, Any]) -> Iterator[str]:
    for name in (*_ROTARY, _QUANTISATION):
        value = values.get(name)
        if value is not None and not isinstance(value, Mapping):
            yield _line(name, value, "an object")
        elif value and name in _ROTARY:
            yield from (f"{name}.{line}" for line in _wrong_scalars(value))
        elif value:
            yield from _wrong_quantisation(value)
    for name in _LISTS:
        value = values.get(name)
        if value is not None and not _is_list_of(str, value):
            yield _line(name, value, "a list of names")
    layers = values.get("mlp_only_layers")
    if layers is not None and not _is_list_of(int, layers):
        yield _line("mlp_only_layers", layers, "a list of layer numbers")


def _wrong_quantisation(values: Mapping[str, Any]) -> Iterator[str]:
    block = values.get("weight_block_size")
    if block is not None and not _is_list_of(int, block):
        yield _line(f"{_QUANTISATION}.weight_block_size", block, "two whole numbers")
    skipped = values.get("modules_to_not_convert")
    if skipped is not None and not _is_list_of(str, skipped):
        yield _line(f"{_QUANTISATION}.modules_to_not_convert", skipped, "a list of names")


def _wrong_products(values: Mapping[str, Any]) -> list[str]:
    """Check the products of sizes that are valid individually."""
    layers = values.get("num_hidden_layers") or 0
    experts = max(values.get(name) or 0 for name in _EXPERTS)
    if layers * experts <= _MOST_EXPERTS:
        return []
    return [
        f"{layers} layers with {experts} experts each exceed the limit of {_MOST_EXPERTS} experts "
        "in total"
    ]


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list | tuple) and all(type(one) is kind for one in value)


def _line(name: str, value: Any, wanted: str) -> str:
    return f"{name}={repr(value)[:80]}: expected {wanted}"
