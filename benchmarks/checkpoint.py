"""An asynchronous checkpoint of half a gigabyte: how long training stands still, and how fast the files are written.

The peers are the machine's own: a clone of the same tensors, and plain `write` and `fsync` of the same bytes to the
same file system.
"""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from support.report import Figure, median, write

ROUNDS = 7
MODEL = {
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "vocab_size": 8192,
}


def build_policy() -> Any:
    """Weights, reference and two moments in fp32, on one rank."""
    from hybridflow.config.schema import OptimConfig, ParallelConfig
    from hybridflow.mcore import parallel
    from hybridflow.mcore.policy import Policy
    from hybridflow.models import family_of
    from hybridflow.models.weights import RandomWeights

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    config = ParallelConfig()
    parallel.initialize(config, seed=1, backend="gloo", timeout_s=60)
    family = family_of(MODEL)
    policy = Policy(family, config, "float32", RandomWeights(family.tensors(), 1, 0.02))
    policy.set_optimizer(OptimConfig())
    policy.freeze_reference()
    return policy


def plain_write(tensors: Sequence[torch.Tensor], file: Path) -> None:
    """The limit: the bytes as they are, in one file, on the disk."""
    with file.open("wb", buffering=0) as stream:
        for tensor in tensors:
            stream.write(memoryview(tensor.numpy().reshape(-1)).cast("B"))
        os.fsync(stream.fileno())
    file.unlink()


def rounds(folder: Path) -> tuple[dict[str, list[float]], int]:
    """Seconds of each side, interleaved in an order that turns, and the bytes of the state."""
    from hybridflow.mcore.checkpoint import Saver
    from hybridflow.mcore.sharded_state import ShardedState

    policy = build_policy()
    saver, state = Saver(policy), [tensor.data for tensor in ShardedState(policy).owned()]
    contiguous = [tensor.contiguous() for tensor in state]
    seconds: dict[str, list[float]] = {"stall": [], "clone": [], "save": [], "plain": []}

    def note(name: str, start: float, turn: int) -> None:
        if turn:  # the first round maps the staging memory and fills caches
            seconds[name].append(time.perf_counter() - start)

    def save(turn: int) -> None:
        start = time.perf_counter()
        saver.start(folder / "save")
        note("stall", start, turn)
        saver.wait(600)
        note("save", start, turn)
        shutil.rmtree(folder / "save")

    def clone(turn: int) -> None:
        start = time.perf_counter()
        copies = [tensor.clone() for tensor in state]
        note("clone", start, turn)
        del copies

    def plain(turn: int) -> None:
        start = time.perf_counter()
        plain_write(contiguous, folder / "plain")
        note("plain", start, turn)

    sides = [save, clone, plain]
    for turn in range(ROUNDS + 1):
        for side in sides[turn % 3 :] + sides[: turn % 3]:
            side(turn)
    return seconds, sum(tensor.nbytes for tensor in state)


def main() -> None:
    """Both figures; files go to the current folder's file system."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        seconds, size = rounds(Path(folder).resolve())
    middle = {name: median(values) for name, values in seconds.items()}
    label = f"of {size / 1e9:.2f} GB"
    stall = [ours / theirs for ours, theirs in zip(seconds["stall"], seconds["clone"], strict=True)]
    figures = [
        Figure(
            f"training stall of a background save {label}",
            middle["stall"],
            "s",
            "a clone of the same tensors",
            middle["clone"],
            middle["clone"] / middle["stall"],
            middle["clone"],
            middle["clone"] / middle["stall"],
        ),
        Figure("stall over clone, worst round", max(stall), "x", limit=1.2),
        Figure(
            f"save to fsynced files with hashes and manifest, {label}",
            size / middle["save"] / 1e9,
            "GB/s",
            "plain write and fsync of the same bytes",
            size / middle["plain"] / 1e9,
            middle["plain"] / middle["save"],
            size / middle["plain"] / 1e9,
            middle["plain"] / middle["save"],
        ),
    ]
    write(
        "checkpoint",
        figures,
        {"bytes": size, "rounds": ROUNDS, "statistic": "median", "world": 1, "file_system": "that of the folder"},
    )
    if middle["stall"] > 1.2 * middle["clone"]:
        raise SystemExit(f"the stall is {middle['stall'] / middle['clone']:.2f} times a clone; at most 1.2 is promised")


if __name__ == "__main__":
    main()
