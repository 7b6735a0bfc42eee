"""The JSON schema of recipes: editors complete and check with it what the loader accepts."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import yaml

from hybridflow.config.json_schema import recipe_schema
from hybridflow.config.locate import shipped_config_dir

CONFIGS = shipped_config_dir()
SCHEMA = recipe_schema()


def errors(values: Any, schema: Any = SCHEMA) -> list[str]:
    found = jsonschema.Draft202012Validator(schema).iter_errors(values)
    return [f"{error.json_path}: {error.message}" for error in found]


def test_the_file_in_configs_is_the_schema_of_this_code() -> None:
    """`make schema` writes it again."""
    assert json.loads((CONFIGS / "schema.json").read_text()) == SCHEMA


@pytest.mark.parametrize("recipe", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_is_valid_and_names_the_schema(recipe: Any) -> None:
    text = recipe.read_text()
    assert "# yaml-language-server: $schema=schema.json" in text.splitlines()
    assert errors(yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    "file", sorted(CONFIGS.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_every_group_file_is_valid(file: Any) -> None:
    text = file.read_text()
    is_global = text.startswith("# @package _global_\n")  # sets keys of several sections
    schema = (
        SCHEMA
        if is_global
        else {"$defs": SCHEMA["$defs"], **SCHEMA["properties"][file.parent.name]}
    )
    values = {key: value for key, value in yaml.safe_load(text).items() if key != "defaults"}
    assert errors(values, schema) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"actor": {"optim": {"lrr": 1}}},
        {"rollout": {"n": 0}},
        {"rollout": {"n": 1.5}},
        {"rollout": {"n": None}},
        {"actor": {"backend": "jax"}},
        {"trainer": {"loggers": ["consle"]}},
        {"data": {"prepare": {"task": "aritmetic"}}},
        {"data": {"train_files": "a.parquet"}},
        {"rollout": {"mem_fraction_static": 1}},
    ],
    ids=json.dumps,
)
def test_what_the_loader_refuses_is_marked(wrong: Any) -> None:
    assert errors(wrong)


@pytest.mark.parametrize(
    "right",
    [
        {"actor": {"clip_ratio_c": None}},
        {"actor": {"ppo_mini_batch_size": "${data.train_batch_size}"}},
        {"model": {"path": "???", "hf_config": {"anything": [1]}}},
        {"data": {"prepare": {"task": "my_task.py:mine"}}},
        {"rollout": {"n": 8, "sampling": {"top_k": -1}}},
    ],
    ids=json.dumps,
)
def test_what_the_loader_accepts_is_not(right: Any) -> None:
    assert errors(right) == []


def test_a_key_is_described_by_its_comment() -> None:
    key = SCHEMA["$defs"]["ActorConfig"]["properties"]["router_replay"]
    assert "r3: from the engine" in key["description"]
    assert key["anyOf"][0] == {"enum": ["none", "compare", "r2", "r3"]}
    assert key["default"] == "none"
