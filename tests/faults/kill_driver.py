"""The driver of a kill trial: an asynchronous run over real conversations, whose engines have no
model.

`python -m tests.faults.kill_driver FOLDER STALENESS` trains `STEPS` steps, or what is left of them
after the last checkpoint in FOLDER. Conversations ask an engine, an environment, an MCP server and
the sandbox; all of these are processes. What it begins it prints ("generate 3"), and what a step is
trained on it writes to FOLDER/trained.jsonl.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import (
    AgentConfig,
    DataConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
)
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.engines.base import Completion, WeightSpan
from hybridflow.errors import EnginesLostError
from hybridflow.rewards.lines import Lines
from hybridflow.rollout.conversations import TURN_REWARDS, Conversations
from hybridflow.rollout.groups import Groups
from hybridflow.rollout.requests import Requests
from hybridflow.saving.manifest import say_saved
from hybridflow.saving.store import CheckpointStore, Retention
from hybridflow.single_controller import block_on, in_thread
from hybridflow.workers.requests import CUT_SHORT
from hybridflow.workers.rollout import response_columns
from tests.unscored import Unscored

SIZE = 4
N = 2
STEPS = 6
ENGINES = 2
ROOM = 240  # tokens after the prompt
# of a step, of a checkpoint, until a lost engine serves again
TRAINING_S = 0.05
SAVING_S = 0.02
AWAY_S = 0.2
TRAINED = "trained.jsonl"
PEAK_MB = "peak_mb"


class _Engine:
    """One engine's process, and what it was asked and has told."""

    def __init__(self, version: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            command = [
                sys.executable,
                "-m",
                "tests.faults.stub_engine",
                str(theirs.fileno()),
                str(os.getpid()),
            ]
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        ours.settimeout(10)
        self.lines = Lines(ours)
        self.lost_at = 0.0
        self.held = dict[int, list[list[Any]]]()
        self.say({"version": version})

    def say(self, message: dict[str, Any]) -> None:
        """Send a message; an engine that has ended hears nothing."""
        try:
            self.lines.send(message)
        except OSError:
            self.lose()

    def hear(self) -> None:
        """Take in what it has told."""
        messages = self.lines.received()
        if messages is None:
            self.lose()
        for message in messages or []:
            for ticket, *one in message["told"]:
                if ticket in self.held:
                    self.held[ticket].append(one)

    def lose(self) -> None:
        """Note that the engine has ended."""
        self.lost_at = self.lost_at or time.monotonic()
        self.process.kill()
        self.process.wait(10)


class Engines(Requests):
    """`Rollouts` over the engines' processes; one that has ended serves again after a while."""

    def __init__(self, config: RunConfig, version: int) -> None:
        super().__init__(config)
        self.version = version
        self.engines = [_Engine(version) for _ in range(ENGINES)]

    async def sleep(self) -> None:
        """Their memory stays."""

    async def wake(self, tags: Sequence[str]) -> None:
        """The memory of the engines stayed where it was."""

    def sync(self, version: int) -> None:
        """The weights of all tokens from now on."""
        self.version = version
        for engine in self.engines:
            engine.say({"version": version})

    def _serving(self) -> Sequence[int]:
        for number, engine in enumerate(self.engines):
            if engine.lost_at and not engine.held and time.monotonic() > engine.lost_at + AWAY_S:
                self.engines[number] = _Engine(self.version)
        found = [number for number, engine in enumerate(self.engines) if not engine.lost_at]
        if not found:
            raise EnginesLostError("both engines have ended")
        return found

    async def _ask(self, training: bool, parts: Mapping[int, DataProto]) -> None:
        for number, part in parts.items():
            rows = zip(
                part["ticket"].tolist(),
                part.jagged("prompt_ids"),
                part["max_new_tokens"].tolist(),
                strict=True,
            )
            for ticket, prompt, most in rows:
                self.engines[number].held[ticket] = []
                self.engines[number].say(
                    {"ticket": ticket, "prompt": prompt.tolist(), "most": most}
                )

    async def _collect(
        self, training: bool, engines: Sequence[int], wait_s: float
    ) -> Sequence[DataProto]:
        alive = [self.engines[number] for number in engines if not self.engines[number].lost_at]
        if len(alive) == len(engines):
            sockets = [one.lines.socket for one in alive]
            readable = (await in_thread(lambda: select.select(sockets, [], [], wait_s)))[0]
            for one in alive:
                if one.lines.socket in readable:
                    one.hear()
        return [self._told(self.engines[number]) for number in engines]

    def _told(self, engine: _Engine) -> DataProto:
        over = {
            ticket
            for ticket, told in engine.held.items()
            if engine.lost_at or (told and told[-1][2])
        }
        return _batch({ticket: engine.held.pop(ticket) for ticket in sorted(over)})

    async def _so_far(self, engines: Sequence[int]) -> Sequence[DataProto]:
        found = [
            {t: told for t, told in self.engines[number].held.items() if told} for number in engines
        ]
        return [_batch(one, cut=True) for one in found]

    async def _leave_out_lost(self, answers: int) -> None:
        self._serving()

    async def _abort(self, tickets: Mapping[int, Sequence[int]]) -> None:
        raise RuntimeError("nothing is aborted")

    async def _forget(self, engines: Sequence[int]) -> None:
        for engine in self.engines:
            engine.held.clear()
            engine.say({"forget": True})


def _batch(held: Mapping[int, Sequence[Sequence[Any]]], cut: bool = False) -> DataProto:
    found = []
    for told in held.values():
        spans = tuple(
            WeightSpan(str(version), place, place + 1) for place, (_, version, _) in enumerate(told)
        )
        reason = CUT_SHORT if cut or not told or not told[-1][2] else told[-1][2]
        found.append(
            Completion([one[0] for one in told], [-float(one[0]) for one in told], reason, spans)
        )
    return response_columns(found).with_columns(ticket=np.array(list(held), np.int64))


class _Prompts:
    """Two tokens each, one epoch."""

    def __len__(self) -> int:
        return SIZE * STEPS

    def batch(self, rows: np.ndarray) -> DataProto:
        """The prompts of these rows."""
        names = ("data_source", "ground_truth")
        columns: dict[str, Any] = {
            name: np.array([str(row) for row in rows], dtype=object) for name in names
        }
        ids = Jagged.from_rows([[3, 3 + int(row)] for row in rows], np.int64)
        return DataProto.from_columns({"prompt_ids": ids, **columns})


class _Policy:
    """A policy without weights."""

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        """Write an empty part of a checkpoint."""
        folder.mkdir()
        time.sleep(SAVING_S)
        (folder / "manifest.json").write_text("{}")
        say_saved(folder)

    async def is_saved(self) -> bool:
        """Whether it has been written."""
        return True


def configuration(folder: Path, staleness: int) -> RunConfig:
    """The run; the files that its conversations use lie in `folder`."""
    agent = AgentConfig(
        loop=f"{folder}/loop.py:both",
        environment=f"{folder}/environment.py:digits",
        environment_processes=2,
        tools=("python",),
        mcp_servers={
            "tally": {
                "command": [sys.executable, f"{folder}/server.py"],
                "max_restarts": 1000,
                "start_timeout_s": 300.0,  # of a loaded machine
            }
        },
        tool_timeout_s=float((folder / "tool_timeout_s").read_text()),
    )
    return RunConfig(
        output_dir=str(folder),
        name="run",
        data=DataConfig(train_batch_size=SIZE, max_response_length=ROOM),
        rollout=RolloutConfig(n=N, num_engines=ENGINES, max_running_requests=16, agent=agent),
        trainer=TrainerConfig(total_steps=STEPS, max_staleness=staleness),
    )


async def main() -> None:
    """Train until the last step."""
    folder = Path(sys.argv[1])
    staleness = int(sys.argv[2])
    _say("start", 0)
    config = configuration(folder, staleness)
    store = CheckpointStore(folder / "checkpoints", Retention())
    latest = store.latest()
    step = latest.step if latest else 0
    engines = Engines(config, step)
    service = Conversations(engines, load_tokenizer(folder / "tokenizer"), config, folder / "logs")
    given: Any = (service, _Prompts(), lambda batch: batch, Unscored())
    groups = Groups(config, *given)
    await groups.restore(*((latest.state, latest.rollouts(), step) if latest else (None,)))
    while step < STEPS:
        engines.sync(step)
        _say("generate", step)
        try:
            batch = await groups.next_batch(step)
        except EnginesLostError:
            await asyncio.sleep(0.02)
            continue
        _say("train", step)
        _write(folder / TRAINED, step, batch)
        await asyncio.sleep(TRAINING_S)
        step += 1
        _say("save", step)
        await store.save("rl", step, groups.state(), _Policy(), rollouts=await groups.begun())
    assert await groups.begun() is None and not groups.state()["handed_out"]
    # getrusage also counts the process that this one was forked from
    [peak] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    (folder / PEAK_MB).write_text(str(int(peak) / 1024))
    _say("end", step)


def _write(path: Path, step: int, batch: DataProto) -> None:
    names = (
        "prompt_ids",
        "response_ids",
        "response_mask",
        "rollout_log_probs",
        "response_versions",
    )
    rows = {name: [row.tolist() for row in batch.jagged(name)] for name in names}
    rows |= {
        name: batch[name].tolist() for name in ("uid", "agent_failure", "messages", TURN_REWARDS)
    }
    with path.open("a") as file:
        file.write(json.dumps({"step": step, **rows}) + "\n")


def _say(moment: str, step: int) -> None:
    print(moment, step, flush=True)


if __name__ == "__main__":
    block_on(main())
