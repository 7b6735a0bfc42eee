"""Weights that training does not touch: every tensor of a published folder is in an export, or its
absence is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hybridflow.models import family_of
from hybridflow.models.scalar_head import ScalarHead
from hybridflow.models.weights import SafetensorsFolder
from hybridflow.saving.carried import Carried, carried_from, exported_config
from hybridflow.saving.safetensors_file import Entry
from hybridflow.saving.tools import import_
from tests.published.folders import FAMILIES, code_ran, published_folder


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def config_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def same_bytes(one: torch.Tensor, two: torch.Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(one.view(torch.uint8), two.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_that_came_is_lost_in_silence(family: str, tmp_path: Path) -> None:
    folder = published_folder(family, tmp_path / "hf")
    done = import_(folder, tmp_path / "out", None, 200_000)
    came = tensors_in(folder)
    went = tensors_in(tmp_path / "out")
    config = config_of(tmp_path / "out")
    before = config_of(folder)
    mapped = family_of(before).tensors().keys()
    scales = {f"{name}_scale_inv" for name in mapped}
    said = " ".join(done.lines)
    assert {name for name in came.keys() - went.keys() - scales if name not in said} == set()
    untouched = went.keys() - mapped
    assert all(same_bytes(went[name], came[name]) for name in untouched)
    layers = before.get("num_nextn_predict_layers", 0)
    assert config.get("num_nextn_predict_layers", 0) == layers
    assert (f"model.layers.2 ({len(untouched)})" in said) == bool(layers) == bool(untouched)
    assert ("quantization_config" in config) == any(
        name.endswith("_scale_inv") for name in untouched
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == went.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in went.values())
    assert not code_ran(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_files_beside_the_weights_are_copied(family: str, tmp_path: Path) -> None:
    folder = published_folder(family, tmp_path / "hf")
    templates = folder / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ messages }}")
    for name in (
        "vocab.txt",
        "spiece.model",
        "sentencepiece.bpe.model",
        "qwen.tiktoken",
        "tekken.json",
        "tokenizer.model.v3",
    ):
        (folder / name).write_text(name)
    import_(folder, tmp_path / "out", None, 1 << 30)
    left = {
        ".gitattributes",
        "README.md",
        "config.json",
        "model.safetensors.index.json",
        "consolidated.00.pt",
    }
    for file in (
        path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"
    ):
        copy = tmp_path / "out" / file.relative_to(folder)
        if file.name not in left and file.parent.name not in ("original", "inference"):
            assert copy.read_bytes() == file.read_bytes(), file.name


def test_a_quantisation_describes_what_is_in_fp8_alone(tmp_path: Path) -> None:
    folder = published_folder("deepseek-v3", tmp_path / "hf")
    import_(folder, tmp_path / "out", "float32", 1 << 30)
    found = config_of(tmp_path / "out")["quantization_config"]
    assert isinstance(found, dict)
    skipped = found["modules_to_not_convert"]
    assert found["weight_block_size"] == [128, 128]
    assert {"model.layers.0", "model.layers.1", "model.embed_tokens", "lm_head"} <= set(skipped)
    went = tensors_in(tmp_path / "out")
    for name, tensor in went.items():
        is_skipped = any(name.startswith(f"{module}.") for module in skipped)
        if tensor.dim() == 2 and name.endswith(".weight"):
            assert is_skipped == (tensor.dtype != torch.float8_e4m3fn), name
    again = SafetensorsFolder(tmp_path / "out")  # it is read again as it was
    family = family_of(config_of(folder))
    for name, shape in family.tensors().items():
        assert torch.equal(again.read(name, (0,) * len(shape), shape), went[name])


@pytest.mark.parametrize("absent", ["all", "one"])
def test_a_config_announces_no_heads_that_are_absent(absent: str, tmp_path: Path) -> None:
    folder = published_folder("glm-4.5", tmp_path / "hf", shards=1)
    kept = tensors_in(folder)
    for name in [
        name
        for name in kept
        if name.startswith("model.layers.2.") and (absent == "all" or "eh_proj" in name)
    ]:
        del kept[name]
    save_file(kept, folder / "model.safetensors")
    done = import_(folder, tmp_path / "out", None, 1 << 30)
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 0
    assert (
        "the export's config.json sets num_nextn_predict_layers to 0 instead of 1, because the "
        "weights are missing"
    ) in done.lines


def test_heads_whose_embedding_is_the_models_are_whole(tmp_path: Path) -> None:
    """Later models of the family leave the copies of embedding and output head out."""
    folder = published_folder("glm-4.5", tmp_path / "hf", shards=1)
    kept = {
        name: tensor
        for name, tensor in tensors_in(folder).items()
        if not name.endswith(("shared_head.head.weight", "2.embed_tokens.weight"))
    }
    save_file(kept, folder / "model.safetensors")
    import_(folder, tmp_path / "out", None, 1 << 30)
    assert config_of(tmp_path / "out")["num_nextn_predict_layers"] == 1


def test_without_the_published_folder_the_absence_is_said(tmp_path: Path) -> None:
    folder = published_folder("deepseek-v3", tmp_path / "hf")
    config = config_of(folder)
    family = family_of(config)
    shutil.rmtree(folder)
    carried = carried_from(folder, family)
    [line] = carried.lines
    assert (
        carried.entries == () and "weights that training does not use are not in the export" in line
    )
    entries = [Entry(name, shape, torch.bfloat16) for name, shape in family.tensors().items()]
    written, [changed] = exported_config(config, torch.bfloat16, entries, tmp_path)
    assert (
        written["num_nextn_predict_layers"] == 0
        and "num_nextn_predict_layers to 0 instead of 1" in changed
    )
    assert "quantization_config" not in written and "auto_map" not in written


def test_a_shard_that_is_gone_is_said_and_does_not_end_an_export(tmp_path: Path) -> None:
    folder = published_folder("glm-4.5", tmp_path / "hf")
    family = family_of(config_of(folder))
    sorted(folder.glob("*.safetensors"))[-1].unlink()
    carried = carried_from(folder, family)
    assert carried.entries == () and "model-00003-of-00003.safetensors" in carried.lines[0]


def test_a_model_with_a_scalar_head_or_of_no_folder_takes_nothing(tmp_path: Path) -> None:
    folder = published_folder("glm-4.5", tmp_path)
    family = family_of(config_of(folder))
    assert (
        carried_from(folder, ScalarHead(family, "ForTokenClassification"))
        == carried_from(None, family)
        == Carried()
    )


def test_code_is_announced_where_its_files_are(tmp_path: Path) -> None:
    folder = published_folder("moonlight", tmp_path)
    config = config_of(folder)
    assert exported_config(config, torch.bfloat16, [], folder)[0]["auto_map"] == config["auto_map"]
    (folder / "modeling_deepseek.py").unlink()
    config["auto_map"]["AutoTokenizer"] = ["org/name--code.Tokenizer", None]  # type: ignore[index]
    kept = exported_config(config, torch.bfloat16, [], folder)[0]["auto_map"]
    assert kept.keys() == {"AutoConfig", "AutoTokenizer"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_an_export_states_one_precision_to_old_and_new_readers(name: str, tmp_path: Path) -> None:
    written, lines = exported_config(
        {"model_type": "qwen3", name: "float32"}, torch.bfloat16, [], tmp_path
    )
    assert written["dtype"] == written["torch_dtype"] == "bfloat16" and lines == []
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
