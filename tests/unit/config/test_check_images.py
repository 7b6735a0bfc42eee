"""Images that a run cannot use are refused before it starts, with the field and what works."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.config import check_images, derived
from hybridflow.config.schema import (
    ClusterConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    SftConfig,
    TrainerConfig,
)
from tests.models import DENSE, MULTIMODAL, VISION, VISIONS


def run_of(hf: dict[str, Any] = VISION, path: str | None = None, **sections: Any) -> RunConfig:
    data = sections.pop("data", {})
    engine = sections.pop("engine", "hf")
    return RunConfig(
        data=DataConfig(image_key="images", **data),
        model=ModelConfig(path=path, hf_config=hf),
        rollout=RolloutConfig(engine=engine),
        cluster=ClusterConfig(in_process=engine == "hf"),
        **sections,
    )


def said(config: RunConfig) -> list[str]:
    return list(check_images.problems(config, derived.run_hf_config(config)))


def test_a_run_with_images_is_accepted() -> None:
    for hf in VISIONS.values():
        assert said(run_of(hf)) == said(run_of(hf, engine="sglang")) == []
    assert said(RunConfig(model=ModelConfig(hf_config=DENSE))) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (run_of(DENSE), "data.image_key=images, but model_type=qwen3 has no vision tower"),
        (
            run_of(MULTIMODAL["qwen3_5"]["text_config"]),
            "model_type=qwen3_5_text has no vision tower (vision_config in config.json); set "
            "model.path to a vision-language model (model_type qwen3_vl, qwen3_vl_moe, qwen3_5, ",
        ),
        (
            run_of(MULTIMODAL["qwen3_5"]["text_config"], "Qwen/Qwen3.5-4B"),
            "model.path=Qwen/Qwen3.5-4B is not in the hub's cache; run `hf download Qwen/Qwen3.5",
        ),
        (
            run_of(engine="vllm"),
            "rollout.engine=vllm does not receive images; set it to sglang",
        ),
        (
            run_of(MULTIMODAL["gemma3"]),
            "but only the text model of model_type=gemma3 can be trained",
        ),
        (run_of(data={"answers": "pairs"}), "data.answers=pairs"),
        (run_of(data={"truncation": "left"}), "data.truncation=left would cut images"),
        (run_of(trainer=TrainerConfig(rollouts_from="x")), "set trainer.rollouts_from=null"),
        (run_of(sft=SftConfig(steps=1, messages_key="m")), "sft.messages_key"),
    ],
)
def test_each_setting_that_is_not_supported_is_one_line(config: RunConfig, message: str) -> None:
    [line] = said(config)
    assert message in line
