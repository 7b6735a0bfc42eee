"""A folder of weights is whole, or one message says which file is not and what completes it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hybridflow.cli.main import main
from hybridflow.errors import ModelError
from hybridflow.models import family_of
from hybridflow.models.model_folder import check_weights
from tests.published.folders import FAMILIES, FAULTS, break_folder, published_folder

MESSAGES = {
    "missing-shard": "3.safetensors: listed in model.safetensors.index.json, but not found",
    "cut-shard": (
        r"3.safetensors is not a complete safetensors file: it has \d+ bytes, but its header requires \d+"
    ),
    "missing-entry": (
        r"lacks 1 of the \d+ tensors that config.json implies, for example model.norm.weight"
    ),
    "missing-index": "model.safetensors.index.json not found, although there are 3 weight files",
    "lfs-pointer": "3.safetensors is a git-lfs pointer, not a weight file; run `git lfs pull` in",
    "incomplete": (
        r"listed in model.safetensors.index.json, but not found; .* \(the last download was interrupted: 1 .incomplete files remain\)"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_published_folders_are_whole(family: str, tmp_path: Path) -> None:
    folder = published_folder(family, tmp_path)
    check_weights(folder, family_of(json.loads((folder / "config.json").read_text())).tensors())


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3", "kimi-k2"])
def test_a_broken_download_is_one_message_with_the_next_command(
    family: str, fault: str, tmp_path: Path
) -> None:
    folder = published_folder(family, tmp_path)
    tensors = family_of(json.loads((folder / "config.json").read_text())).tensors()
    file = break_folder(folder, fault)
    with pytest.raises(ModelError, match=MESSAGES[fault]) as error:
        check_weights(folder, tensors)
    text = str(error.value)
    assert (
        text.startswith(str(file))
        and f"`hf download ORG/NAME --local-dir {folder}`" in text
        and "\n" not in text
    )


def spoil(folder: Path) -> dict[str, Callable[[], object]]:
    index = folder / "model.safetensors.index.json"
    shard = folder / "model-00003-of-00003.safetensors"

    def without_a_tensor() -> None:
        kept = load_file(shard)
        del kept["model.norm.weight"]
        save_file(kept, shard)

    return {
        "does not contain the tensor model.norm.weight, which": without_a_tensor,
        "is not a valid weight index": lambda: index.write_text("{}"),
        "is not a valid weight index .not JSON": lambda: index.write_text("{"),
        "index.json is a git-lfs pointer, not the index itself": lambda: index.write_text(
            "version https://git-lfs.github.com/"
        ),
        "3.safetensors is not a complete safetensors file; run": lambda: shard.write_bytes(
            b"\x10\0\0\0\0\0\0\0not a header at"
        ),
        (
            "3.safetensors is not a complete safetensors file: it has 0 bytes|not a complete safetensors file; "
            "run"
        ): lambda: shard.write_bytes(b""),
    }


@pytest.mark.parametrize("message", spoil(Path()))
def test_other_damage_is_named(message: str, tmp_path: Path) -> None:
    folder = published_folder("qwen3-moe", tmp_path)
    spoil(folder)[message]()
    with pytest.raises(ModelError, match=message):
        check_weights(folder)


def test_a_folder_in_another_form_is_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(
        ModelError,
        match=r"neither .*; pytorch_model\.bin is in another format, but only safetensors is",
    ):
        check_weights(tmp_path)


RECIPE = """
defaults: [data: files, model: folder, actor: tiny, rollout: tiny, algorithm: grpo, cluster: in-process,
           trainer: smoke, reward: builtin, sft: none, _self_]
name: mine
model: {{path: {path}, dtype: float32}}
data: {{train_files: [{path}/config.json], train_batch_size: 2, max_prompt_length: 8, max_response_length: 8}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "import"])
@pytest.mark.parametrize("fault", ["missing-shard", "lfs-pointer"])
def test_commands_say_it_before_anything_starts(
    command: str, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = published_folder("qwen3-moe", tmp_path / "hf")
    break_folder(folder, fault)
    (tmp_path / "mine.yaml").write_text(RECIPE.format(path=folder))
    words = {
        "train": ["train", "--config-dir", str(tmp_path), "--config-name", "mine", "--explain"],
        "import": ["checkpoint", "import", str(folder), str(tmp_path / "out")],
    }[command]
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"hf download ORG/NAME --local-dir {folder}" in err and "Traceback" not in err
    shutil.rmtree(folder)


@pytest.mark.slow
def test_a_folder_of_another_family_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = published_folder("glm-4.5", tmp_path / "hf")
    (tmp_path / "mine.yaml").write_text(
        RECIPE.format(path=folder).replace("model: folder", "model: qwen3-8b")
    )
    assert main(["train", "--config-dir", str(tmp_path), "--config-name", "mine", "--explain"]) == 2
    err = capsys.readouterr().err
    assert (
        f"model.path={folder} is not the recipe's model: its config.json has model_type=glm4_moe, but model.hf_config has qwen3"
    ) in err
    assert "set the recipe's model folder" in err
