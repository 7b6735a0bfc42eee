"""The response mask on the driver: advantages, KL terms, metrics and dumps of rows with
observations are those of the rows without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
)
from hybridflow.dispatch import Mesh, MeshPosition, method_spec, plan_call
from hybridflow.observe.rollouts import dump_path, read_rollouts
from hybridflow.rollout.evaluation import dump_batch
from hybridflow.single_controller import block_on
from hybridflow.trainer.advantages import Advantages
from hybridflow.trainer.groups import PolicyGroup
from hybridflow.trainer.metrics import batch_metrics
from hybridflow.workers.policy import PolicyWorker
from tests.unit.trainer.worlds import Ended

LENGTHS = np.array([6, 4, 0, 5, 3])
# in the middle, at the end, at the start
SAMPLED = [1, 1, 0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 0, 1, 1, 1]
TOKENS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "entropys")
COUNTED_WHOLE = {
    "perf/total_num_tokens",
    "response_length/mean",
    "response_length/max",
    "response_length/min",
}


def finished(keep: bool, critic: bool = False, garbage: float = 1e9) -> DataProto:
    """Five answers to two prompts: with their observations, at which columns hold garbage, or
    without them."""
    mask = np.array(SAMPLED, bool)
    rng = np.random.default_rng(0)
    row = np.repeat(np.arange(5), LENGTHS)
    lengths = LENGTHS if keep else np.bincount(row[mask], minlength=5)
    names = (*TOKENS, *(("values",) if critic else ()))
    columns: dict[str, np.ndarray] = {
        name: rng.normal(-1, 0.4, 18).astype(np.float32) for name in names
    }
    columns = {
        name: np.where(mask, values, np.float32(garbage)) for name, values in columns.items()
    }
    columns |= {
        "response_ids": np.arange(18),
        "response_versions": np.ones(18, np.int64),
        "response_mask": mask,
    }
    objects = {
        name: np.array([value] * 5, object)
        for name, value in {
            "finish_reason": "stop",
            "data_source": "toy",
            "response_text": "x",
            "ground_truth": "1",
            "weight_version": "1",
            "extra_info": {},
        }.items()
    }
    return DataProto.from_columns(
        {
            **{
                name: Jagged.from_lengths(v if keep else v[mask], lengths)
                for name, v in columns.items()
            },
            **objects,
            "prompt_ids": Jagged.from_lengths(np.arange(5), np.ones(5, np.int64)),
            "uid": np.array([0, 0, 0, 1, 1]),
            "scores": np.array([1, 0, 1, 0, 0.5], np.float32),
        }
    )


@pytest.mark.parametrize("kl", [{}, {"kl_coef": 0.3, "kl_penalty": "k3", "kl_target": 0.1}])
@pytest.mark.parametrize(
    "estimator", [{"adv_estimator": "grpo"}, {"adv_estimator": "gae", "gamma": 0.9, "lam": 0.8}]
)
def test_observations_are_as_if_they_were_not_there(
    estimator: dict[str, Any], kl: dict[str, Any]
) -> None:
    config = RunConfig(algorithm=AlgorithmConfig(**estimator, **kl))
    parts = [Advantages(config) for _ in range(2)]
    critic = estimator["adv_estimator"] == "gae"
    found, wanted = (
        part.add(finished(keep, critic)) for part, keep in zip(parts, (True, False), strict=True)
    )
    mask = np.array(SAMPLED, bool)
    np.testing.assert_allclose(found["rewards"], wanted["rewards"], rtol=1e-6)
    for name in {"advantages", "returns"} & set(wanted.columns):
        values = found.jagged(name).values
        np.testing.assert_allclose(values[mask], wanted.jagged(name).values, rtol=1e-5, atol=1e-6)
        assert not values[~mask].any()
    assert (
        parts[0].metrics == pytest.approx(parts[1].metrics)
        and parts[0].control.value == parts[1].control.value
    )
    numbers = batch_metrics(found)
    expected = batch_metrics(wanted)
    assert numbers.keys() == expected.keys()
    for name in numbers.keys() - COUNTED_WHOLE:
        assert numbers[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-7), name
    # what the model reads is counted as a whole
    assert numbers["response_length/mean"] == LENGTHS.mean()


def test_scores_of_rows_without_a_response_are_left_out() -> None:
    """As in verl, where `critic/score` and `critic/rewards` are those of samples that were not
    aborted."""
    batch = Advantages(RunConfig()).add(finished(True))
    metrics = batch_metrics(batch)
    answered = LENGTHS > 0
    assert metrics["critic/score/mean"] == pytest.approx(batch["scores"][answered].mean())
    assert metrics["critic/rewards/mean"] == pytest.approx(batch["rewards"][answered].mean())
    nothing = batch_metrics(batch.rows([2]))
    assert np.isnan(nothing["critic/score/mean"])


class Letters:
    def decode(self, ids: list[int]) -> str:
        return str(ids)


def test_a_dump_says_which_tokens_were_sampled(tmp_path: Path) -> None:
    batches: list[DataProto] = [
        Advantages(RunConfig()).add(finished(keep)) for keep in (True, False)
    ]
    tokenizer: Any = Letters()
    rows = []
    for number, batch in enumerate(batches):
        dump_batch(tmp_path, number, batch, tokenizer)
        rows.append(read_rollouts(dump_path(tmp_path, number)))
    assert (
        rows[0][0]["response_mask"] == [[1, 2], [0, 2], [1, 2]]
        and rows[0][2]["response_mask"] == []
    )
    for with_mask, without in zip(*rows, strict=True):
        for name in ("advantage", "logprob_diff_mean", "logprob_diff_max"):
            assert with_mask[name] == pytest.approx(without[name], rel=1e-5), name


# ---- the same updates in any layout
# ----


class Ranks:
    """A worker group of so many data-parallel ranks that notes the rows of every update instead of
    training on them."""

    def __init__(self, ranks: int) -> None:
        self.mesh = Mesh(tuple(MeshPosition(rank, ranks, True) for rank in range(ranks)))
        self.updates: list[set[int]] = []

    def call(self, method: Any, *arguments: Any, role: str) -> Ended:
        assert role == "actor"
        if method.__name__ != "update_policy":
            return Ended(
                [
                    {
                        "memory": {},
                        "reserved": 0,
                        "offloaded": 0,
                        "routes": {},
                        "trainable": 1,
                        "copied": 0,
                    }
                ]
            )
        plan = plan_call(method_spec(method), len(self.mesh.positions), self.mesh, arguments, {})
        calls = [plan.calls[rank].args for rank in sorted(plan.calls)]
        shares = [
            [part.jagged("response_ids").values.tolist() for part in batch.split(n)]
            for batch, n in calls
        ]
        for parts in zip(*shares, strict=True):
            self.updates.append({token for part in parts for token in part})
        report = {"sums": {}, "info": {"grad_norm": 1.0, "lr": 1.0, "applied": 1.0}}
        return Ended([[report] * len(share) for share in shares])


def test_every_layout_trains_on_the_same_sequence_of_mini_batches() -> None:
    """Drawn from each rank's share, an update's rows would depend on how many ranks there are."""
    rng = np.random.default_rng(1)
    tokens = Jagged.from_lengths(np.arange(16), np.ones(16, np.int64))
    columns = dict.fromkeys(
        ("response_ids", "response_mask", "old_log_probs", "advantages"), tokens
    )
    prompts = Jagged.from_rows([np.zeros(n) for n in rng.integers(1, 9, 16)], np.int64)
    batch = DataProto.from_columns({"prompt_ids": prompts, **columns})
    seen = []
    for procs in (1, 2, 4):
        config = RunConfig(
            data=DataConfig(train_batch_size=8),
            model=ModelConfig(hf_config={"hidden_size": 8, "num_hidden_layers": 1}),
            actor=ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2),
            rollout=RolloutConfig(n=2),
        )
        config = _with_procs(config, procs)
        group: Any = Ranks(procs)
        updates = block_on(
            PolicyGroup(group, config).update(PolicyWorker.update_policy, batch, seed=5)
        )
        assert len(updates) == len(group.updates) == 8 and all(
            len(rows) == 4 for rows in group.updates
        )
        seen.append(group.updates)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][:4] != seen[0][4:]  # each epoch draws anew


def _with_procs(config: RunConfig, procs: int) -> RunConfig:
    from dataclasses import replace

    return replace(config, cluster=replace(config.cluster, procs_per_node=procs))
