"""Models that SGLang 0.5.23 would compute differently from the trainer, or could not start.

The check runs before any process starts. `hybridflow.engines.sglang` fixes other differences inside
the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hybridflow.config import derived
from hybridflow.config.schema import RolloutConfig, RunConfig
from hybridflow.errors import ModelError
from hybridflow.models.vision import tower_of

_ENGINE = RolloutConfig().engine
# sglang/srt/models/llama.py and qwen2.py compute attention without windows
_WITHOUT_WINDOWS = ("ministral3", "mistral", "qwen2", "qwen2_moe")
# files that build all layers on every rank, and use the tensor-parallel group for attention
_WITHOUT_STAGES = ("ernie4_5", "ernie4_5_moe", "gemma3_text", "olmo2", "olmo3")
# files with a separate output layer in any case
_UNTIED = ("glm4_moe_lite", "gpt_oss", "minimax_m2", "qwen2_moe")
# number of positions after which queries grow (sglang/srt/models/ministral3.py:110)
_GROWTH_AFTER = 16384
# families whose head SGLang's class for drafts reads (glm4_moe.py:1080: exactly one)
_DRAFTING = ("deepseek_v3", "glm4_moe", "kimi_k2")
# number of DeepStack features that SGLang always adds (sglang/srt/models/qwen3_vl_moe.py:63)
_DEEPSTACK = {"qwen3_vl_moe": 3}
_FACTOR = "attention_factor"  # SGLang always computes it from the other settings
_OTHER = "set rollout.engine=hf with cluster=in-process"


def check_served(family: Any, config: RunConfig) -> None:
    """Check that the run's engines support this model.

    Raises:
        ModelError: the model has a part that SGLang lacks or computes differently. The message
            names the model_type, the field of config.json and a remedy.
    """
    engine = config.rollout.engine
    kind = family.hf["model_type"]
    is_apart = derived.generates(config) and not config.cluster.in_process
    if tower_of(family) is not None and is_apart and engine != _ENGINE:
        raise ModelError(
            f"rollout.engine={engine} does not receive the vision tower of model_type={kind}; set "
            f"it to {_ENGINE}"
        )
    if engine != _ENGINE or not derived.generates(config):
        return
    found = (_windows, _embeddings, _heads, _rotary, _sparse_layers, _shapes, _tower, _drafts)
    for problem in (line for check in found for line in check(family, config)):
        raise ModelError(f"rollout.engine={engine} does not support model_type={kind} {problem}")


def _drafts(family: Any, config: RunConfig) -> Iterator[str]:
    method = config.rollout.speculative.method
    heads = family.hf.get("num_nextn_predict_layers") or 0
    if method is not None and (family.hf["model_type"] not in _DRAFTING or heads != 1):
        yield (
            f"with rollout.speculative.method={method}: drafting requires exactly one head, as in "
            f"DeepSeek-V3, and one of the model types {', '.join(_DRAFTING)} "
            f"(num_nextn_predict_layers is {heads}); set the method to null"
        )


def _windows(family: Any, config: RunConfig) -> Iterator[str]:
    kind = family.hf["model_type"]
    longest = derived.max_sequence_length(config)
    windows = [window for window in getattr(family, "windows", ()) if window]
    if kind in _WITHOUT_WINDOWS and windows and longest > min(windows):
        yield (
            f"with rows longer than its sliding_window={min(windows)} (data.max_prompt_length + "
            f"data.max_response_length = {longest}); lower them to {min(windows)} in total, or "
            f"{_OTHER}"
        )
    original = family.rotary.original
    grows = kind == "ministral3" and original != _GROWTH_AFTER
    if grows and longest > min(original, _GROWTH_AFTER):
        yield (
            f"with original_max_position_embeddings={original} in rope_parameters "
            f"(only {_GROWTH_AFTER} is supported); {_OTHER}"
        )


def _embeddings(family: Any, _: RunConfig) -> Iterator[str]:
    kind = family.hf["model_type"]
    if family.tied and kind in _UNTIED:
        yield f"with tie_word_embeddings=true; {_OTHER}"
    if not family.tied and kind == "gemma3_text":
        yield f"with tie_word_embeddings=false; {_OTHER}"


def _heads(family: Any, _: RunConfig) -> Iterator[str]:
    is_olmo = family.hf["model_type"] in ("olmo2", "olmo3")
    if is_olmo and family.head_dim * family.heads != family.hidden:
        yield f"with head_dim={family.head_dim} other than hidden_size / heads; {_OTHER}"


def _sparse_layers(family: Any, _: RunConfig) -> Iterator[str]:
    if family.hf["model_type"] != "ernie4_5_moe":
        return
    first, last, step = (
        int(family.values[f"moe_layer_{name}"]) for name in ("start_index", "end_index", "interval")
    )
    last = family.num_layers - 1 if last == -1 else last
    layers = range(family.num_layers)
    theirs = [layer for layer in layers[first : last + 1] if (layer - first) % step == 0]
    if theirs != [layer for layer in layers if family.is_sparse(layer)]:
        yield f"with moe_layer_interval={step} from moe_layer_start_index={first}; {_OTHER}"


def _rotary(family: Any, _: RunConfig) -> Iterator[str]:
    kind = family.hf["model_type"]
    rotary = family.rotary
    given = rotary.settings.get(_FACTOR)
    if rotary.kind == "yarn" and given is not None:
        rest = {name: rotary.settings[name] for name in rotary.settings if name != _FACTOR}
        if abs(replace(rotary, settings=rest).attention_factor - given) > 1e-6:
            yield f"with {_FACTOR}={given} in its rotary settings; {_OTHER}"
    local = family.local_rotary
    if local is None:
        return
    if local.kind != "default":
        yield f"with rope_type={local.kind!r} in sliding-window layers; {_OTHER}"
    if kind == "olmo3" and (family.hf.get("rope_parameters") or local.theta != rotary.theta):
        yield f"with rope_parameters; use rope_theta and rope_scaling, or {_OTHER}"


def _shapes(family: Any, config: RunConfig) -> Iterator[str]:
    rollout = config.rollout
    kind = family.hf["model_type"]
    if kind == "gpt_oss" and rollout.expert > 1:
        # its loader puts all experts on every rank (sglang/srt/models/gpt_oss.py:1277)
        yield f"with rollout.expert={rollout.expert}; set it to 1"
    if kind in _WITHOUT_STAGES:
        for key in ("pipeline", "data_parallel_attention"):
            if (size := getattr(rollout, key)) > 1:
                yield f"with rollout.{key}={size}; set it to 1"


def _tower(family: Any, config: RunConfig) -> Iterator[str]:
    """Check the vision tower's DeepStack features, and that the engine's ranks can share the tower,
    which is split like attention."""
    tower = tower_of(family)
    rollout = config.rollout
    if tower is None:
        return
    features = len(tower.deepstack)
    wanted = _DEEPSTACK.get(family.hf["model_type"], features)
    if features != wanted:
        yield (
            f"with {features} entries in vision_config.deepstack_visual_indexes (only {wanted} are "
            f"supported); {_OTHER}"
        )
    ranks = rollout.tensor // rollout.data_parallel_attention
    for name in ("num_heads", "intermediate_size"):
        if (size := tower.sizes[name]) % ranks:
            yield (
                f"with rollout.tensor={rollout.tensor}: the {ranks} ranks of an engine's attention "
                f"do not divide vision_config.{name}={size}; choose a divisor of {size}"
            )
