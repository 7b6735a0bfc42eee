"""Environments in processes: steps, what a broken environment costs, and nothing left behind."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hybridflow.agents.environments.base import ENVIRONMENTS, Step
from hybridflow.agents.episodes import EpisodeError, Episodes
from hybridflow.config.schema import AgentConfig
from hybridflow.errors import ConfigError
from hybridflow.process.children import ENDED, state_of

OWN = '''
import os, sys, time
from hybridflow.agents.environments.base import Step, environment

@environment("own")
class Own:
    """Does what the ground truth and the answers say."""

    def reset(self, row):
        self.answers = []
        if row["ground_truth"] == "no reset":
            raise KeyError("level 7")
        if row["ground_truth"] == "hangs":
            time.sleep(3600)
        self.greeting = row["extra_info"].get("greeting", b"")

    def step(self, answer):
        self.answers.append(answer)
        if answer == "raise":
            raise RuntimeError("no such move")
        if answer == "leave":
            sys.exit(4)
        if answer == "end":
            os._exit(5)
        if answer == "nonsense":
            return "lost"
        if answer == "nan":
            return Step("", float("nan"))
        if answer == "endless":
            return Step("x" * 10_000_000)
        if answer == "pid":
            return Step(str(os.getpid()), done=True)
        return Step(",".join(self.answers) + self.greeting.decode(), 0.5 * len(self.answers))
'''


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    (tmp_path / "own.py").write_text(OWN)
    return AgentConfig(
        loop="environment", environment=f"{tmp_path / 'own.py'}:own", environment_processes=1
    )


def row(truth: str = "", **extra_info: Any) -> dict[str, Any]:
    return {"data_source": "x", "ground_truth": truth, "extra_info": extra_info}


@pytest.mark.slow
def test_episodes_of_several_processes_go_on_at_the_same_time(config: AgentConfig) -> None:
    async def play(episodes: Episodes, name: str) -> tuple[list[Step], str]:
        async with episodes.begin(row(greeting=name.encode())) as episode:
            steps = [await episode.step(answer) for answer in (name, "b")]
            return steps, (await episode.step("pid")).observation

    async def all_of_them() -> list[tuple[list[Step], str]]:
        episodes = Episodes(replace(config, environment_processes=2))
        return await asyncio.gather(*(play(episodes, name) for name in "pqrstu"))

    found = asyncio.run(all_of_them())
    for name, (steps, _) in zip("pqrstu", found, strict=True):
        assert steps == [Step(name + name, 0.5), Step(f"{name},b{name}", 1.0)]
    pids = {int(pid) for _, pid in found}
    assert len(pids) == 2
    gc.collect()
    assert {state_of(pid) for pid in pids} <= {"", ENDED}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("raise", r"^the environment failed: RuntimeError: no such move \(line 20\)$"),
        ("leave", r"^the environment failed: SystemExit: 4"),
        ("nonsense", r"^the environment failed: TypeError: step must return a Step, got 'lost'"),
        (
            "nan",
            (
                r"^the environment failed: ValueError: step returned the reward 'nan'; expected a "
                r"finite number"
            ),
        ),
    ],
)
def test_an_environment_that_fails_costs_its_own_episode(
    config: AgentConfig, answer: str, said: str
) -> None:
    async def play() -> None:
        episodes = Episodes(config)
        async with episodes.begin(row()) as other:
            with pytest.raises(EpisodeError, match=said):
                async with episodes.begin(row()) as episode:
                    await episode.step(answer)
            assert (await other.step("a")).observation == "a"

    asyncio.run(play())


def test_an_environment_that_cannot_begin_costs_its_own_episode(config: AgentConfig) -> None:
    async def play() -> None:
        episodes = Episodes(config)
        for truth, extra, said in (
            ("no reset", {}, r"KeyError: 'level 7' \(line 12\)"),
            ("", {"greeting": object()}, "a prompt row contains a value of type object"),
        ):
            with pytest.raises(EpisodeError, match=said):
                async with episodes.begin(row(truth, **extra)):
                    pass
        async with episodes.begin(row()) as episode:
            assert len((await episode.step("endless")).observation) == 1 << 16

    asyncio.run(play())


@pytest.mark.slow
def test_a_process_that_ends_takes_its_episodes_and_no_others(config: AgentConfig) -> None:
    async def play() -> None:
        episodes = Episodes(config)
        async with episodes.begin(row()) as other:
            async with episodes.begin(row()) as episode:
                with pytest.raises(
                    EpisodeError, match="the environment process exited with code 5"
                ):
                    await episode.step("end")
            with pytest.raises(EpisodeError, match="the environment process exited with code 5"):
                await other.step("a")
        async with episodes.begin(row()) as later:
            assert (await later.step("a")).observation == "a"

    asyncio.run(play())


def test_an_environment_that_hangs_is_ended(config: AgentConfig) -> None:
    async def play() -> None:
        episodes = Episodes(replace(config, tool_timeout_s=0.5))
        with pytest.raises(
            EpisodeError,
            match=r"sent nothing for 0.5 s \(rollout.agent.tool_timeout_s\) and was killed",
        ):
            async with episodes.begin(row("hangs")):
                pass
        # a busy machine may need more than half a second for what does not hang
        episodes.config = config
        async with episodes.begin(row()) as episode:
            assert (await episode.step("a")).observation == "a"

    asyncio.run(play())


@pytest.mark.slow
def test_processes_that_end_again_and_again_are_not_started_for_ever(config: AgentConfig) -> None:
    async def play() -> None:
        episodes = Episodes(config)
        episodes._restarts.most = 1
        for _ in range(2):
            async with episodes.begin(row()) as episode:
                with pytest.raises(EpisodeError, match="code 5"):
                    await episode.step("end")
        for _ in range(2):
            with pytest.raises(
                EpisodeError,
                match=r"2 processes of rollout.agent.environment=.*own have exited.*code 5",
            ):
                episodes.begin(row())

    asyncio.run(play())


def test_the_game_says_where_the_number_is() -> None:
    game = ENVIRONMENTS.get("guess")()
    game.reset({"ground_truth": "6"})
    said = [game.step(answer) for answer in ("4", " 9\n", "six", "²", "", "6")]
    assert [step.observation for step in said] == ["+", "-", "?", "?", "?", ""]
    assert [(step.reward, step.done) for step in said] == [(0.0, False)] * 5 + [(1.0, True)]


@pytest.mark.slow
def test_an_unknown_environment_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout.agent.environment=gess: .*did you mean 'guess'"
    ):
        ENVIRONMENTS.get("gess")
