"""Hub ids in place of paths: found in the cache that `hf download` fills, and named with the
command where it lacks them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.config import derived, hub
from hybridflow.config.check import problems
from hybridflow.config.hub import located
from hybridflow.config.load import load_config
from hybridflow.models.published import published
from tests.hub_cache import COMMIT, download, hub_cache
from tests.unit.config.small import small

RECIPE = "grpo-qwen3-8b-1x8"


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with hub_cache(tmp_path) as folder:
        yield folder


MODEL = {"config.json": json.dumps(published("qwen3-8b")), "model.safetensors": ""}


def test_a_model_is_its_snapshot(cache: Path) -> None:
    config = load_config(RECIPE, ["model.path=Qwen/Qwen3-8B", "reference.path=Qwen/Qwen3-8B"])
    assert located(config) == config  # nothing is downloaded
    snapshot = download(cache, "Qwen/Qwen3-8B", MODEL)
    found = located(config)
    assert found.model.path == found.reference.path == str(snapshot)
    assert located(load_config(RECIPE, [f"model.path=Qwen/Qwen3-8B@{COMMIT}"])).model.path == str(
        snapshot
    )
    assert (
        located(load_config(RECIPE, ["model.path=Qwen/Qwen3-8B@v2"])).model.path
        == "Qwen/Qwen3-8B@v2"
    )


def test_a_folder_of_the_same_name_is_that_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download(cache, "Qwen/Qwen3-8B", MODEL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen/Qwen3-8B").mkdir(parents=True)
    assert located(load_config(RECIPE, ["model.path=Qwen/Qwen3-8B"])).model.path == "Qwen/Qwen3-8B"


def test_a_model_without_its_weights_is_not_there(cache: Path) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    download(
        cache, "Qwen/Qwen3-8B", {"config.json": MODEL["config.json"], "model-1.safetensors": ""}
    )
    snapshot = download(
        cache, "Qwen/Qwen3-4B", {"model.safetensors.index.json": index, "model-1.safetensors": ""}
    )
    assert hub.cached("Qwen/Qwen3-8B", "model") is not None  # one file that no index contradicts
    assert hub.cached("Qwen/Qwen3-4B", "model") is None  # a download that was cut off
    (snapshot / "model-2.safetensors").write_text("")
    assert hub.cached("Qwen/Qwen3-4B", "model") == snapshot


def test_what_is_missing_is_said_with_the_command(cache: Path) -> None:
    words = ["model.path=Qwen/Qwen3-8B", "data=files", "data.train_files=[openai/gsm8k]"]
    model, data = problems(located(load_config(RECIPE, words)), "train")[::-1]
    assert (
        "model.path=Qwen/Qwen3-8B" in model
        and "`hf download Qwen/Qwen3-8B`" in model
        and str(cache) in model
    )
    assert (
        "data.train_files: openai/gsm8k" in data
        and "`hf download --repo-type dataset openai/gsm8k`" in data
    )
    (teacher,) = (
        line
        for line in problems(small("teacher.path=Org/Teacher@v2"), "train")
        if line.startswith("teacher.path")
    )
    assert "`hf download Org/Teacher --revision v2`" in teacher


def test_a_plan_takes_the_recipes_sizes_where_the_model_is_not_there(cache: Path) -> None:
    config = located(load_config(RECIPE, ["model.path=Qwen/Qwen3-8B"]))
    assert derived.hf_config(config.model) == config.model.hf_config
    assert problems(config, files=False) == []


@pytest.mark.parametrize(
    ("names", "split", "subset", "expected"),
    [
        (("data/train-0-of-2.parquet", "data/train-1-of-2.parquet", "data/test-0.parquet"), *("train", ""), (0, 1)),
        (("main/train-0.parquet", "main/test-0.parquet", "socratic/test-0.parquet"), *("test", "main"), (1,)),
        (("train.jsonl", "validation.jsonl"), *("test", ""), (1,)),
        (("deepscaler.json", "dataset_infos.json", "README.md"), *("train", ""), (0,)),
        (("data/dapo-math-17k.parquet",), *("train", ""), (0,)),
        (("train.parquet",), *("test", ""), ()),  # nothing is held out
    ],
)  # fmt: skip
def test_files_of_a_split(
    tmp_path: Path, names: tuple[str, ...], split: str, subset: str, expected: tuple[int, ...]
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert hub.split_files(tmp_path, split, subset=subset) == [
        tmp_path / names[number] for number in expected
    ]


def test_data_files_are_those_of_the_split_or_of_a_pattern(cache: Path) -> None:
    names = ("main/train-0.parquet", "main/test-0.parquet", "socratic/train-0.parquet")
    snapshot = download(cache, "openai/gsm8k", dict.fromkeys(names, "x"), "datasets")
    words = [
        "data=files",
        "data.train_files=['openai/gsm8k:main/train-*']",
        "data.val_files=[openai/gsm8k]",
    ]
    config = located(load_config(RECIPE, [*words, "data.val_sets={more: {files: [openai/gsm8k]}}"]))
    assert config.data.train_files == (str(snapshot / "main/train-0.parquet"),)
    assert config.data.val_files == (str(snapshot / "main/test-0.parquet"),)
    assert config.data.val_sets == {"more": {"files": [str(snapshot / "main/test-0.parquet")]}}
    words = [
        "model.path=Qwen/Qwen3-8B",
        "data=files",
        "data.train_files=['openai/gsm8k:no/*.parquet']",
    ]
    assert (
        f"snapshot {snapshot} has no matching files"
        in problems(located(load_config(RECIPE, words)), "train")[0]
    )
