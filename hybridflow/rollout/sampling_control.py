"""Selection of a step's samples: groups with equal scores are replaced, and truncated answers are
excluded. An excluded sample keeps its row, so that every step has the same number of rows, but its
`response_mask` is cleared, so that it does not contribute to any loss or statistic.
"""

from __future__ import annotations

import numpy as np

from hybridflow.batch import DataProto, objects
from hybridflow.config.schema import RunConfig
from hybridflow.data.packing import sampled_tokens, without_rows


def without_overlong(batch: DataProto) -> DataProto:
    """Exclude answers that reached the maximum length, because their end, and thus their score, is
    unknown (DAPO's overlong filtering, arXiv 2503.14476, section 3.4).
    """
    cut_off = batch["finish_reason"] == "length"
    return without_rows(batch, cut_off) if cut_off.any() else batch


def groups_that_differ(batch: DataProto) -> np.ndarray:
    """Return, in order of appearance, the ids (`uid`) of groups in which at least two unmasked
    samples have different scores. In any other group, all group-relative advantages are 0.
    """
    counts = sampled_tokens(batch) > 0
    uid = batch["uid"][counts]
    scores = batch["scores"][counts]
    ids, group = np.unique(uid, return_inverse=True)
    low = np.full(len(ids), np.inf)
    high = np.full(len(ids), -np.inf)
    np.minimum.at(low, group, scores)
    np.maximum.at(high, group, scores)
    return in_order(batch["uid"][np.isin(batch["uid"], ids[high > low])])


def in_order(ids: np.ndarray) -> np.ndarray:
    """Return the distinct group ids in order of first appearance."""
    found, first = np.unique(ids, return_index=True)
    return found[np.argsort(first)]


class DynamicSampling:
    """Collects groups whose scores differ, over at most `algorithm.dynamic_sampling` batches per
    step (DAPO, arXiv 2503.14476, section 3.2). If there are too few, the step is completed with
    groups whose scores are equal, so that the number of rows is the same in every step. `metrics`
    reports how many groups were discarded.
    """

    def __init__(self, config: RunConfig) -> None:
        self.rounds = config.algorithm.dynamic_sampling
        self.prompts = config.data.train_batch_size
        self.metrics: dict[str, float] = {}
        self._parts: list[DataProto] = []
        self._differ: list[np.ndarray] = []

    def add(self, batch: DataProto) -> DataProto | None:
        """Add a batch and return the rows of the step, or None if another batch is needed.

        Args:
            batch: prompts with answers and scores; `uid` starts at 0.
        """
        if not self.rounds:
            return batch
        batch = batch.with_columns(uid=batch["uid"] + len(self._parts) * self.prompts)
        self._parts.append(batch)
        self._differ.append(groups_that_differ(batch))
        if sum(map(len, self._differ)) < self.prompts and len(self._parts) < self.rounds:
            return None
        whole = DataProto.concat(_alike(self._parts))
        differ = np.concatenate(self._differ)
        order = in_order(whole["uid"])
        same = order[~np.isin(order, differ)]
        chosen = np.concatenate([differ, same])[: self.prompts]
        used = np.isin(whole["uid"], chosen)
        self._report(whole, used, len(differ), len(order))
        return whole.rows(np.flatnonzero(used))

    def _report(self, whole: DataProto, used: np.ndarray, differ: int, groups: int) -> None:
        tokens = whole.lengths("response_ids")
        filled = max(self.prompts - differ, 0)
        self.metrics = {
            "sampling/batches": float(len(self._parts)),
            "sampling/groups_differ": differ / groups,
            "sampling/groups_thrown_away": float(groups - differ - filled),
            "sampling/groups_surplus": float(max(differ - self.prompts, 0)),
            "sampling/groups_filled": float(filled),
            "sampling/tokens_thrown_away": float(tokens[~used].sum()),
            "sampling/tokens_used": float(tokens[used].sum() / max(tokens.sum(), 1)),
        }


def _alike(parts: list[DataProto]) -> list[DataProto]:
    """Add missing columns so that all batches have the same ones. Columns for extra values and
    failures exist only in batches in which the reward returned them.
    """
    names = {name for part in parts for name in part.columns}
    found = []
    for part in parts:
        added = {}
        for name, missing in (("reward_extra", {}), ("reward_failure", None)):
            if name in names and name not in part:
                added[name] = objects([missing] * len(part))
        found.append(part.with_columns(**added) if added else part)
    return found
