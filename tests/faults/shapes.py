"""The runs that are disturbed: each as small as its layout allows, with greedy sampling, so that a
run that was disturbed can be compared with one that was not to the last bit."""

from __future__ import annotations

from pathlib import Path

from hybridflow.config.load import load_config
from hybridflow.data.prepare import prepare
from tests.e2e.teachers import random_reward_model, random_teacher

STEPS = 8
PAIRS = 64
OWN_FLOW = Path(__file__).with_name("safe_rlhf.py")
# Responses differ from prompt to prompt; the mean over the batch is near 0. `safe_rlhf` reads costs.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    number = sum(map(ord, solution_str))
    return {"score": (number % 7 - 3) / 3, "cost": number % 3 - 1}
"""
_ONE = ("actor=tiny", "cluster=one-process", "rollout=tiny")
# a gradient where sample and baseline are one answer
_BONUS = "actor.entropy_coef=0.01"
SHAPES: dict[str, tuple[str, ...]] = {
    "one process": _ONE,
    "own critic": (
        *_ONE,
        "algorithm=ppo",
        "+critic=tiny-own",
        "critic.procs=1",
        "critic.parallel.pipeline=1",
        "reference.placement=own",
    ),
    "TP 2, PP 2, EP 2": ("rollout=tiny",),
    "two engines": ("actor=tiny", "cluster=one-process", "rollout=tiny-two-engines"),
    "fsdp": (
        *_ONE,
        "model=tiny-dense",
        "~model.hf_config.moe_intermediate_size",
        "actor.backend=fsdp",
        "cluster.procs_per_node=2",
    ),
    # one for each built-in flow that no shape above follows: these follow grpo, and ppo
    "remax": (*_ONE, "algorithm=remax", _BONUS),
    "dpo": (
        *_ONE,
        "algorithm=dpo",
        "actor.ppo_mini_batch_size=4",
        "data.answers=pairs",
        "data.train_files=['${data.prepare.out}/pairs.parquet']",
        "rollout.n=2",
    ),
    "distill": (
        *_ONE,
        "teacher.placement=own",
        "teacher.top_k=8",
        "actor.distillation.coef=1.0",
        "actor.distillation.task_rewards=false",
    ),
    "rejection": (*_ONE, "algorithm.flow=rejection", "actor.policy_loss=reinforce"),
    "cure": (
        *_ONE,
        "algorithm.flow=cure",
        "data.keep_prompts=true",
        "+roles={tester: {procs: 1, rollout: {num_engines: 1}}}",
        "algorithm.flow_options={prompt: '{task}'}",
    ),
    "learned reward": (
        *_ONE,
        "algorithm.flow=learned_reward",
        "reward_model.trains=true",
        "rollout.n=2",
    ),
    "safe rlhf": (
        *_ONE,
        "algorithm=ppo",
        "algorithm.flow=safe_rlhf",
        "+critic=tiny",
        "cost_critic.placement=own",
        "cost_critic.optim.lr=1e-3",
    ),
    # a file of the user's (`safe_rlhf.py`) on ranks of TP 2 and PP 2, with every role of PPO
    "own flow": (
        "rollout=tiny",
        "algorithm=ppo",
        f"algorithm.flow='{OWN_FLOW}:safe_rlhf'",
        "+critic=tiny",
        "+reward_model=tiny",
        "actor.parallel.expert=1",
    ),
}
SLURM = "Slurm, two nodes"
_OF_JOBS = {
    SLURM: (
        "actor=tiny",
        "cluster.nodes=2",
        "cluster.procs_per_node=1",
        "actor.parallel.pipeline=2",
        "rollout=tiny",
    )
}
# the built-in flows that train, and a shape that follows each
FLOWS = {
    "grpo": "one process",
    "ppo": "own critic",
    "remax": "remax",
    "dpo": "dpo",
    "distill": "distill",
    "rejection": "rejection",
    "cure": "cure",
    "learned_reward": "learned reward",
    "safe_rlhf": "safe rlhf",
}


def words_of(shape: str, work: Path, out: Path) -> list[str]:
    """The command line of a run of this shape whose folder is `out`/e2e; data and reward lie in
    `work`."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "reward.py").write_text(REWARD)
    options = {**load_config("e2e").data.prepare.options, "num_pairs": PAIRS}
    prepare("arithmetic", work / "data", None, options)
    announcer, estimator = (
        Path(__file__).with_name(f"{name}.py") for name in ("announcer", "estimator")
    )
    own = list({**SHAPES, **_OF_JOBS}[shape])
    if not any(word.startswith("algorithm=") for word in own):
        own.append(f"algorithm.adv_estimator='{estimator}:score'")
    if shape in ("own flow", "learned reward"):
        own.append(f"reward_model.path={random_reward_model(work / 'cost')}")
    if shape == "distill":
        own.append(f"teacher.path={random_teacher(work / 'teacher')}")
    return [
        *("train", "--config-name", "e2e", f"+data.prepare.options.num_pairs={PAIRS}"),
        *(f"data.prepare.out={work / 'data'}", f"output_dir={out}", "actor.optim.lr=3e-3"),
        *("reward=custom", f"reward.path={work / 'reward.py'}", "rollout.n=1"),
        *("rollout.sampling.top_k=1", "rollout.logprob_diff_bound=null"),
        # two updates a step, and so a pass for the old log-probabilities
        "actor.ppo_mini_batch_size=2",
        *("data.val_max_prompts=4", "rollout.extra_args={disable_radix_cache: true}"),
        *(
            f"trainer.total_steps={STEPS}",
            "trainer.save_every_steps=1",
            "trainer.test_every_steps=4",
        ),
        *("trainer.max_restarts=1000", "rollout.max_restarts=1000", "trainer.report=false"),
        f"trainer.loggers=[jsonl,'{announcer}:announcer']",
        *own,
    ]
