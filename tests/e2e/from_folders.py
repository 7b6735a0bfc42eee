"""Runs in one process from a model folder, and their log-probs against transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hybridflow.batch import DataProto
from hybridflow.config.load import load_config
from hybridflow.data.prepare import prepare
from tests.e2e.forked import ForkedRun
from tests.e2e.runs import REWARD, Run

RECIPE = """
defaults: [data: files, model: folder, actor: tiny, rollout: tiny, algorithm: grpo, cluster: in-process,
           trainer: smoke, reward: custom, sft: smoke, _self_]
model: {{path: {folder}/hf, dtype: float32}}
data:
  train_files: [{folder}/data/train.parquet]
  train_batch_size: 2
  max_prompt_length: 96
  max_response_length: 12
sft: {{train_files: [{folder}/data/sft.parquet]}}
rollout: {{n: 4}}
actor: {{optim: {{lr: 1.0e-3}}}}
reward: {{path: {folder}/reward.py}}
output_dir: {folder}/runs
"""


def train(folder: Path, name: str, *words: str) -> str:
    """One run in one process; what it printed."""
    recipe = ("--config-dir", str(folder), "--config-name", "published", f"name={name}")
    run_of = Run if "cluster=one-process" in words else ForkedRun
    with run_of(folder / "output", "train", *recipe, *words) as run:
        assert run.end(300) == 0, run.out + run.err
        return run.out


def prepared(folder: Path) -> Path:
    """Data, reward and recipe beside `folder`/hf."""
    prepare("arithmetic", folder / "data", None, load_config("e2e").data.prepare.options)
    (folder / "reward.py").write_text(REWARD)
    (folder / "published.yaml").write_text(RECIPE.format(folder=folder))
    return folder


@torch.no_grad()
def largest_difference(model: Any, batch: DataProto) -> float:
    """The largest difference between the responses' log-probs in transformers and in the
    trainer."""
    columns = [batch.jagged(name) for name in ("prompt_ids", "response_ids", "old_log_probs")]
    found = []
    for prompt, response, expected in zip(*columns, strict=True):
        ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
        log_probs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1].float(), dim=-1)
        mine = log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        found.append(float((mine - torch.from_numpy(expected.copy())).abs().max()))
    return max(found)
