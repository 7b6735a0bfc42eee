"""One optimizer step of a few layers of Qwen3-30B-A3B's shape in bf16 on one GPU: tokens a second, share of the matrix
peak, peak memory.

`make bench NAME=train_step`. The limit is a large bf16 matrix product, timed in turns with the steps. Without a GPU no
figure is taken and nothing is written. `ARGS=--rehearse` runs a tiny model on whatever device there is, to see that the
command works.
"""

from __future__ import annotations

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hybridflow.batch import DataProto, Jagged
from hybridflow.bench.measurements.base import interleaved
from hybridflow.device.platform import Platform
from support.pool import free_port
from support.report import Figure, median, write

ROUNDS = 7
# config.json of Qwen/Qwen3-30B-A3B with 4 of its 48 layers
MODEL: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
}
REHEARSAL = {
    **MODEL,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
    "num_hidden_layers": 2,
}


def build(platform: Platform, model: dict[str, Any]) -> Any:
    """Policy with optimizer, on one rank; weights are random."""
    from hybridflow.config.schema import OptimConfig, ParallelConfig
    from hybridflow.mcore import parallel
    from hybridflow.mcore.policy import Policy
    from hybridflow.models import family_of
    from hybridflow.models.weights import RandomWeights

    platform.set_device(0)
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    config = ParallelConfig()
    parallel.initialize(config, seed=1, backend=platform.collective_backend, timeout_s=300)
    family = family_of(model)
    policy = Policy(family, config, "bfloat16", RandomWeights(family.tensors(), 1, 0.02))
    policy.set_optimizer(OptimConfig())
    return policy


def batch_of(sequences: int, tokens: int, vocab: int) -> DataProto:
    """Sequences of one length, half prompt, half response."""
    ids = np.random.default_rng(0).integers(2, vocab, (2, sequences * tokens // 2))
    lengths = [tokens // 2] * sequences
    return DataProto.from_columns(
        {"prompt_ids": Jagged.from_lengths(ids[0], lengths), "response_ids": Jagged.from_lengths(ids[1], lengths)}
    )


def matrix_flops(model: dict[str, Any], sequences: int, tokens: int) -> float:
    """Operations of all matrix products of a forward and a backward pass (three times the forward's), with causal
    attention counted as half.

    A token goes through its own experts alone; the head's products are those of response tokens.
    """
    hidden, heads, groups, width = (
        model[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    attention = hidden * width * (heads + 2 * groups) + heads * width * hidden
    experts = model["num_experts_per_tok"] * 3 * hidden * model["moe_intermediate_size"] + hidden * model["num_experts"]
    scores = 2 * heads * width * tokens / 2
    layers = model["num_hidden_layers"] * (attention + experts + scores)
    head = hidden * model["vocab_size"] / 2
    return 3 * 2 * sequences * tokens * (layers + head)


def product(platform: Platform, size: int) -> Callable[[], None]:
    """The limit: one bf16 product of square matrices."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=platform.device()) for _ in range(2))

    def run() -> None:
        for _ in range(10):
            left @ right
        platform.synchronize()

    return run


def measure(platform: Platform, model: dict[str, Any], sequences: int, tokens: int, size: int) -> list[Figure]:
    """All figures."""
    from hybridflow.workers.losses import sft_loss

    policy, batch = build(platform, model), batch_of(sequences, tokens, model["vocab_size"])

    def step() -> None:
        budget = sequences * tokens
        policy.train_mini_batch(batch, sft_loss, columns=(), max_tokens=budget, temperature=1.0, with_entropy=False)
        platform.synchronize()

    step()
    platform.reset_peak_memory()
    times = {
        name: median(values)
        for name, values in interleaved({"step": step, "product": product(platform, size)}, ROUNDS, 2).items()
    }
    peak = 10 * 2 * size**3 / times["product"]
    reached = matrix_flops(model, sequences, tokens) / times["step"]
    name = f"{model['num_hidden_layers']} layers of Qwen3-30B-A3B, {sequences} x {tokens} tokens, bf16"
    return [
        Figure(f"{name}: step", times["step"], "s"),
        Figure(f"{name}: rate", sequences * tokens / times["step"], "tokens/s"),
        Figure(f"{name}: matrix products", reached / 1e12, "TFLOP/s", limit=peak / 1e12, share=reached / peak),
        Figure(
            f"{name}: peak memory", platform.peak_memory_bytes() / 1e9, "GB", limit=platform.total_memory_bytes() / 1e9
        ),
    ]


def main() -> None:
    """Measure on a GPU; say so where there is none."""
    if sys.argv[1:] == ["--rehearse"]:
        for figure in measure(Platform.detect(), REHEARSAL, 4, 32, 256):
            print(
                f"rehearsal of a tiny model, not a figure: {figure.metric.partition(': ')[2]} {figure.value:.4g} "
                f"{figure.unit}"
            )
        return
    platform = Platform.detect()
    if platform.kind != "cuda":
        print("no CUDA device here: no figure was taken, benchmarks/results is as it was")
        return
    figures = measure(platform, MODEL, 8, 4096, 8192)
    write("train_step", figures, {"model": MODEL, "device": torch.cuda.get_device_name(), "rounds": ROUNDS})


if __name__ == "__main__":
    main()
