"""Proximal policy optimisation with a critic (arXiv 1707.06347)."""

from __future__ import annotations

from hybridflow.flows.base import Run, flow


@flow("ppo", roles=("policy", "critic", "reference", "reward_model", "teacher"))
async def ppo(run: Run) -> None:
    """Train the policy and the critic on advantages that compare each token's return with the
    critic's value.
    """
    async for _ in run.steps():
        batch = await run.samples()
        batch = await run.all(
            run.reward_model.scores(batch),
            run.policy.log_probs(batch),
            run.reference.log_probs(batch),
            run.teacher.log_probs(batch),
            run.critic.values(batch),
        )
        batch = run.advantages(batch)
        # concurrently with the policy's update and the next generation, if it has separate devices
        run.later(run.critic.update(batch))
        await run.policy.update(batch)
        await run.sync()
