"""Ranks that are lost: those that train take the loop back to a checkpoint, the others start again
within the step."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import ReferenceConfig, RunConfig, SftConfig, TrainerConfig
from hybridflow.errors import CheckpointError, HybridFlowError, SchemaError, WorkerError
from hybridflow.observe.progress import Progress
from hybridflow.observe.timeline import read_timeline
from hybridflow.saving.manifest import say_saved
from hybridflow.single_controller import block_on
from hybridflow.trainer.groups import FrozenGroup
from hybridflow.trainer.loop import RLTrainer
from hybridflow.trainer.protocols import Update
from hybridflow.trainer.recovery import fit_with_restarts
from hybridflow.workers.model_role import ModelWorker
from tests.models import TINY
from tests.unit.single_controller.replies import Reply, call_of
from tests.unit.trainer.worlds import Ended, Immediate, World, config_of, records, trainer_of


def lost(role: str) -> WorkerError:
    return WorkerError("the worker process died", role=role, rank=0, node="here", method="update")


class Ranks:
    """A group of ranks that is alive or not."""

    def __init__(self) -> None:
        self.alive = True
        self.restarts = 0
        self.hooks: list[Callable[[], Any]] = []

    def is_alive(self) -> bool:
        return self.alive

    async def restart(self) -> None:
        self.restarts = self.restarts + 1
        self.alive = True
        for hook in self.hooks:
            hook()


class Fragile(World):
    """A world whose policy is lost in its first update, and whose checkpoints take a while to be
    whole."""

    def __init__(self, writes: bool = True) -> None:
        super().__init__()
        self.ranks = Ranks()
        self.writes = writes

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        if self.calls.count("update") == 0 and not self.ranks.restarts:
            self.ranks.alive = False
            raise lost("actor")
        return await super().update(method, batch, seed)

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        self.calls.append("save")
        folder.mkdir()

        def write() -> None:
            time.sleep(0.5)
            if folder.is_dir():  # nobody has given up on it
                (folder / "manifest.json").write_text("{}")
                say_saved(folder)

        if self.writes:
            threading.Thread(target=write, daemon=True).start()


def after_a_warm_start(folder: Path, world: Fragile) -> RLTrainer:
    trainer = trainer_of(
        replace(config_of(folder, kl=0.1, total_steps=2), sft=SftConfig(steps=1)), world
    )
    block_on(trainer.start_from_present_weights())
    block_on(trainer.save())
    world.calls.clear()
    return trainer


def test_a_policy_lost_in_the_first_step_comes_back_with_the_warm_start(tmp_path: Path) -> None:
    world = Fragile()
    trainer = after_a_warm_start(tmp_path, world)
    block_on(fit_with_restarts(trainer, {"actor": world.ranks}, 1, Progress(0, "", enabled=False)))
    assert world.ranks.restarts == 1
    # the weights that restarted ranks begin with are those before the warm start: they must never
    # count
    assert "load reference=True" in world.calls and "freeze_reference" not in world.calls
    assert [record["step"] for record in records(trainer, "train")] == [1, 2]


def test_without_a_checkpoint_of_the_warm_start_a_loss_ends_the_run(tmp_path: Path) -> None:
    world = Fragile()
    trainer = after_a_warm_start(tmp_path, world)
    block_on(trainer.session.store.wait())
    shutil.rmtree(trainer.session.folder / "checkpoints")
    with pytest.raises(
        CheckpointError, match="no checkpoint contains the weights of the warm start"
    ):
        block_on(
            fit_with_restarts(trainer, {"actor": world.ranks}, 1, Progress(0, "", enabled=False))
        )
    assert "freeze_reference" not in world.calls


class OwnCritic(Immediate):
    """A critic in processes of its own, lost in the second step's update."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ranks = Ranks()
        self.updates = 0

    async def call(self, method: Callable[..., Any], *args: Any) -> Any:
        self.world.calls.append(f"critic {method.__name__}")

    async def compute(self, method: Callable[..., Any], batch: DataProto) -> DataProto:
        response = batch.jagged("response_ids")
        values = Jagged(np.zeros(len(response.values), np.float32), response.offsets)
        return DataProto.from_columns({"values": values})

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        self.updates += 1
        if self.updates == 2:
            self.ranks.alive = False
            raise lost("critic")
        return [Update({"loss": 0.1}, 1.0, 1e-3, True)]

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
        say_saved(folder)

    async def is_saved(self) -> bool:
        return True


def with_critic(config: RunConfig, world: World, critic: OwnCritic) -> RLTrainer:
    config = replace(config, algorithm=replace(config.algorithm, adv_estimator="gae"))
    world.export = lambda folder: None  # type: ignore[attr-defined]
    trainer = trainer_of(config, world, critic=critic)
    block_on(trainer.start_from_present_weights())
    return trainer


@pytest.mark.parametrize(
    ("every", "back"), [(1, ["load reference=False", "critic load"]), (0, ["set_optimizer"])]
)
def test_a_lost_critic_takes_the_policy_back_with_it(
    tmp_path: Path, every: int, back: list[str]
) -> None:
    config = config_of(tmp_path, total_steps=3, save_every_steps=every)
    world = World()
    policy = Ranks()
    critic = OwnCritic(world)
    trainer = with_critic(config, world, critic)
    policy.hooks.append(lambda: world.calls.append("policy restarted"))
    critic.ranks.hooks.append(lambda: world.calls.append("critic restarted"))
    block_on(
        fit_with_restarts(
            trainer, {"actor": policy, "critic": critic.ranks}, 1, Progress(0, "", enabled=False)
        )
    )
    # both begin anew: neither the one's weights nor the other's are those of the checkpoint, or of
    # the beginning
    at = world.calls.index("policy restarted")
    assert world.calls[at : at + 2 + len(back)] == ["policy restarted", "critic restarted", *back]
    assert [record["step"] for record in records(trainer, "train")] == [1, 2, 3]
    assert trainer.session.totals["restarts"] == 1


class Slow(OwnCritic):
    """A critic whose first update is under way when the policy is lost, and ends when its ranks are
    killed."""

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        self.world.calls.append("critic update")
        if not self.ranks.restarts:
            killed = Reply()
            self.ranks.hooks.append(lambda: killed.set_result(None))
            await call_of({0: killed})
            self.world.calls.append("critic goes on")
        return [Update({"loss": 0.1}, 1.0, 1e-3, True)]


def test_what_was_under_way_when_ranks_were_lost_goes_no_further_and_is_not_recorded(
    tmp_path: Path,
) -> None:
    world = Fragile()
    config = config_of(tmp_path, total_steps=2)
    critic = Slow(world)
    trainer = with_critic(
        replace(config, critic=replace(config.critic, placement="own")), world, critic
    )
    groups: Any = {"actor": world.ranks, "critic": critic.ranks}
    block_on(fit_with_restarts(trainer, groups, 1, Progress(0, "", enabled=False)))
    assert "critic goes on" not in world.calls and world.calls.count("critic update") == 3
    assert [record["step"] for record in records(trainer, "train")] == [1, 2]
    spans = read_timeline(trainer.session.folder / "timeline.jsonl")
    assert [span["step"] for span in spans if span["name"] == "update_critic"] == [1, 2]
    assert not [span for span in spans if "error" in span]


class Workers(Ranks):
    """The worker group of a role that only computes; its ranks are lost in some of the calls."""

    def __init__(self, lost_in: Sequence[int]) -> None:
        super().__init__()
        self.lost_in = list(lost_in)
        self.num_calls = 0

    def call(self, method: Callable[..., Any], *args: Any, role: str) -> Ended:
        self.num_calls += 1
        if self.num_calls in self.lost_in:
            self.alive = False
            raise lost(role)
        if method is ModelWorker.fill:
            raise SchemaError("an error of ranks that live")
        return Ended(args[0].select(["prompt_ids"]))  # a role is sent what its method reads


def frozen(workers: Any, told: list[str], allowed: int = 1) -> FrozenGroup:
    config = RunConfig(
        model=replace(RunConfig().model, hf_config=TINY),
        reference=ReferenceConfig(placement="own"),
        trainer=TrainerConfig(max_restarts=allowed),
    )
    return FrozenGroup(workers, "reference", config, told.append)


def rows() -> DataProto:
    lengths = [np.arange(1 + i % 3) for i in range(6)]
    columns = {name: Jagged.from_rows(lengths, np.int64) for name in ("prompt_ids", "response_ids")}
    return DataProto.from_columns({"uid": np.arange(6), **columns})


def test_a_role_that_only_computes_starts_again_within_the_step() -> None:
    workers = Workers([1])
    told = list[str]()
    filled = list[int]()
    workers.hooks.append(lambda: filled.append(workers.num_calls))
    found = block_on(frozen(workers, told).compute(ModelWorker.compute_ref_log_probs, rows()))
    assert found.jagged("prompt_ids").lengths.tolist() == [1, 2, 3, 1, 2, 3]
    assert (workers.num_calls, workers.restarts, filled) == (2, 1, [1])
    assert told[0].startswith("restarting the ranks of the reference: the worker process died")


def test_its_restarts_are_limited_and_an_error_of_living_ranks_is_none() -> None:
    for allowed in (0, 2):
        workers = Workers([1, 2, 3])
        with pytest.raises(WorkerError, match="died"):
            block_on(
                frozen(workers, [], allowed).compute(ModelWorker.compute_ref_log_probs, rows())
            )
        assert workers.restarts == allowed
    workers = Workers([])
    with pytest.raises(HybridFlowError, match="ranks that live"):
        block_on(frozen(workers, []).call(ModelWorker.fill, Path("start")))
    assert workers.restarts == 0
