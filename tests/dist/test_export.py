"""Hugging Face folders: written by ranks without a whole model on any, and by one process out of a
checkpoint; bit for bit the same."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hybridflow.cli.main import main
from hybridflow.errors import CheckpointError
from hybridflow.saving.manifest import write_sealed
from hybridflow.saving.reader import CheckpointFolder
from tests.dist.harness.policies import FULL
from tests.dist.harness.ranks import NOTHING, run_ranks
from tests.models import BIG, TINY

pytestmark = pytest.mark.slow
SHARD = 40_000  # bytes
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks: `hf` written by them, `checkpoint` of the same weights (at tp2·pp2·ep2)."""
    folder = tmp_path_factory.mktemp("export")
    run_ranks(
        4,
        "tests.dist.cases.checkpoint:export_and_save",
        parallel=FULL,
        hf=TINY,
        folder=str(folder),
        max_shard_bytes=SHARD,
    )
    return folder


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_shards_are_bounded_indexed_and_checksummed(folder: Path) -> None:
    index = json.loads((folder / "hf" / "model.safetensors.index.json").read_text())
    files = sorted((folder / "hf").glob("*.safetensors"))
    assert len(files) > 4 and set(index["weight_map"].values()) == {file.name for file in files}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            names = list(handle.keys())
            sizes = [handle.get_tensor(name).nbytes for name in names]
        assert sum(sizes) <= SHARD or len(names) == 1
        assert {index["weight_map"][name] for name in names} == {file.name}
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in tensors_in(folder / "hf").values()
    )
    checked = subprocess.run(
        ["sha256sum", "-c", "checksums.sha256"],
        cwd=folder / "hf",
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0 and checked.stdout.count(": OK") == len(files)


def test_one_process_exports_a_checkpoint_of_four_ranks(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "checkpoint",
                "export",
                str(folder / "checkpoint"),
                str(tmp_path / "out"),
                "--max-shard-size",
                "30000",
            ]
        )
        == 0
    )
    found = tensors_in(tmp_path / "out")
    expected = tensors_in(folder / "hf")
    assert found.keys() == expected.keys() and len(found) > 40
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert "tensors in" in capsys.readouterr().out
    assert (
        main(
            [
                "checkpoint",
                "export",
                str(folder / "checkpoint"),
                str(tmp_path / "half"),
                "--dtype",
                "bfloat16",
            ]
        )
        == 0
    )
    for name, tensor in tensors_in(tmp_path / "half").items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert main(["checkpoint", "export", str(folder / "checkpoint"), str(tmp_path / "out")]) == 2
    assert "already exists" in capsys.readouterr().err


def test_any_layout_reads_slices_of_a_checkpoint(folder: Path) -> None:
    source = CheckpointFolder(folder / "checkpoint")
    expected = tensors_in(folder / "hf")
    for name, tensor in expected.items():
        rows = tensor.shape[0]
        low = rows // 3
        high = max(rows // 3 + 1, 2 * rows // 3)
        start = (low, *(0,) * (tensor.dim() - 1))
        shape = (high - low, *tensor.shape[1:])
        assert torch.equal(source.read(name, start, shape), tensor[low:high]), name
    with pytest.raises(CheckpointError, match="has no tensor nonsense"):
        source.read("nonsense", (0,), (1,))


def test_inspect_and_verify(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "global_step_3"
    shutil.copytree(folder / "checkpoint", copy / "policy")
    write_sealed(copy / "driver.json", {"phase": "rl", "step": 3, "state": {}})
    assert main(["checkpoint", "inspect", str(copy), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["step"], figures["family"], figures["layout"]["pipeline"]) == (
        3,
        "qwen3_moe",
        2,
    )
    assert set(figures["parts"]) == {
        "model",
        "optimizer exp_avg",
        "optimizer exp_avg_sq",
        "reference",
        "random state",
    }
    assert figures["parts"]["model"]["tensors"] == figures["parts"]["optimizer exp_avg"]["tensors"]
    assert main(["checkpoint", "inspect", str(copy)]) == 0
    out = capsys.readouterr().out
    assert "tensor=2 pipeline=2 expert=2" in out and "optimizer exp_avg_sq" in out
    assert main(["checkpoint", "verify", str(copy)]) == 0
    assert "all match the manifest (step 3)" in capsys.readouterr().out

    largest = max((copy / "policy").glob("*.bin"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert main(["checkpoint", "export", str(copy), str(tmp_path / "flipped")]) == 1
    assert f"{largest} does not match its hash" in capsys.readouterr().err
    assert not (tmp_path / "flipped").exists()
    (copy / "policy" / "stray").write_text("")
    assert main(["checkpoint", "verify", str(copy)]) == 1
    err = capsys.readouterr().err
    assert (
        f"{largest} does not match its hash" in err
        and "stray is not part of the checkpoint" in err
        and err.count("hybridflow: ") == 2
    )
    assert main(["checkpoint", "verify", str(copy), "--json"]) == 1
    [report] = json.loads(capsys.readouterr().out)
    assert len(report["problems"]) == 2
    shutil.copytree(folder / "checkpoint", copy / "critic")  # of two roles, each is looked at
    assert main(["checkpoint", "verify", str(copy)]) == 1
    assert f"{copy / 'critic'}: " in capsys.readouterr().out
    (copy / "policy" / "manifest.json").unlink()
    assert main(["checkpoint", "inspect", str(copy)]) == 1
    assert "is not a complete checkpoint" in capsys.readouterr().err


def test_import_checks_and_rewrites_a_hugging_face_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "given"
    shutil.copytree(folder / "hf", given)
    index = json.loads((given / "model.safetensors.index.json").read_text())
    name = index["weight_map"]["model.norm.weight"]
    save_file({**load_file(given / name), "rotary.inv_freq": torch.ones(4)}, given / name)
    index["weight_map"]["rotary.inv_freq"] = name
    (given / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["checkpoint", "import", str(given), str(tmp_path / "start")]) == 2
    assert f"{name} does not match its checksum in checksums.sha256" in capsys.readouterr().err
    (given / "checksums.sha256").unlink()
    assert (
        main(
            ["checkpoint", "import", str(given), str(tmp_path / "start"), "--max-shard-size", "1Mi"]
        )
        == 0
    )
    assert f"copied unchanged from {given}: rotary.inv_freq" in capsys.readouterr().out
    found = tensors_in(tmp_path / "start")
    expected = tensors_in(folder / "hf")
    assert found.keys() - expected.keys() == {"rotary.inv_freq"} and all(
        torch.equal(found[key], expected[key]) for key in expected
    )

    del index["weight_map"]["model.norm.weight"]
    (given / "model.safetensors.index.json").write_text(json.dumps(index))
    assert main(["checkpoint", "import", str(given), str(tmp_path / "again")]) == 2
    assert (
        "tensors that config.json implies, for example model.norm.weight" in capsys.readouterr().err
    )
    assert not (tmp_path / "again").exists() and not (tmp_path / "again.partial").exists()
    (given / "config.json").unlink()
    assert main(["checkpoint", "import", str(given), str(tmp_path / "again")]) == 2
    assert "is not a Hugging Face folder" in capsys.readouterr().err


def test_no_rank_holds_more_than_a_tensor_and_its_staging(tmp_path: Path) -> None:
    """A model of 200 MiB, its largest tensor 16 MiB: two ranks' memory grows by little more than
    that tensor while they export it."""
    results: list[dict[str, Any]] = run_ranks(
        2,
        "tests.dist.cases.checkpoint:memory_of_export",
        loaded=NOTHING,
        parallel={"tensor": 2},
        hf=BIG,
        folder=str(tmp_path / "hf"),
    )
    for rank in results:
        assert rank["largest"] == 16 * MIB and rank["model"] > 150 * MIB
        # assembled, packed, sent and received; and what the transport takes on its first use
        assert rank["grown"] <= 4 * rank["largest"] + 24 * MIB < rank["model"], rank
