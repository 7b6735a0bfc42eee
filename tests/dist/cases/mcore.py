"""What each rank does in the tests of the Megatron backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import OptimConfig
from tests.dist.harness.policies import batch_of, policy_of, share_of

TOP = 5


def log_probs_and_export(
    parallel: dict[str, Any], hf: dict[str, Any], folder: str, max_tokens: int
) -> Any:
    from hybridflow.mcore.hf_export import export
    from hybridflow.mcore.parallel import data_parallel_position

    policy = policy_of(parallel, hf)
    found = policy.log_probs(
        share_of(batch_of(12, 3)), max_tokens=max_tokens, temperature=0.7, with_entropy=True
    )
    top = policy.top_log_probs(
        share_of(batch_of(12, 3)), k=TOP, max_tokens=max_tokens, temperature=0.7
    )
    export(policy, Path(folder), hf, None)
    if not data_parallel_position()[2]:
        return None
    result = {
        "log_probs": found[0],
        "entropy": found[1],
        "top_values": top[0],
        "top_tokens": top[1],
    }
    assert all(
        (column.lengths == batch_of(12, 3)["response_ids"].lengths).all()
        for column in result.values()
    )
    return {name: column.values.tolist() for name, column in result.items()}


def move_expert_biases(
    parallel: dict[str, Any], hf: dict[str, Any], before: str, after: str, rate: float
) -> Any:
    """Export, one update with moving expert biases, export; then the frozen reference's log-probs
    before and after."""
    from hybridflow.mcore.hf_export import export
    from hybridflow.workers.losses import sft_loss

    policy = policy_of(parallel, hf, expert_bias_update_rate=rate)
    policy.set_optimizer(OptimConfig(lr=1e-3))
    policy.freeze_reference()
    export(policy, Path(before), hf, None)
    batch = batch_of(8, 0)
    log_probs = []
    for _ in range(2):
        with policy.as_reference():
            found = policy.log_probs(batch, max_tokens=4096, temperature=1.0, with_entropy=False)
        log_probs.append(found[0].values.tolist())
        policy.train_mini_batch(
            batch, sft_loss, columns=(), max_tokens=4096, temperature=1.0, with_entropy=False
        )
        if not Path(after).exists():
            export(policy, Path(after), hf, None)
    return log_probs


def log_probs_of_checkpoint(
    parallel: dict[str, Any],
    hf: dict[str, Any],
    checkpoint: str,
    prompts: list[list[int]],
    responses: list[list[int]],
) -> Any:
    """Load a checkpoint's weights into these ranks and score the responses; a list a response, on
    the rank that collects."""
    from hybridflow.mcore import checkpoint as checkpoints
    from hybridflow.mcore.parallel import data_parallel_position

    policy = policy_of(parallel, hf)
    checkpoints.load(policy, Path(checkpoint))
    batch = DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_rows(prompts, np.int64),
            "response_ids": Jagged.from_rows(responses, np.int64),
        }
    )
    found = policy.log_probs(batch, max_tokens=256, temperature=1.0, with_entropy=False)
    return (
        [found[0].row(i).tolist() for i in range(len(batch))]
        if data_parallel_position()[2]
        else None
    )


def unequal_loads(
    parallel: dict[str, Any], hf: dict[str, Any], rows: list[int], max_tokens: int
) -> dict[str, Any]:
    """Each data-parallel rank gets another number of rows: how many micro-batches it runs, and
    whether the pass goes through."""
    from hybridflow.mcore.parallel import data_parallel_position

    policy = policy_of(parallel, hf)
    batch = batch_of(rows[data_parallel_position()[0]], 3)
    count = len(policy._micro_batches(batch, max_tokens, ()))
    found = policy.log_probs(batch, max_tokens=max_tokens, temperature=1.0, with_entropy=False)
    return {"micro_batches": count, "rows": len(found[0]) if found else None}
