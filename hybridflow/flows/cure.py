"""CURE (arXiv 2506.03136): a coder and a tester that improve each other. The policy writes programs
for the dataset's tasks, and the tester writes unit tests for the same tasks. Each program is run on
every unit test for its task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hybridflow.batch import DataProto, objects
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
    """`prompt`: the request to the tester, in which {task} stands for the last message of the task.
    `test_timeout_s`: wall-clock limit for running a program on a unit test."""

    prompt: str = _REQUEST
    test_timeout_s: Positive = 6.0


@flow("cure", roles=("policy", "reference", "tester"), options=Options)
async def cure(run: Run) -> None:
    """Reward programs for passing the ground-truth tests (the verifier's score, at least 1 if all
    pass), and unit tests for distinguishing correct programs from wrong ones."""
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
    """Build the tester's prompt for each task, in batch order."""
    _, first = np.unique(programs["uid"], return_index=True)
    tasks = [messages[-1]["content"] for messages in programs["prompt"][first]]
    return [prompt.replace("{task}", task) for task in tasks]


async def judged(
    programs: DataProto, tests: DataProto, runs: ProgramRuns
) -> tuple[np.ndarray, Mapping[str, float]]:
    """Return the rewards [B] of the unit tests, and metrics: those of `rewards_of`, averaged over
    tasks, and judged_tasks, the fraction of tasks with both correct and wrong programs.
    """
    texts = programs["response_text"]
    read = objects([unit_test_of(text) for text in tests["response_text"]])
    tasks = rows_by_task(programs, tests)
    tables = await asyncio.gather(
        *[runs.passed(texts[own].tolist(), read[asked].tolist()) for own, asked in tasks]
    )
    is_right = programs["scores"] >= 1
    rewards = np.zeros(len(tests), np.float32)
    found: dict[str, list[float]] = {"right_tests": [], "mu": []}
    for (own, asked), passed in zip(tasks, tables, strict=True):
        rewards[asked], metrics = rewards_of(passed, is_right[own], read[asked])
        for name, value in metrics.items():
            found[name].append(value)
    means = {name: float(np.mean(values)) for name, values in found.items() if values}
    return rewards, {"judged_tasks": len(found["mu"]) / len(tasks), **means}


def rows_by_task(programs: DataProto, tests: DataProto) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the rows of the programs and of the unit tests for each task. The uid of a unit test
    is the index of its task."""
    tasks = np.unique(programs["uid"], return_inverse=True)[1]
    return [
        (np.flatnonzero(tasks == task), np.flatnonzero(tests["uid"] == task))
        for task in range(max(tasks) + 1)
    ]


def rewards_of(
    passed: np.ndarray, is_right: np.ndarray, tests: np.ndarray
) -> tuple[np.ndarray, Mapping[str, float]]:
    """Return the rewards of a task's unit tests, and metrics. If there is a correct program, the
    metrics include right_tests, the fraction of unit tests that all correct programs pass; if there
    is also a wrong program, they include mu (see `rewards.unit_tests`).
    """
    is_test = np.array([test is not None for test in tests])
    rewards, mu = unit_test_rewards(passed, is_right, is_test)
    metrics = {}
    if is_right.any():
        metrics["right_tests"] = float(passed[is_right].all(0).mean())
    return rewards, metrics if mu is None else {**metrics, "mu": mu}
