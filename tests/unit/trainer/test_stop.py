"""A run that is asked to stop ends after the present step and a checkpoint, and a second run does the rest."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hybridflow.errors import RunStopped
from hybridflow.trainer.app import _stop_when_asked
from tests.unit.trainer.worlds import World, config_of, records, trainer_of


def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint_and_the_next_run_goes_on(tmp_path: Path) -> None:
    trainer = trainer_of(config_of(tmp_path), World())
    before, scored = signal.getsignal(signal.SIGUSR1), trainer.with_scores
    trainer.with_scores = lambda batch: (os.kill(os.getpid(), signal.SIGUSR1), scored(batch))[1]  # type: ignore[method-assign]
    with pytest.raises(RunStopped, match=r"resumes from .*global_step_1") as stopped, _stop_when_asked(trainer.session):
        trainer.fit()
    assert stopped.value.exit_code == 75 and signal.getsignal(signal.SIGUSR1) == before
    assert [record["step"] for record in records(trainer, "train")] == [1]
    checkpoint = trainer.session.store.latest()
    assert checkpoint is not None and checkpoint.step == 1

    again = trainer_of(config_of(tmp_path), World())
    again.session.resume(checkpoint)
    again.resume(checkpoint)
    again.fit()
    assert [record["step"] for record in records(again, "train")] == [1, 2, 3]


def test_asked_in_the_last_step_the_run_finishes(tmp_path: Path) -> None:
    trainer = trainer_of(config_of(tmp_path, total_steps=1), World())
    trainer.session.stop_asked = True
    trainer.fit()
    assert trainer.step == 1
