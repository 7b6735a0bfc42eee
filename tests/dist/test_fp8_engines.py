"""Slices in block-wise fp8 into real SGLang engines. On a CPU these load and do not compute, so
their weights are compared, byte for byte.

The oracle is SGLang itself: its checksum after it has loaded a folder in which whole tensors were
quantised, block after block, by plain code that knows nothing of plans. A token would come from
Triton's kernel (sglang/srt/layers/quantization/fp8_utils.py:1809), which has no driver here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file

from hybridflow.models.fp8 import BlockQuantisation
from tests.dist.harness.sync_senders import tensors_of
from tests.dist.harness.sync_world import SyncWorld
from tests.engine_weights import load_weights_from_disk, weights_checksum
from tests.models import FP8_MOE
from tests.unit.reshard.fp8_cases import forms_of

pytestmark = [pytest.mark.slow, pytest.mark.full]
FP8 = BlockQuantisation((8, 8))


def quantised_folder(world: SyncWorld, seed: int, folder: Path) -> Path:
    """What a checkpoint in fp8 of the seed's weights holds."""
    forms = forms_of(
        {name: tensor.numpy() for name, tensor in tensors_of(world.model, seed).items()}, FP8
    )
    written = {
        name: tensor.bfloat16().contiguous() for name, tensor in forms["plain"].items()
    } | forms["fp8"]
    folder.mkdir()
    save_file(written, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(world.hf_config))
    return folder


def test_engines_in_fp8_hold_what_a_cold_start_from_a_quantised_checkpoint_loads(
    tmp_path: Path,
) -> None:
    world = SyncWorld(
        FP8_MOE,
        {"ranks": 4, "tensor": 2, "pipeline": 2, "expert": 2},
        [1, {"tensor": 2, "expert": 2}],
        tmp_path,
        FP8,
    )
    try:
        assert "no unused tensors" in world.plan_line
        for seed in (1, 2):
            assert world.sync(world.train(seed)).stale == {}
            streamed = [weights_checksum(world.client(number)) for number in range(2)]
            folder = quantised_folder(world, seed, tmp_path / f"fp8-{seed}")
            for number in range(2):
                client = world.client(number, 60.0)
                load_weights_from_disk(client, str(folder))
                assert weights_checksum(client) == streamed[number], (seed, number)
    finally:
        world.close()
