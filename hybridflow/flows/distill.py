"""On-policy distillation (arXiv 2306.13649): the policy learns a teacher's distribution at tokens
that the policy sampled."""

from __future__ import annotations

from hybridflow.flows.base import Run, flow


@flow("distill", roles=("policy", "reference", "teacher"))
async def distill(run: Run) -> None:
    """Train on the teacher's distribution; no reward enters the loss
    (`actor.distillation.task_rewards=false`)."""
    async for _ in run.steps():
        batch = await run.samples()
        batch = await run.all(
            run.policy.log_probs(batch),
            run.reference.log_probs(batch),
            run.teacher.log_probs(batch),
        )
        batch = run.advantages(batch)
        await run.policy.update(batch)
        await run.sync()
