"""Dumps of each step's samples, for inspection and for training on them again in another run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import ROUTES, SUPPORT, Column, DataProto, Jagged, objects, read_parquet
from hybridflow.data.image_tokens import IMAGES
from hybridflow.data.packing import RESPONSE_MASK
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError, SchemaError
from hybridflow.observe.rollouts import (
    MADE_WITH,
    TOKEN_COLUMNS,
    dump_path,
    dump_rollouts,
    list_dumps,
)
from hybridflow.rollout.requests import values

# large, and not needed for inspection or training
_NOT_DUMPED = (
    "entropy_coefs",
    "entropys",
    ROUTES,
    "sum_pi_squared",
    "teacher_log_probs",
    "teacher_top_log_probs",
    "teacher_top_ids",
    *IMAGES,
)
# required for training
_NEEDED = (
    "uid",
    "prompt_ids",
    "response_ids",
    "rollout_log_probs",
    RESPONSE_MASK,
    "response_versions",
    "score",
    "data_source",
    "ground_truth",
    "extra_info",
    "response_text",
    "finish_reason",
    "weight_version",
)
_MOST_LOG_PROB = 0.1  # tolerance above log-prob 0, for rounding
_CONVERSATION = ("messages", "turns", "tool_calls", "agent_failure")
_MODEL_FACTS = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_experts",
    "vocab_size",
)


def identity(hf_config: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the properties of a run's model and tokenizer that a dump records, so that its tokens
    are never used to train a different model.
    """
    facts = {name: hf_config[name] for name in _MODEL_FACTS if hf_config.get(name) is not None}
    return {**facts, "tokenizer": tokenizer.digest()}


def dump_batch(
    folder: Path,
    step: int,
    batch: DataProto,
    tokenizer: Tokenizer,
    made_with: Mapping[str, Any] | None = None,
) -> None:
    """Write a step's samples to `folder/step_N.parquet`, for inspection and for `read_batch`.

    Token columns are fetched a few rows at a time.

    Args:
        made_with: `identity` of the run that produced the samples.
    """
    names = [name for name in batch.columns if name not in _NOT_DUMPED]
    pieces = (_dumped(piece, step, tokenizer) for piece in batch.pieces(names))
    dump_rollouts(dump_path(folder, step), pieces, made_with)


def _dumped(batch: DataProto, step: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Convert one piece of the batch to rows of the dump."""

    def listed(column: str) -> Any:
        return batch[column].tolist()

    prompts = batch.jagged("prompt_ids")
    mask = batch.jagged(RESPONSE_MASK)
    rows: dict[str, Any] = {
        "step": [step] * len(batch),
        "uid": listed("uid" if "uid" in batch else "index"),
        "data_source": listed("data_source"),
        "prompt_text": _prompt_texts(prompts, tokenizer),
        "response_text": listed("response_text"),
        "ground_truth": listed("ground_truth"),
        "score": listed("scores"),
        "prompt_length": prompts.lengths.tolist(),
        "response_length": batch.lengths("response_ids").tolist(),
        "response_mask": _runs(mask),
        "finish_reason": listed("finish_reason"),
        "weight_version": listed("weight_version"),
        "response_versions": _runs(batch.jagged("response_versions")),
        "extra_info": listed("extra_info"),
    }
    if "reward_extra" in batch or "reward_failure" in batch:
        rows["reward_failure"] = _failures(batch)
        rows["reward_extra"] = _extras(batch)
    if "messages" in batch:
        rows |= {name: listed(name) for name in _CONVERSATION}
    if "rm_scores" in batch:
        rows["rm_score"] = listed("rm_scores")
    if "greedy_scores" in batch:
        rows["greedy_score"] = listed("greedy_scores")
    if "advantages" in batch:
        rows["advantage"] = _means(batch.jagged("advantages"), mask)
    if "old_log_probs" in batch:
        old = batch.jagged("old_log_probs")
        rollout = batch.jagged("rollout_log_probs")
        difference = Jagged(np.abs(old.values - rollout.values), old.offsets)
        rows["logprob_diff_mean"] = _means(difference, mask)
        rows["logprob_diff_max"] = _maxima(difference, mask)
    return rows | {name: batch.jagged(name) for name in TOKEN_COLUMNS if name in batch}


def _failures(batch: DataProto) -> list[str | None]:
    """Return each row's scoring error, or None. An extra value that the reward itself names
    "failure" is not a scoring error.
    """
    return values(batch, "reward_failure", None)


def _extras(batch: DataProto) -> list[dict[str, Any]]:
    """Return the reward's extra values, plus the error text for rows that failed."""
    extras = values(batch, "reward_extra", None)
    texts = _failures(batch)
    found = []
    for extra, text in zip(extras, texts, strict=True):
        own = dict(extra or {})
        if text:
            own["failure"] = text
        found.append(own)
    return found


def _prompt_texts(prompts: Jagged, tokenizer: Tokenizer) -> list[str]:
    """Decode each row's prompt. The samples of a group share one, which is decoded once."""
    texts: dict[bytes, str] = {}
    found = []
    for row in prompts:
        key = row.tobytes()
        if key not in texts:
            texts[key] = tokenizer.decode(row.tolist())
        found.append(texts[key])
    return found


def _means(column: Jagged, mask: Jagged) -> np.ndarray:
    """Return each row's mean over the tokens in `mask` [B]; 0 for a row without any."""
    size = len(column)
    rows = np.repeat(np.arange(size), column.lengths)[mask.values]
    sums = np.bincount(rows, column.values[mask.values], size)
    counts = np.bincount(rows, minlength=size)
    return sums / np.maximum(counts, 1)


def _maxima(column: Jagged, mask: Jagged) -> np.ndarray:
    """Return each row's maximum over the tokens in `mask` [B], for values that are not negative; 0
    for a row without any.
    """
    masked = np.where(mask.values, column.values, 0)
    maxima = np.maximum.reduceat(np.append(masked, 0), column.offsets[:-1])
    return maxima * (column.lengths > 0)


def _runs(column: Jagged) -> Jagged:
    """Run-length encode each row as [value, length] pairs, because thousands of tokens have only
    one or two distinct values.
    """
    tokens = column.values.astype(np.int64)
    begins = np.diff(tokens, prepend=0) != 0
    row_starts = column.offsets[:-1][column.lengths > 0]
    begins[row_starts] = True
    starts = np.flatnonzero(begins)
    run_lengths = np.diff(starts, append=len(tokens))
    pairs = np.stack([tokens[starts], run_lengths], 1)
    return Jagged(pairs, np.searchsorted(starts, column.offsets))


# ---- reading


class Dumps:
    """Dumps from an earlier run, which this run trains on instead of generating its own samples.

    Args:
        path: a folder of dumps, or one step's file.
        made_with: this run's `identity`, which the dumps must match.
        rows: number of samples per step.
        with_support: True if this run needs the sampling supports.
    """

    def __init__(
        self, path: Path, made_with: Mapping[str, Any], rows: int, with_support: bool = False
    ) -> None:
        self.path = path
        self.made_with = made_with
        self.rows = rows
        self.with_support = with_support
        if path.is_dir():
            self._files = dict(list_dumps(path))
        else:
            siblings = list_dumps(path.parent)
            self._files = {step: file for step, file in siblings if file.name == path.name}

    def last_after(self, step: int) -> int:
        """Return the last step of the consecutive dumps that follow `step`.

        Raises:
            DataError: there is no dump for the next step.
        """
        last = step
        while last + 1 in self._files:
            last += 1
        if last == step:
            there = ", ".join(map(str, sorted(self._files))) or "none"
            raise DataError(
                f"trainer.rollouts_from={self.path}: this run continues with step {step + 1}, but "
                f"there is no dump for that step (steps with a dump: {there}); start from the "
                "checkpoint of the step before the first dump"
            )
        return last

    def check(self, after: int) -> None:
        """Check, before anything is started, that the dump for the step after `after` is readable.
        Raises the same errors as `last_after` and `batch`.
        """
        self.last_after(after)
        self.batch(after + 1)

    def batch(self, step: int) -> DataProto:
        """Return a step's batch. Raises the same errors as `read_batch`."""
        file = self._files[step]
        batch = read_batch(file, self.made_with)
        if len(batch) != self.rows:
            raise DataError(
                f"{file} contains {len(batch)} samples, but a step of this run has "
                f"{self.rows} (data.train_batch_size x rollout.n); set these to the values of the "
                "run that wrote it"
            )
        if (SUPPORT[0] in batch) != self.with_support:
            extent = "the whole" if self.with_support else "a truncated"
            raise DataError(
                f"{file} was sampled from {extent} vocabulary, "
                "which contradicts this run's rollout.sampling; set top_p, top_k and min_p to the "
                "values of the run that wrote it"
            )
        return batch


def read_batch(path: Path, made_with: Mapping[str, Any]) -> DataProto:
    """Read the batch from a dump as it was before training: prompts, responses and scores.

    Raises:
        DataError: the file is missing, truncated or damaged, has no tokens, or comes from a model
            or tokenizer other than `made_with`.
    """
    held = read_parquet(path)
    missing = [name for name in _NEEDED if name not in held]
    if missing:
        raise DataError(
            f"{path} has no {', '.join(missing)}, so it cannot be trained on; use the rollouts/ "
            "folder of a run made with this version"
        )
    theirs = held.meta.get(MADE_WITH, {})
    for name, ours in made_with.items():
        if theirs.get(name) != ours:
            differing = "tokenizer" if name == "tokenizer" else "model"
            raise DataError(
                f"{path} comes from another {differing}: its "
                f"{name} is {theirs.get(name)}, this run's is {ours}"
            )
    try:
        vocab_size = int(made_with.get("vocab_size", np.iinfo(np.int64).max))
        _check_tokens(held, vocab_size)
        return DataProto.from_columns(_trained_columns(held))
    except (SchemaError, ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise DataError(f"{path}: damaged, or not a rollout dump: {error}") from error


def _check_tokens(held: DataProto, vocab_size: int) -> None:
    """Raise ValueError for tokens outside the vocabulary and for invalid numbers, because any
    intact Parquet file could be passed as a dump.
    """
    for name in ("prompt_ids", "response_ids"):
        ids = held.jagged(name).values
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"{name} must be integers, got {ids.dtype}")
        wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if len(wrong):
            raise ValueError(
                f"{name} contains the token {ids[wrong[0]]}, which is not in the model's vocabulary"
            )
    log_probs = held.jagged("rollout_log_probs").values
    scores = held.dense("score")
    if not np.issubdtype(log_probs.dtype, np.floating) or not np.issubdtype(
        scores.dtype, np.floating
    ):
        raise ValueError(
            f"rollout_log_probs and scores must be floating point, got {log_probs.dtype} and "
            f"{scores.dtype}"
        )
    if np.isnan(log_probs).any() or (log_probs > _MOST_LOG_PROB).any():
        raise ValueError(
            "rollout_log_probs contains a value that is not the logarithm of a probability"
        )
    mask = held.jagged(RESPONSE_MASK).values.reshape(-1, 2)[:, 0]
    if not np.isin(mask, (0, 1)).all():
        raise ValueError(f"{RESPONSE_MASK} contains a value other than 0 and 1")


def _trained_columns(held: DataProto) -> dict[str, Column]:
    columns: dict[str, Column] = {}
    for name in _NEEDED:
        if name not in ("score", RESPONSE_MASK, "response_versions"):
            columns[name] = held[name]
    lengths = held.jagged("response_ids").lengths
    columns["scores"] = held["score"]
    columns[RESPONSE_MASK] = _from_runs(held.jagged(RESPONSE_MASK), lengths, np.bool_)
    columns["response_versions"] = _from_runs(held.jagged("response_versions"), lengths, np.int64)
    if not np.array_equal(held.jagged("rollout_log_probs").lengths, lengths):
        raise ValueError("rollout_log_probs and response_ids have different lengths")
    columns |= {name: held[name] for name in SUPPORT if name in held}
    for name, dumped in {"rm_scores": "rm_score", "greedy_scores": "greedy_score"}.items():
        if dumped in held:
            columns[name] = held[dumped]
    if "turns" in held:
        columns |= {name: held[name] for name in _CONVERSATION}
    if "reward_extra" in held:
        columns |= _reward_columns(held)
    return columns


def _reward_columns(held: DataProto) -> dict[str, Column]:
    """Return the reward's extra values and the scoring errors, each only if a row has any."""
    extras = list(map(json.loads, held["reward_extra"].tolist()))
    if "reward_failure" in held:
        failures = held["reward_failure"].tolist()
    else:
        # dumps of older versions have failures only among the reward's extra values
        failures = [extra.get("failure") for extra in extras]
    for extra, text in zip(extras, failures, strict=True):
        if text is not None:
            del extra["failure"]
    columns: dict[str, Column] = {}
    if any(extras):
        columns["reward_extra"] = objects(extras)
    if any(failures):
        columns["reward_failure"] = objects(failures)
    return columns


def _from_runs(runs: Jagged, lengths: np.ndarray, kind: type) -> Jagged:
    """Decode rows of [value, run length] pairs to one value per token."""
    pairs = runs.values.reshape(-1, 2)
    counts = pairs[:, 1]
    if (counts < 1).any() or (counts > lengths.max(initial=0)).any():
        raise ValueError("a token run is empty, or longer than any response")
    sums = np.add.reduceat(np.append(counts, 0), runs.offsets[:-1])
    if not np.array_equal(sums * (runs.lengths > 0), lengths):
        raise ValueError("the token runs do not add up to the response lengths")
    tokens = np.repeat(pairs[:, 0], counts)
    return Jagged.from_lengths(tokens.astype(kind), lengths)
