"""Memory changes hands in an order in which the optimizer and the engines' cache never meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hybridflow.config.schema import ActorConfig, CriticConfig, OffloadConfig, RolloutConfig, RunConfig
from hybridflow.trainer.phases import Phases


class Noted:
    """Notes who sleeps and wakes."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def run(self, method: Callable[..., Any], parts: tuple[str, ...]) -> None:
        getattr(self, method.__name__)(parts)

    def sleep(self, parts: tuple[str, ...] = ()) -> None:
        self.calls.append(" ".join([self.name, "sleep", *parts]))

    def wake(self, parts: tuple[str, ...]) -> None:
        self.calls.append(" ".join([self.name, "wake", *parts]))


def run(offload: OffloadConfig, engines_sleep: bool) -> list[str]:
    calls: list[str] = []
    config = replace(
        RunConfig(), actor=ActorConfig(offload=offload), rollout=RolloutConfig(sleep_while_training=engines_sleep)
    )
    policy: Any = Noted("policy", calls)
    phases = Phases(config, policy, Noted("engines", calls))  # type: ignore[arg-type]
    for _ in range(2):
        with phases.sync():
            calls.append("SYNC")
        calls.append("GENERATE")
        with phases.training():
            calls.append("TRAIN")
    return calls


def test_without_offload_nobody_is_asked() -> None:
    assert run(OffloadConfig(), False) == ["SYNC", "GENERATE", "TRAIN"] * 2


def test_policy_and_engines_take_turns() -> None:
    rest = "policy sleep gradients optimizer reference"
    assert run(OffloadConfig(weights=True, gradients=True, optimizer=True), True) == [
        *(rest, "SYNC", "policy sleep weights", "GENERATE"),  # the engines have been awake from the start
        *("engines sleep", "policy wake weights", "TRAIN", rest),
        *(rest, "engines wake weights", "SYNC", "policy sleep weights", "engines wake kv_cache", "GENERATE"),
        *("engines sleep", "policy wake weights", "TRAIN", rest),
    ]


@pytest.mark.parametrize(
    ("offload", "sleeps", "asked"),
    [(OffloadConfig(optimizer=True), False, "policy"), (OffloadConfig(), True, "engines")],
)
def test_each_side_alone(offload: OffloadConfig, sleeps: bool, asked: str) -> None:
    calls = [call for call in run(offload, sleeps) if not call.isupper()]
    assert calls and all(call.startswith(asked) for call in calls)


def test_other_roles_are_off_the_device_before_weights_travel_and_bring_in_what_they_need_themselves() -> None:
    calls: list[str] = []
    config = replace(RunConfig(), critic=CriticConfig(offload=OffloadConfig(optimizer=True)))
    policy, engines, critic, model = (Noted(name, calls) for name in ("policy", "engines", "critic", "model"))
    phases = Phases(config, policy, engines, {"critic": critic, "reward_model": model})  # type: ignore[arg-type, dict-item]
    with phases.sync():
        calls.append("SYNC")
    with phases.training():
        calls.append("TRAIN")
    assert calls == [
        "critic sleep weights gradients optimizer reference",
        "SYNC",
        "TRAIN",
    ]  # nothing of the reward model is offloaded
