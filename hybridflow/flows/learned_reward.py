"""A reward model trained alongside the policy, on pairs of the policy's own answers ranked by the
verifier's scores (iterated online reward models, arXiv 2204.05862, section 4.5)."""

from __future__ import annotations

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.flows.base import Run, flow


@flow("learned_reward", roles=("policy", "reference", "reward_model"))
async def learned_reward(run: Run) -> None:
    """Score each step with the reward model before training the model on the step's pairs."""
    async for _ in run.steps():
        batch = await run.samples()
        batch = await run.all(
            run.reward_model.scores(batch),
            run.policy.log_probs(batch),
            run.reference.log_probs(batch),
        )
        batch = run.advantages(batch)
        best, worst = preferred(batch)
        run.record(pairs=float(len(best)))
        if len(best):
            run.record(ordered=float((batch["rm_scores"][best] > batch["rm_scores"][worst]).mean()))
            await run.reward_model.update(pairs_of(batch, best, worst))
        await run.policy.update(batch)
        await run.sync()


def preferred(batch: DataProto) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each prompt whose answers differ in score, one row with the highest score and one
    with the lowest. Ties go to the first row.
    """
    best, worst = list[int](), list[int]()
    scores = batch["scores"]
    for uid in np.unique(batch["uid"]):
        rows = np.flatnonzero(batch["uid"] == uid)
        high, low = rows[scores[rows].argmax()], rows[scores[rows].argmin()]
        if scores[high] > scores[low]:
            best.append(int(high))
            worst.append(int(low))
    return np.array(best, np.int64), np.array(worst, np.int64)


def pairs_of(batch: DataProto, chosen: np.ndarray, rejected: np.ndarray) -> DataProto:
    """Return one row per pair: prompt_ids, chosen_ids, rejected_ids."""
    return DataProto.from_columns(
        {
            "prompt_ids": batch.rows(chosen).jagged("prompt_ids"),
            "chosen_ids": batch.rows(chosen).jagged("response_ids"),
            "rejected_ids": batch.rows(rejected).jagged("response_ids"),
        }
    )
