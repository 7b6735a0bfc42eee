"""A dump is read back as the batch that was trained on, and nothing else is trained on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged, Supports, support_columns
from hybridflow.errors import DataError
from hybridflow.observe.rollouts import dump_path, dump_rollouts, read_rollouts
from hybridflow.rollout.dumps import Dumps, dump_batch, identity, read_batch

LENGTHS = np.array([3, 0, 5, 2])


class Letters:
    vocabulary = "abc"

    def decode(self, ids: list[int]) -> str:
        return str(ids)

    def digest(self) -> str:
        return self.vocabulary


TOKENIZER = cast(Any, Letters())
MADE_WITH = identity(
    {"model_type": "qwen3", "hidden_size": 64, "vocab_size": 99, "rope_theta": 1e4}, TOKENIZER
)


def objects(*values: Any) -> np.ndarray:
    column = np.empty(len(values), object)
    for row, value in enumerate(values):
        column[row] = value
    return column


def batch_of(seed: int = 0) -> DataProto:
    rng = np.random.default_rng(seed)
    tokens = int(LENGTHS.sum())

    def jagged(values: np.ndarray) -> Jagged:
        return Jagged.from_lengths(values, LENGTHS)

    return DataProto.from_columns(
        {
            "uid": np.array([0, 0, 1, 1]),
            "prompt_ids": Jagged.from_rows(
                [rng.integers(0, 99, n) for n in (4, 4, 1, 1)], np.int64
            ),
            "response_ids": jagged(rng.integers(0, 99, tokens)),
            "response_mask": jagged(rng.random(tokens) < 0.6),
            "rollout_log_probs": jagged(-rng.random(tokens, np.float32)),
            "response_versions": jagged(np.sort(rng.integers(3, 5, tokens))),
            "scores": rng.random(4, np.float32),
            "data_source": objects(*["toy"] * 4),
            "ground_truth": objects("1", "1", {"a": 2}, "3"),
            "extra_info": objects({}, {}, {"index": 1}, None),
            "response_text": objects("x", "", "<b>\ud800", "y"),
            "finish_reason": objects("stop", "abort", "length", "stop"),
            "weight_version": objects("3", "3", "4", "4"),
            "reward_extra": objects(
                {"acc": 0.1}, {"acc": 1, "failure": "wrong digits"}, {"acc": True}, {}
            ),
            "reward_failure": objects(None, None, None, "no score"),
        }
    )


def test_supports_are_read_back_and_a_run_that_samples_otherwise_refuses_them(
    tmp_path: Path,
) -> None:
    rows = [
        Supports(np.arange(n, dtype=np.int32), np.arange(n * (n - 1) // 2, dtype=np.int32))
        for n in LENGTHS
    ]
    dump_batch(tmp_path, 1, batch_of().with_columns(**support_columns(rows)), TOKENIZER, MADE_WITH)
    dump_batch(tmp_path, 2, batch_of(), TOKENIZER, MADE_WITH)
    found = Dumps(tmp_path, MADE_WITH, 4, with_support=True).batch(1)
    for name, column in support_columns(rows).items():
        np.testing.assert_array_equal(found.jagged(name).values, column.values)
        np.testing.assert_array_equal(found.jagged(name).offsets, column.offsets)
    with pytest.raises(
        DataError,
        match=r"step_000001.*from a truncated vocabulary.*contradicts this run's rollout.sampling",
    ):
        Dumps(tmp_path, MADE_WITH, 4).batch(1)
    with pytest.raises(DataError, match=r"step_000002.*from the whole vocabulary"):
        Dumps(tmp_path, MADE_WITH, 4, with_support=True).batch(2)


def test_what_was_trained_on_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    batch = batch_of()
    old = Jagged.from_lengths(np.arange(10, dtype=np.float32), LENGTHS)
    dump_batch(
        tmp_path, 7, batch.with_columns(old_log_probs=old, entropys=old), TOKENIZER, MADE_WITH
    )
    found = Dumps(tmp_path, MADE_WITH, 4).batch(7)
    for name in (
        "prompt_ids",
        "response_ids",
        "response_mask",
        "rollout_log_probs",
        "response_versions",
    ):
        one = batch.jagged(name)
        two = found.jagged(name)
        assert one.values.dtype == two.values.dtype, name
        np.testing.assert_array_equal(one.values, two.values)
        np.testing.assert_array_equal(one.offsets, two.offsets)
    for name in (
        "uid",
        "scores",
        "finish_reason",
        "weight_version",
        "reward_extra",
        "reward_failure",
    ):
        assert found[name].tolist() == batch[name].tolist(), name
    # what the step computes is computed again
    assert "old_log_probs" not in found and "advantages" not in found
    # people's rows have no columns of tokens
    assert "response_ids" not in read_rollouts(dump_path(tmp_path, 7))[0]


def test_rows_without_extras_have_none_when_read(tmp_path: Path) -> None:
    batch = batch_of()
    dump_batch(
        tmp_path,
        1,
        batch.select([n for n in batch.columns if "reward" not in n]),
        TOKENIZER,
        MADE_WITH,
    )
    assert not {"reward_extra", "reward_failure"} & set(
        read_batch(dump_path(tmp_path, 1), MADE_WITH).columns
    )


def test_steps_without_a_gap(tmp_path: Path) -> None:
    for step in (2, 3, 5):
        dump_batch(tmp_path, step, batch_of(step), TOKENIZER, MADE_WITH)
    dumps = Dumps(tmp_path, MADE_WITH, 4)
    assert dumps.last_after(1) == 3 and dumps.last_after(4) == 5
    with pytest.raises(DataError, match=r"continues with step 4.*steps with a dump: 2, 3, 5"):
        dumps.last_after(3)
    one = Dumps(dump_path(tmp_path, 3), MADE_WITH, 4)
    assert one.last_after(2) == 3
    with pytest.raises(DataError, match=r"continues with step 2, .*steps with a dump: 3"):
        one.check(1)


def test_other_dumps_are_refused_by_one_message(tmp_path: Path) -> None:
    path = dump_path(tmp_path, 1)
    dump_batch(tmp_path, 1, batch_of(), TOKENIZER, MADE_WITH)
    with pytest.raises(
        DataError, match="comes from another model: its hidden_size is 64, this run's is 128"
    ):
        read_batch(path, {**MADE_WITH, "hidden_size": 128})
    with pytest.raises(DataError, match="comes from another tokenizer"):
        read_batch(path, {**MADE_WITH, "tokenizer": "other"})
    with pytest.raises(DataError, match="contains 4 samples, but a step of this run has 8"):
        Dumps(tmp_path, MADE_WITH, 8).batch(1)
    whole = path.read_bytes()
    for cut in (0, 4, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"step_000001\.parquet: not a readable parquet file"):
            read_batch(path, MADE_WITH)
    dump_rollouts(path, {"score": [1.0], "uid": [0]})
    with pytest.raises(DataError, match=r"has no prompt_ids, .*so it cannot be trained on"):
        read_batch(path, MADE_WITH)
    with pytest.raises(DataError, match="no such file"):
        read_batch(tmp_path / "none.parquet", MADE_WITH)


def test_columns_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    batch = batch_of()
    shorter = Jagged.from_lengths(np.zeros(9, np.bool_), [3, 0, 4, 2])
    dump_batch(tmp_path, 1, batch.with_columns(response_mask=shorter), TOKENIZER, MADE_WITH)
    with pytest.raises(
        DataError, match="damaged, or not a rollout dump: the token runs do not add up"
    ):
        read_batch(dump_path(tmp_path, 1), MADE_WITH)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (
            "prompt_ids",
            99,
            "prompt_ids contains the token 99, which is not in the model's vocabulary",
        ),
        ("response_ids", -1, "response_ids contains the token -1"),
        ("rollout_log_probs", np.nan, "not the logarithm of a probability"),
        ("rollout_log_probs", 7.0, "not the logarithm of a probability"),
    ],
)
def test_a_whole_file_with_tokens_that_no_run_has_is_refused(
    tmp_path: Path, column: str, value: float, message: str
) -> None:
    batch = batch_of()
    held = batch.jagged(column)
    wrong = held.values.copy()
    wrong[2] = value
    dump_batch(
        tmp_path,
        1,
        batch.with_columns(**{column: Jagged(wrong, held.offsets)}),
        TOKENIZER,
        MADE_WITH,
    )
    with pytest.raises(
        DataError, match=rf"step_000001\.parquet: damaged, or not a rollout dump: .*{message}"
    ):
        read_batch(dump_path(tmp_path, 1), MADE_WITH)


@pytest.mark.parametrize(
    "runs", [[[1, 2**62], [1, 2**62], [1, 3 - 2**63]], [[1, 0], [1, 3]], [[7, 3]]]
)
def test_runs_of_tokens_that_add_up_in_a_strange_way_are_refused(
    tmp_path: Path, runs: list[list[int]]
) -> None:
    """Counts that wrap around in 64 bits would ask for exabytes."""
    rows = {
        "response_mask": [runs],
        "response_ids": Jagged.from_rows([np.arange(3)], np.int64),
        "score": [1.0],
    }
    texts = {
        name: ["x"] for name in ("data_source", "ground_truth", "response_text", "finish_reason")
    }
    rows |= {
        "prompt_ids": Jagged.from_rows([np.arange(3)], np.int64),
        "uid": [0],
        "extra_info": ["{}"],
    }
    rows |= {
        "rollout_log_probs": Jagged.from_rows([np.zeros(3)], np.float32),
        "weight_version": ["1"],
    }
    dump_rollouts(
        dump_path(tmp_path, 1), {**rows, **texts, "response_versions": [[[0, 3]]]}, MADE_WITH
    )
    with pytest.raises(DataError, match="damaged, or not a rollout dump"):
        read_batch(dump_path(tmp_path, 1), MADE_WITH)


@pytest.mark.parametrize("seed", range(5))
def test_means_maxima_and_runs_are_those_of_a_loop_over_the_rows(tmp_path: Path, seed: int) -> None:
    batch = batch_of(seed)
    rng = np.random.default_rng(seed)
    columns = {
        name: Jagged.from_lengths(rng.normal(size=int(LENGTHS.sum())).astype(np.float32), LENGTHS)
        for name in ("advantages", "old_log_probs")
    }
    dump_batch(tmp_path, 1, batch.with_columns(**columns), TOKENIZER, MADE_WITH)
    for row, found in enumerate(read_rollouts(dump_path(tmp_path, 1))):
        mask = batch.jagged("response_mask").row(row)
        versions = batch.jagged("response_versions").row(row)
        assert [value for value, n in found["response_mask"] for _ in range(n)] == mask.tolist()
        assert [v for v, n in found["response_versions"] for _ in range(n)] == versions.tolist()
        for runs in (found["response_mask"], found["response_versions"]):
            assert all(one[0] != two[0] for one, two in itertools.pairwise(runs))
        advantages = columns["advantages"].row(row)[mask]
        differences = np.abs(
            columns["old_log_probs"].row(row) - batch.jagged("rollout_log_probs").row(row)
        )[mask]
        expected = {
            "advantage": advantages.mean() if len(advantages) else 0,
            "logprob_diff_mean": differences.mean() if len(differences) else 0,
            "logprob_diff_max": differences.max(initial=0),
        }
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
