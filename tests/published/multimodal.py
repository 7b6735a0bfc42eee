"""Folders with a vision tower next to the text model, written by transformers' own classes."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.models import MULTIMODAL, VISIONS
from tests.published.tokenizers import FORMS, write_tokenizer

# prefixes of the text model's names
OLDER = "language_model.model."  # published Gemma 3 and Mistral 3
NEWER = "model.language_model."  # transformers 5 in memory
_RENAMED = (
    (OLDER, NEWER),
    ("language_model.lm_head.", "lm_head."),
    ("vision_tower.", "model.vision_tower."),
    ("multi_modal_projector.", "model.multi_modal_projector."),
)


def multimodal_folder(
    kind: str,
    folder: Path,
    *,
    prefix: str | None = None,
    stacked: bool = True,
    tokenizer: bool = False,
    images: bool = False,
) -> Path:
    """Write a tiny model of a kind (a key of `MULTIMODAL`) in float32.

    Args:
        prefix: `OLDER` or `NEWER`; None: the names under which transformers saves it.
        stacked: whether the experts of a layer are stacked, as published, or one by one, as
            transformers saves them.
        tokenizer: whether to write one, of more tokens than the model otherwise has.
        images: take the model from `VISIONS` instead.
    """
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    folder.mkdir(parents=True, exist_ok=True)
    hf = deepcopy((VISIONS if images else MULTIMODAL)[kind])
    if tokenizer:
        form = FORMS["qwen3"]
        specials = write_tokenizer("qwen3", folder)
        hf["text_config"] |= {"vocab_size": form.rows, "eos_token_id": specials[form.eos]}
    config = CONFIG_MAPPING[hf["model_type"]].from_dict(hf)
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    if stacked and any(name.endswith("experts.gate_up_proj") for name in model.state_dict()):
        tensors = {name: one.contiguous() for name, one in model.state_dict().items()}
        if kind == "qwen3_vl_moe":  # transposed, as published
            for name, one in tensors.items():
                tensors[name] = one.mT.contiguous() if ".experts." in name else one
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if prefix is not None:
        _rename(folder / "model.safetensors", prefix)
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def with_stacked_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of each layer in two tensors, with transposed matrices, as in published Qwen3-VL."""
    found: dict[str, torch.Tensor] = {}
    layers: dict[str, list[dict[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        layer, is_expert, rest = name.partition(".mlp.experts.")
        if not is_expert:
            found[name] = tensor
            continue
        number, part, _ = rest.split(".")
        experts = layers.setdefault(layer, [])
        experts += [{}] * (int(number) == len(experts))
        experts[int(number)] = {**experts[int(number)], part: tensor.t()}
    for layer, experts in layers.items():
        both = [torch.cat([one["gate_proj"], one["up_proj"]], 1) for one in experts]
        found[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(both)
        found[f"{layer}.mlp.experts.down_proj"] = torch.stack([one["down_proj"] for one in experts])
    return found


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def config_of(folder: Path) -> dict[str, Any]:
    """The contents of config.json."""
    return dict(json.loads((folder / "config.json").read_text()))


def read_by_transformers(folder: Path) -> Any:
    """The multimodal model, in which every tensor of the folder has its place."""
    from transformers import AutoModelForImageTextToText

    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


def _rename(file: Path, prefix: str) -> None:
    tensors = {}
    for name, tensor in load_file(file).items():
        renamed = name
        for older, newer in _RENAMED:
            other, wanted = (older, newer) if prefix == NEWER else (newer, older)
            if name.startswith(other):
                renamed = wanted + name.removeprefix(other)
                break
        tensors[renamed] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
