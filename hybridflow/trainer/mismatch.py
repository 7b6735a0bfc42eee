"""Metrics of the log-prob differences between engines and trainer for sampled tokens: as
divergences, by position in the response, and by the age of the weights that sampled the token.
"""

from __future__ import annotations

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.data.packing import RESPONSE_MASK

_QUARTERS = ("first", "second", "third", "last")


def ratio_sums(engine_T: np.ndarray, trainer_T: np.ndarray) -> np.ndarray:
    """Return five values: the number of sampled tokens and, with r = trainer / engine, the sums of
    log r, r, r^2 and r - 1 - log r over these tokens. Log-ratios are clamped to +-20."""
    log_ratio = np.clip(trainer_T.astype(np.float64) - engine_T, -20.0, 20.0)
    ratio = np.exp(log_ratio)
    return np.array(
        [
            len(ratio),
            log_ratio.sum(),
            ratio.sum(),
            (ratio**2).sum(),
            (ratio - 1.0 - log_ratio).sum(),
        ]
    )


def divergences(sums: np.ndarray) -> dict[str, float]:
    """Compute the divergences between engine and trainer from `ratio_sums`: kl and k3 are estimates
    of the KL divergence, chi2 = mean(r^2) - 1, and ess = mean(r)^2 / mean(r^2) is the effective
    sample size under importance weighting, as a fraction of the tokens."""
    count, log_ratio, ratio, squared, k3 = sums.tolist()
    return {
        "kl": -log_ratio / count,
        "k3": k3 / count,
        "chi2": squared / count - 1.0,
        "ess": ratio**2 / (count * squared),
    }


def mismatch_metrics(batch: DataProto) -> dict[str, float]:
    """Return rollout/mismatch/*: kl, k3, chi2 and ess; the mean |difference| in each quarter of a
    row's sampled tokens; and, if tokens were sampled with several weight versions, the mean
    |difference| for each version, labelled by the number of weight syncs since that version.
    Fetches one piece of the columns at a time.
    """
    sums = np.zeros(5)
    quarters = np.zeros((2, 4))
    by_version = dict[int, np.ndarray]()
    names = [RESPONSE_MASK, "rollout_log_probs", "old_log_probs"]
    known = "response_versions" in batch
    if known:
        names.append("response_versions")
    for piece in batch.pieces(names):
        mask = piece.jagged(RESPONSE_MASK)
        engine = piece.jagged("rollout_log_probs").values[mask.values]
        trainer = piece.jagged("old_log_probs").values[mask.values]
        sums += ratio_sums(engine, trainer)
        difference = np.abs(engine - trainer)
        quarters += _totals(_quarter_of_tokens(mask), difference, 4)
        if known:
            sampled_with = piece.jagged("response_versions").values[mask.values]
            versions, places = np.unique(sampled_with, return_inverse=True)
            totals = _totals(places, difference, len(versions))
            for version, total in zip(versions.tolist(), totals.T, strict=True):
                by_version[version] = by_version.get(version, np.zeros(2)) + total
    if not sums[0]:
        return {}
    found = divergences(sums)
    for name, (total, count) in zip(_QUARTERS, quarters.T, strict=True):
        if count:
            found[f"{name}_quarter"] = total / count
    if len(by_version) > 1:
        newest = max(by_version)
        for version in sorted(by_version, reverse=True):
            total, count = by_version[version]
            found[f"{newest - version}_syncs_behind"] = total / count
    return {f"rollout/mismatch/{name}": float(value) for name, value in found.items()}


def _quarter_of_tokens(mask: Jagged) -> np.ndarray:
    """Return, for each sampled token, the quarter (0 to 3) of its row's sampled tokens that it is
    in."""
    before = np.concatenate([[0], np.cumsum(mask.values, dtype=np.int64)])[mask.offsets]
    sampled = np.diff(before)  # of each row
    row_starts = np.repeat(before[:-1] - before[0], sampled)
    number = np.arange(int(sampled.sum())) - row_starts
    return number * 4 // np.repeat(sampled, sampled)


def _totals(places_T: np.ndarray, values_T: np.ndarray, size: int) -> np.ndarray:
    """Return [2, size]: the sum and the count of the values at each index."""
    sums = np.bincount(places_T, values_T, size)
    counts = np.bincount(places_T, minlength=size)
    return np.stack([sums, counts])
