"""The loop's logic with small stand-ins for the policy, the engines and the weight sync: no Ray, no
Megatron, no SGLang."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import pytest

from hybridflow.batch import DataProto
from hybridflow.errors import CheckpointError, HybridFlowError, LogprobMismatchError, WorkerError
from hybridflow.observe.progress import Progress
from hybridflow.observe.rollouts import read_rollouts
from hybridflow.rollout.dumps import Dumps
from hybridflow.single_controller import block_on
from hybridflow.trainer.loop import RLTrainer
from hybridflow.trainer.protocols import Update
from hybridflow.trainer.recovery import fit_with_restarts
from hybridflow.trainer.samples import Dumped, Sampled
from tests.unit.trainer.worlds import (
    PROMPTS,
    ROWS,
    N,
    Rows,
    Scores,
    World,
    config_of,
    records,
    trainer_of,
)


def test_a_step_does_things_in_order_and_syncs_before_it_generates(tmp_path: Path) -> None:
    world = World()
    block_on(trainer_of(config_of(tmp_path, total_steps=2), world).fit())
    step = ["generate", "log_probs", "update"]
    assert world.calls == ["sync 0", "answer", *step, "sync 1", *step, "sync 2", "answer", "save"]
    assert len(set(world.seeds)) == 2  # mini-batches are drawn differently every step


def test_rollouts_alone_train_and_save_nothing_and_a_run_trains_on_their_dumps(
    tmp_path: Path,
) -> None:
    world = World()
    made_with = {"tokenizer": "letters"}
    alone = trainer_of(config_of(tmp_path / "alone", total_steps=2, rollout_only=True), world)
    cast(Sampled, alone.samples).made_with = made_with
    block_on(alone.fit())
    assert world.calls == ["sync 0", "answer", "generate", "generate"]
    for record in records(alone, "train"):
        assert (
            record["critic/score/mean"] == 0.5
            and "actor/loss" not in record
            and "critic/rewards/mean" not in record
        )
    folder = alone.session.folder / "rollouts"
    assert {row["weight_version"] for row in read_rollouts(folder / "step_000002.parquet")} == {"0"}
    world = World()
    config = config_of(tmp_path / "trained", total_steps=3, val_before_train=False)
    trainer = trainer_of(config, world)
    given: tuple[Any, ...] = (config, world, Rows(), Scores(), trainer.session.timeline)
    trainer.samples = Dumped(Dumps(folder, made_with, PROMPTS * N), *given)
    block_on(trainer.fit())
    assert world.calls == [
        "sync 0",
        "log_probs",
        "update",
        "sync 1",
        "log_probs",
        "update",
        "sync 2",
        "save",
    ]
    assert len(records(trainer, "train")) == 2  # of 3: there are no more dumps


@pytest.mark.parametrize(
    ("old", "mini_batch", "rows"), [("trainer", PROMPTS, PROMPTS * N), ("engine", 1, N)]
)
def test_where_no_pass_comes_first_the_update_reports_the_log_probs(
    tmp_path: Path, old: Literal["trainer", "engine"], mini_batch: int, rows: int
) -> None:
    """One update a step, or the engine's log-probs: the difference is that of the rows of the first
    mini-batch."""
    config = config_of(tmp_path, total_steps=1)
    config = replace(
        config, actor=replace(config.actor, ppo_mini_batch_size=mini_batch, old_log_probs=old)
    )
    world = World(difference=0.005)
    world.first_rows = rows
    trainer = trainer_of(config, world)
    block_on(trainer.fit())
    assert world.calls == ["sync 0", "answer", "generate", "update", "sync 1", "answer", "save"]
    [record] = records(trainer, "train")
    assert (
        record["rollout/logprob_diff/mean"] == pytest.approx(0.005)
        and record["actor/entropy"] == -1.0
    )
    dumped = read_rollouts(trainer.session.folder / "rollouts" / "step_000001.parquet")
    assert len(dumped) == PROMPTS * N and ("logprob_diff_mean" in dumped[0]) == (
        rows == PROMPTS * N
    )


class Counting(World):
    """A world that notes how many rows its passes score."""

    def __init__(self, difference: float = 0.0) -> None:
        super().__init__(difference)
        self.scored: list[int] = []

    async def log_probs(self, batch: DataProto) -> DataProto:
        self.scored.append(len(batch))
        return await super().log_probs(batch)


def test_with_several_updates_a_pass_scores_the_rows_of_the_later_ones_alone(
    tmp_path: Path,
) -> None:
    """What is recorded is still of all rows: the first update reports its own."""
    config = config_of(tmp_path, total_steps=1)
    config = replace(config, actor=replace(config.actor, ppo_mini_batch_size=1))
    world = Counting(difference=0.005)
    world.first_rows = N
    trainer = trainer_of(config, world)
    block_on(trainer.fit())
    assert world.scored == [(PROMPTS - 1) * N]
    [record] = records(trainer, "train")
    assert (
        record["rollout/logprob_diff/mean"] == pytest.approx(0.005)
        and record["actor/entropy"] == -1.0
    )
    dumped = read_rollouts(trainer.session.folder / "rollouts" / "step_000001.parquet")
    assert len(dumped) == PROMPTS * N and all("logprob_diff_mean" in row for row in dumped)


def test_a_pass_scores_all_rows_where_the_reward_reads_them(tmp_path: Path) -> None:
    config = config_of(tmp_path, kl=0.1, total_steps=1)
    actor = replace(config.actor, ppo_mini_batch_size=1)
    algorithm = replace(config.algorithm, kl_coef=0.1)
    world = Counting()
    block_on(trainer_of(replace(config, actor=actor, algorithm=algorithm), world).fit())
    assert world.scored[0] == PROMPTS * N


@pytest.mark.parametrize("mini_batch", [PROMPTS, 1])
def test_engines_that_disagree_stop_a_run_whose_update_reports_it_before_anybody_gets_the_weights(
    tmp_path: Path, mini_batch: int
) -> None:
    config = config_of(tmp_path, save_every_steps=1)
    world = World(difference=0.02)
    world.first_rows = mini_batch * N
    with pytest.raises(
        LogprobMismatchError, match=r"step 1: .*bound 1\.00e-02.*logprob_diff_bound"
    ):
        block_on(
            trainer_of(
                replace(config, actor=replace(config.actor, ppo_mini_batch_size=mini_batch)), world
            ).fit()
        )
    scored = [] if mini_batch == PROMPTS else ["log_probs"]
    assert world.calls == ["sync 0", "answer", "generate", *scored, "update"]


@pytest.mark.parametrize(
    ("dtype", "bound", "difference", "stops"),
    [
        ("float32", 0.01, 0.05, True),
        ("bfloat16", 0.01, 0.05, False),
        ("bfloat16", 0.01, 0.2, True),
        ("bfloat16", 0.3, 0.2, False),
        ("bfloat16", None, 9.0, False),
    ],
)
def test_the_bound_on_the_difference_follows_the_dtype(
    tmp_path: Path, dtype: Any, bound: float | None, difference: float, stops: bool
) -> None:
    config = config_of(tmp_path, total_steps=1)
    rollout = replace(config.rollout, logprob_diff_bound=bound)
    trainer = trainer_of(
        replace(config, rollout=rollout, model=replace(config.model, dtype=dtype)),
        World(difference),
    )
    with pytest.raises(LogprobMismatchError) if stops else nullcontext():
        block_on(trainer.fit())


def test_a_reference_is_asked_only_where_a_kl_term_needs_it(tmp_path: Path) -> None:
    world = World()
    trainer = trainer_of(config_of(tmp_path, kl=0.1, total_steps=1), world)
    block_on(trainer.start_from_present_weights())
    assert world.calls == ["freeze_reference", "set_optimizer"]
    block_on(trainer.fit())
    assert world.calls[2:] == [
        "sync 0",
        "answer",
        "generate",
        "log_probs",
        "ref_log_probs",
        "log_probs",
        "update",
        "sync 1",
        "answer",
        "save",
    ]


@pytest.mark.parametrize(
    ("every", "validated", "before"),
    [(0, [0, 5], True), (2, [0, 2, 4, 5], True), (5, [5], False)],
    ids=["ends", "during", "not-before"],
)
def test_validation_before_during_and_after(
    tmp_path: Path, every: int, validated: list[int], before: bool
) -> None:
    trainer = trainer_of(
        config_of(tmp_path, total_steps=5, test_every_steps=every, val_before_train=before), World()
    )
    block_on(trainer.fit())
    assert [record["step"] for record in records(trainer, "val")] == validated
    for step in validated:
        rows = read_rollouts(trainer.session.folder / "validation" / f"step_{step:06d}.parquet")
        assert len(rows) == ROWS and {row["weight_version"] for row in rows} == {str(step)}
    assert trainer.session.totals["score_after"] == 0.5


@pytest.mark.parametrize(("every", "saved"), [(0, [5]), (2, [2, 4, 5]), (1, [1, 2, 3, 4, 5])])
def test_checkpoints_come_when_due_and_at_the_end(
    tmp_path: Path, every: int, saved: list[int]
) -> None:
    config = config_of(tmp_path, total_steps=5, save_every_steps=every, max_checkpoints_to_keep=9)
    trainer = trainer_of(config, World())
    block_on(trainer.fit())
    block_on(trainer.session.store.wait())
    folder = trainer.session.folder / "checkpoints"
    assert sorted(path.name for path in folder.glob("global_step_*")) == [
        f"global_step_{step}" for step in saved
    ]
    assert json.loads((folder / "latest.json").read_text()) == {"folder": "global_step_5"}


def test_old_checkpoints_go(tmp_path: Path) -> None:
    trainer = trainer_of(
        config_of(tmp_path, total_steps=5, save_every_steps=1, max_checkpoints_to_keep=2), World()
    )
    block_on(trainer.fit())
    block_on(trainer.session.store.wait())
    names = sorted(
        path.name for path in (trainer.session.folder / "checkpoints").glob("global_step_*")
    )
    assert names == ["global_step_4", "global_step_5"]


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = trainer_of(config_of(tmp_path / "whole", total_steps=6), World())
    block_on(whole.fit())

    config = config_of(tmp_path / "cut", kl=0.1, total_steps=3, save_every_steps=1)
    first = trainer_of(config, World())
    block_on(first.fit())
    block_on(first.session.store.wait())
    # as if a fourth step had begun when the run was killed
    first.session.tracker.log(4, {"x": 1.0})
    first.session.close()
    world = World()
    second = trainer_of(replace(config, trainer=replace(config.trainer, total_steps=6)), world)
    latest = second.session.store.latest()
    assert latest is not None and (latest.phase, latest.step) == ("rl", 3)
    second.session.resume(latest)
    block_on(second.resume(latest))
    assert world.calls == ["load reference=True"]
    block_on(second.fit())
    assert world.calls[1:3] == [
        "sync 3",
        "generate",
    ]  # the engines get the restored weights, and nothing is validated again
    assert [record["step"] for record in records(second, "train")] == [1, 2, 3, 4, 5, 6]
    for step in range(1, 7):
        prompts = [
            [
                row["prompt_text"]
                for row in read_rollouts(
                    run.session.folder / "rollouts" / f"step_{step:06d}.parquet"
                )
            ]
            for run in (whole, second)
        ]
        assert prompts[0] == prompts[1], f"step {step} saw other prompts"
    assert second.samples.state() == whole.samples.state()
    assert second.session.totals["seconds_grpo"] > latest.state["totals"]["seconds_grpo"]


class Breaking(World):
    """A world whose policy breaks in some updates, and the group that it would be."""

    def __init__(self, breaks_at: Sequence[int]) -> None:
        super().__init__()
        self.breaks_at = list(breaks_at)
        self.updates = 0
        self.alive = True

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        self.updates += 1
        if self.updates in self.breaks_at:
            self.alive = False
            raise WorkerError(
                "the worker process died", role="actor", rank=1, node="here", method="update_policy"
            )
        return await super().update(method, batch, seed)

    def is_alive(self) -> bool:
        return self.alive

    async def restart(self) -> None:
        self.calls.append("restart")
        self.alive = True


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_the_console_says_from_which_policy_a_divergence_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kl: float
) -> None:
    lines: list[Mapping[str, float]] = []
    monkeypatch.setattr(
        Progress, "update", lambda self, step, shown, seconds: lines.append(dict(shown))
    )
    trainer = trainer_of(config_of(tmp_path, kl=kl, total_steps=1), World())
    block_on(trainer.start_from_present_weights())
    block_on(trainer.fit())
    [shown] = lines
    [record] = records(trainer, "train")
    found = {name: value for name, value in shown.items() if "kl" in name}
    assert found == {name: record[f"actor/{name}"] for name in ("ppo_kl", *["ref_kl"] * bool(kl))}


def broken_run(folder: Path, world: Breaking, max_restarts: int, **settings: Any) -> RLTrainer:
    trainer = trainer_of(config_of(folder, kl=0.1, **settings), world)
    block_on(trainer.start_from_present_weights())
    block_on(
        fit_with_restarts(trainer, {"actor": world}, max_restarts, Progress(0, "", enabled=False))
    )
    return trainer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("every", "breaks_at"), [(1, [3]), (2, [4]), (2, [4, 6]), (0, [2]), (0, [1, 4])]
)
def test_a_run_whose_policy_breaks_goes_on_from_its_last_checkpoint(
    tmp_path: Path, every: int, breaks_at: list[int]
) -> None:
    whole = trainer_of(config_of(tmp_path / "whole", total_steps=5), World())
    block_on(whole.fit())
    world = Breaking(breaks_at)
    trainer = broken_run(
        tmp_path / "broken", world, len(breaks_at), total_steps=5, save_every_steps=every
    )
    after = world.calls[world.calls.index("restart") + 1]
    assert after == ("freeze_reference" if every == 0 else "load reference=True")
    assert trainer.session.totals["restarts"] == len(breaks_at)
    assert trainer.session.totals_now()["seconds_total"] < 60
    assert [record["step"] for record in records(trainer, "train")] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in records(trainer, "val")] == [0, 5]
    for step in range(1, 6):
        prompts = [
            [
                row["prompt_text"]
                for row in read_rollouts(
                    run.session.folder / "rollouts" / f"step_{step:06d}.parquet"
                )
            ]
            for run in (whole, trainer)
        ]
        assert prompts[0] == prompts[1], f"step {step} saw other prompts"


def test_restarts_are_counted_and_an_error_of_a_whole_group_is_none_of_their_business(
    tmp_path: Path,
) -> None:
    for allowed, breaks_at in ((0, [2]), (1, [2, 4])):
        world = Breaking(breaks_at)
        with pytest.raises(WorkerError, match="died"):
            broken_run(tmp_path / str(allowed), world, allowed, total_steps=5)
        assert world.calls.count("restart") == allowed
    world = Breaking([])
    world.difference = 0.5
    with pytest.raises(LogprobMismatchError):
        broken_run(tmp_path / "whole group", world, 3)
    assert "restart" not in world.calls


@pytest.mark.parametrize("difference", [0.02, float("nan")])
def test_engines_that_disagree_stop_the_run_before_it_trains(
    tmp_path: Path, difference: float
) -> None:
    config = config_of(tmp_path)
    world = World(difference=difference)
    # the reward reads log-probs of all rows
    config = replace(config, algorithm=replace(config.algorithm, kl_coef=0.1))
    with pytest.raises(
        LogprobMismatchError, match=r"step 1: .*bound 1\.00e-02.*logprob_diff_bound"
    ):
        block_on(trainer_of(config, world).fit())
    assert "update" not in world.calls and "save" not in world.calls


def test_without_a_bound_the_difference_is_only_recorded(tmp_path: Path) -> None:
    trainer = trainer_of(config_of(tmp_path, bound=None), World(difference=0.5))
    block_on(trainer.fit())
    assert [record["rollout/logprob_diff/mean"] for record in records(trainer, "train")] == [
        0.5
    ] * 3
    assert trainer.session.totals["logprob_diff_max"] == 0.5


def test_a_total_that_is_no_number_has_a_form_in_the_checkpoint_and_comes_back(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, bound=None)
    first = trainer_of(config, World(difference=math.nan))
    block_on(first.fit())
    block_on(first.session.store.wait())
    session = trainer_of(config, World()).session
    latest = session.store.latest()
    assert latest is not None
    json.loads((latest.folder / "driver.json").read_text(), parse_constant=pytest.fail)
    session.resume(latest)
    assert math.isnan(session.totals["logprob_diff_sum"]) and session.totals["seconds_grpo"] > 0


def test_a_gradient_that_is_not_finite_stops_the_run_without_a_checkpoint(tmp_path: Path) -> None:
    world = World(applied=(True, False))
    trainer = trainer_of(config_of(tmp_path, save_every_steps=1), world)
    with pytest.raises(HybridFlowError, match=r"step 1: a gradient of the actor is not finite"):
        block_on(trainer.fit())
    assert "save" not in world.calls
    [record] = records(trainer, "train")  # what happened can be read
    assert record["actor/skipped_updates"] == 1


def test_metrics_keep_the_first_update_apart(tmp_path: Path) -> None:
    trainer = trainer_of(config_of(tmp_path, total_steps=1), World())
    block_on(trainer.fit())
    [record] = records(trainer, "train")
    assert (record["actor/first_ppo_kl"], record["actor/ppo_kl"]) == (0.0, pytest.approx(0.05))
    assert record["critic/score/mean"] == 0.5
    assert record["critic/solved_groups"] == record["critic/unsolved_groups"] == 0


def test_a_full_disk_leaves_the_previous_checkpoint_in_force(tmp_path: Path) -> None:
    world = World()
    trainer = trainer_of(config_of(tmp_path, total_steps=1), world)
    block_on(trainer.fit())
    block_on(trainer.session.store.wait())
    trainer.step = 2
    world.fail_save = True
    with pytest.raises(
        CheckpointError,
        match=(
            r"global_step_2 could not be written \(No space left.*previous checkpoint is untouched"
        ),
    ):
        block_on(trainer.save())
    folder = trainer.session.folder / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_1", "latest.json"]
    latest = trainer.session.store.latest()
    assert latest is not None and latest.step == 1
    (folder / "global_step_1" / "driver.json").write_text("{")
    with pytest.raises(CheckpointError, match="does not point to a complete checkpoint"):
        trainer.session.store.latest()


def test_a_step_off_the_policy_trains_what_older_weights_made_and_bounds_the_newest_alone(
    tmp_path: Path,
) -> None:
    """The engines' log-probs of older weights differ by design; those of the present ones are still
    compared."""

    class Aging(World):
        def generate(self, prompts: DataProto, *, training: bool) -> DataProto:
            self.difference = 0.0 if self.engine_version == self.right else 1.0
            return super().generate(prompts, training=training)

        right = -1

    world = Aging()
    # step 1 trains what these made; what version 1 made is trained a version later, in step 3
    world.right = 0
    trainer = trainer_of(
        config_of(tmp_path, max_staleness=1, total_steps=3, val_before_train=False), world
    )
    block_on(trainer.fit())
    found = records(trainer, "train")
    assert [record["rollout/staleness/max"] for record in found] == [0, 1, 1]
    assert [record["rollout/groups_left"] for record in found] == [PROMPTS, PROMPTS, 0]
    assert world.calls.count("generate") == 2  # two steps' prompts together, then one step's
    world = Aging()
    trainer = trainer_of(
        config_of(tmp_path / "off", max_staleness=1, total_steps=3, val_before_train=False), world
    )
    with pytest.raises(LogprobMismatchError, match="step 1"):
        block_on(trainer.fit())


@pytest.mark.parametrize(("epochs", "steps"), [(1, 2), (2, 5), (3, 7)])
def test_a_run_of_epochs_ends_after_their_last_whole_batch(
    tmp_path: Path, epochs: int, steps: int
) -> None:
    config = config_of(tmp_path, total_steps=None, total_epochs=epochs, test_every_steps=0)
    assert config.data.train_batch_size == 4 and ROWS == 10
    trainer = trainer_of(config, World())
    block_on(trainer.fit())
    assert [record["step"] for record in records(trainer, "train")] == list(range(1, steps + 1))
    assert [record["step"] for record in records(trainer, "val")] == [0, steps]
