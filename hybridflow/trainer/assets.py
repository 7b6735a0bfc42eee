"""The files that a job needs on disk before anything starts: data, tokenizer, the resolved model
config, and the folder from which engines start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.agents.environments.base import ENVIRONMENTS
from hybridflow.agents.toolbox import toolbox
from hybridflow.config import derived
from hybridflow.config.model_config import published_form
from hybridflow.config.schema import RunConfig
from hybridflow.data.images import ImageReader
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.models import family_of, use_family
from hybridflow.models.fp8 import BlockQuantisation
from hybridflow.models.vision import tower_of
from hybridflow.models.vision_decoder import VisionDecoder
from hybridflow.models.weights import copy_companions

_ENGINE_TYPES = {"kimi_k2": "deepseek_v3"}


def prepare_data(config: RunConfig) -> str | None:
    """Run `data.prepare` unless its output already exists. Returns a line for the user, or None if
    no preparation is configured."""
    task = config.data.prepare.task
    if task is None:
        return None
    from hybridflow.data.prepare import prepare

    settings = config.data.prepare
    done = prepare(
        task,
        Path(settings.out),
        Path(settings.source) if settings.source else None,
        settings.options,
    )
    counts = ", ".join(f"{name} {rows}" for name, rows in done.rows.items())
    return f"{'found prepared data' if done.reused else 'prepared data'} in {done.folder}: {counts}"


def open_tokenizer(config: RunConfig) -> Tokenizer:
    """Load `model.tokenizer`, or else the tokenizer in `model.path`, together with the tool
    declarations.

    Raises:
        ConfigError: there is no tokenizer, or `rollout.agent` refers to an unknown tool or
            environment.
    """
    folder = config.model.tokenizer or config.model.path
    if folder is None:
        raise ConfigError(
            "model.tokenizer and model.path are both null; set model.tokenizer to a Hugging Face "
            "tokenizer folder"
        )
    tokenizer = load_tokenizer(folder).with_template(config.data.chat_template_kwargs)
    agent = config.rollout.agent
    tokenizer.tools = toolbox(config).schemas()
    if agent.environment is not None:
        # raises for a wrong name now; its processes start with the first conversation
        ENVIRONMENTS.get(agent.environment)
    return tokenizer


def resolve_hf_config(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the Hugging Face config. A missing vocabulary size and missing special tokens are
    filled in from the tokenizer.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    use_family(config.model.family)
    resolved = dict(derived.run_hf_config(config))
    resolved.setdefault("vocab_size", tokenizer.vocab_size)
    resolved.setdefault("eos_token_id", tokenizer.eos_id)
    resolved.setdefault("pad_token_id", tokenizer.pad_id)
    resolved.setdefault("bos_token_id", None)
    if config.data.image_key is not None:
        _check_processor(resolved, ImageReader(tokenizer))
    resolved.setdefault("architectures", [family_of(resolved).architecture])
    if resolved["vocab_size"] < tokenizer.vocab_size:
        raise ConfigError(
            f"the model's vocab_size={resolved['vocab_size']} is less than the "
            f"{tokenizer.vocab_size} tokens of {tokenizer.path}"
        )
    return resolved


def _check_processor(resolved: dict[str, Any], reader: ImageReader) -> None:
    """Fill in a missing image token from the tokenizer, and check that the image processor produces
    the patches that the vision tower expects. Raises ConfigError if it does not.
    """
    resolved.setdefault("image_token_id", reader.tokens.token)
    if (tower := tower_of(family_of(resolved))) is None:
        return  # `check_images` has refused it
    made = (reader.tokens.token, reader.tokens.merge, reader.patch_numbers)
    read = (tower.image_token, tower.merge, tower.patch_numbers)
    if made != read:
        raise ConfigError(
            f"the tokenizer and image processor in {reader.tokenizer.path} do not match the "
            f"model's config: (image token, merge size, values per patch) is {made} there, and "
            f"{read} in the config; set model.tokenizer to the model's own folder"
        )


def write_engine_folder(
    folder: Path,
    hf_config: Mapping[str, Any],
    dtype: str,
    tokenizer: Tokenizer,
    quantization: str | None = None,
) -> Path:
    """Write a Hugging Face folder without weights. Engines start from it with random weights and
    then receive the policy's weights.

    Its `quantization_config` describes the weights that engines receive, not those in the
    checkpoint from which the policy started.

    Raises:
        ModelError: `quantization` is fp8, but the model's config specifies another fp8 format.
    """
    written = {**hf_config, "dtype": dtype, "torch_dtype": dtype}
    # SGLang also ends a response at the config's end token; the tokenizer's end token is one of our
    # stop tokens
    written["eos_token_id"] = tokenizer.eos_id
    # engines use their own classes, never code from the folder, and know Kimi-K2 under the
    # architecture that it is based on
    written.pop("auto_map", None)
    if written.get("model_type") in _ENGINE_TYPES:
        written["model_type"] = _ENGINE_TYPES[written["model_type"]]
    written.pop("quantization_config", None)
    written |= _axes(hf_config)
    if quantization == "fp8":
        written["quantization_config"] = BlockQuantisation.of(hf_config).config()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published_form(written), indent=2))
    copy_companions(tokenizer.path, folder)
    return folder


def _axes(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a model whose positions have three axes, with the fields that
    transformers takes for granted: without them, SGLang would use one axis, or assign frequencies
    to axes in blocks (sglang/srt/layers/rotary_embedding/factory.py:251). Empty for other models.
    """
    family = family_of(hf_config) if hf_config.get("vision_config") else None
    if not isinstance(family, VisionDecoder):
        return {}
    name = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    fields = {"mrope_section": list(family.rotaries()[0].sections), "mrope_interleaved": True}
    return {name: {**(hf_config.get(name) or {}), **fields}}
