"""What the first update of a step reports comes back in the order of the batch, however many ranks share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.load import load_config
from hybridflow.dispatch import Mesh, MeshPosition, method_spec, plan_call
from hybridflow.trainer.groups import PolicyGroup
from hybridflow.workers.policy import PolicyWorker

ROWS, SEED = 16, 5


class Ranks:
    """Data-parallel ranks whose log-probs are the rows' numbers."""

    def __init__(self, size: int) -> None:
        self.mesh = Mesh(tuple(MeshPosition(rank, size, True) for rank in range(size)))
        self.noted: dict[int, DataProto] = {}

    def run(self, method: Callable[..., Any], *args: Any, role: str | None = None) -> Any:
        plan = plan_call(method_spec(method), len(self.mesh.positions), self.mesh, args, {})
        return plan.collect({
            rank: getattr(self, method.__name__)(rank, *call.args) for rank, call in plan.calls.items()
        })  # fmt: skip

    def update_policy(self, rank: int, batch: DataProto, rows: int) -> list[Any]:
        first = next(iter(batch.mini_batches(rows)))
        prompts = first.jagged("prompt_ids").values  # one token, the row's number
        lengths = first.lengths("response_ids")
        column = Jagged(np.repeat(prompts, lengths).astype(np.float32), np.concatenate([[0], np.cumsum(lengths)]))
        self.noted.setdefault(rank, DataProto.from_columns({"old_log_probs": column, "entropys": column}))
        return [{"sums": {}, "info": {"grad_norm": 1.0, "lr": 1.0, "applied": 1.0}}] * (len(batch) // rows)

    def take_update_log_probs(self, rank: int, batch: DataProto) -> DataProto:
        assert len(batch) == len(self.noted[rank])
        return self.noted.pop(rank)

    def take_observations(self, rank: int) -> dict[str, Any]:
        return {"memory": {}, "reserved": 0, "offloaded": 0, "routes": {}, "trainable": 1, "copied": 0}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("mini_batch", [1, 2, 4])
def test_each_row_gets_what_its_update_computed(ranks: int, mini_batch: int) -> None:
    words = ["actor=tiny", "cluster=one-process", f"cluster.procs_per_node={ranks}", "actor.old_log_probs=engine"]
    config = load_config("e2e", [*words, f"actor.ppo_mini_batch_size={mini_batch}", "actor.kl_loss_coef=0"])
    lengths = np.random.default_rng(0).integers(1, 9, ROWS)
    flat, offsets = np.zeros(lengths.sum(), np.float32), np.concatenate([[0], np.cumsum(lengths)])
    batch = DataProto.from_columns({
        "uid": np.arange(ROWS) // 4,
        "prompt_ids": Jagged(np.arange(ROWS), np.arange(ROWS + 1)),
        **{name: Jagged(flat, offsets) for name in ("advantages", "rollout_log_probs")},
        "response_ids": Jagged(flat.astype(np.int64), offsets),
        "response_mask": Jagged(flat == 0, offsets),
    })  # fmt: skip
    workers: Any = Ranks(ranks)
    policy = PolicyGroup(workers, config)
    updates = policy.update(PolicyWorker.update_policy, batch, SEED)
    assert len(updates) == 4 // mini_batch
    scored = policy.update_log_probs(batch, SEED)
    assert len(scored) == 4 * mini_batch
    numbers = scored.jagged("prompt_ids").values
    assert (np.diff(numbers) > 0).all()
    for number, row in zip(numbers, scored.jagged("old_log_probs"), strict=True):
        assert row.tolist() == [number] * lengths[number]
