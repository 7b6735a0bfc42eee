"""What the first update of a step reports comes back in the order of the batch, however many ranks
share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.load import load_config
from hybridflow.dispatch import Mesh, MeshPosition, method_spec, plan_call
from hybridflow.single_controller import block_on
from hybridflow.trainer.groups import PolicyGroup
from hybridflow.workers.policy import PolicyWorker
from tests.unit.trainer.worlds import Ended

ROWS = 16
SEED = 5


class Ranks:
    """Data-parallel ranks whose log-probs are the rows' numbers."""

    def __init__(self, size: int, compares: bool = False) -> None:
        """`compares`: all updates but the first get the old log-probs of their rows, and check
        them."""
        self.compares = compares
        self.scored = 0
        self.trained: dict[int, list[list[int]]] = {}  # of each rank, the rows of each update
        self.mesh = Mesh(tuple(MeshPosition(rank, size, True) for rank in range(size)))
        self.noted: dict[int, DataProto] = {}

    def call(self, method: Callable[..., Any], *args: Any, role: str | None = None) -> Ended:
        plan = plan_call(method_spec(method), len(self.mesh.positions), self.mesh, args, {})
        found = {
            rank: getattr(self, method.__name__)(rank, *call.args)
            for rank, call in plan.calls.items()
        }
        return Ended(plan.collect(found))

    def update_policy(
        self, rank: int, batch: DataProto, rows: int, notes: bool = False
    ) -> list[Any]:
        minis = batch.split(rows)
        # one token, the row's number
        numbers = [mini.jagged("prompt_ids").values.tolist() for mini in minis]
        if notes:
            assert rank not in self.noted and "old_log_probs" not in batch
            self.noted[rank] = log_probs_of(minis[0])
        elif self.compares:
            for mini in minis:
                assert mini.jagged("old_log_probs").equals(
                    log_probs_of(mini).jagged("old_log_probs")
                )
        self.trained.setdefault(rank, []).extend(numbers)
        return [{"sums": {}, "info": {"grad_norm": 1.0, "lr": 1.0, "applied": 1.0}}] * len(minis)

    def compute_log_probs(self, rank: int, batch: DataProto) -> DataProto:
        self.scored += len(batch)
        return log_probs_of(batch)

    def take_update_log_probs(self, rank: int, batch: DataProto) -> DataProto:
        assert len(batch) == len(self.noted[rank])
        return self.noted.pop(rank)

    def take_observations(self, rank: int) -> dict[str, Any]:
        return {
            "memory": {},
            "reserved": 0,
            "offloaded": 0,
            "routes": {},
            "trainable": 1,
            "copied": 0,
        }


def log_probs_of(batch: DataProto) -> DataProto:
    """Each row's number at each of its response tokens."""
    prompts = batch.jagged("prompt_ids").values
    lengths = batch.lengths("response_ids")
    column = Jagged(
        np.repeat(prompts, lengths).astype(np.float32), np.concatenate([[0], np.cumsum(lengths)])
    )
    return DataProto.from_columns({"old_log_probs": column, "entropys": column})


def rows_of_a_step() -> DataProto:
    lengths = np.random.default_rng(0).integers(1, 9, ROWS)
    flat = np.zeros(lengths.sum(), np.float32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return DataProto.from_columns({
        "uid": np.arange(ROWS) // 4,
        "prompt_ids": Jagged(np.arange(ROWS), np.arange(ROWS + 1)),
        **{name: Jagged(flat, offsets) for name in ("advantages", "rollout_log_probs")},
        "response_ids": Jagged(flat.astype(np.int64), offsets),
        "response_mask": Jagged(flat == 0, offsets),
    })  # fmt: skip


def group_of(workers: Any, ranks: int, *more: str) -> PolicyGroup:
    words = [
        "actor=tiny",
        "cluster=one-process",
        f"cluster.procs_per_node={ranks}",
        "actor.kl_loss_coef=0",
        *more,
    ]
    return PolicyGroup(workers, load_config("e2e", words))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("mini_batch", [1, 2, 4])
def test_each_row_gets_what_its_update_computed(ranks: int, mini_batch: int) -> None:
    workers = Ranks(ranks)
    batch = rows_of_a_step()
    policy = group_of(
        workers, ranks, "actor.old_log_probs=engine", f"actor.ppo_mini_batch_size={mini_batch}"
    )
    updates, scored = block_on(policy.update_and_score(batch, SEED))
    assert len(updates) == 4 // mini_batch and len(scored) == 4 * mini_batch
    numbers = scored.jagged("prompt_ids").values
    assert (np.diff(numbers) > 0).all()
    for number, row, one in zip(
        numbers, scored.jagged("old_log_probs"), scored.jagged("response_ids"), strict=True
    ):
        assert row.tolist() == [number] * len(one)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("mini_batch", "epochs"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_later_updates_compare_with_a_pass_over_their_rows_and_later_epochs_with_both(
    ranks: int, mini_batch: int, epochs: int
) -> None:
    """The mini-batches are those of a step that scores all rows first, and no row is scored
    twice."""
    words = [f"actor.ppo_mini_batch_size={mini_batch}", f"actor.ppo_epochs={epochs}"]
    workers = Ranks(ranks, compares=True)
    whole = Ranks(ranks)
    batch = rows_of_a_step()
    policy = group_of(workers, ranks, *words)
    later = block_on(policy.later_log_probs(batch, SEED)) if mini_batch < 4 else None
    updates, scored = block_on(policy.update_and_score(batch, SEED, later))
    assert len(updates) == 4 // mini_batch * epochs and workers.scored == ROWS - 4 * mini_batch
    assert scored.jagged("prompt_ids").equals(batch.jagged("prompt_ids"))
    assert scored.select(["old_log_probs", "entropys"]).equals(log_probs_of(batch))
    scored_first = batch.union(log_probs_of(batch))
    block_on(group_of(whole, ranks, *words).update(PolicyWorker.update_policy, scored_first, SEED))
    assert workers.trained == whole.trained
