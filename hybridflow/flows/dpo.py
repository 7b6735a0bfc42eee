"""Training on preferences between two answers (DPO, arXiv 2305.18290; IPO, KTO). The answers are
recorded pairs or sampled from the policy.
"""

from __future__ import annotations

from hybridflow.flows.base import Run, flow


@flow("dpo", roles=("policy", "reference", "reward_model"))
async def dpo(run: Run) -> None:
    """Raise the probability of the better answer in each pair, relative to the reference."""
    async for _ in run.steps():
        batch = await run.samples()
        batch = await run.all(
            run.reward_model.scores(batch),
            run.policy.log_probs(batch),
            run.reference.log_probs(batch),
        )
        batch = run.advantages(batch)
        await run.policy.update(batch)
        await run.sync()
