"""Measures training steps on one rank, compared with bare matrix products."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from hybridflow.bench.measurements.base import Place, Yields, measurement, synchronized
from hybridflow.bench.result import measured
from hybridflow.bench.rounds import Side, Timed, repeated

# Layers with the proportions of Qwen3-30B-A3B, scaled down so that a step takes a tenth of a second
# on two cores.
MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "float32",
    "eos_token_id": 1,
    "pad_token_id": 0,
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
    "vocab_size": 1024,
}
SEQUENCES = 8
TOKENS = 64
PRODUCT = 512
PRODUCTS = 10


@measurement("training", "train", timeout_s=240, warm_up=3)
def training(place: Place) -> Yields:
    """supervised update of a small dense model: tokens per second, and fraction of this machine's
    peak matrix throughput"""
    import torch

    from hybridflow.device.platform import Platform
    from hybridflow.workers.losses import sft_loss

    platform = Platform.detect()
    left, right = torch.randn(2, PRODUCT, PRODUCT, device=platform.device())
    product = synchronized(repeated(lambda: left @ right, PRODUCTS))
    update = partial(
        _policy(platform).train_mini_batch,
        _batch(),
        sft_loss,
        columns=(),
        max_tokens=SEQUENCES * TOKENS,
        temperature=1.0,
        with_entropy=False,
    )
    step = synchronized(update)
    flops = _flops()
    # seconds of a step's matrix products
    limit = Side("bare products", product, scale=flops / (PRODUCTS * 2 * PRODUCT**3))
    calls = {"train/matrix products": step}
    yield Timed(calls, limit, amount=flops / 1e9, unit="GFLOP/s", bound=0.1)
    tokens = SEQUENCES * TOKENS
    yield Timed({"train/tokens": step}, amount=tokens, unit="tokens/s", better="none")
    if platform.kind == "cuda":
        yield measured("train/peak memory", "GB", platform.peak_memory_bytes() / 1e9)


def _policy(platform: Any) -> Any:
    """Return a randomly initialized policy and its optimizer on one rank."""
    from hybridflow.config.schema import ModelConfig, OptimConfig, RunConfig
    from hybridflow.process.rendezvous import world_of_one
    from hybridflow.workers.backend import open_backend

    world_of_one()
    platform.set_device(0)
    config = RunConfig(model=ModelConfig(dtype="float32"))
    policy = open_backend(config, MODEL, platform, 0)
    policy.set_optimizer(OptimConfig())
    return policy


def _batch() -> Any:
    """Return a batch of sequences that are half prompt, half response."""
    from hybridflow.batch import DataProto, Jagged

    random = np.random.default_rng(0)
    columns = {}
    for name in ("prompt_ids", "response_ids"):
        ids = random.integers(2, MODEL["vocab_size"], (SEQUENCES, TOKENS // 2))
        columns[name] = Jagged.from_rows(list(ids), np.int64)
    return DataProto.from_columns(columns)


def _flops() -> float:
    """Return the number of floating-point operations in the matrix products of an update, three
    times as many as in the forward pass.

    Causal attention is counted as half. The output head is counted only for response tokens.
    """
    from hybridflow.models import family_of
    from hybridflow.planning.sizes import layer_shapes

    each = float(MODEL["hidden_size"] * MODEL["vocab_size"])
    decoder: Any = family_of(MODEL)
    for layer in layer_shapes(decoder):
        each += layer.flops + layer.core * layer.pairs(TOKENS)
    return 3 * SEQUENCES * TOKENS * each
