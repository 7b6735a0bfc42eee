"""What is far from published runs is warned of; the shipped recipes follow theirs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.config import derived
from hybridflow.config.habits import warnings
from hybridflow.config.load import load_config
from hybridflow.config.locate import list_recipes, shipped_config_dir
from hybridflow.config.schema import RunConfig
from hybridflow.models.published import published
from tests.unit.config.small import small

RECIPE = "grpo-qwen3-8b-1x8"


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ([], False),
        (["actor.optim.lr=5e-6"], False),
        (["actor.optim.lr=3e-4"], True),
        (["actor.optim.lr=1e-4", "actor.lora.rank=16"], False),
        (["actor.optim.lr=1e-2", "actor.lora.rank=16"], True),
    ],
)
def test_a_rate_far_above_the_habit_is_warned_of(words: list[str], warned: bool) -> None:
    lines = list(warnings(load_config(RECIPE, words)))
    assert len(lines) == warned
    assert not warned or (
        lines[0].startswith("actor.optim.lr=") and "actor.optim.lr=1e-6" in lines[0]
    )


def test_small_models_and_random_weights_have_rates_of_their_own(tmp_path: Path) -> None:
    assert list(warnings(small("actor.optim.lr=1e-2"))) == []
    sizes = {**published("qwen3-8b"), "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    assert (
        list(warnings(load_config(RECIPE, [f"model.path={tmp_path}", "actor.optim.lr=1e-2"]))) == []
    )


SIZE_RECIPES = [
    recipe.name for recipe in list_recipes([shipped_config_dir()]) if recipe.name.endswith("x8")
]


def corrects(config: RunConfig) -> bool:
    return config.actor.rollout_correction.weight != "none"


def test_every_size_recipe_names_a_published_run() -> None:
    for file in (shipped_config_dir() / "published").glob("*.yaml"):
        assert "# Source: " in file.read_text(encoding="utf-8"), file
    for name in SIZE_RECIPES:
        text = (shipped_config_dir() / f"{name}.yaml").read_text(encoding="utf-8")
        assert "  - published: " in text, name


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [SIZE_RECIPES[::4], pytest.param(SIZE_RECIPES, marks=pytest.mark.full)]
)
def test_size_recipes_follow_a_published_run_and_name_model_data_and_evaluation(
    names: list[str],
) -> None:
    for name in names:
        config = load_config(name)
        assert config.model.path and config.data.prepare.task and config.data.train_files, name
        assert config.data.val_files or config.data.val_sets, name
        assert list(warnings(config)) == [], name
        mixture = derived.num_experts(config.model.hf_config)
        if mixture:
            assert config.actor.policy_loss == "gspo" or config.actor.router_replay == "r3", name
        assert corrects(config) or not (mixture or config.rollout.quantization), name


@pytest.mark.slow
def test_dr_grpo_is_the_whole_of_its_paper() -> None:
    config = small("algorithm=dr-grpo", "rollout.n=8")
    assert small().actor.kl_loss_coef > 0  # what the preset has to take away
    actor = config.actor
    algorithm = config.algorithm
    assert (algorithm.adv_estimator, algorithm.norm_adv_by_std) == ("grpo", False)
    assert (actor.loss_agg_mode, actor.loss_norm_tokens) == (
        "seq-mean-token-sum-norm",
        config.data.max_response_length,
    )
    assert actor.kl_loss_coef == algorithm.kl_coef == 0 and not derived.needs_reference(config)
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, 0.2)
