"""The same update by transformers on the same device: bfloat16, its own attention, gradient
checkpointing and torch's fused AdamW. Weights and moments are in bfloat16, which is less than a
trainer keeps: its memory is a lower bound."""

from __future__ import annotations

from typing import Any

import torch

from hybridflow.device.platform import Platform
from hybridflow.models.published import published
from tests import models
from tests.gpu.measure import DEVICE, REHEARSAL, result
from tests.gpu.train_step import SEQUENCES, best_seconds


def main() -> None:
    """Print seconds and memory of an update of 4 sequences, half of each a response."""
    from transformers import AutoConfig, AutoModelForCausalLM

    hf, tokens = (models.DENSE, 128) if REHEARSAL else (published("qwen3-0.6b"), 16384)
    named: dict[str, Any] = {
        name: value for name, value in dict(hf).items() if name != "model_type"
    }
    config = AutoConfig.for_model(dict(hf)["model_type"], **named)
    platform = Platform.detect()
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    length = tokens // SEQUENCES
    ids = torch.randint(2, config.vocab_size, (SEQUENCES, length), device=DEVICE)
    labels = ids.clone()
    labels[:, : length // 2] = -100  # prompts

    def update() -> None:
        model(input_ids=ids, labels=labels, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    platform.reset_peak_memory()
    took = best_seconds(update, 1 if REHEARSAL else 3)
    result(
        {
            "seconds": took,
            "tokens_per_s": tokens / took,
            "peak_memory_GB": platform.peak_memory_bytes() / 1e9,
        }
    )


if __name__ == "__main__":
    main()
