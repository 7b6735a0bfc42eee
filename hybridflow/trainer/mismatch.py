"""How far the engines' log-probs of the sampled tokens are from the trainer's: as divergences, along the responses, and
by the age of the weights that sampled."""

from __future__ import annotations

import numpy as np

from hybridflow.batch import DataProto
from hybridflow.data.micro_batches import RESPONSE_MASK

_QUARTERS = ("first", "second", "third", "last")


def divergences(engine_T: np.ndarray, trainer_T: np.ndarray) -> dict[str, float]:
    """Estimates from tokens that the engine sampled, with r = trainer / engine: kl and k3 of the divergence from the
    trainer, chi2 = mean(r^2) - 1, and ess = mean(r)^2 / mean(r^2), the share of the tokens that importance weights
    would leave. Log-ratios are clamped to +-20."""
    log_ratio = np.clip(trainer_T.astype(np.float64) - engine_T, -20.0, 20.0)
    ratio = np.exp(log_ratio)
    second = float(np.mean(ratio**2))
    return {
        "kl": float(-np.mean(log_ratio)),
        "k3": float(np.mean(ratio - 1.0 - log_ratio)),
        "chi2": second - 1.0,
        "ess": float(np.mean(ratio)) ** 2 / second,
    }


def mismatch_metrics(batch: DataProto) -> dict[str, float]:
    """rollout/mismatch/*: `divergences`; the mean |difference| in each quarter of a row's sampled tokens; and where the
    weights that sampled are not all of one age, the same by the number of weight syncs they are behind the newest."""
    engine, trainer, places, versions = ([np.zeros(0)] for _ in range(4))
    names = (RESPONSE_MASK, "rollout_log_probs", "old_log_probs")
    known = "response_versions" in batch
    for piece in batch.pieces((*names, "response_versions") if known else names):
        mask, offsets = piece.jagged(RESPONSE_MASK).values, piece.jagged(RESPONSE_MASK).offsets
        before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])[offsets]
        sampled = np.diff(before)  # of each row
        number = np.arange(int(sampled.sum())) - np.repeat(before[:-1] - before[0], sampled)
        places.append(number * 4 // np.repeat(sampled, sampled))
        engine.append(piece.jagged("rollout_log_probs").values[mask])
        trainer.append(piece.jagged("old_log_probs").values[mask])
        if known:
            versions.append(piece.jagged("response_versions").values[mask])
    all_engine, all_trainer, quarter = np.concatenate(engine), np.concatenate(trainer), np.concatenate(places)
    if not len(all_engine):
        return {}
    found, difference = divergences(all_engine, all_trainer), np.abs(all_engine - all_trainer)
    for number, name in enumerate(_QUARTERS):
        if (here := quarter == number).any():
            found[f"{name}_quarter"] = float(difference[here].mean())
    lags = np.concatenate(versions).max(initial=0) - np.concatenate(versions)
    ages = np.unique(lags)
    if len(ages) > 1:
        found |= {f"{int(age)}_syncs_behind": float(difference[lags == age].mean()) for age in ages}
    return {f"rollout/mismatch/{name}": value for name, value in found.items()}
