"""The map of multi-token-prediction heads, and the models for which they are refused."""

from __future__ import annotations

import itertools
from math import prod
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.load import load_config
from hybridflow.config.schema import ParallelConfig
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.check import check, check_cut
from hybridflow.models.family import family_of, num_prediction_heads, without_prediction_heads
from hybridflow.models.layout import Coordinates
from hybridflow.models.published import published
from tests.models import FAMILIES

WITH_HEADS = {
    **{
        name: {**FAMILIES[name], "num_nextn_predict_layers": 2}
        for name in ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
    },
    **{name: FAMILIES[name] for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")},
}


@pytest.mark.parametrize("name", WITH_HEADS)
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_last_stage_holds_every_element_of_the_heads(name: str, tensor: int) -> None:
    family: Any = family_of(WITH_HEADS[name], mtp=True)
    plain = without_prediction_heads(family)
    assert num_prediction_heads(family) == (1 if "qwen" in name else 2)
    assert num_prediction_heads(plain) == 0 and without_prediction_heads(plain) is plain
    own = {n: s for n, s in family.tensors().items() if n not in plain.tensors()}
    regions: dict[str, set[Any]] = {}
    for tp, pp in itertools.product(range(tensor), range(2)):
        at = Coordinates(tp_rank=tp, tp_size=tensor, pp_rank=pp, pp_size=2, etp_rank=tp,
                         etp_size=tensor)  # fmt: skip
        before = {local.name for local in plain.local_tensors(at)}
        for local in family.local_tensors(at):
            if local.name not in before:
                assert pp == 1
                for piece in local.pieces:
                    regions.setdefault(piece.source, set()).add(piece.region)
    copy = regions.pop("model.embed_tokens.weight")
    assert len(copy) == tensor
    held = {name: sum(prod(shape) for _, _, shape in found) for name, found in regions.items()}
    assert held == {name: prod(shape) for name, shape in own.items()}


def test_the_head_of_a_published_model_has_the_names_of_its_folder() -> None:
    family = family_of({"vocab_size": 129280, **published("deepseek-v3")}, mtp=True)
    own = family.tensors().keys() - without_prediction_heads(family).tensors().keys()
    assert all(name.startswith("model.layers.61.") for name in own)
    assert {f"model.layers.61.{name}.weight" for name in ("enorm", "hnorm", "eh_proj")} <= own
    assert "model.layers.61.shared_head.norm.weight" in own
    hybrid = family_of(FAMILIES["qwen3_next"], mtp=True)
    own = hybrid.tensors().keys() - without_prediction_heads(hybrid).tensors().keys()
    assert all(name.startswith("mtp.") for name in own)
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.shared_expert_gate.weight"} <= own
    assert not [name for name in own if "linear_attn" in name]


@pytest.mark.parametrize(
    ("hf", "said"),
    [
        (FAMILIES["qwen3_moe"], "model_type 'qwen3_moe' has no multi-token-prediction heads"),
        ({**FAMILIES["glm4_moe"], "num_nextn_predict_layers": 0}, "has no multi-token-prediction"),
        ({**WITH_HEADS["glm4_moe"], "tie_word_embeddings": True}, "tie_word_embeddings=true"),
        ({**FAMILIES["qwen3_5_text"], "mtp_num_hidden_layers": 2}, "has no multi-token-prediction"),
        (
            {
                **FAMILIES["qwen3_next"],
                "layer_types": ["full_attention", *["linear_attention"] * 3],
            },
            "the last layer has DeltaNet",
        ),
    ],
)
def test_a_model_whose_heads_cannot_be_trained_is_refused_with_the_key(hf: Any, said: str) -> None:
    check_cut(hf, ParallelConfig())
    with pytest.raises(ModelError, match=r"actor\.mtp\.train=true") as error:
        check_cut(hf, ParallelConfig(), mtp=True)
    assert said in str(error.value) and "false" in str(error.value)


def test_heads_need_a_layer_on_the_last_stage() -> None:
    layout = ParallelConfig(pipeline=2, layers_per_stage=(4, 0))
    check_cut(WITH_HEADS["glm4_moe"], layout)
    with pytest.raises(ModelError, match="heads need one"):
        check_cut(WITH_HEADS["glm4_moe"], layout, mtp=True)


def test_a_run_is_refused_before_its_start_if_the_model_has_no_heads() -> None:
    config = load_config("tiny-moe-grpo", ["actor.mtp.train=true"])
    with pytest.raises(ConfigError, match=r"actor\.mtp\.train=true: model_type 'qwen3_moe'"):
        check(config)


def test_a_folder_without_the_heads_it_declares_is_refused(tmp_path: Path) -> None:
    from tests.published.folders import published_folder

    folder = tmp_path / "glm"
    published_folder("glm-4.5", folder, num_nextn_predict_layers=0, num_hidden_layers=2)
    config_file = folder / "config.json"
    text = config_file.read_text()
    assert '"num_nextn_predict_layers": 0' in text
    config_file.write_text(
        text.replace('"num_nextn_predict_layers": 0', '"num_nextn_predict_layers": 1')
    )
    words = ["model.hf_config={}", f"model.path={folder}"]
    with_heads = load_config("tiny-moe-grpo", [*words, "actor.mtp.train=true"])
    with pytest.raises(ConfigError, match=r"lacks .* tensors"):
        check(with_heads)
