"""When phases run: in a simulation of many steps, and in the formula that the search uses."""

from __future__ import annotations

import random

import pytest

from hybridflow.planning.schedule import Stage, Timed, begins, step_seconds

POOLS = ("actor", "rollout", "critic", "reward_model")


def test_work_beside_generation_hides_it() -> None:
    assert step_seconds([(10, 0, 0, 0), (0, 3, 4, 0)], overlaps=False) == 17
    assert step_seconds([(10, 0, 0, 0), (0, 3, 4, 0)], overlaps=True) == 10
    assert step_seconds([(10, 3, 4, 0)], overlaps=True) == 17


def test_a_critic_of_its_own_trains_beside_policy_and_next_generation() -> None:
    assert step_seconds([(10, 0, 4, 0), (0, 3, 0, 12)], overlaps=False) == 17  # 12 of 4 + 10
    # it is the bottleneck
    assert step_seconds([(10, 0, 4, 0), (0, 3, 0, 20)], overlaps=False) == 23
    assert step_seconds([(10, 3, 4, 12)], overlaps=False) == 29
    # engines on the critic's devices
    assert step_seconds([(0, 0, 4, 0), (10, 3, 0, 12)], overlaps=False) == 25
    assert step_seconds([(10, 0, 4, 0), (0, 3, 0, 12)], overlaps=True) == 15
    assert step_seconds([(10, 0, 4, 0), (0, 3, 0, 12)], overlaps=False, rest=2) == 19


def simulated(
    seconds: dict[str, tuple[float, float, float]], engines: str, rest: float, steps: int = 60
) -> float:
    """The time between the ends of two late steps' passes, event by event: (passes, update, its
    share of generation) of each pool; the policy's is `actor`."""
    free = dict.fromkeys(seconds, 0.0)
    ready = 0.0
    ends = []
    for _ in range(steps):
        answered = max(ready, free[engines]) + seconds[engines][2]
        free[engines] = answered
        for pool, (passes, _, _) in seconds.items():
            free[pool] = max(free[pool], answered) + passes
        prepared = max(free.values())
        ends.append(prepared)
        for pool, (_, update, _) in seconds.items():
            free[pool] = prepared + update
        ready = max(free["actor"], free[engines]) + rest
        free["actor"] = free[engines] = ready
    return (ends[-1] - ends[steps // 2]) / (steps - 1 - steps // 2)


@pytest.mark.parametrize("seed", range(40))
def test_the_formula_is_what_many_steps_take(seed: int) -> None:
    draw = random.Random(seed)
    pools = ["actor", *draw.sample(POOLS[1:], draw.randint(0, 3))]
    engines = draw.choice(pools)
    rest = draw.choice([0.0, 3.0])
    seconds = {
        pool: (
            float(draw.randint(0, 9)),
            float(draw.randint(0, 20)),
            float(draw.randint(1, 20)) * (pool == engines),
        )
        for pool in pools
    }
    seconds["actor"] = (seconds["actor"][0], max(seconds["actor"][1], 1.0), seconds["actor"][2])
    stages = []
    for pool, (passes, update, answering) in seconds.items():
        stages.append(
            (answering, passes, update, 0.0)
            if pool == "actor"
            else (answering, passes, 0.0, update)
        )
    assert step_seconds(stages, overlaps=False, rest=rest) == pytest.approx(
        simulated(seconds, engines, rest)
    )


def test_phases_begin_when_what_they_wait_for_has_ended() -> None:
    phases: list[tuple[float, str, Stage]] = [
        (10, "rollout", "generation"),
        (2, "actor", "preparation"),
        (1, "actor", "preparation"),
        (4, "critic", "preparation"),
        (14, "critic", "update"),
        (6, "actor", "update"),
        (1, "actor", "rest"),
    ]
    # a step takes 4 + 14 on the critic's devices and 10 + 4 + 6 + 1 on the others
    assert begins([Timed(*one) for one in phases], "rollout") == [0, 10, 12, 10, 14, 14, 20]
    # on slower devices the critic's passes wait for the update of the step before
    phases[4] = (30, "critic", "update")
    at = begins([Timed(*one) for one in phases], "rollout")
    assert at[:3] == [0, 10, 12] and at[3] > 10 and at[4] == at[5] == at[3] + 4
    assert step_seconds([(10, 0, 0, 0), (0, 3, 6, 0), (0, 4, 0, 30)], False, rest=1) == 34


def test_an_endless_phase_has_no_schedule() -> None:
    assert begins([Timed(float("inf"), "actor", "generation")], "actor") == [0.0]
