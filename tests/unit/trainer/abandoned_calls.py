"""A process whose calls fail together, are dropped, or are interrupted (SIGINT) in the middle of a
step; its standard error is looked at.

`python -m tests.unit.trainer.abandoned_calls failures|interrupts FOLDER`
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.errors import HybridFlowError
from hybridflow.observe.timeline import Timeline, read_timeline
from hybridflow.single_controller import block_on, event_loop
from hybridflow.trainer.devices import Devices
from tests.unit.single_controller.replies import Reply, call_of
from tests.unit.trainer.worlds import Immediate, World, config_of, trainer_of


def failures(folder: Path) -> None:
    """Calls that fail at once, one that waits for another that fails, calls that are dropped before
    they begin, and a reply that comes when the loop is closed."""
    devices = Devices(lambda role: role, Timeline(folder / "timeline.jsonl"))

    async def fails(text: str) -> None:
        await asyncio.sleep(0)
        raise HybridFlowError(text)

    async def reads(other: asyncio.Task[None]) -> None:
        await other

    async def all_at_once() -> None:
        first = devices.call("a", "a", 1, fails("first"))
        calls = [
            first,
            devices.call("b", "b", 1, reads(first)),
            devices.call("c", "c", 1, fails("third")),
        ]
        await devices.finish(*calls)

    async def dropped() -> None:
        for role in ("a", "a", "b"):
            devices.call(role, role, 1, fails("it was dropped"))
        await devices.forget()

    late = Reply()

    async def given_up() -> None:
        await asyncio.wait_for(call_of({0: late})._result(), 0.05)

    for work in (all_at_once, dropped, given_up):
        try:
            block_on(work())
        except (HybridFlowError, TimeoutError) as error:
            print(work.__name__, "raised", repr(error))
    for role in ("a", "b"):
        devices_of_a_run_that_ends = Devices(lambda role: role, Timeline(folder / "other.jsonl"))
        block_on(_left_alone(devices_of_a_run_that_ends, role, fails))
    event_loop._close()
    late.set_result("nobody is there")


async def _left_alone(devices: Devices, role: str, fails: Callable[[str], Any]) -> None:
    devices.call(role, role, 1, fails("nobody waits for it"))
    devices.call(role, role, 1, fails("it waits for its turn"))


class Interrupted(World):
    """A policy whose call is interrupted: while the driver waits for it, also while a reference on
    the same devices awaits its turn, or while it computes at one of three places."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    async def update_and_score(self, *given: Any) -> Any:
        if self.place == "waits":
            threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
            await call_of({0: Reply()})
        if self.place == "call":
            signal.raise_signal(signal.SIGINT)
        if self.place == "collects":
            reply = Reply()
            reply.set_result(None)
            await call_of({0: reply}, collect=lambda _: signal.raise_signal(signal.SIGINT))
        return await super().update_and_score(*given)

    async def log_probs(self, batch: DataProto) -> DataProto:
        if self.place == "reference":
            threading.Timer(0.2, signal.raise_signal, [signal.SIGINT]).start()
            await call_of({0: Reply()})
        return await super().log_probs(batch)

    def generate(self, prompts: DataProto, *, training: bool) -> DataProto:
        if self.place == "loop" and training:
            signal.raise_signal(signal.SIGINT)
        return super().generate(prompts, training=training)


class Waiting(Immediate):
    """A role in processes of its own that does not answer."""

    async def update(self, *given: Any) -> Any:
        return await call_of({0: Reply()})

    async def compute(self, method: Callable[..., Any], batch: DataProto) -> DataProto:
        responses = batch.jagged("response_ids")
        return DataProto.from_columns(
            {"values": Jagged(responses.values.astype(np.float32) / 10, responses.offsets)}
        )


def interrupts(folder: Path) -> None:
    """SIGINT in the middle of a step, in which a critic's update is under way as well."""
    for place in ("waits", "reference", "call", "collects", "loop"):
        config = config_of(folder / place, kl=0.1, total_steps=2)
        config = replace(
            config,
            algorithm=replace(config.algorithm, adv_estimator="gae"),
            critic=replace(config.critic, placement="own"),
        )
        trainer = trainer_of(config, Interrupted(place), critic=Waiting())
        try:
            block_on(trainer.fit())
        except KeyboardInterrupt:
            print(place, "was interrupted in step", trainer.step)
        block_on(trainer.engines.close())
        trainer.session.close()
        phases = read_timeline(trainer.session.folder / "timeline.jsonl")
        assert [phase["error"] for phase in phases if phase["name"] == "step"], phases
        del trainer
        gc.collect()


if __name__ == "__main__":
    {"failures": failures, "interrupts": interrupts}[sys.argv[1]](Path(sys.argv[2]))
    gc.collect()
    print("all is over")
