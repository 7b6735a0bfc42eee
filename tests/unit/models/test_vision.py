"""The map of a vision-language model: its config in both forms, its tensors, what is refused."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from hybridflow.config.derived import differing_size, run_hf_config
from hybridflow.config.model_config import flattened, published_form, with_tower
from hybridflow.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    ClusterConfig,
    DataConfig,
    LoraConfig,
    ModelConfig,
    MtpConfig,
    ParallelConfig,
    RolloutConfig,
    RunConfig,
)
from hybridflow.engines.hf.engine import checkpoint_tensors
from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.causal import causal_on_meta
from hybridflow.models.check import check_cut, problems
from hybridflow.models.layout import Coordinates
from hybridflow.models.lora import AdapterMap
from tests.models import DENSE, MULTIMODAL, VISION, VISIONS


def changed(section: str, **fields: Any) -> dict[str, Any]:
    hf = deepcopy(VISION)
    hf[section] |= fields
    return hf


def test_a_config_reads_alike_in_both_forms() -> None:
    flat = flattened(VISION)
    assert flat["num_hidden_layers"] == 4 and flat["model_type"] == "qwen3_vl"
    assert flattened(flat) == flat
    assert flattened(published_form(flat)) == flat
    assert published_form(published_form(flat)) == published_form(flat)
    text = published_form(flat)["text_config"]
    assert text["model_type"] == "qwen3_vl_text" and text["hidden_size"] == 32
    assert published_form(DENSE) == DENSE
    assert family_of(VISION).tensors() == family_of(flat).tensors()


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_run_with_images_has_the_tower_of_a_folder(kind: str) -> None:
    hf = VISIONS[kind]
    whole = with_tower(hf)
    assert whole["model_type"] == kind and whole["num_hidden_layers"] == 4
    assert with_tower(whole) == flattened(whole) == whole
    assert with_tower(published_form(whole)) == whole
    run = RunConfig(model=ModelConfig(hf_config=hf))
    assert family_of(run_hf_config(run)).hf["model_type"] == f"{kind}_text"
    run = replace(run, data=DataConfig(image_key="images"))
    assert run_hf_config(run) == whole
    # a recipe's sizes of the text model are those of the folder
    assert differing_size(hf["text_config"], whole) is None
    assert differing_size({**hf["text_config"], "head_dim": 8}, whole) == ("head_dim", 8, 16)
    text = {name for name in family_of(hf).tensors() if name.startswith("model.")}
    towers = {f"model.language_model.{name.removeprefix('model.')}" for name in text}
    assert family_of(whole).tensors().keys() > towers


def test_a_tower_that_cannot_be_used_is_left_alone() -> None:
    assert with_tower(MULTIMODAL["gemma3"]) == flattened(MULTIMODAL["gemma3"])
    assert with_tower(VISION) == flattened(VISION) and with_tower(DENSE) == DENSE


@pytest.mark.parametrize(
    "hf",
    [
        *map(with_tower, VISIONS.values()),
        {**VISION, "tie_word_embeddings": True},
        changed("vision_config", deepstack_visual_indexes=[], depth=1, num_heads=4),
        changed("vision_config", spatial_merge_size=1, temporal_patch_size=1, in_channels=1),
    ],
)
def test_tensors_are_those_of_transformers(hf: dict[str, Any]) -> None:
    family = family_of(hf)
    model = causal_on_meta(family)
    theirs = {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(model)}
    assert family.tensors() == theirs


def test_the_tower_is_on_the_first_stage_and_whole_on_every_rank() -> None:
    family = family_of(VISION)
    for at in (Coordinates(pp_size=2), Coordinates(tp_rank=1, tp_size=2)):
        local = {one.name: one.shape for one in family.local_tensors(at)}
        assert local["vision.patch_embed.proj.weight"] == (16, 3, 2, 4, 4)
        assert sum(name.startswith("vision.") for name in local) == 3 + 3 * 12 + 3 * 6
    last = family.local_tensors(Coordinates(pp_rank=1, pp_size=2))
    assert not any(one.name.startswith("vision.") for one in last)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({**VISION, "vision_config": None}, "has no vision_config"),
        (changed("vision_config", depth="3"), r"vision_config\.depth='3'"),
        (changed("vision_config", patch_size=0), r"vision_config\.patch_size=0"),
        (changed("vision_config", out_hidden_size=48), "out_hidden_size=48 .* hidden_size=32"),
        (changed("vision_config", deepstack_visual_indexes=[3]), r"indexes=\[3\].*0 to 2"),
        ({**VISION, "image_token_id": "<|image_pad|>"}, "image_token_id='<|image_pad|>'"),
        (
            {
                **with_tower(VISIONS["qwen3_5"]),
                "vision_config": {
                    **VISIONS["qwen3_5"]["vision_config"],
                    "deepstack_visual_indexes": [0],
                },
            },
            r"indexes=\[0\]: transformers ignores it in model_type qwen3_5",
        ),
        (
            {**with_tower(VISIONS["qwen3_vl_moe"]), "norm_topk_prob": False},
            "norm_topk_prob=False, which is not supported; set it to True",
        ),
        (changed("text_config", rope_scaling={"mrope_section": [4, 4]}), "three whole numbers"),
        (
            changed("text_config", rope_scaling={"mrope_interleaved": False}),
            "mrope_interleaved=False",
        ),
    ],
)
def test_configs_that_are_not_supported_are_refused_by_field(
    hf: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        family_of(hf)


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"context": 2}, r"actor\.parallel\.context=2.*three axes"),
        ({"pipeline": 4}, "has 1 layers, but .* after 2 layers .*first_stage_layers"),
    ],
)
def test_layouts_that_are_not_supported_are_refused(parallel: dict[str, int], message: str) -> None:
    check_cut(VISION, ParallelConfig(tensor=2, pipeline=2))
    check_cut(VISION, ParallelConfig(pipeline=3, first_stage_layers=2))
    with pytest.raises(ModelError, match=message):
        check_cut(VISION, ParallelConfig(**parallel))


def run_of(
    hf: dict[str, Any],
    algorithm: str = "grpo",
    in_process: bool = True,
    images: bool = False,
    **actor: Any,
) -> RunConfig:
    return RunConfig(
        data=DataConfig(image_key="images" if images else None),
        model=ModelConfig(hf_config=hf, tokenizer="t"),
        actor=ActorConfig(**actor),
        algorithm=AlgorithmConfig(adv_estimator=algorithm),
        rollout=RolloutConfig(engine="hf"),
        cluster=ClusterConfig(in_process=in_process),
    )


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (run_of(VISION, backend="fsdp"), "vision tower.*fsdp"),
        (
            run_of(VISION, in_process=False),
            "engine=hf does not receive the vision tower.*set it to sglang",
        ),
        (run_of(VISION, freeze_vision_tower=False, recompute="full"), "recompute=full"),
        (
            run_of(DENSE, freeze_vision_tower=False),
            "'qwen3' has no vision tower that can be trained; remove",
        ),
        (
            run_of(VISIONS["qwen3_5"], freeze_vision_tower=False),
            "'qwen3_5_text' has no vision tower that can be trained; set data.image_key, or remove",
        ),
        (
            run_of(VISIONS["qwen3_5"], images=True, mtp=MtpConfig(train=True)),
            "'qwen3_5' has no multi-token-prediction heads that can be trained",
        ),
        (run_of(VISION, "gae"), "of the critic has a vision tower.*; set critic.path"),
    ],
)
def test_settings_that_are_not_supported_are_refused(config: RunConfig, message: str) -> None:
    assert list(problems(run_of(VISION, freeze_vision_tower=False))) == []
    hf = VISIONS["qwen3_5_moe"]
    assert list(problems(run_of(hf, images=True, freeze_vision_tower=False))) == []
    with pytest.raises(ModelError, match=message):
        raise ModelError("\n".join(problems(config)))


@pytest.mark.parametrize("kind", VISIONS)
def test_adapters_leave_the_tower_alone(kind: str) -> None:
    adapters = AdapterMap(family_of(with_tower(VISIONS[kind])), LoraConfig(rank=2), seed=0)
    assert adapters.tensors()
    assert all(".language_model." in name for name in adapters.tensors())
