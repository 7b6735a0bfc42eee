"""The stand-ins for CUDA must not change what torch does elsewhere in the same process."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import hybridflow.mcore.bootstrap
import torch
with torch.device("meta"):
    made = [torch.empty(2), torch.arange(3), torch.zeros(2), torch.full((2,), 1.0), torch.ones(2), torch.tensor([1])]
print({tensor.device.type for tensor in made}, torch.empty(1, device="cuda").device.type)
"""


@pytest.mark.slow
def test_a_device_context_still_reaches_every_factory() -> None:
    """transformers builds models under `torch.device("meta")`; factories that escape it leave
    buffers uninitialised."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert found.stdout.split("\n")[-2] == "{'meta'} cpu"
