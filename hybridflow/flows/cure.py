"""CURE (arXiv 2506.03136): a coder and a tester that improve each other. The policy writes programs
for the tasks of the dataset, and the tester unit tests for the same tasks; each program is run on
each unit test of its task."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.config.keys import Positive
from hybridflow.flows.base import Run, flow
from hybridflow.rewards.unit_tests import ProgramRuns, unit_test_of, unit_test_rewards

_REQUEST = """{task}

Do not solve this task. Write one test for programs that solve it: an input, and the output that a
right program prints for it. Think step by step, and end with these two blocks:

Input:
```
what the program reads
```

Output:
```
what the program prints
```"""


@dataclass(frozen=True)
class Options:
    """`prompt`: what the tester is asked; {task} stands for the last message of the task.
    `test_timeout_s`: wall clock limit of a program on a unit test."""

    prompt: str = _REQUEST
    test_timeout_s: Positive = 6.0


@flow("cure", roles=("policy", "reference", "tester"), options=Options)
async def cure(run: Run) -> None:
    """A program is rewarded by the ground-truth tests (the verifier's score, at least 1 if it
    passes all), a unit test by telling right programs from wrong ones."""
    with ProgramRuns(run.options.test_timeout_s) as runs:
        async for _ in run.steps():
            programs = await run.samples()
            tests = await run.tester.generate(requests(programs, run.options.prompt))
            rewards, metrics = await judged(programs, tests, runs)
            run.record(**metrics)
            tests = tests.with_columns(scores=rewards)
            scored = run.tester.log_probs(tests)
            programs = await run.all(
                run.policy.log_probs(programs), run.reference.log_probs(programs)
            )
            programs = run.advantages(programs)
            tests = run.tester.advantages(await scored)
            updated = run.tester.update(tests)  # beside the policy's, on devices of its own
            await run.policy.update(programs)
            await updated
            await run.sync()


def requests(programs: DataProto, prompt: str) -> list[str]:
    """What the tester is asked, for each task in the order of the batch."""
    _, first = np.unique(programs["uid"], return_index=True)
    tasks = [messages[-1]["content"] for messages in programs["prompt"][first]]
    return [prompt.replace("{task}", task) for task in tasks]


async def judged(
    programs: DataProto, tests: DataProto, runs: ProgramRuns
) -> tuple[np.ndarray, Mapping[str, float]]:
    """The rewards [B] of the unit tests, and metrics over the tasks with right programs:
    right_tests, the share of unit tests that all of these pass, and mu, over the tasks that have
    wrong ones too; judged_tasks is their share."""
    is_right = programs["scores"] >= 1
    tasks = np.unique(programs["uid"], return_inverse=True)[1]
    rows = [(np.flatnonzero(tasks == task), tests["uid"] == task) for task in range(max(tasks) + 1)]
    read = np.array([unit_test_of(text) for text in tests["response_text"]], dtype=object)
    tables = await asyncio.gather(
        *[runs.passed(programs["response_text"][of].tolist(), read[by].tolist()) for of, by in rows]
    )
    rewards = np.zeros(len(tests), np.float32)
    right, mus = list[float](), list[float]()
    for (of, by), passed in zip(rows, tables, strict=True):
        is_test = np.array([test is not None for test in read[by]])
        rewards[by], mu = unit_test_rewards(passed, is_right[of], is_test)
        if is_right[of].any():
            right.append(float(passed[is_right[of]].all(0).mean()))
        if mu is not None:
            mus.append(mu)
    metrics = {"judged_tasks": len(mus) / len(rows)}
    metrics |= {"right_tests": float(np.mean(right))} if right else {}
    return rewards, metrics | ({"mu": float(np.mean(mus))} if mus else {})
