"""Mismatch of engines and trainer, summed piece by piece: what the definition gives over the whole
batch."""

from __future__ import annotations

import numpy as np
import pytest

from hybridflow.batch import DataProto, Jagged
from hybridflow.trainer.mismatch import mismatch_metrics


def test_sums_over_pieces_are_the_definition_over_all_tokens() -> None:
    rng = np.random.default_rng(3)
    lengths = np.array([5, 0, 9, 1, 12])
    total = int(lengths.sum())
    row = np.repeat(np.arange(5), lengths)
    columns = {
        "response_mask": rng.random(total) < 0.7,
        "rollout_log_probs": rng.normal(-1, 0.5, total).astype(np.float32),
        "old_log_probs": rng.normal(-1, 0.5, total).astype(np.float32),
        "response_versions": rng.integers(3, 6, total),
    }
    batch = DataProto.from_columns(
        {name: Jagged.from_lengths(values, lengths) for name, values in columns.items()}
    )
    found = mismatch_metrics(batch)
    mask = columns["response_mask"]
    ratio = np.exp(
        (columns["old_log_probs"].astype(np.float64) - columns["rollout_log_probs"])[mask]
    )
    difference = np.abs(columns["old_log_probs"] - columns["rollout_log_probs"])[mask]
    expected = {
        "kl": -np.log(ratio).mean(),
        "k3": (ratio - 1 - np.log(ratio)).mean(),
        "chi2": (ratio**2).mean() - 1,
        "ess": ratio.mean() ** 2 / (ratio**2).mean(),
    }
    place = np.concatenate(
        [np.arange(n) * 4 // n for n in np.bincount(row[mask], minlength=5) if n]
    )
    for number, name in enumerate(("first", "second", "third", "last")):
        expected[f"{name}_quarter"] = difference[place == number].mean()
    for age in range(3):
        expected[f"{age}_syncs_behind"] = difference[
            columns["response_versions"][mask] == 5 - age
        ].mean()
    assert found.keys() == {f"rollout/mismatch/{name}" for name in expected}
    for name, value in expected.items():
        assert found[f"rollout/mismatch/{name}"] == pytest.approx(value, rel=1e-5), name


def test_a_batch_without_a_sampled_token_has_none() -> None:
    none = {
        name: Jagged.from_lengths(np.zeros(0, np.float32), [0])
        for name in ("rollout_log_probs", "old_log_probs")
    }
    mask = Jagged.from_lengths(np.zeros(0, np.bool_), [0])
    assert mismatch_metrics(DataProto.from_columns({**none, "response_mask": mask})) == {}
