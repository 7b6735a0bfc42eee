"""Each process that conversations need is killed once in one run; what the kill trials would
notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.errors import ResourceError
from hybridflow.rewards.sandbox import Sandbox
from tests.faults.kill_driver import SIZE, STEPS, TRAINED, N
from tests.faults.kills import (
    MOMENTS,
    STALENESS,
    VICTIMS,
    Programs,
    covering,
    differences,
    play,
    product,
)
from tests.faults.liars import LARGE_ENVIRONMENT, LYING_SERVER
from tests.faults.stub_engine import EOS, next_token


def test_the_product_has_every_process_at_every_moment_with_every_staleness() -> None:
    campaigns = product(1)
    found = {
        (staleness, kill.victim, kill.moment) for staleness, kills in campaigns for kill in kills
    }
    assert len(found) == len(STALENESS) * len(VICTIMS) * len(MOMENTS)
    assert sum(len(kills) for _, kills in campaigns) >= 50 and product(1) == campaigns != product(2)


@pytest.fixture
def needs_sandbox() -> None:
    """Skips where the sandbox of the conversations' programs cannot run."""
    try:
        Sandbox().close()
    except ResourceError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.usefixtures("needs_sandbox")
def test_a_run_that_loses_each_process_once_trains_every_prompt_once(tmp_path: Path) -> None:
    outcomes = play(1, 1, covering(1), tmp_path)
    assert [fault for one in outcomes for fault in one.faults] == []
    assert {one.victim for one in outcomes} == set(VICTIMS)
    assert any(one.ended for one in outcomes if one.victim == "driver")


@pytest.mark.slow
@pytest.mark.usefixtures("needs_sandbox")
@pytest.mark.parametrize(
    "programs",
    [pytest.param(LYING_SERVER, marks=pytest.mark.full), LARGE_ENVIRONMENT],
    ids=lambda one: one.title,
)
def test_programs_that_lie_cost_no_prompt_and_little_memory(
    programs: Programs, tmp_path: Path
) -> None:
    outcomes = play(1, 1, [], tmp_path, programs)
    assert [fault for one in outcomes for fault in one.faults] == []


def written(folder: Path) -> list[dict[str, Any]]:
    """What a run without disturbances would write, of one answer to each prompt."""
    steps = []
    for step in range(STEPS):
        rows: dict[str, list[Any]] = {
            name: []
            for name in (
                "prompt_ids",
                "response_ids",
                "response_mask",
                "uid",
                "rollout_log_probs",
                "response_versions",
                "agent_failure",
                "messages",
                "turn_rewards",
            )
        }
        for row in range(SIZE * N):
            prompt = [3, 3 + step * SIZE + row // N]
            ids = list[int]()
            while EOS not in ids and len(ids) < 5:
                ids.append(next_token([*prompt, *ids]))
            rows["prompt_ids"].append(prompt)
            rows["response_ids"].append(ids)
            rows["response_mask"].append([True] * len(ids))
            rows["rollout_log_probs"].append([-float(token) for token in ids])
            rows["response_versions"].append([step] * len(ids))
            rows["uid"].append(row // N)
            rows["agent_failure"].append(None)
            rows["messages"].append([])
            rows["turn_rewards"].append([])
        steps.append({"step": step, **rows})
    return steps


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda steps: None, ""),
        (lambda steps: steps.pop(2), "steps [0, 1, 3, 4, 5]"),
        (lambda steps: steps[1].update(prompt_ids=steps[0]["prompt_ids"]), "prompts: "),
        (lambda steps: steps[1]["prompt_ids"].__setitem__(0, [3, 9]), "step 1: the groups are"),
        (lambda steps: steps[1]["response_ids"][3].__setitem__(0, 99), "a token does not follow"),
        (lambda steps: steps[1]["rollout_log_probs"][3].__setitem__(0, 0.5), "another token's"),
        (
            lambda steps: steps[3]["response_versions"][3].__setitem__(0, 1),
            "step 3, row 3: versions [1, 3]",
        ),
        (
            lambda steps: steps[1]["response_versions"][3].__setitem__(0, 2),
            "step 1, row 3: versions",
        ),
        (lambda steps: steps[1]["agent_failure"].__setitem__(3, "it was lost"), "tokens to train"),
        (
            lambda steps: steps[1]["turn_rewards"].__setitem__(3, [1.0]),
            "rewards [1.0], expected []",
        ),
    ],
)
def test_what_would_be_noticed(change: Any, fault: str, tmp_path: Path) -> None:
    steps = written(tmp_path)
    change(steps)
    (tmp_path / TRAINED).write_text("".join(json.dumps(step) + "\n" for step in steps))
    faults, _ = differences(tmp_path, 1, may_lose=True)
    assert (any(fault in one for one in faults)) if fault else faults == []
