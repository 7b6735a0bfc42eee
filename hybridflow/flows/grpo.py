"""Group-relative policy optimisation (arXiv 2402.03300). Also used with all other estimators that
need no critic.
"""

from __future__ import annotations

from hybridflow.flows.base import Run, flow


@flow("grpo", roles=("policy", "reference", "reward_model", "teacher"))
async def grpo(run: Run) -> None:
    """Train the policy on advantages that compare each sample with the other samples for its
    prompt.
    """
    async for _ in run.steps():
        batch = await run.samples()
        batch = await run.all(
            run.reward_model.scores(batch),
            run.policy.log_probs(batch),
            run.reference.log_probs(batch),
            run.teacher.log_probs(batch),
        )
        batch = run.advantages(batch)
        await run.policy.update(batch)
        await run.sync()
