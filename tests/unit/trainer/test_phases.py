"""Memory changes hands in an order in which the optimizer and the engines' cache never meet."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.schema import (
    ActorConfig,
    CriticConfig,
    OffloadConfig,
    RolloutConfig,
    RunConfig,
)
from hybridflow.observe.progress import Progress
from hybridflow.single_controller import block_on
from hybridflow.trainer.devices import Phases
from hybridflow.trainer.generation import EngineProcesses
from hybridflow.trainer.groups import tell_backend


class Noted:
    """Notes who sleeps and wakes."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls

    async def call(self, method: Callable[..., Any], parts: tuple[str, ...]) -> None:
        await getattr(self, method.__name__)(parts)

    async def sleep(self, parts: tuple[str, ...] = ()) -> None:
        self.calls.append(" ".join([self.name, "sleep", *parts]))

    async def wake(self, parts: tuple[str, ...]) -> None:
        self.calls.append(" ".join([self.name, "wake", *parts]))


def run(offload: OffloadConfig, engines_sleep: bool, pool: Any = None) -> list[str]:
    calls: list[str] = []
    rollout = RolloutConfig(sleep_while_training=engines_sleep, pool=pool)
    config = replace(RunConfig(), actor=ActorConfig(offload=offload), rollout=rollout)
    policy: Any = Noted("policy", calls)
    phases = Phases(config, policy, Noted("engines", calls))  # type: ignore[arg-type]

    async def steps() -> None:
        for _ in range(2):
            async with phases.sync():
                calls.append("SYNC")
            calls.append("GENERATE")
            async with phases.training():
                calls.append("TRAIN")

    block_on(steps())
    return calls


def test_without_offload_nobody_is_asked() -> None:
    assert run(OffloadConfig(), False) == ["SYNC", "GENERATE", "TRAIN"] * 2


def test_policy_and_engines_take_turns() -> None:
    rest = "policy sleep gradients optimizer reference"
    assert run(OffloadConfig(weights=True, gradients=True, optimizer=True), True) == [
        # the engines have been awake from the start
        *(rest, "SYNC", "policy sleep weights", "GENERATE"),
        *("engines sleep", "policy wake weights", "TRAIN", rest),
        *(
            rest,
            "engines wake weights",
            "SYNC",
            "policy sleep weights",
            "engines wake kv_cache",
            "GENERATE",
        ),
        *("engines sleep", "policy wake weights", "TRAIN", rest),
    ]


def test_engines_on_the_trainers_devices_have_released_them_before_the_first_sync() -> None:
    calls = run(OffloadConfig(weights=True, gradients=True, optimizer=True), True, "actor")
    assert (
        calls
        == [
            *(
                "policy sleep gradients optimizer reference",
                "engines wake weights",
                "SYNC",
                "policy sleep weights",
            ),
            *("engines wake kv_cache", "GENERATE", "engines sleep", "policy wake weights", "TRAIN"),
            "policy sleep gradients optimizer reference",
        ]
        * 2
    )


class NotedEngines(Noted):
    """Engines, and the plan of the weight sync."""

    async def wait_ready(self) -> None:
        self.calls.append("engines ready")

    async def prepare(self) -> str:
        self.calls.append("engines describe")
        return "a plan"


@pytest.mark.parametrize("shared", [True, False])
def test_engines_are_released_before_the_ranks_start_and_take_their_weights_to_be_described(
    shared: bool,
) -> None:
    config = replace(
        RunConfig(),
        rollout=RolloutConfig(sleep_while_training=True, pool="actor" if shared else None),
    )
    calls: list[str] = []
    told: Any = Progress(0, "", enabled=False)
    engines: Any = object.__new__(EngineProcesses)
    engines.engines = NotedEngines("engines", calls)
    engines.config = config
    engines._weights = engines.engines
    assert engines.give_way(told) is engines
    calls.append("RANKS START")
    block_on(engines.wait_ready(told))
    before, after = (
        (["engines ready", "engines sleep"], ["engines wake weights"]) if shared else ([], [])
    )
    assert calls == [*before, "RANKS START", "engines ready", *after, "engines describe"]


@pytest.mark.parametrize(
    ("offload", "sleeps", "asked"),
    [(OffloadConfig(optimizer=True), False, "policy"), (OffloadConfig(), True, "engines")],
)
def test_each_side_alone(offload: OffloadConfig, sleeps: bool, asked: str) -> None:
    calls = [call for call in run(offload, sleeps) if not call.isupper()]
    assert calls and all(call.startswith(asked) for call in calls)


def test_other_roles_are_off_the_device_before_weights_travel_and_bring_in_what_they_need_themselves() -> (
    None
):
    calls: list[str] = []
    config = replace(RunConfig(), critic=CriticConfig(offload=OffloadConfig(optimizer=True)))
    policy, engines, critic, model = (
        Noted(name, calls) for name in ("policy", "engines", "critic", "model")
    )
    phases = Phases(config, policy, engines, {"critic": critic, "reward_model": model})  # type: ignore[arg-type, dict-item]

    async def step() -> None:
        async with phases.sync():
            calls.append("SYNC")
        async with phases.training():
            calls.append("TRAIN")

    block_on(step())
    assert calls == [
        "critic sleep weights gradients optimizer reference",
        "SYNC",
        "TRAIN",
    ]  # nothing of the reward model is offloaded


class Describing:
    """A policy whose layers are computed by this."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def run(self, method: Any, role: str) -> dict[str, str]:
        assert (method.__name__, role) == ("describe", "actor")
        return {"backend": self.backend, "megatron_core": "0.16.1"}


@pytest.mark.parametrize(
    ("backend", "warns"),
    [("torch (cpu)", False), ("torch (cuda)", True), ("transformer-engine", False)],
)
def test_what_computes_is_said_once_and_recorded(backend: str, warns: bool, tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text('{"cores": 2}')
    said: list[str] = []
    actor: Any = Describing(backend)
    tell_backend(actor, RunConfig(), tmp_path, said.append)
    assert said[0] == f"the policy runs with backend {backend}, megatron_core 0.16.1"
    assert [line.startswith("warning: Transformer Engine") for line in said[1:]] == [True] * warns
    recorded = json.loads((tmp_path / "environment.json").read_text())
    assert recorded == {"cores": 2, "policy": {"backend": backend, "megatron_core": "0.16.1"}}
