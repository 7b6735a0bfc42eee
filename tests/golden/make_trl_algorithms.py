"""Writes `trl_algorithms.json`: what TRL 1.16.0 answers for off-policy sequence masks, VESPO's weights and tokens of
high entropy, in float64 on the batches of `drawn`.

Needs the peer beside torch and transformers: `pip install --no-deps --target PEER trl==1.16.0 accelerate datasets
pandas python-dateutil pytz tzdata six multiprocess dill xxhash`, then
`PYTHONPATH=.:PEER python tests/golden/make_trl_algorithms.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from trl.trainer.grpo_trainer import GRPOTrainer

from tests.golden.algorithm_inputs import CASES, TRL_OPTIONS, Case, drawn

OUT = Path(__file__).with_name("trl_algorithms.json")


def answers(case: Case) -> dict[str, Any]:
    """TRL's answers for a batch: rows that are kept, their weights, and tokens of high entropy."""
    mask, new, old = case.padded(case.mask.double()), case.padded(case.new), case.padded(case.old)
    advantages = case.by_row()[:, None]
    kept = GRPOTrainer.get_off_policy_mask(advantages, new, case.padded(case.rollout), mask, TRL_OPTIONS["most"])
    ratio = (new - old) * mask
    weights = {
        str(k_neg): GRPOTrainer.get_gamma_weights(advantages, ratio, mask, None, k_neg=k_neg)[:, 0].tolist()
        for k_neg in TRL_OPTIONS["k_neg"]
    }
    trainer = SimpleNamespace(accelerator=Accelerator(cpu=True))
    high = GRPOTrainer.get_high_entropy_mask(trainer, -new, mask, 1 - TRL_OPTIONS["share"])
    rows = [row[:length].tolist() for row, length in zip(high, case.lengths.tolist(), strict=True)]
    return {"kept": kept[:, 0].bool().tolist(), "weights": weights, "high": [one for row in rows for one in row]}


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    found = [answers(drawn(seed)) for seed in range(CASES)]
    OUT.write_text(json.dumps({"peer": "TRL 1.16.0", "cases": found}, separators=(",", ":")) + "\n")
