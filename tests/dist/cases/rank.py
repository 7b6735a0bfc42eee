"""What ranks do in the tests of `run_ranks` itself."""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def described() -> dict[str, Any]:
    """What a rank finds: its place in the system, and everything that forks of one process could
    share by mistake."""
    rank = os.environ["RANK"]
    found: dict[str, Any] = {
        "environment": {
            name: os.environ.get(name)
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "OF_THE_TEST")
        },
        "inherited": subprocess.run(
            ["printenv", "RANK"], capture_output=True, text=True, check=True
        ).stdout.strip()
        == rank,
        "folder": str(Path.cwd()),
        "leads_its_session": os.getsid(0) == os.getpid(),
        "files": sorted(
            os.readlink(f"/proc/self/fd/{number}")
            for number in os.listdir("/proc/self/fd")
            if _is_open(number)
        ),
        "signals": [
            str(signal.getsignal(number))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD)
        ],
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "threads": len(os.listdir("/proc/self/task")),
        "random": random.random(),
        "hash": hash("a name"),
        "loaded": [
            name
            for name in ("numpy", "torch", "megatron.core", "transformers")
            if name in sys.modules
        ],
    }
    if "numpy" in sys.modules:
        found["numpy"] = float(sys.modules["numpy"].random.random())
    if "torch" in sys.modules:
        found["torch"] = float(sys.modules["torch"].rand(1, dtype=sys.modules["torch"].float64))
    return found


def _is_open(number: str) -> bool:
    return Path(f"/proc/self/fd/{number}").is_symlink()  # the listing's own is gone by now


def of_megatron() -> dict[str, Any]:
    """What loading Megatron must have left alone."""
    importlib.import_module("hybridflow.mcore.policy")  # before anything of megatron
    import torch
    from megatron.core import parallel_state

    return described() | {
        "threads_of_torch": torch.get_num_threads(),
        "groups": torch.distributed.is_initialized()
        or parallel_state.model_parallel_is_initialized(),
        "default": (
            str(torch.get_default_dtype()),
            str(torch.get_default_device()),
            torch.is_grad_enabled(),
        ),
        "compiles": (os.environ.get("TORCH_COMPILE_DISABLE"), not torch._dynamo.config.disable),
    }


def mixed(folder: str) -> str:
    """Rank 0 returns, rank 1 fails, rank 2 ends itself, rank 3 waits for ever with a child that
    does so too."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        raise ValueError("what went wrong")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 3:
        child = subprocess.Popen(["sleep", "1000"])
        Path(folder, "child").write_text(str(child.pid))
        time.sleep(1000)
    return "fine"


def stay(folder: str) -> None:
    """Say who this is, then wait."""
    Path(folder, os.environ["RANK"]).write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(1000)
