"""Training steps of one rank next to bare matrix products."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from hybridflow.bench.measurements.base import Place, interleaved, measurement, rates
from hybridflow.bench.result import Metric, Reference

# Layers as Qwen3-30B-A3B's are in their proportions, so small that two cores do a step in a tenth of a second.
MODEL: dict[str, Any] = {
    "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 768, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "tie_word_embeddings": False, "max_position_embeddings": 1024, "vocab_size": 1024,
}  # fmt: skip
SEQUENCES, TOKENS, PRODUCT = 8, 64, 512


@measurement("training", "train", timeout_s=240)
def training(place: Place) -> Iterator[Metric]:
    """a supervised update of a small dense model: tokens a second, and its share of the matrix peak of this machine"""
    import torch

    from hybridflow.batch import DataProto, Jagged
    from hybridflow.config.schema import OptimConfig, ParallelConfig
    from hybridflow.device.platform import Platform
    from hybridflow.mcore import parallel
    from hybridflow.mcore.policy import Policy
    from hybridflow.models import family_of
    from hybridflow.models.weights import RandomWeights
    from hybridflow.process.secret import VARIABLE, job_secret
    from hybridflow.workers.losses import sft_loss

    platform, config = Platform.detect(), ParallelConfig()
    os.environ.setdefault(VARIABLE, job_secret())
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}  # one rank: nobody else has to find its store
    platform.set_device(0)
    parallel.initialize(config, seed=1, backend=platform.collective_backend, timeout_s=60)
    family = family_of(MODEL)
    policy = Policy(family, config, "float32", RandomWeights(family.tensors(), 1, 0.02))
    policy.set_optimizer(OptimConfig())
    half = SEQUENCES * TOKENS // 2
    ids = np.random.default_rng(0).integers(2, MODEL["vocab_size"], (2, half))
    columns = ("prompt_ids", "response_ids")
    lengths = [TOKENS // 2] * SEQUENCES
    batch = DataProto.from_columns(
        {name: Jagged.from_lengths(values, lengths) for name, values in zip(columns, ids, strict=True)}
    )
    left, right = (torch.randn(PRODUCT, PRODUCT, device=platform.device()) for _ in range(2))

    def step() -> None:
        policy.train_mini_batch(
            batch, sft_loss, columns=(), max_tokens=SEQUENCES * TOKENS, temperature=1.0, with_entropy=False
        )
        platform.synchronize()

    def product() -> None:
        for _ in range(10):
            left @ right
        platform.synchronize()

    found = interleaved({"step": step, "product": product}, warm_up=3)
    yield Metric("training", "train/tokens", "tokens/s", "none", rates(SEQUENCES * TOKENS, found["step"]))
    peak = Reference("bare products", rates(10 * 2 * PRODUCT**3 / 1e9, found["product"]))
    reached = rates(_flops() / 1e9, found["step"])
    yield Metric("training", "train/matrix products", "GFLOP/s", "higher", reached, peak, bound=0.1)
    if platform.kind == "cuda":
        yield Metric("training", "train/peak memory", "GB", "none", (platform.peak_memory_bytes() / 1e9,))


def _flops() -> float:
    """Operations of all matrix products of an update: three times the forward pass's, causal attention as half; the
    head's are those of response tokens."""
    hidden, heads, groups, width = (
        MODEL[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    attention = hidden * width * (heads + 2 * groups) + heads * width * hidden + heads * width * TOKENS
    layers = MODEL["num_hidden_layers"] * (attention + 3 * hidden * MODEL["intermediate_size"])
    return float(3 * 2 * SEQUENCES * TOKENS * (layers + hidden * MODEL["vocab_size"] / 2))
