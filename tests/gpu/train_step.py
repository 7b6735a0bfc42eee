"""An update at the shape of a published model: its batch, its step, and its share of a matrix
product's speed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hybridflow.config.schema import OptimConfig
from hybridflow.device.platform import Platform
from hybridflow.planning.devices import DEVICES
from hybridflow.planning.sizes import decoder_of
from hybridflow.planning.training import Cut, Training
from hybridflow.process.secret import VARIABLE, job_secret
from tests.dist.harness.policies import policy_of

SEQUENCES = 4


def alone() -> None:
    """Be a world of one rank."""
    os.environ.setdefault(VARIABLE, job_secret())
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29577",
    }
    Platform.detect().set_device(0)


def update_of(hf: Mapping[str, Any], dtype: str, tokens: int) -> Callable[[], None]:
    """A function that makes one update: 4 sequences of `tokens` tokens in all, half of each a
    response."""
    import numpy as np

    from hybridflow.batch import DataProto, Jagged
    from hybridflow.workers.losses import sft_loss

    policy = policy_of({}, dict(hf), std=0.02, dtype=dtype, recompute="full")
    policy.set_optimizer(OptimConfig())
    ids = np.random.default_rng(0).integers(2, int(hf["vocab_size"]), (2, tokens // 2))
    names = ("prompt_ids", "response_ids")
    batch = DataProto.from_columns(
        {
            name: Jagged.from_lengths(values, [tokens // 2 // SEQUENCES] * SEQUENCES)
            for name, values in zip(names, ids, strict=True)
        }
    )

    def update() -> None:
        policy.train_mini_batch(
            batch, sft_loss, columns=(), max_tokens=tokens, temperature=1.0, with_entropy=False
        )

    return update


def flops_of(hf: Mapping[str, Any], tokens: int) -> float:
    """Operations of an update, without those of recomputation."""
    return Training(decoder_of(hf), Cut(1), DEVICES["H100"]).flops(tokens, tokens / SEQUENCES)


def best_seconds(work: Callable[[], Any], rounds: int) -> float:
    """The shortest of some rounds, after two that warm up."""
    platform = Platform.detect()

    def once() -> float:
        platform.synchronize()
        started = time.perf_counter()
        work()
        platform.synchronize()
        return time.perf_counter() - started

    return min([once() for _ in range(rounds + 2)][2:])


def product_flops(side: int, dtype: str, rounds: int) -> float:
    """Operations a second of a product of two squares."""
    square = torch.randn(
        side, side, device=Platform.detect().current_device(), dtype=getattr(torch, dtype)
    )
    return 2 * side**3 / best_seconds(lambda: square @ square, rounds)


def measure(
    hf: Mapping[str, Any], dtype: str, tokens: int, product: int, rounds: int = 5
) -> dict[str, float]:
    """The best of `rounds` updates beside the best product of squares."""
    platform = Platform.detect()
    platform.reset_peak_memory()
    took = best_seconds(update_of(hf, dtype, tokens), rounds)
    memory = platform.peak_memory_bytes()
    reached = flops_of(hf, tokens) / took
    peak = product_flops(product, dtype, rounds)
    return {
        "seconds": took,
        "tokens_per_s": tokens / took,
        "TFLOP_s": reached / 1e12,
        "product_TFLOP_s": peak / 1e12,
        "share": reached / peak,
        "peak_memory_GB": memory / 1e9,
    }
