"""ReMax (arXiv 2310.10505): the baseline is the score of the greedy answer."""

from __future__ import annotations

from hybridflow.flows.base import Run, flow


@flow("remax", roles=("policy", "reference", "reward_model", "teacher"))
async def remax(run: Run) -> None:
    """Train the policy on advantages relative to the greedy answer to each prompt."""
    async for _ in run.steps():
        batch = await run.samples(greedy=True)
        batch = await run.all(
            run.reward_model.scores(batch),
            run.policy.log_probs(batch),
            run.reference.log_probs(batch),
            run.teacher.log_probs(batch),
        )
        batch = run.advantages(batch)
        await run.policy.update(batch)
        await run.sync()
