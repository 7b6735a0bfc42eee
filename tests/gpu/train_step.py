"""Updates at the shape of Qwen3 0.6B: tokens a second, and the share of the matrix peak, as one line of JSON."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

import torch

from hybridflow.config.schema import OptimConfig
from hybridflow.device.platform import Platform
from hybridflow.models.published import published
from hybridflow.planning.devices import DEVICES
from hybridflow.planning.sizes import decoder_of
from hybridflow.planning.training import Cut, Training
from hybridflow.process.secret import VARIABLE, job_secret
from tests.dist.harness.policies import policy_of

PRODUCT = 8192


def measure(hf: Mapping[str, Any], dtype: str, tokens: int, product: int, rounds: int = 5) -> dict[str, float]:
    """The best of `rounds` updates of 4 sequences of `tokens` tokens in all, beside the best product of squares."""
    import numpy as np

    from hybridflow.batch import DataProto, Jagged
    from hybridflow.workers.losses import sft_loss

    platform, half = Platform.detect(), tokens // 2
    policy = policy_of({}, dict(hf), std=0.02, dtype=dtype, recompute="full")
    policy.set_optimizer(OptimConfig())
    ids = np.random.default_rng(0).integers(2, int(hf["vocab_size"]), (2, half))
    names = ("prompt_ids", "response_ids")
    batch = DataProto.from_columns(
        {name: Jagged.from_lengths(values, [half // 4] * 4) for name, values in zip(names, ids, strict=True)}
    )
    square = torch.randn(product, product, device=platform.current_device(), dtype=getattr(torch, dtype))

    def seconds(work: Any) -> float:
        platform.synchronize()
        started = time.perf_counter()
        work()
        platform.synchronize()
        return time.perf_counter() - started

    def step() -> None:
        policy.train_mini_batch(batch, sft_loss, columns=(), max_tokens=tokens, temperature=1.0, with_entropy=False)

    steps, products = ([seconds(work) for _ in range(rounds + 2)][2:] for work in (step, lambda: square @ square))
    flops = Training(decoder_of(hf), Cut(1), DEVICES["H100"]).flops(tokens, tokens / 4)
    reached, peak = flops / min(steps) / 1e12, 2 * product**3 / min(products) / 1e12
    return {
        "tokens_per_s": tokens / min(steps),
        "tflops": reached,
        "product_tflops": peak,
        "share": reached / peak,
        "peak_memory_gb": platform.peak_memory_bytes() / 1e9,
    }


if __name__ == "__main__":
    os.environ.setdefault(VARIABLE, job_secret())
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    Platform.detect().set_device(0)
    found = measure(published("qwen3-0.6b"), "bfloat16", 16384, PRODUCT)
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))
    assert found["share"] > 0.05, "an update reaches less than a twentieth of a matrix product's speed"
