"""A user's algorithm in a file of their own: Safe RLHF (arXiv 2310.12773, eq. 10 and 11) with one critic. The
reward model's score is the cost, whose mean a multiplier, learned by dual ascent, keeps at the limit."""

import hybridflow as hf

LIMIT = 0.0  # of the mean cost


@hf.flow("safe_rlhf", roles=("policy", "critic", "reference", "reward_model"))
async def safe_rlhf(run):
    async for _ in run.steps():
        batch = await run.samples()
        batch = await run.all(
            run.reward_model.scores(batch),
            run.policy.log_probs(batch),
            run.reference.log_probs(batch),
            run.critic.values(batch),
        )
        multiplier = run.state.get("multiplier", 1.0)
        cost = batch["rm_scores"]
        scores = (batch["scores"] - multiplier * cost) / (1.0 + multiplier)
        batch = batch.drop(["rm_scores"]).with_columns(scores=scores.astype("float32"))
        run.state["multiplier"] = max(0.0, multiplier + 0.1 * (float(cost.mean()) - LIMIT))
        run.record(cost=cost.mean(), multiplier=multiplier)
        batch = run.advantages(batch)
        run.later(run.critic.update(batch))
        await run.policy.update(batch)
        await run.sync()
