"""Supervised learning on the policy's best answers (RAFT, arXiv 2304.06767; rejection sampling in
Llama 2, arXiv 2307.09288, section 3.2.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.keys import NonNegativeInt
from hybridflow.flows.base import Run, flow


@dataclass(frozen=True)
class Options:
    """Options for selecting answers to train on: at most `best` per prompt (0 means all), with a
    reward above `threshold`."""

    threshold: float = 0.0
    best: NonNegativeInt = 1


@flow(
    "rejection",
    roles=("policy", "reference", "reward_model"),
    options=Options,
    policy_losses=("reinforce",),
)
async def rejection(run: Run) -> None:
    """Minimize the mean negative log-likelihood of the tokens in the chosen answers."""
    async for _ in run.steps():
        batch = await run.samples()
        batch = await run.all(
            run.reward_model.scores(batch),
            run.policy.log_probs(batch),
            run.reference.log_probs(batch),
        )
        batch = run.advantages(batch)  # its rewards select the answers
        rows = chosen(batch, run.options)
        run.record(chosen=float(rows.mean()))
        if not rows.any():
            continue
        lengths = batch.lengths("response_ids")
        ones = Jagged.from_lengths(np.ones(lengths.sum(), np.float32), lengths)
        batch = run.leave_out(batch, ~rows).with_columns(advantages=ones)
        await run.policy.update(batch)
        await run.sync()


def chosen(batch: DataProto, options: Options) -> np.ndarray:
    """Return [B] bool: True for rows to train on. Ties go to the first row. Rows whose tokens are
    all masked are never chosen."""
    uid = batch["uid"]
    mask = batch.jagged("response_mask")
    sums = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])
    counts = sums[mask.offsets[1:]] > sums[mask.offsets[:-1]]
    rewards = np.where(counts, batch["rewards"], -np.inf)
    order = np.lexsort((-rewards, uid))  # sorted by prompt, best row first
    _, first, group = np.unique(uid[order], return_index=True, return_inverse=True)
    rank = np.empty(len(uid), np.int64)
    rank[order] = np.arange(len(uid)) - first[group]
    return (rewards > options.threshold) & ((rank < options.best) | (options.best == 0))
