"""The tensors of each family by their published names, drawn from a seed, and the files that hold
them.

The names are written out here and not asked of the project's own maps, so that a folder disagrees
with a wrong map.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Shapes = Iterator[tuple[str, tuple[int, ...]]]
_FLOAT32 = "e_score_correction_bias"
_UNQUANTISED = ("norm", "mlp.gate.", "embed_tokens", "eh_proj", "head", "bias", "inv_freq")


def tensors_of(config: dict[str, Any], seed: int, *, extra_head: bool) -> dict[str, torch.Tensor]:
    """Every tensor of the folder: bfloat16, the routers' corrections float32, linears fp8 with the
    scales of their blocks where the config has a `quantization_config`.

    Args:
        extra_head: whether a model with tied embeddings has `lm_head.weight` all the same, as
            Qwen3-0.6B.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for name, shape in _shapes(config, extra_head):
        values = torch.empty(shape).normal_(0.0, 0.1, generator=generator)
        if "norm" in name and name.endswith(".weight"):
            values = 1.0 + values
        if name.endswith(_FLOAT32):
            found[name] = values
        elif config.get("quantization_config") and not any(part in name for part in _UNQUANTISED):
            found[name], found[f"{name}_scale_inv"] = _fp8(
                values, config["quantization_config"]["weight_block_size"]
            )
        else:
            found[name] = values.bfloat16()
    head = found.get("lm_head.weight")
    embedding = found["model.embed_tokens.weight"]
    if head is not None and config["tie_word_embeddings"]:
        found["lm_head.weight"] = embedding.clone()
    for name in found:  # heads for more than one token repeat the embedding and the output head
        if name.endswith("shared_head.head.weight"):
            found[name] = found["lm_head.weight"].clone()
        elif name.startswith("model.layers.") and name.endswith("embed_tokens.weight"):
            found[name] = embedding.clone()
    return found


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], count: int, name: str) -> None:
    """`model.safetensors`, or `count` shards of about the same size, called by `name`, with their
    index."""
    if count == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    total = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    written = 0
    for key, tensor in tensors.items():
        parts[min(count - 1, written * count // total)][key] = tensor
        written += tensor.nbytes
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = name.format(number=number, count=count)
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _fp8(values: torch.Tensor, block: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = values.shape
    scales = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = values[at].abs().max() / 448.0
            stored[at] = (values[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return stored, scales


def _shapes(config: dict[str, Any], extra_head: bool) -> Shapes:
    hidden, layers, vocabulary = (
        int(config[key]) for key in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        yield from _layer(config, layer)
    yield "model.norm.weight", (hidden,)
    if extra_head or not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)
    for layer in range(layers, layers + (config.get("num_nextn_predict_layers") or 0)):
        name = f"model.layers.{layer}"
        yield from _layer(config, layer)
        yield f"{name}.embed_tokens.weight", (vocabulary, hidden)
        yield f"{name}.enorm.weight", (hidden,)
        yield f"{name}.hnorm.weight", (hidden,)
        yield f"{name}.eh_proj.weight", (hidden, 2 * hidden)
        yield f"{name}.shared_head.norm.weight", (hidden,)
        yield f"{name}.shared_head.head.weight", (vocabulary, hidden)


def _layer(config: dict[str, Any], layer: int) -> Shapes:
    name = f"model.layers.{layer}"
    hidden = int(config["hidden_size"])
    yield f"{name}.input_layernorm.weight", (hidden,)
    yield from (_latent if "kv_lora_rank" in config else _grouped)(config, f"{name}.self_attn")
    yield f"{name}.post_attention_layernorm.weight", (hidden,)
    if config["model_type"] == "mixtral":
        yield from _mixtral_experts(config, f"{name}.block_sparse_moe")
    elif layer < config.get("first_k_dense_replace", 0) or "moe_intermediate_size" not in config:
        yield from _mlp(f"{name}.mlp", hidden, int(config["intermediate_size"]))
    else:
        yield from _experts(config, f"{name}.mlp")


def _grouped(config: dict[str, Any], name: str) -> Shapes:
    hidden, heads, groups = (
        int(config[key]) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    width = int(config.get("head_dim") or hidden // heads)
    rows = {"q_proj": heads * width, "k_proj": groups * width, "v_proj": groups * width}
    for part, size in rows.items():
        yield f"{name}.{part}.weight", (size, hidden)
        if config["model_type"] == "qwen2" or config.get("attention_bias"):
            yield f"{name}.{part}.bias", (size,)
    yield f"{name}.o_proj.weight", (hidden, heads * width)
    if config["model_type"] in ("qwen3", "qwen3_moe") or config.get("use_qk_norm"):
        yield f"{name}.q_norm.weight", (width,)
        yield f"{name}.k_norm.weight", (width,)


def _latent(config: dict[str, Any], name: str) -> Shapes:
    keys = (
        "hidden_size",
        "num_attention_heads",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    )
    hidden, heads, latent, nope, rope, value = (int(config[key]) for key in keys)
    queries = heads * (nope + rope)
    rank = config["q_lora_rank"]
    if rank is None:
        yield f"{name}.q_proj.weight", (queries, hidden)
    else:
        yield f"{name}.q_a_proj.weight", (rank, hidden)
        yield f"{name}.q_a_layernorm.weight", (rank,)
        yield f"{name}.q_b_proj.weight", (queries, rank)
    yield f"{name}.kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    yield f"{name}.kv_a_layernorm.weight", (latent,)
    yield f"{name}.kv_b_proj.weight", (heads * (nope + value), latent)
    yield f"{name}.o_proj.weight", (hidden, heads * value)


def _mlp(name: str, hidden: int, width: int) -> Shapes:
    yield f"{name}.gate_proj.weight", (width, hidden)
    yield f"{name}.up_proj.weight", (width, hidden)
    yield f"{name}.down_proj.weight", (hidden, width)


def _experts(config: dict[str, Any], name: str) -> Shapes:
    hidden = int(config["hidden_size"])
    width = int(config["moe_intermediate_size"])
    count = int(config.get("n_routed_experts") or config["num_experts"])
    yield f"{name}.gate.weight", (count, hidden)
    if "n_routed_experts" in config:
        yield f"{name}.gate.{_FLOAT32}", (count,)
    for expert in range(count):
        yield from _mlp(f"{name}.experts.{expert}", hidden, width)
    if shared := config.get("n_shared_experts"):
        yield from _mlp(f"{name}.shared_experts", hidden, width * shared)


def _mixtral_experts(config: dict[str, Any], name: str) -> Shapes:
    hidden = int(config["hidden_size"])
    width = int(config["intermediate_size"])
    yield f"{name}.gate.weight", (int(config["num_local_experts"]), hidden)
    for expert in range(int(config["num_local_experts"])):
        yield f"{name}.experts.{expert}.w1.weight", (width, hidden)
        yield f"{name}.experts.{expert}.w2.weight", (hidden, width)
        yield f"{name}.experts.{expert}.w3.weight", (width, hidden)
