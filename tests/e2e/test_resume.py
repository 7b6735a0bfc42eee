"""One run, stopped three times in three ways, each time resumed by the same command: nothing is
left behind, no step is lost or doubled."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hybridflow.config.load import load_config
from hybridflow.data.sampler import ResumableSampler
from hybridflow.observe.jsonl import read_jsonl
from hybridflow.observe.rollouts import read_rollouts
from tests.e2e.runs import Run

pytestmark = pytest.mark.slow
STEPS = 9
PROMPTS = 4
ROWS = 30
# two stages and one engine: four starts of everything are dear, and every layout's own resuming is
# `tests/dist/test_checkpoint.py`'s
TWO_RANKS = ("actor=tiny", "cluster.procs_per_node=2", "actor.parallel.pipeline=2", "rollout=tiny")


@dataclass
class Stopped:
    """How one of the runs went, noted when it had ended."""

    exit_code: int
    seconds: float
    out: str
    err: str
    left: list[str]
    steps: list[int]
    checkpoint: str | None


@pytest.fixture(scope="module")
def history(
    tmp_path_factory: pytest.TempPathFactory, settings: list[str]
) -> Iterator[tuple[Path, dict[str, Stopped]]]:
    """SIGTERM while workers start, Ctrl-C in the loop, SIGKILL in the loop, then to the end."""
    out = tmp_path_factory.mktemp("resume")
    folder = out / "e2e"
    words = [
        *settings,
        *TWO_RANKS,
        f"output_dir={out}",
        f"trainer.total_steps={STEPS}",
        "trainer.save_every_steps=1",
        "rollout.n=2",
    ]

    def run(number: signal.Signals | None, when: str | int, to_all: bool = False) -> Stopped:
        """`when`: words of the output, or a step whose checkpoint (or a later one: steps are short)
        is there."""
        step = max(when, _saved_step(folder) + 1) if isinstance(when, int) else 0
        with Run(out / "output", "train", *words) as run:
            if number is not None:
                run.wait_for(
                    lambda: (
                        _saved_step(folder) >= step if isinstance(when, int) else when in run.out
                    )
                )
                run.send(number, to_all=to_all)
            start = time.monotonic()
            exit_code = run.end(300 if number is None else 60)
            seconds = time.monotonic() - start
            left = run.left_behind()
            return Stopped(
                exit_code, seconds, run.out, run.err, left, _steps(folder), _latest(folder)
            )

    yield (
        folder,
        {
            "terminated": run(signal.SIGTERM, " ranks (TP1·PP2"),
            "interrupted": run(signal.SIGINT, 2, to_all=True),
            "killed": run(signal.SIGKILL, 5),
            "finished": run(None, ""),
        },
    )


def _latest(folder: Path) -> str | None:
    pointer = folder / "checkpoints" / "latest.json"
    return json.loads(pointer.read_text())["folder"] if pointer.exists() else None


def _saved_step(folder: Path) -> int:
    """The step of the last checkpoint of the main job; 0 before it."""
    name = _latest(folder) or ""
    return int(name.rsplit("_", 1)[1]) if name.startswith("global_step_") else 0


def _steps(folder: Path, phase: str = "train") -> list[int]:
    return [
        record["step"]
        for record in read_jsonl(folder / "metrics.jsonl")
        if record["phase"] == phase
    ]


History = tuple[Path, dict[str, Stopped]]


def test_sigterm_while_starting_stops_everything(history: History) -> None:
    run = history[1]["terminated"]
    assert run.exit_code == 130, run.err
    assert run.left == []
    assert run.err.count("hybridflow: ") == 1 and "Traceback" not in run.err
    assert "there is no checkpoint yet, so the same command starts from the beginning" in run.err


def test_ctrl_c_in_the_loop_says_how_to_resume(history: History) -> None:
    run = history[1]["interrupted"]
    assert run.exit_code == 130, run.err
    assert run.left == []
    assert run.checkpoint is not None and f"checkpoints/{run.checkpoint}" in run.err
    assert "the same command resumes" in run.err and "Traceback" not in run.err


def test_after_a_killed_driver_nothing_is_left(history: History) -> None:
    run = history[1]["killed"]
    assert run.exit_code == -signal.SIGKILL
    assert run.left == []


@pytest.mark.parametrize(
    ("stopped", "resumed"), [("interrupted", "killed"), ("killed", "finished")]
)
def test_the_same_command_goes_on_at_the_last_checkpoint(
    history: History, stopped: str, resumed: str
) -> None:
    folder, runs = history
    assert runs[stopped].checkpoint is not None
    assert (
        f"resuming from {folder / 'checkpoints' / str(runs[stopped].checkpoint)}"
        in runs[resumed].out
    )
    assert "SFT 1/" not in runs[resumed].out  # what lies behind the checkpoint is not done again


def test_the_end_is_that_of_an_uninterrupted_run(history: History) -> None:
    folder, runs = history
    assert runs["finished"].exit_code == 0, runs["finished"].err
    assert runs["finished"].left == []
    assert _steps(folder) == list(range(1, STEPS + 1))
    assert (_steps(folder, "sft"), _steps(folder, "val")) == ([1, 2], [0, STEPS])
    summary = json.loads((folder / "summary.json").read_text())
    assert (
        summary["steps"] == STEPS
        and summary["first_ppo_kl_max"] <= 1e-6
        and summary["logprob_diff_mean"] <= 1e-4
    )
    for record in read_jsonl(folder / "metrics.jsonl"):
        if record["phase"] == "train":
            assert record["rollout/logprob_diff/mean"] <= 1e-4 and record["actor/grad_norm"] > 1e-3


def test_prompts_come_in_the_order_of_one_uninterrupted_sampler(history: History) -> None:
    """Over the end of an epoch, too: 9 steps of 4 prompts out of 30."""
    folder, _ = history
    config = load_config("config", (), folder)
    train = [row["extra_info"]["index"] for row in read_rollouts(config.data.train_files[0])]
    assert len(train) == ROWS
    sampler = ResumableSampler(ROWS, PROMPTS, config.data.shuffle, config.seed)
    for step in range(1, STEPS + 1):
        rows = read_rollouts(folder / "rollouts" / f"step_{step:06d}.parquet")
        assert {row["weight_version"] for row in rows} == {str(step - 1)}
        assert [json.loads(row["extra_info"])["index"] for row in rows] == np.repeat(
            [train[i] for i in next(sampler)], 2
        ).tolist()
