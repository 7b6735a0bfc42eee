"""What SGLang computes differently from a family is refused by name before anything starts; what
it computes alike is not."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.config.schema import DataConfig, RolloutConfig, RunConfig, TrainerConfig
from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.published import published, published_names
from hybridflow.models.served import check_served
from tests.models import FAMILIES, NOT_SYNCED, VISION, VISIONS

LONG = DataConfig(max_prompt_length=20, max_response_length=12)
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
GROWING = {**YARN, "llama_4_scaling_beta": 0.1}
# what is computed, and what is not: family, fields, the message
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mistral", {"sliding_window": 31}, r"sliding_window=31 \(data\.max_prompt_length \+ "),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}, "=8"),
    ("gpt_oss", {"tie_word_embeddings": True}, "tie_word_embeddings=true"),
    ("gemma3_text", {"tie_word_embeddings": False}, "tie_word_embeddings=false"),
    ("ministral3", {"rope_parameters": GROWING | {"original_max_position_embeddings": 31}}, "=31"),
    ("olmo2", {"head_dim": 32}, "head_dim=32 other than"),
    ("olmo3", {"rope_scaling": YARN | {"attention_factor": 1.5}}, "attention_factor=1.5"),
    ("olmo3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_start_index": 2}, "moe_layer_interval=2"),
]
COMPUTED: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 32}),
    ("olmo3", {"sliding_window": 4}),
    ("olmo3", {"rope_scaling": YARN | {"attention_factor": 1.2079441541679836}}),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    ("ministral3", {"rope_parameters": GROWING | {"original_max_position_embeddings": 32}}),
    ("ernie4_5_moe", {"moe_layer_interval": 2}),
]


def check(family: str, fields: dict[str, Any], data: DataConfig = LONG, **rollout: Any) -> None:
    config = RunConfig(data=data, rollout=RolloutConfig(**rollout))
    check_served(family_of({**FAMILIES[family], **fields}), config)


@pytest.mark.parametrize(("family", "fields", "message"), REFUSED)
def test_what_sglang_computes_differently_is_refused(
    family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"model_type={family} .*{message}.*rollout.engine=hf"):
        check(family, fields)
    check(family, fields, engine="hf")
    check_served(
        family_of({**FAMILIES[family], **fields}),
        RunConfig(data=LONG, trainer=TrainerConfig(rollouts_from="runs/other")),
    )


@pytest.mark.parametrize(("family", "fields"), COMPUTED)
def test_what_it_computes_alike_is_not(family: str, fields: dict[str, Any]) -> None:
    check(family, fields)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - set(NOT_SYNCED)))
def test_every_model_that_is_synced_in_tests_and_every_published_one_is_served(family: str) -> None:
    check(family, {})
    for name in published_names():
        if (hf := published(name))["model_type"] == family:
            check_served(family_of(hf), RunConfig())


def test_engines_that_a_model_cannot_be_cut_into_are_refused() -> None:
    check("minimax_m2", {}, pipeline=2)
    with pytest.raises(ModelError, match=r"model_type=olmo3 with rollout\.pipeline=2; set it to 1"):
        check("olmo3", {}, pipeline=2)
    with pytest.raises(ModelError, match=r"model_type=gpt_oss with rollout\.expert=2; set it to 1"):
        check("gpt_oss", {}, tensor=2, expert=2)


def test_a_tower_is_served_by_ranks_that_divide_it() -> None:
    family = family_of(VISION)
    for rollout in ({"tensor": 2}, {"tensor": 4, "data_parallel_attention": 2}):
        check_served(family, RunConfig(rollout=RolloutConfig(**rollout)))
    with pytest.raises(ModelError, match=r"rollout\.tensor=4: the 4 ranks .*num_heads=2"):
        check_served(family, RunConfig(rollout=RolloutConfig(tensor=4)))
    # two features of DeepStack, and three as published
    mixture = VISIONS["qwen3_vl_moe"]
    with pytest.raises(ModelError, match=r"with 2 entries in .*deepstack_visual_indexes \(only 3"):
        check_served(family_of(mixture), RunConfig())
    tower = {**mixture["vision_config"], "deepstack_visual_indexes": [0, 1, 2]}
    check_served(family_of({**mixture, "vision_config": tower}), RunConfig())
    with pytest.raises(ModelError, match=r"vllm does not receive the vision tower .*sglang"):
        check_served(family, RunConfig(rollout=RolloutConfig(engine="vllm")))
