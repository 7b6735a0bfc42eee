"""Megatron's layers on a GPU give what they give on a CPU, and all that is offloaded comes back
byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.lane import KIND, needs_gpu, needs_transformer_engine, on

pytestmark = needs_gpu
MODELS = ("TINY", "DENSE", "LLAMA", "DEEPSEEK")


@pytest.mark.parametrize("hf", MODELS)
def test_torchs_layers_compute_what_a_cpu_computes(hf: str) -> None:
    arguments = {"hf": hf, "dtype": "float32", "torch_modules": True}
    np.testing.assert_allclose(
        on(KIND, "scores", **arguments), on("cpu", "scores", **arguments), atol=1e-4
    )


@needs_transformer_engine
@pytest.mark.parametrize("hf", MODELS)
def test_transformer_engines_layers_compute_what_torchs_do(hf: str) -> None:
    mine, theirs = (
        np.array(on(KIND, "scores", hf=hf, dtype="bfloat16", torch_modules=plain))
        for plain in (False, True)
    )
    assert np.abs(mine - theirs).mean() < 2e-2


def test_what_is_offloaded_leaves_the_gpu_and_comes_back() -> None:
    found = on(KIND, "offloaded", hf="TINY")
    assert found["after"] == found["before"]
    assert found["held"] - found["away"] >= 0.9 * found["freed"] > 0
