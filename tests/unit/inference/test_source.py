"""Models that a command is given: what is found, and one message for each folder that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.inference.source import find
from tests.unit.inference.folders import model


def test_an_export_knows_its_run_and_any_other_folder_none(tmp_path: Path) -> None:
    run = tmp_path / "run"
    export = model(run / "export", dtype="float32")
    other = model(run / "elsewhere" / "export")
    (run / "config.yaml").write_text("name: run\n")
    found = find(str(export))
    assert (found.run, found.dtype, found.step, found.name) == (run, "float32", None, "export")
    further = find(str(model(run / "export-tester")))
    assert (further.run, further.role) == (run, "tester")
    assert find(str(other)).run is None and find(str(other)).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "no such folder; pass a run"),
        (lambda path: path.write_text("x"), "is a file; pass a run"),
        (lambda path: path.mkdir(), "is not a model: no config.json, no checkpoint and no"),
        (lambda path: model(path, num_hidden_layers=-1), "config.json is not a model config"),
        (lambda path: (model(path) / "config.json").write_text("{"), "config.json is not JSON"),
        (
            lambda path: (model(path) / "model.safetensors").rename(path / "pytorch_model.bin"),
            "has no weights: no .safetensors files",
        ),
        (
            lambda path: model(path, architectures=["Qwen3ForSequenceClassification"]),
            "contains a critic or a reward model, which cannot generate text",
        ),
        (
            lambda path: model(path, architectures=["Qwen3ForTokenClassification"]),
            "contains a critic or a reward model",
        ),
    ],
)
def test_a_folder_that_is_no_model_is_named(tmp_path: Path, make: object, said: str) -> None:
    assert callable(make)
    make(tmp_path / "given")
    with pytest.raises(ConfigError, match=said) as refused:
        find(str(tmp_path / "given"))
    assert str(tmp_path / "given") in str(refused.value) and "\n" not in str(refused.value)


def test_a_hub_id_that_is_not_in_the_cache_comes_with_its_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"hf download nobody/nothing"):
        find("nobody/nothing")


def test_the_latest_checkpoint_is_found_from_within_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relative name `checkpoints/latest` looks like a hub id."""
    (tmp_path / "checkpoints" / "global_step_3" / "policy").mkdir(parents=True)
    (tmp_path / "checkpoints" / "latest.json").write_text('{"folder": "global_step_3"}')
    monkeypatch.chdir(tmp_path)
    for given in ("checkpoints/latest", "checkpoints", ".", str(tmp_path)):
        with pytest.raises(CheckpointError, match=r"global_step_3 is not a complete checkpoint"):
            find(given)
