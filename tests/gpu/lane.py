"""Where the ranks of the checks run: on the GPU, or in a rehearsal (`make gpu ARGS=--rehearse`) on
the CPU."""

from __future__ import annotations

import os
from importlib.metadata import distributions
from typing import Any

import pytest

from hybridflow.device.platform import Kind, Platform
from tests.dist.harness.ranks import MEGATRON, NOTHING, run_ranks

REHEARSAL = "HYBRIDFLOW_GPU_REHEARSAL" in os.environ
KIND: Kind = "cpu" if REHEARSAL else "cuda"
# a process that has looked for CUDA devices cannot be forked
LOADED = MEGATRON if REHEARSAL else NOTHING
needs_gpu = pytest.mark.skipif(Platform.detect().kind != KIND, reason="needs a GPU")
needs_transformer_engine = pytest.mark.skipif(
    not any(distributions(name="transformer-engine")), reason="needs Transformer Engine"
)


def on(platform: Kind, function: str, **arguments: Any) -> Any:
    """What `tests.gpu.cases:FUNCTION` returns on one rank of this kind."""
    return run_ranks(
        1, f"tests.gpu.cases:{function}", loaded=LOADED, platform=platform, **arguments
    )[0]
