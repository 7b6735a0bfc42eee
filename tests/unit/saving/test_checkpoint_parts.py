"""The pure parts of checkpoints: rectangles of flat ranges, manifests, files of exports, and what
the command line says of wrong paths."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from hybridflow.cli.main import main
from hybridflow.errors import CheckpointError, ModelError
from hybridflow.models.layout import boxes
from hybridflow.saving.manifest import (
    INDEX,
    MANIFEST,
    FileRecord,
    Manifest,
    config_digest,
    differences,
    digest_of,
    problems_of,
)
from hybridflow.saving.reader import CheckpointFolder
from hybridflow.saving.rectangles import Rectangle, write_tensors
from hybridflow.saving.safetensors_file import Entry, ShardWriter, shards_of
from hybridflow.saving.tools import inspect, verify
from tests.unit.saving.lies import lie_about, places, put

MODEL = {"model_type": "qwen3", "hidden_size": 32, "architectures": ["A"], "torch_dtype": "float32"}


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple), st.data())
def test_rectangles_fill_exactly_the_flat_range_in_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    total = prod(shape)
    low = data.draw(st.integers(0, total))
    high = data.draw(st.integers(low, total))
    flat = np.arange(total)
    array = flat.reshape(shape)
    found = []
    cuts = list(boxes(shape, low, high))
    for start, size in cuts:
        found.append(
            array[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].reshape(-1)
        )
    assert np.array_equal(np.concatenate([np.zeros(0, int), *found]), flat[low:high])
    assert len(cuts) <= max(1, 2 * len(shape) - 1)


def manifest_of(folder: Path) -> Manifest:
    files = {
        path.name: digest_of(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST
    }
    layout = {"world": 1, "tensor": 1}
    return Manifest(
        "rl", 3, ("model",), layout, "float32", MODEL, {"torch": "x"}, "2026-01-01T00:00:00Z", files
    )


@pytest.mark.slow
def test_each_lie_of_an_index_is_one_message(tmp_path: Path) -> None:
    """What stands in a foreign checkpoint's index is replaced, value by value, by what does not
    belong there."""
    weights = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    halves = [Rectangle("w", weights[2 * half :][:2], (4, 6), (2 * half, 0)) for half in range(2)]
    chunks, _ = write_tensors(tmp_path, 0, halves)
    right = {"chunks": chunks, "hf": [["w", [0, 0], [4, 6], "w", [0, 0]]]}
    manifest_of(tmp_path).write(tmp_path)
    lies: list[object] = [
        -1,
        1 << 70,
        3.5,
        None,
        "x",
        [],
        [0],
        [1, 2, 3],
        {},
        True,
        [-1, 0],
        [1 << 60, 1 << 60],
    ]
    told = 0
    for place in places(right):
        for lie in lies:
            value = json.loads(json.dumps(right))
            put(value, place, lie)
            (tmp_path / INDEX).write_text(json.dumps(value))
            try:
                inspect(tmp_path)
                assert torch.equal(CheckpointFolder(tmp_path).read("w", (0, 0), (4, 6)), weights)
            except CheckpointError as error:
                told += 1
                assert str(tmp_path) in str(error)
    assert told > 250
    (tmp_path / INDEX).write_text(json.dumps(right))
    assert torch.equal(CheckpointFolder(tmp_path).read("w", (1, 0), (2, 6)), weights[1:3])


@pytest.mark.parametrize("lies", [40, pytest.param(265, marks=pytest.mark.full)])
def test_lies_of_an_index_in_combination_are_messages_or_the_right_weights(
    tmp_path: Path, lies: int
) -> None:
    """Values, rectangles and slices are exchanged, repeated, shifted and left out: never a
    traceback, and never weights that were not saved."""
    weights = torch.arange(96, dtype=torch.float32).reshape(8, 12)
    other = torch.arange(100, 148, dtype=torch.float32).reshape(4, 12)
    quarters = [
        Rectangle("w", weights[2 * part :][:2], (8, 12), (2 * part, 0)) for part in range(4)
    ]
    chunks, _ = write_tensors(tmp_path, 0, [*quarters, Rectangle("v", other, (4, 12), (0, 0))])
    hf = [
        ["w", [0, 0], [4, 12], "w", [0, 0]],
        ["w", [4, 0], [4, 12], "w", [4, 0]],
        ["v", [0, 0], [4, 12], "v", [0, 0]],
    ]
    manifest_of(tmp_path).write(tmp_path)
    drawn = random.Random(265)
    told = 0
    kept = 0
    for _ in range(lies):
        value = json.loads(json.dumps({"chunks": chunks, "hf": hf}))
        for _ in range(drawn.randint(1, 3)):
            lie_about(value, drawn)
        (tmp_path / INDEX).write_text(json.dumps(value))
        manifest_of(tmp_path).write(tmp_path)  # with the right hashes
        try:
            inspect(tmp_path)
            found = CheckpointFolder(tmp_path)
            saved = {row.numpy().tobytes() for row in (*weights, *other)}
            for name, shape in (("w", (8, 12)), ("v", (4, 12))):
                assert {row.numpy().tobytes() for row in found.read(name, (0, 0), shape)} <= saved
            kept += 1
        except CheckpointError as error:
            told += 1
            assert str(tmp_path) in str(error) and len(str(error)) < 1000
    assert told > lies * 0.7 and kept > 0


def test_a_slice_that_comes_twice_leaves_no_memory_in_place_of_another(tmp_path: Path) -> None:
    """As many elements as the tensor has are there, and the half that is not was never written."""
    weights = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    chunks, _ = write_tensors(tmp_path, 0, [Rectangle("w", weights, (4, 6), (0, 0))])
    half = ["w", [0, 0], [2, 6], "w", [0, 0]]
    (tmp_path / INDEX).write_text(json.dumps({"chunks": chunks, "hf": [half, half]}))
    manifest_of(tmp_path).write(tmp_path)
    with pytest.raises(CheckpointError, match="overlapping entries"):
        CheckpointFolder(tmp_path).read("w", (0, 0), (4, 6))


def test_a_checkpoint_without_the_drivers_part_is_not_well(tmp_path: Path) -> None:
    policy = tmp_path / "global_step_3" / "policy"
    policy.mkdir(parents=True)
    manifest_of(policy).write(policy)
    assert [
        problem
        for problem in verify(policy)[1]
        if "driver.json is missing: this checkpoint can only be exported" in problem
    ]
    moved = policy.rename(tmp_path / "weights")  # a role's folder alone can be kept without
    assert verify(moved)[1] == []


def test_a_manifest_comes_back_and_finds_every_kind_of_damage(tmp_path: Path) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / name).write_bytes(name.encode() * 100_000)
    manifest = manifest_of(tmp_path)
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path) == manifest and manifest.size == 400_000
    assert problems_of(tmp_path, manifest) == []
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_bytes(b"b" * 99_999)
    (tmp_path / "c").write_bytes(b"c" * 99_999 + b"x")
    found = problems_of(tmp_path, manifest)
    assert len(found) == 3
    assert (
        "a cannot be read: No such file" in found[0]
        and "b has 99999 bytes, but the manifest lists 100000" in found[1]
        and "hash" in found[2]
    )
    assert problems_of(tmp_path, manifest, ["d"]) == []


def test_the_hash_is_the_one_that_xxhsum_prints(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    # XXH3_128bits of nothing, from its specification
    assert digest_of(tmp_path / "x") == FileRecord(0, "99aa06d3014798d86001c324468d497f")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 2, "files": {}}',
        '{"format": 1, "files": {"a": 3}}',
    ],
)
def test_a_manifest_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=str(tmp_path / MANIFEST)):
        Manifest.read(tmp_path)


def test_configs_differ_in_what_matters_alone() -> None:
    same = {**MODEL, "architectures": ["B"], "torch_dtype": "bfloat16", "eos_token_id": 7}
    assert differences(MODEL, same) == [] and config_digest(MODEL) == config_digest(same)
    other = {**MODEL, "hidden_size": 64, "rope_theta": 1e6}
    assert differences(MODEL, other) == [
        "hidden_size is 32 in the checkpoint, 64 here",
        "rope_theta is absent in the checkpoint, 1000000.0 here",
    ]
    assert config_digest(MODEL) != config_digest(other)


def test_shards_hold_what_fits_and_are_read_back(tmp_path: Path) -> None:
    entries = [
        Entry(f"t{i}", (rows, 3), torch.bfloat16) for i, rows in enumerate((10, 20, 500, 1, 0))
    ]
    files = shards_of(entries, 200)
    assert [[entry.name for entry in own] for own in files.values()] == [
        ["t0", "t1"],
        ["t2"],
        ["t3", "t4"],
    ]
    assert list(files) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    values = {entry.name: torch.randn(entry.shape) for entry in entries}
    for name, own in files.items():
        writer = ShardWriter(tmp_path / name, own)
        for entry in own:
            writer.add(entry.name, values[entry.name])
        writer.close()
        for key, tensor in load_file(tmp_path / name).items():
            assert torch.equal(tensor, values[key].bfloat16())
    writer = ShardWriter(tmp_path / "x", entries)
    with pytest.raises(ModelError, match=r"expected t0 .*, got t1"):
        writer.add("t1", values["t1"])


def test_what_was_written_where_it_lies_can_be_offloaded_later(tmp_path: Path) -> None:
    """`Tensor.numpy()` would pin the storage for good."""
    live = {"a": torch.randn(7, 3), "b": torch.randn(4, 5).bfloat16(), "empty": torch.randn(0, 3)}
    rows = [Rectangle(name, tensor, tuple(tensor.shape), (0, 0)) for name, tensor in live.items()]
    chunks, files = write_tensors(tmp_path, 0, rows)
    written = (tmp_path / "rank_0.bin").read_bytes()
    for chunk in chunks:
        tensor = live[chunk["key"]]
        own = written[chunk["offset"] : chunk["offset"] + chunk["length"]]
        assert (
            own == tensor.clone().view(torch.uint8).numpy().tobytes()
            and tensor.untyped_storage().resizable()
        )
    assert files == {"rank_0.bin": digest_of(tmp_path / "rank_0.bin")}
    writer = ShardWriter(tmp_path / "model.safetensors", [Entry("a", (7, 3), torch.float32)])
    writer.add("a", live["a"])
    writer.close()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], live["a"])
    assert live["a"].untyped_storage().resizable()


def test_wrong_paths_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run" / "checkpoints" / "global_step_1" / "policy").mkdir(parents=True)
    (tmp_path / "empty").mkdir()

    def said(*words: str) -> tuple[int, str]:
        code = main(["checkpoint", *words])
        return code, capsys.readouterr().err

    code, text = said("inspect", str(tmp_path / "nowhere"))
    assert code == 2 and "nowhere: no such folder; pass a run" in text
    code, text = said("verify", str(tmp_path / "empty"))
    assert code == 2 and "empty contains no checkpoint" in text
    code, text = said(
        "export", str(tmp_path / "run" / "checkpoints" / "global_step_1"), str(tmp_path / "out")
    )
    assert code == 1 and "is not a complete checkpoint: no manifest.json" in text
    (tmp_path / "run" / "checkpoints" / "latest.json").write_text(
        json.dumps({"folder": "global_step_9"})
    )
    code, text = said("inspect", str(tmp_path / "run"))
    assert code == 2 and "global_step_9: no such folder" in text
    code, text = said("import", str(tmp_path / "empty"), str(tmp_path / "out"))
    assert code == 2 and "is not a Hugging Face folder" in text
    with pytest.raises(SystemExit):
        said("export", "a", "b", "--max-shard-size", "many")
    assert "expected a size such as 500M or 4Gi" in capsys.readouterr().err


@pytest.mark.slow
def test_help_imports_nothing_that_takes_long_and_the_tools_no_torch() -> None:
    code = (
        "import sys; from hybridflow.cli.main import parse\ntry: parse(['checkpoint', 'export', '--help'])\nexcept "
        "SystemExit: pass\n"
        "found = {'numpy', 'pyarrow', 'xxhash', 'omegaconf', 'hydra', 'ray', 'transformers'} & set(sys.modules)\n"
        "assert not found, found\n"
        # nor do inspect and verify need it
        "import hybridflow.saving.tools\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--max-shard-size" in done.stdout, done.stderr
