"""What transformers computes on an exported folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.dist.harness.policies import batch_of


def oracle(folder: Path, temperature: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Response log-probs, entropies and log-probs of the whole vocabulary by transformers, one
    sequence at a time.

    In float64, so that a difference is ours: two float32 results may each be half the bound from
    the exact one, and which way they round depends on the processor.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    batch = batch_of(12, 3)
    log_probs = []
    entropies = []
    wholes = []
    for i in range(len(batch)):
        prompt = batch["prompt_ids"].row(i)
        response = batch["response_ids"].row(i)
        ids = torch.from_numpy(np.concatenate([prompt, response]))
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1] / temperature
        distribution = logits.log_softmax(-1)
        log_probs.append(distribution.gather(-1, torch.tensor(response)[:, None])[:, 0].numpy())
        entropies.append(-(distribution.exp() * distribution).sum(-1).numpy())
        wholes.append(distribution.numpy())
    return np.concatenate(log_probs), np.concatenate(entropies), np.concatenate(wholes)
