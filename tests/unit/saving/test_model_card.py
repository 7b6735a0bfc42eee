"""The model card of an export: what the run recorded, no line for what it did not, nothing of this
machine, and nothing that a foreign folder could smuggle in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridflow.config.load import dump_yaml, load_config
from hybridflow.saving.model_card import card, write_card

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "dtype": "float32",
}


def run_folder(folder: Path, *words: str) -> tuple[Path, Path]:
    """A run and its export."""
    export = folder / "export"
    export.mkdir(parents=True)
    (export / "config.json").write_text(json.dumps(CONFIG))
    (folder / "config.yaml").write_text(dump_yaml(load_config("e2e", ["name=mine", *words])))
    environment = {"hybridflow": "0.1.0", "packages": {"torch": "2.13.0"}, "git": {"commit": "abc"}}
    (folder / "environment.json").write_text(json.dumps(environment))
    records: list[dict[str, Any]] = [{"phase": "sft", "step": 9, "sft/loss": 1.0}]
    for step in range(41):
        if step % 20 == 0:
            records.append({"phase": "val", "step": step, "val/accuracy": 0.5 + step / 100})
        if step:
            records.append({"phase": "train", "step": step, "critic/score/mean": step / 50})
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder, export


def parts(text: str) -> dict[str, list[list[str]]]:
    """{title of a section: the cells of its table}."""
    found = {}
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        lines = [line for line in body.splitlines() if line.startswith("| ")]
        found[title] = [line[2:-2].split(" | ") for line in lines]
    return found


@pytest.mark.slow
def test_a_card_has_what_the_run_recorded(tmp_path: Path) -> None:
    run, export = run_folder(tmp_path / "runs" / "mine", "actor.optim.lr=0.0025")
    text = write_card(export, run).read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hybridflow", "reinforcement-learning"],
    }
    assert "# license: to be filled in" in text and "weights after step 40." in text
    found = parts(text)
    assert found.keys() == {
        "Model", "Data", "Recipe", "Training curve", "Evaluation", "Versions"
    }  # fmt: skip
    model = dict(found["Model"])
    assert model["base model"] == "none: trained from random weights"
    assert (model["architecture"], model["precision"]) == (CONFIG["architectures"][0], "float32")
    data = dict(found["Data"])
    assert data["training prompts"] == "data/arithmetic-e2e/train.parquet"
    assert "num_train" in data["prepared by"]
    recipe = yaml.safe_load(text.split("the defaults:\n\n")[1].split("\n\n##")[0])
    assert recipe["actor"]["optim"]["lr"] == 0.0025 and recipe["rollout"]["n"] == 4
    assert not recipe.keys() & {"name", "output_dir", "cluster"}
    curve = found["Training curve"]
    assert curve[0] == ["step", "held-out accuracy", "score"]
    steps = [int(row[0]) for row in curve[1:]]
    assert steps == sorted(steps) and {0, 20, 40} <= set(steps) and len(steps) <= 15
    assert ["20", "0.7", "0.4"] in curve
    assert found["Evaluation"][1:] == [["val (in training)", "accuracy", "0.9", ""]]
    assert dict(found["Versions"]) == {
        "": "", "hybridflow": "0.1.0", "commit": "abc", "torch": "2.13.0"
    }  # fmt: skip


def test_an_earlier_checkpoint_has_its_own_curve_and_evaluations(tmp_path: Path) -> None:
    run, export = run_folder(tmp_path)
    statistic = {"value": 0.75, "interval": [0.7, 0.8], "method": "wilson"}
    for step in (20, 40):
        results = {"step": step, "sets": {"val-hard": {"statistics": {f"pass@{step}": statistic}}}}
        (run / "eval" / f"global_step_{step}").mkdir(parents=True)
        (run / "eval" / f"global_step_{step}" / "results.json").write_text(json.dumps(results))
    found = parts(card(export, run, 20))
    assert found["Training curve"][-1][:2] == ["20", "0.7"]
    assert found["Evaluation"][1:] == [
        ["val (in training)", "accuracy", "0.7", ""],
        ["val-hard", "pass@20", "0.75", "0.7 to 0.8"],
    ]
    # weights of a warm start are from before the loop
    text = card(export, run, -1)
    assert (
        parts(text).keys() == {"Model", "Data", "Recipe", "Versions"}
        and "step" not in (text.split("## Model")[0])
    )


def test_what_is_unknown_has_no_line(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    text = card(tmp_path / "export", tmp_path)
    assert text.splitlines()[-3:] == ["# export", "", "Trained with HybridFlow."]
    assert parts(text) == {} and "None" not in text and "base_model" not in text


@pytest.mark.slow
def test_a_card_names_no_folder_of_this_machine(tmp_path: Path) -> None:
    home = f"{tmp_path}/home"
    cached = f"{home}/models--Qwen--Qwen3-0.6B/snapshots/0123abc"
    words = (
        f"model.path={cached}",
        "~model.hf_config",
        f"data.train_files=[{home}/train.parquet]",
        f"reward.path={home}/reward.py",
        "data.prepare.task=null",
        "reward.kwargs={url: 'http://judge.internal:80'}",
        "rollout.agent.mcp_servers={web: {url: 'http://tools.internal'}}",
    )
    run, export = run_folder(tmp_path / "run", *words)
    text = card(export, run)
    assert str(tmp_path) not in text and "internal" not in text
    assert "base_model: Qwen/Qwen3-0.6B" in text
    found = parts(text)
    assert dict(found["Model"])["base model"] == "Qwen/Qwen3-0.6B"
    assert dict(found["Data"])["training prompts"] == "train.parquet"


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"environment.json": {"hybridflow": "</b>\n# Owned\n|x|", "packages": 3, "git": []}},
        {"environment.json": {"hybridflow": ["x"], "packages": {"torch": {"a": 1}}}},
        {"config.json": {"architectures": ["x" * 100_000], "dtype": "\x1b[2J"}},
        {"config.json": {"architectures": 5, "num_hidden_layers": [1]}},
        {"eval/a/results.json": {"step": 40, "sets": {"s": [], "t": {"statistics": {"u": 1}}}}},
        {
            "eval/a/results.json": {
                "step": 40,
                "sets": {"a\nb": {"statistics": {"u": {"value": "x", "interval": [None, 1, 2]}}}},
            }
        },
    ],
)
def test_a_foreign_folder_writes_no_markdown_of_its_own(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    run, export = run_folder(tmp_path)
    for name, value in change.items():
        file = export / name if name == "config.json" else run / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(value))
    text = card(export, run)
    assert "\n# Owned" not in text and "\x1b" not in text and "</b>" not in text
    assert max(map(len, text.splitlines())) < 2000
    titles = [line for line in text.splitlines() if line.startswith("#")]
    assert titles[:2] == ["# license: to be filled in", "# mine"]
    assert set(titles[2:]) <= {f"## {name}" for name in parts(text)}
