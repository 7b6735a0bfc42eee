"""A step of GRPO, part by part: `python examples/one_step.py`.

Trains a tiny model with random weights on two-digit sums for five steps, in this process, in under
a minute. Only the package is required. You can inspect and replace each part; the run handles
everything else (checkpoints, records, resuming). See docs/python.md.
"""

from __future__ import annotations

import sys

import hybridflow as hf

STEPS = 5


def share_of_sevens(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]
) -> float:
    """Return the share of sevens, a reward that an untrained model learns within a few steps."""
    return solution_str.count("7") / max(len(solution_str), 1)


def show_samples(batch: hf.DataProto, count: int = 3) -> None:
    """Print a few samples. A batch has one row per sample, and its columns are dense, jagged (rows
    of different lengths) or objects."""
    for row in range(0, len(batch), len(batch) // count):
        ids = batch.jagged("response_ids").row(row)
        text, score = batch["response_text"][row], batch["scores"][row]
        print(f"  prompt {batch['uid'][row]}: {text!r} ({len(ids)} tokens), score {score:.2f}")


def one_step(run: hf.Run, step: int) -> None:
    """Run one step of GRPO, with the same dataflow as hybridflow/flows/grpo.py."""
    # 1. the engine answers prompts, `rollout.n` times each, and the reward scores the answers
    batch = run.samples()
    print(f"step {step}: {len(batch)} samples, mean score {batch['scores'].mean():.3f}")
    show_samples(batch)

    # 2. log-probabilities of the sampled tokens, under the policy before its update (no column if
    # the update computes them anyway) and under the reference of the KL term
    batch = run.policy.log_probs(batch)
    batch = run.reference.log_probs(batch)

    # 3. a sample is compared with the other samples of its prompt
    batch = run.advantages(batch)
    values = batch.jagged("advantages").values
    print(f"  advantages of {len(values)} tokens from {values.min():.2f} to {values.max():.2f}")

    # 4. all optimizer updates of the step
    run.policy.update(batch)

    # 5. the engine receives the new weights and answers with them
    run.sync()
    print(f"  now 12+34= is answered {run.generate(['12+34='])[0]!r}")


def main(output_dir: str = "runs") -> int:
    """Run the steps. Returns 0 if the reward has increased."""
    with hf.Run(
        recipe="e2e",
        name="one-step",
        output_dir=output_dir,
        cluster="in-process",
        reward=share_of_sevens,
        sft="none",
        rollout={"n": 8},
        actor={"optim": {"lr": 3e-3}, "kl_loss_coef": 1e-3},
        trainer={"total_steps": STEPS, "resume": "disable"},
    ) as run:
        before = run.evaluate()["val/score"]
        for step in run.steps_by_hand():
            one_step(run, step)
        after = run.evaluate()["val/score"]
    print(f"held-out score {before:.3f} -> {after:.3f}; report: {run.folder}/report.html")
    return int(after <= before)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
