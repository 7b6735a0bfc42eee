"""The libraries of the GPU lock can be imported on this machine; prints their versions and the device."""

from __future__ import annotations

import importlib
import json

import torch

from hybridflow.device.platform import Platform

NAMES = ("megatron.core", "sgl_kernel", "sglang", "flashinfer", "triton")

if __name__ == "__main__":
    Platform.detect().set_device(0)
    versions = {name: str(getattr(importlib.import_module(name), "__version__", "?")) for name in NAMES}
    ones = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    assert float((ones @ ones)[0, 0]) == 1024.0
    capability = Platform("cuda").capability()
    print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "capability": capability, **versions}))
