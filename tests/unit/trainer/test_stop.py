"""A run that is asked to stop ends after the present step and a checkpoint, and a second run does
the rest."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridflow.errors import ClusterLostError, RunStopped
from hybridflow.observe.progress import Progress
from hybridflow.single_controller import block_on
from hybridflow.trainer.app import _stop_when_asked, _with_clusters
from hybridflow.trainer.stopping import Stops
from tests.unit.trainer.worlds import World, config_of, records, trainer_of


def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint_and_the_next_run_goes_on(
    tmp_path: Path,
) -> None:
    trainer = trainer_of(config_of(tmp_path), World())
    before = signal.getsignal(signal.SIGUSR1)
    add = trainer.advantages.add
    trainer.advantages.add = lambda batch, of: (
        os.kill(os.getpid(), signal.SIGUSR1),
        add(batch, of),
    )[1]  # type: ignore[method-assign]
    with (
        pytest.raises(RunStopped, match=r"resumes from .*global_step_1") as stopped,
        _stop_when_asked(trainer.session),
    ):
        block_on(trainer.fit())
    assert stopped.value.exit_code == 75 and signal.getsignal(signal.SIGUSR1) == before
    assert [record["step"] for record in records(trainer, "train")] == [1]
    checkpoint = trainer.session.store.latest()
    assert checkpoint is not None and checkpoint.step == 1

    again = trainer_of(config_of(tmp_path), World())
    again.session.resume(checkpoint)
    block_on(again.resume(checkpoint))
    block_on(again.fit())
    assert [record["step"] for record in records(again, "train")] == [1, 2, 3]


def test_asked_in_the_last_step_the_run_finishes(tmp_path: Path) -> None:
    trainer = trainer_of(config_of(tmp_path, total_steps=1), World())
    trainer.session.stop_asked = True
    block_on(trainer.fit())
    assert trainer.step == 1


@pytest.mark.parametrize("interrupted", [True, False])
def test_a_signal_to_all_processes_stops_the_run_though_ray_is_lost_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """Without the signal a lost Ray is started again."""
    jobs: list[Any] = []

    def lose() -> None:
        raise ClusterLostError("Ray's raylet has ended")

    def job(one: Any, stops: Stops) -> Any:
        yield from ()
        jobs.append(one)
        if one.goes_on:
            return {"done": True}
        one.stack.callback(lose)
        if interrupted:
            raise KeyboardInterrupt
        return {}

    def parts(
        config: Any, preload: Any, session: Any, stack: Any, progress: Any, goes_on: bool
    ) -> Any:
        return SimpleNamespace(stack=stack, goes_on=goes_on)

    monkeypatch.setattr("hybridflow.trainer.app.Job", parts)
    config = config_of(tmp_path)
    session = trainer_of(config, World()).session
    with Progress(0, "") as progress:
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                next(_with_clusters(config, None, job, session, progress, Stops()))
        else:
            with pytest.raises(StopIteration) as ended:
                next(_with_clusters(config, None, job, session, progress, Stops()))
            assert ended.value.value == {"done": True}
    assert len(jobs) == (1 if interrupted else 2)
