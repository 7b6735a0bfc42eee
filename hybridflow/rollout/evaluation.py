"""Scoring of responses, validation on the held-out set, and dumps of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.agents.loops.base import LOOPS
from hybridflow.batch import DataProto, objects
from hybridflow.config import derived
from hybridflow.config.entries import FLOWS
from hybridflow.config.schema import RewardConfig, RunConfig
from hybridflow.config.val_sets import VAL_SET, tag, val_sets
from hybridflow.data.custom import Prompts, open_prompts
from hybridflow.data.dataset import PreferenceDataset
from hybridflow.data.images import COLUMN, with_pixels
from hybridflow.data.packing import without_rows
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.dispatch import DataflowStep
from hybridflow.errors import ConfigError
from hybridflow.rewards.manager import RewardManager, Submitted
from hybridflow.rewards.reading import opens_thinking
from hybridflow.rewards.verifiers.base import (
    PROMPT,
    THINKING_OPEN,
    ScoreResult,
    finite_number,
    result_of,
)
from hybridflow.rollout.answer_statistics import answer_statistics
from hybridflow.rollout.conversations import TURN_REWARDS
from hybridflow.rollout.dumps import dump_batch
from hybridflow.rollout.protocols import ROOM, Rollouts
from hybridflow.rollout.requests import available, values

SCORING = DataflowStep(
    "reward",
    ("response_ids", "data_source", "ground_truth", "extra_info"),
    ("response_text", "scores"),
)

# ReMax's baseline is sampled with the validation settings, which must therefore be greedy
GREEDY = DataflowStep("greedy answers", ("prompt_ids",), ("greedy_scores",))

# tokens at the end of a prompt; enough for a marker that opens the thinking
_MARKER_TOKENS = 16


@dataclass(frozen=True)
class Scoring:
    """Rows being scored: their texts, and either their pending scores or the results from the agent
    loop.
    """

    texts: Sequence[str]
    rows: Submitted | Sequence[ScoreResult]


class Scorer:
    """Decodes responses and scores them with the reward function."""

    def __init__(self, rewards: RewardManager, tokenizer: Tokenizer) -> None:
        self.rewards = rewards
        self.tokenizer = tokenizer

    async def score(self, batch: DataProto) -> DataProto:
        """Score a batch. Returns the columns declared by `SCORING`: response_text (objects) and
        scores [B] f32. Also returns reward_extra (objects: {name: value}) if the reward returns
        more than a score, and reward_failure (objects: text or None) if rows failed.
        """
        return await self.finish(self.begin(batch, len(batch)))

    def begin(self, batch: DataProto, size: int) -> list[Scoring]:
        """Start scoring a batch in parts of `size` rows. Pass the result to `finish`."""
        texts = self._texts(batch)
        starts = range(0, len(texts), max(size, 1))
        parts = [slice(start, start + size) for start in starts]
        config = self.rewards.config
        if TURN_REWARDS in batch and _loop_scores(config):
            given = batch[TURN_REWARDS].tolist()
            results = [_loop_result(rewards, config.weight) for rewards in given]
            return [Scoring(texts[part], results[part]) for part in parts]
        sources = batch["data_source"].tolist()
        truths = batch["ground_truth"].tolist()
        infos = self._infos(batch)
        groups = batch["uid"].tolist() if "uid" in batch else list(range(len(texts)))
        scorings = []
        for part in parts:
            submitted = self.rewards.submit(
                sources[part], texts[part], truths[part], infos[part], groups[part]
            )
            scorings.append(Scoring(texts[part], submitted))
        return scorings

    def _texts(self, batch: DataProto) -> list[str]:
        """Return each row's text to score: for conversations, only the last answer."""
        texts: list[str] = []
        if "answer_text" in batch:
            texts += batch["answer_text"].tolist()
            return texts
        for piece in batch.pieces(["response_ids"]):
            for row in piece.jagged("response_ids"):
                texts.append(self.tokenizer.decode_response(row.tolist()))
        return texts

    def _infos(self, batch: DataProto) -> list[dict[str, Any]]:
        """Return each row's extra_info for the reward, with the messages and rewards of its
        conversation and the information about its prompt that the reward needs."""
        reads_prompt = self.rewards.reads_prompt
        reads_thinking = self.rewards.reads_thinking
        infos = [dict(info or {}) for info in batch["extra_info"].tolist()]
        if "answer_text" in batch:
            for name in available(batch, "messages", TURN_REWARDS).columns:
                for info, value in zip(infos, batch[name].tolist(), strict=True):
                    info[name] = value
        if not (reads_prompt or reads_thinking):
            return infos
        # the samples of a prompt have the same tokens at its end
        known: dict[tuple[int, ...], bool] = {}
        for info, row in zip(infos, batch.jagged("prompt_ids"), strict=True):
            if reads_prompt:
                info[PROMPT] = self.tokenizer.decode(row.tolist())
            if reads_thinking:
                end = tuple(row[-_MARKER_TOKENS:].tolist())
                if end not in known:
                    known[end] = opens_thinking(self.tokenizer.decode(end))
                info[THINKING_OPEN] = known[end]
        return infos

    async def finish(self, parts: Sequence[Scoring]) -> DataProto:
        """Wait until all parts are scored. Returns the same columns as `score` for their rows, in
        order.

        Raises:
            DataError: same as for `RewardManager.check`.
        """
        texts: list[str] = []
        submitted = []
        for part in parts:
            texts += part.texts
            if isinstance(part.rows, Submitted):
                submitted.append(part.rows)
        collected = await self.rewards.collect(submitted)
        self.rewards.check(list(chain(*collected)))
        left = iter(collected)
        results: list[ScoreResult] = []
        for part in parts:
            results += next(left) if isinstance(part.rows, Submitted) else part.rows
        scores = np.array([result.score for result in results], dtype=np.float32)
        extras = [result.extra for result in results]
        failures = [result.failure for result in results]
        found_columns = {"response_text": np.array(texts, dtype=object), "scores": scores}
        if any(extras):
            found_columns["reward_extra"] = np.array(extras, dtype=object)
        if any(failures):
            found_columns["reward_failure"] = np.array(failures, dtype=object)
        return DataProto.from_columns(found_columns)

    def check_failures(self, batch: DataProto) -> None:
        """Raise DataError, as `RewardManager.check` does, for rows that failed after scoring."""
        texts = batch["reward_failure"].tolist()
        self.rewards.check([ScoreResult(0.0, failure=text) for text in texts])

    def forget(self, parts: Sequence[Scoring]) -> None:
        """Discard these parts without collecting their scores."""
        for part in parts:
            if isinstance(part.rows, Submitted):
                self.rewards.forget(part.rows)


def _loop_result(rewards: Sequence[float], weight: float) -> ScoreResult:
    """Return the score of a conversation whose agent loop assigns rewards."""
    try:
        return result_of({"score": sum(rewards), TURN_REWARDS: rewards}, weight)
    except ValueError as error:
        return ScoreResult(0.0, failure=f"the agent loop returned {error}")


def _loop_scores(config: RewardConfig) -> bool:
    """Return True if the agent loop's rewards are used as the score."""
    return config.path is None and not config.combine


def sources_to_score(config: RunConfig, *datasets: Prompts | PreferenceDataset) -> list[str]:
    """Return the data sources that need a verifier, or an empty list if the agent loop provides the
    rewards."""
    agent_loop = LOOPS.get(config.rollout.agent.loop)
    if agent_loop.gives_rewards and _loop_scores(config.reward):
        return []
    sources: list[str] = []
    for dataset in datasets:
        sources += dataset.data_sources
    return sources


def check_truths(
    rewards: RewardManager, config: RunConfig, *datasets: Prompts | PreferenceDataset
) -> None:
    """Raise DataError if a ground truth is invalid for its verifier. The message names the file and
    the row."""
    for dataset in datasets:
        if not sources_to_score(config, dataset):
            continue
        rows = dataset.batch(np.arange(len(dataset)))
        sources = rows["data_source"].tolist()
        truths = rows["ground_truth"].tolist()
        # custom datasets have no places
        row_numbers = [f"row {row}" for row in range(len(dataset))]
        places = getattr(dataset, "places", row_numbers)
        rewards.check_truths(sources, truths, places)


def check_numbers(
    rewards: RewardManager, config: RunConfig, dataset: Prompts | PreferenceDataset
) -> None:
    """Check that the reward returns all extra values that the flow reads, by using the first row's
    ground truth as an answer and scoring it. If scoring fails, the check is skipped.

    Raises:
        ConfigError: the reward does not return one of these values.
    """
    flow = derived.flow_name(config)
    needed = FLOWS.get(flow).rewards
    from_dumps = config.trainer.rollouts_from is not None
    if not needed or from_dumps or not sources_to_score(config, dataset):
        return
    row = dataset.batch(np.arange(1))
    source = row["data_source"].tolist()
    [truth] = row["ground_truth"]
    call = rewards.submit(source, [str(truth)], [truth], row["extra_info"])
    [[result]] = asyncio.run(rewards.collect([call]))
    missing = [name for name in needed if finite_number(result.extra.get(name)) is None]
    if missing and result.failure is None:
        returned = ", ".join(["score", *result.extra])
        raise ConfigError(
            f"algorithm.flow={flow} reads the number {missing[0]!r} from the reward's result, "
            "but for the ground truth of the first row the reward returned only "
            f'{returned}; return {{"score": 1.0, "{missing[0]}": 0.0}} from the reward'
        )


def open_val_sets(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Prompts]:
    """Open the validation sets for which files are configured. Returns {name: prompts}. Raises the
    same errors as `open_prompts`."""
    opened = {}
    for name, wanted in val_sets(config).items():
        if wanted.files:
            own = tokenizer.with_template(wanted.chat_template_kwargs)
            opened[name] = open_prompts(wanted.files, own, config.data, wanted.max_prompts)
    return opened


class Validator:
    """Generates and scores answers for each validation set.

    Args:
        datasets: {name: prompts}, from `open_val_sets`.
        folder: the run folder.
    """

    def __init__(
        self, config: RunConfig, datasets: Mapping[str, Prompts], scorer: Scorer, folder: Path
    ) -> None:
        self.datasets = dict(datasets)
        self.scorer = scorer
        self.folder = folder
        self.sets = val_sets(config)
        self.tags = {name: tag(name) for name in self.sets}

    async def run(self, engines: Rollouts, step: int) -> dict[str, float]:
        """Validate all sets concurrently. Returns their metrics, with the prefix "val", or
        "val-NAME" for an entry of `data.val_sets`; empty if there are no sets."""
        metrics: dict[str, float] = {}
        async for name, batch in self.scored(engines):
            self.dump(name, batch, step)
            metrics |= self.metrics(name, batch)
        return metrics

    async def scored(
        self, engines: Rollouts, watch: Callable[[int, int], None] | None = None
    ) -> AsyncIterator[tuple[str, DataProto]]:
        """Generate and score answers for all sets concurrently. Yields (name, prompts with answers
        and scores) for each set.

        Args:
            watch: called with the numbers of finished and requested answers while answers are
                awaited.
        """
        asked = {name: self._prompts(name) for name in self.datasets}
        samples = {}
        for name, prompts in asked.items():
            samples[name] = engines.begin(prompts, training=False)
        begun = list(chain(*samples.values()))
        for name, prompts in asked.items():
            own = samples[name]
            while watch is not None and not all(sample.done() for sample in own):
                await engines.advance()
                finished = sum(sample.done() for sample in begun)
                watch(finished, len(begun))
            batch = prompts.union(await engines.answers(own))
            scores = await self.scorer.score(batch)
            yield name, batch.union(scores)

    def dump(self, name: str, batch: DataProto, step: int) -> None:
        """Write a validation set's answers at this step to a file in the folder of the set."""
        folder = self.folder / f"validation{self.tags[name]}"
        dump_batch(folder, step, batch, self.scorer.tokenizer)

    def metrics(self, name: str, batch: DataProto) -> dict[str, float]:
        """Return a validation set's metrics with its prefix, and verl's `val-core` metrics."""
        samples = self.sets[name].samples
        tag = self.tags[name]
        found = self._metrics(f"val{tag}", batch, samples)
        return found | _core(f"val-core{tag}", batch, samples)

    def _prompts(self, name: str) -> DataProto:
        """Return a validation set's prompts, each repeated once per sample."""
        dataset = self.datasets[name]
        val_set = self.sets[name]
        batch = dataset.batch(np.arange(len(dataset)))
        size = len(batch)
        if COLUMN in batch:
            batch = with_pixels(batch, dataset)
        limit = val_set.sampling.max_new_tokens
        if limit is not None:
            batch = batch.with_columns(**{ROOM: np.full(size, limit)})
        if name:
            batch = batch.with_columns(**{VAL_SET: np.array([name] * size, object)})
        if val_set.samples > 1:
            batch = batch.with_columns(uid=np.arange(size)).repeat(val_set.samples)
        return batch

    @staticmethod
    def _metrics(prefix: str, batch: DataProto, samples: int) -> dict[str, float]:
        """Compute the mean score (also reported as accuracy if every score is 0 or 1) and, for
        multiple answers per prompt, `answer_statistics`. Each metric is computed overall and per
        data source. Also compute response lengths, and the means of the reward's extra values.
        """
        length = np.mean(batch.lengths("response_ids"))
        metrics = {f"{prefix}/response_length/mean": float(length)}
        parts = {prefix: np.ones(len(batch), dtype=bool)}
        sources = batch["data_source"]
        for source in dict.fromkeys(sources.tolist()):
            parts[f"{prefix}/{source}"] = sources == source
        for part, rows in parts.items():
            scores = batch["scores"][rows]
            mean = float(np.mean(scores))
            metrics[f"{part}/score"] = mean
            if np.isin(scores, (0.0, 1.0)).all():
                metrics[f"{part}/accuracy"] = mean
            if samples > 1:
                extras = batch["reward_extra"][rows].tolist() if "reward_extra" in batch else None
                for name, value in answer_statistics(scores, samples, extras).items():
                    metrics[f"{part}/{name}"] = value
        for name, value in extra_metrics(batch).items():
            if name.endswith("/mean"):
                metrics[f"{prefix}/{name}"] = value
        return metrics


def _core(prefix: str, batch: DataProto, samples: int) -> dict[str, float]:
    """Compute the metrics that verl logs under val-core for each data source: mean@N and, with
    several answers per prompt, best@N/mean and maj@N/mean. They are computed from the reward's
    extra value `acc` if every row has it, otherwise from the score.
    """
    metrics = {}
    extras = values(batch, "reward_extra", {})
    accuracies = [finite_number(extra.get("acc")) for extra in extras]
    for source in dict.fromkeys(batch["data_source"].tolist()):
        rows = np.flatnonzero(batch["data_source"] == source)
        given = [accuracies[row] for row in rows]
        has_accuracy = None not in given
        if has_accuracy:
            head = f"{prefix}/{source}/acc"
            scores = np.array(given, np.float64)
        else:
            head = f"{prefix}/{source}/reward"
            scores = batch["scores"][rows]
        metrics[f"{head}/mean@{samples}"] = float(np.mean(scores))
        if samples > 1:
            own_extras = [extras[row] for row in rows]
            found = answer_statistics(scores, samples, own_extras)
            for name in (f"best@{samples}", f"maj@{samples}"):
                if name in found:
                    metrics[f"{head}/{name}/mean"] = found[name]
    return metrics


def with_failures(batch: DataProto, texts: Sequence[str | None]) -> DataProto:
    """Mark additional rows as failed, and set their scores to 0. `texts` [B] contains the reason
    for each failed row, and None for the others.
    """
    before = values(batch, "reward_failure", None)
    merged = [new if old is None else old for old, new in zip(before, texts, strict=True)]
    has_score = [text is None for text in texts]
    scores = np.where(has_score, batch["scores"], np.float32(0.0))
    return batch.with_columns(scores=scores, reward_failure=objects(merged))


def without_failed(batch: DataProto, policy: str) -> DataProto:
    """If `reward.on_failure` is `drop`, exclude failed rows from training: their tokens are masked,
    and their score becomes the mean of their group's other rows, which leaves the group's mean
    unchanged."""
    if policy != "drop" or "reward_failure" not in batch:
        return batch
    failed = np.array([text is not None for text in batch["reward_failure"]])
    scores = batch["scores"].copy()
    uid = batch["uid"]
    for row in np.flatnonzero(failed):
        others = scores[(uid == uid[row]) & ~failed]
        scores[row] = others.mean() if len(others) else 0.0
    return without_rows(batch.with_columns(scores=scores), failed)


def failures(batch: DataProto) -> list[str]:
    """Return one line per distinct scoring error, most frequent first. Each line includes the
    number of affected rows and the index of the first.
    """
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(values(batch, "reward_failure", None)):
        if text is not None:
            rows.setdefault(text, []).append(row)
    lines = []
    for text, found in sorted(rows.items(), key=lambda item: -len(item[1])):
        count = f"{len(found)} of {len(batch)} rows"
        lines.append(f"{count} have no score (first: row {found[0]}): {text}")
    return lines


def extra_metrics(batch: DataProto) -> dict[str, float]:
    """Compute reward_extra/NAME/mean, /max and /min over the rows for which the reward returned a
    finite number or boolean called NAME, and reward/failed, the fraction of rows whose scoring
    failed."""
    numbers: dict[str, list[float]] = {}
    for extra in values(batch, "reward_extra", {}):
        for name, value in extra.items():
            number = finite_number(value)
            if number is not None:
                numbers.setdefault(name, []).append(number)
    metrics = {}
    for name, found in numbers.items():
        head = f"reward_extra/{name}"
        metrics[f"{head}/mean"] = float(np.mean(found))
        metrics[f"{head}/max"] = max(found)
        metrics[f"{head}/min"] = min(found)
    if "reward_failure" in batch and len(batch):
        failed = [text is not None for text in batch["reward_failure"].tolist()]
        metrics["reward/failed"] = float(np.mean(failed))
    return metrics | _conversation_metrics(batch)


def _conversation_metrics(batch: DataProto) -> dict[str, float]:
    """Compute agent/turns/mean and /max, agent/tool_calls/mean, and agent/failed, the fraction of
    conversations whose loop failed."""
    if "turns" not in batch:
        return {}
    failed = [text is not None for text in batch["agent_failure"].tolist()]
    return {
        "agent/turns/mean": float(np.mean(batch["turns"])),
        "agent/turns/max": float(np.max(batch["turns"])),
        "agent/tool_calls/mean": float(np.mean(batch["tool_calls"])),
        "agent/failed/mean": float(np.mean(failed)),
    }
