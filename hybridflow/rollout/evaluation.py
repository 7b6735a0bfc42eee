"""Scoring of responses, validation on the held-out set, and dumps of both."""

from __future__ import annotations

import math
import numbers
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.agents.loops.base import LOOPS
from hybridflow.batch import ROUTES, DataProto, Jagged
from hybridflow.config.schema import RewardConfig, RunConfig
from hybridflow.data.custom import Prompts
from hybridflow.data.micro_batches import RESPONSE_MASK
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.dispatch import DataflowStep
from hybridflow.observe.rollouts import dump_path, dump_rollouts
from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.verifiers.base import ScoreResult
from hybridflow.rollout.answer_statistics import answer_statistics
from hybridflow.rollout.conversations import TURN_REWARDS
from hybridflow.rollout.protocols import RolloutService, answers
from hybridflow.rollout.sampling_control import without_rows

# large, and not read here
_NOT_DUMPED = (
    "entropy_coefs",
    "entropys",
    "ref_log_probs",
    "response_ids",
    ROUTES,
    "sum_pi_squared",
    "teacher_top_log_probs",
    "teacher_top_ids",
)


SCORING = DataflowStep(
    "reward", ("response_ids", "data_source", "ground_truth", "extra_info"), ("response_text", "scores")
)

# ReMax compares with the answer that validation's sampling gives, which has to be the greedy one
GREEDY = DataflowStep("greedy answers", ("prompt_ids",), ("greedy_scores",))


class Scorer:
    """Decodes responses and asks the reward function."""

    def __init__(self, rewards: RewardManager, tokenizer: Tokenizer) -> None:
        self.rewards, self.tokenizer = rewards, tokenizer

    def score(self, batch: DataProto) -> DataProto:
        """Columns response_text (objects) and scores [B] f32, as `SCORING` declares, reward_extra (objects: {name:
        value}) where the reward returns more than a score, reward_failure (objects: text or None) where rows failed."""
        columns = [batch[name].tolist() for name in ("data_source", "ground_truth", "extra_info")]
        given = batch[TURN_REWARDS].tolist() if TURN_REWARDS in batch else None
        if "answer_text" in batch:  # of conversations the last answer counts; how it came about is at hand
            texts = batch["answer_text"].tolist()
            columns[2] = [
                {**(info or {}), "messages": messages}
                for info, messages in zip(columns[2], batch["messages"].tolist(), strict=True)
            ]
            if given is not None:
                columns[2] = [{**info, TURN_REWARDS: rewards} for info, rewards in zip(columns[2], given, strict=True)]
        else:
            pieces = batch.pieces(["response_ids"])
            texts = [
                self.tokenizer.decode_response(row.tolist()) for piece in pieces for row in piece.jagged("response_ids")
            ]
        groups = batch["uid"].tolist() if "uid" in batch else list(range(len(texts)))
        if given is not None and _loop_scores(self.rewards.config):
            results = [ScoreResult(sum(rewards), {TURN_REWARDS: rewards}) for rewards in given]
        else:
            results = self.rewards.score(columns[0], texts, columns[1], columns[2], groups)
        scores = np.array([result.score for result in results], dtype=np.float32)
        found = {"response_text": np.array(texts, dtype=object), "scores": scores}
        if any(result.extra for result in results):
            found["reward_extra"] = np.array([result.extra for result in results], dtype=object)
        if any(result.failure for result in results):
            found["reward_failure"] = np.array([result.failure for result in results], dtype=object)
        return DataProto.from_columns(found)


def _loop_scores(config: RewardConfig) -> bool:
    """Whether the rewards that an agent loop gives, if it does, are the score."""
    return config.path is None and not config.combine


def sources_to_score(config: RunConfig, *datasets: Prompts | None) -> list[str]:
    """The data sources whose rows need a verifier: none where the agent loop gives the rewards."""
    if LOOPS.get(config.rollout.agent.loop).gives_rewards and _loop_scores(config.reward):
        return []
    return [source for dataset in datasets if dataset is not None for source in dataset.data_sources]


class Validator:
    """Answers the held-out prompts with `rollout.val_sampling` and scores them."""

    def __init__(self, config: RunConfig, dataset: Prompts | None, scorer: Scorer, folder: Path) -> None:
        self.config, self.dataset, self.scorer, self.folder = config, dataset, scorer, folder

    def run(self, engines: RolloutService, step: int) -> dict[str, float]:
        """val/score (mean score), val/accuracy (the same where every score is 0 or 1) and, with several answers to a
        prompt, `answer_statistics`, all by data source too; lengths and means of what the reward returned beside the
        score. The answers are dumped under `validation/`. Nothing without a held-out set."""
        if self.dataset is None:
            return {}
        batch = self.dataset.batch(np.arange(len(self.dataset)))
        if self.config.rollout.val_samples > 1:
            numbered = batch.with_columns(uid=np.arange(len(batch), dtype=np.int64))
            batch = numbered.repeat(self.config.rollout.val_samples)
        batch = batch.union(answers(engines, batch, training=False))
        batch = batch.union(self.scorer.score(batch))
        dump_batch(self.folder, step, batch, self.scorer.tokenizer)
        metrics = {"val/response_length/mean": float(np.mean(batch.lengths("response_ids")))}
        parts = {
            f"/{source}": batch["data_source"] == source for source in dict.fromkeys(batch["data_source"].tolist())
        }
        for part, rows in {"": np.ones(len(batch), dtype=bool), **parts}.items():
            scores = batch["scores"][rows]
            metrics[f"val{part}/score"] = float(np.mean(scores))
            if np.isin(scores, (0.0, 1.0)).all():
                metrics[f"val{part}/accuracy"] = metrics[f"val{part}/score"]
            if self.config.rollout.val_samples > 1:
                extras = batch["reward_extra"][rows].tolist() if "reward_extra" in batch else None
                found = answer_statistics(scores, self.config.rollout.val_samples, extras)
                metrics |= {f"val{part}/{name}": value for name, value in found.items()}
        return metrics | {
            f"val/{name}": value for name, value in extra_metrics(batch).items() if name.endswith("/mean")
        }


def without_failed(batch: DataProto, policy: str) -> DataProto:
    """With the policy `drop` (`reward.on_failure`), rows whose scoring failed have no sampled token left and,
    so that the mean of their group stays as it is, the mean score of its other rows."""
    if policy != "drop" or "reward_failure" not in batch:
        return batch
    failed = np.array([text is not None for text in batch["reward_failure"]])
    scores, uid = batch["scores"].copy(), batch["uid"]
    for row in np.flatnonzero(failed):
        others = scores[(uid == uid[row]) & ~failed]
        scores[row] = others.mean() if len(others) else 0.0
    return without_rows(batch.with_columns(scores=scores), failed)


def failures(batch: DataProto) -> list[str]:
    """A line for each text with which scoring failed, the most frequent first: the number of rows and the first one."""
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(batch["reward_failure"].tolist() if "reward_failure" in batch else ()):
        if text is not None:
            rows.setdefault(text, []).append(row)
    ordered = sorted(rows.items(), key=lambda item: -len(item[1]))
    return [
        f"{len(found)} of {len(batch)} rows have no score (row {found[0]} first): {text}" for text, found in ordered
    ]


def extra_metrics(batch: DataProto) -> dict[str, float]:
    """reward_extra/NAME/mean, /max and /min over the rows whose reward returned a finite number (or true, false) of
    this name beside the score, and reward/failed, the share of rows whose scoring failed."""
    failed = [text is not None for text in batch["reward_failure"].tolist()] if "reward_failure" in batch else []
    values: dict[str, list[float]] = {}
    for extra in batch["reward_extra"].tolist() if "reward_extra" in batch else ():
        for name, value in extra.items():
            if isinstance(value, numbers.Real) and math.isfinite(value):
                values.setdefault(name, []).append(float(value))
    spreads = {
        f"reward_extra/{name}/{what}": float(of(found))
        for name, found in values.items()
        for what, of in (("mean", np.mean), ("max", np.max), ("min", np.min))
    }
    return spreads | ({"reward/failed": float(np.mean(failed))} if failed else {}) | _conversation_metrics(batch)


def _conversation_metrics(batch: DataProto) -> dict[str, float]:
    """agent/turns/mean and /max, agent/tool_calls/mean, and agent/failed, the share of conversations whose loop
    failed."""
    if "turns" not in batch:
        return {}
    failed = [text is not None for text in batch["agent_failure"].tolist()]
    return {
        "agent/turns/mean": float(np.mean(batch["turns"])),
        "agent/turns/max": float(np.max(batch["turns"])),
        "agent/tool_calls/mean": float(np.mean(batch["tool_calls"])),
        "agent/failed/mean": float(np.mean(failed)),
    }


def dump_batch(folder: Path, step: int, batch: DataProto, tokenizer: Tokenizer) -> None:
    """Write what happened to each sample, for people: `folder/step_N.parquet`. Token columns are read a few rows at a
    time."""
    names = [name for name in batch.columns if name not in _NOT_DUMPED]
    lengths = batch.with_columns(response_length=batch.lengths("response_ids"))
    dump_rollouts(
        dump_path(folder, step),
        (_dumped(piece, step, tokenizer) for piece in lengths.pieces([*names, "response_length"])),
    )


def _dumped(batch: DataProto, step: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The rows of one piece."""
    prompts = batch.jagged("prompt_ids")
    mask = batch.jagged(RESPONSE_MASK)
    rows: dict[str, Any] = {
        "step": [step] * len(batch),
        "uid": batch["uid"].tolist() if "uid" in batch else batch["index"].tolist(),
        "data_source": batch["data_source"].tolist(),
        "prompt_text": [tokenizer.decode(row.tolist()) for row in prompts],
        "response_text": batch["response_text"].tolist(),
        "ground_truth": batch["ground_truth"].tolist(),
        "score": batch["scores"].tolist(),
        "prompt_length": prompts.lengths.tolist(),
        "response_length": batch["response_length"].tolist(),
        "response_mask": [_runs(row.astype(np.int64)) for row in mask],
        "finish_reason": batch["finish_reason"].tolist(),
        "weight_version": batch["weight_version"].tolist(),
        "response_versions": [_runs(row) for row in batch.jagged("response_versions")],
        "extra_info": batch["extra_info"].tolist(),
    }
    if "reward_extra" in batch or "reward_failure" in batch:
        rows["reward_extra"] = _extras(batch)
    if "messages" in batch:
        rows |= {name: batch[name].tolist() for name in ("messages", "turns", "tool_calls", "agent_failure")}
    if "rm_scores" in batch:
        rows["rm_score"] = batch["rm_scores"].tolist()
    if "advantages" in batch:
        rows["advantage"] = [_mean(row[kept]) for row, kept in zip(batch.jagged("advantages"), mask, strict=True)]
    if "old_log_probs" in batch:
        old, rollout = batch.jagged("old_log_probs"), batch.jagged("rollout_log_probs")
        difference = Jagged(np.abs(old.values - rollout.values), old.offsets)
        sampled = [row[kept] for row, kept in zip(difference, mask, strict=True)]
        rows["logprob_diff_mean"] = [_mean(row) for row in sampled]
        rows["logprob_diff_max"] = [float(row.max(initial=0.0)) for row in sampled]
    return rows


def _extras(batch: DataProto) -> list[dict[str, Any]]:
    """What the reward returned beside the score; the text of a failure under "failure"."""
    none = [None] * len(batch)
    extras = batch["reward_extra"].tolist() if "reward_extra" in batch else none
    texts = batch["reward_failure"].tolist() if "reward_failure" in batch else none
    return [(extra or {}) | ({"failure": text} if text else {}) for extra, text in zip(extras, texts, strict=True)]


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0


def _runs(values: np.ndarray) -> list[list[int]]:
    """[value, length] of each run of equal values: thousands of tokens have one or two versions."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    lengths = np.diff(starts, append=len(values))
    return np.stack([values[starts], lengths], 1).tolist()
