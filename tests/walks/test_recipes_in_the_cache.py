"""Recipes of several families and sizes, from an empty folder: model and data lie in the Hugging
Face cache as they are published, and a run goes to its end on this machine with nothing but
`+scale=laptop ~model.hf_config`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.runs import Run
from tests.published.folders import code_ran
from tests.walks.published_cache import FAMILIES, MAIN, laid

pytestmark = pytest.mark.slow
ALWAYS = "grpo-moonlight-16b-a3b-1x8"


def goes_to_its_end(folder: Path, recipe: str) -> None:
    cache = laid(folder, recipe)
    work = folder / "work"
    work.mkdir()
    command = (sys.executable, "-c", MAIN, "train")
    words = ("--config-name", recipe, "+scale=laptop", "~model.hf_config")
    with Run(
        folder / "output", *words, command=command, site={"HF_HOME": str(cache)}, cwd=work
    ) as run:
        assert run.end(400) == 0, run.out + run.err
    assert "GRPO 2/2" in run.out or "PPO 2/2" in run.out
    made = work / "runs" / recipe
    steps = [one["step"] for one in read_jsonl(made / "metrics.jsonl") if one["phase"] == "train"]
    assert steps == [1, 2]
    assert json.loads((made / "export" / "config.json").read_text())["num_hidden_layers"] == 2
    assert not code_ran(cache)


def test_a_recipe_goes_to_its_end(tmp_path: Path) -> None:
    goes_to_its_end(tmp_path, ALWAYS)


@pytest.mark.full
@pytest.mark.parametrize("recipe", [name for name in FAMILIES if name != ALWAYS])
def test_every_family(recipe: str, tmp_path: Path) -> None:
    goes_to_its_end(tmp_path, recipe)
