"""What each rank does in the tests of critics and reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import OptimConfig, ParallelConfig
from tests.dist.cases.gradient import with_mask
from tests.dist.harness.policies import batch_of, digest, share_of, weights_of


def _model(parallel: dict[str, Any], hf: dict[str, Any], head: str, bias: bool = False) -> Any:
    from hybridflow.mcore import parallel as groups
    from hybridflow.mcore.value_model import ValueModel
    from hybridflow.models import family_of
    from hybridflow.models.scalar_head import ScalarHead

    config = ParallelConfig(**parallel)
    family = ScalarHead(family_of(hf), head, bias)
    groups.initialize(config, seed=1, backend="gloo", timeout_s=180)
    return ValueModel(family, config, "float32", weights_of(family))


def outputs_and_export(
    parallel: dict[str, Any],
    hf: dict[str, Any],
    folder: str,
    task: str,
    bias: bool,
    max_tokens: int,
) -> Any:
    """Values and scores of random weights, and the model as a Hugging Face folder; once more from
    that folder."""
    from hybridflow.mcore.hf_export import export
    from hybridflow.mcore.parallel import data_parallel_position
    from hybridflow.models.weights import SafetensorsFolder

    model = _model(parallel, hf, head=task, bias=bias)
    export(model, Path(folder), model.family.hf, None)
    batch = batch_of(12, 3)
    found = model.values(batch, max_tokens=max_tokens), model.scores(batch, max_tokens=max_tokens)
    for parameter in (one for stage in model.stages for one in stage.parameters()):
        parameter.data.zero_()
    model.load_from(SafetensorsFolder(folder))
    again = model.values(batch, max_tokens=max_tokens)
    if not data_parallel_position()[2]:
        return None
    return {
        "values": found[0].values.tolist(),
        "scores": found[1].tolist(),
        "again": again.values.tolist(),
    }


def with_targets(batch: DataProto, seed: int) -> DataProto:
    """Returns and old values for every response token."""
    rng = np.random.default_rng(seed)
    offsets = batch.jagged("response_ids").offsets
    columns = {
        name: Jagged(rng.normal(size=offsets[-1]).astype(np.float32), offsets)
        for name in ("returns", "values")
    }
    return batch.with_columns(**columns)


def train(
    parallel: dict[str, Any],
    hf: dict[str, Any],
    pairs: bool,
    steps: int,
    max_tokens: int,
    masked: bool = False,
) -> Any:
    """Train on the same data; returns (loss, grad norm) a step, and a digest of the final weights
    in HF form.

    Args:
        masked: some response tokens are observations, whose returns and old values are NaN.
    """
    from hybridflow.config.schema import CriticConfig
    from hybridflow.mcore.parallel import data_parallel_position
    from hybridflow.workers.losses import PairLoss, ValueLoss

    model = _model(
        parallel, hf, head="ForSequenceClassification" if pairs else "ForTokenClassification"
    )
    model.set_optimizer(OptimConfig(lr=1e-2, weight_decay=0.1, adam_beta2=0.95, adam_eps=1e-3))
    value_loss = ValueLoss(CriticConfig(cliprange_value=0.3))
    history = []
    for step in range(steps):
        batch = with_targets(batch_of(8, step), step)
        batch = share_of(with_mask(batch) if masked else batch)
        if pairs:
            sums, info = model.train_pairs(batch, PairLoss(), max_tokens=max_tokens)
        else:
            sums, info = model.train_values(
                batch, value_loss, columns=value_loss.columns, max_tokens=max_tokens
            )
        pair = torch.tensor(sums.get("loss", (0.0, 0.0)), dtype=torch.float64)
        if not data_parallel_position()[2]:
            pair.zero_()
        dist.all_reduce(pair)
        history.append([float(pair[0] / pair[1]), info["grad_norm"]])
    return {"history": history, "digest": digest(model)}


def save_or_load(parallel: dict[str, Any], hf: dict[str, Any], folder: str, load: bool) -> Any:
    """Two steps of the critic and a checkpoint, or that checkpoint; then two more steps."""
    from hybridflow.config.schema import CriticConfig
    from hybridflow.mcore import checkpoint
    from hybridflow.workers.losses import ValueLoss

    model = _model(parallel, hf, head="ForTokenClassification")
    model.set_optimizer(
        OptimConfig(lr=1e-2, lr_decay_style="linear", lr_decay_steps=9, weight_decay=0.1)
    )
    loss = ValueLoss(CriticConfig())

    def steps(numbers: range) -> list[list[float]]:
        found = []
        for step in numbers:
            batch = share_of(with_targets(batch_of(8, step), step))
            _, info = model.train_values(batch, loss, columns=loss.columns, max_tokens=40)
            found.append([info["grad_norm"], info["lr"]])
        return found

    if load:
        checkpoint.load(model, Path(folder))
    else:
        steps(range(2))
        checkpoint.save(model, Path(folder))
    return {"history": steps(range(2, 4)), "digest": digest(model)}
