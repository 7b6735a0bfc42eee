"""What this machine is, and how fast it copies and multiplies."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hybridflow.device.platform import Platform
from tests.gpu.measure import DEVICE, REHEARSAL, result, seconds

PACKAGES = (
    *(
        "torch",
        "triton",
        "transformers",
        "numpy",
        "pyarrow",
        "safetensors",
        "megatron-core",
        "hydra-core",
        "ray",
    ),
    *(
        "sglang",
        "sglang-kernel",
        "transformer-engine",
        "liger-kernel",
        "quack-kernels",
        "cut-cross-entropy",
    ),
)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _said(*words: str) -> str:
    """What a program prints; why not, where it cannot."""
    try:
        return subprocess.run(
            words, capture_output=True, text=True, check=False, timeout=10
        ).stdout.strip()[-400:]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def main() -> None:
    """Print what can be read, then measure."""
    query = "--query-gpu=name,driver_version,memory.total,compute_mode"
    shared = shutil.disk_usage("/dev/shm")
    found: dict[str, Any] = {
        "gpu": _said("nvidia-smi", query, "--format=csv,noheader"),
        "nvcc": _said("nvcc", "--version")[-80:],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "locked_memory_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shared_memory_MiB": shared.free >> 20,
    }
    result(found)
    if not REHEARSAL:
        os.environ["HYBRIDFLOW_PLATFORM"] = "cuda"
    device = Platform.detect()  # says why torch cannot use the GPU
    found["capability"] = device.capability()
    size, side = (1 << 20, 128) if REHEARSAL else (1 << 32, 8192)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    a, b = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    copied = seconds(lambda: target.copy_(source))
    multiplied = seconds(lambda: a @ b)
    found["copy_TB_s"] = 2 * size / copied / 1e12
    found["product_TFLOP_s"] = 2 * side**3 / multiplied / 1e12
    result(found)


if __name__ == "__main__":
    main()
