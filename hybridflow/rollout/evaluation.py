"""Scoring of responses, validation on the held-out set, and dumps of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.agents.loops.base import LOOPS
from hybridflow.batch import DataProto, objects
from hybridflow.config.schema import RewardConfig, RunConfig
from hybridflow.config.val_sets import VAL_SET, tag, val_sets
from hybridflow.data.custom import Prompts, open_prompts
from hybridflow.data.dataset import PreferenceDataset
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.dispatch import DataflowStep
from hybridflow.rewards.manager import RewardManager, Submitted
from hybridflow.rewards.reading import opens_thinking
from hybridflow.rewards.scores import finite_number
from hybridflow.rewards.verifiers.base import PROMPT, THINKING_OPEN, ScoreResult, result_of
from hybridflow.rollout.answer_statistics import answer_statistics
from hybridflow.rollout.conversations import TURN_REWARDS
from hybridflow.rollout.dumps import dump_batch
from hybridflow.rollout.protocols import ROOM, Rollouts
from hybridflow.rollout.sampling_control import without_rows

SCORING = DataflowStep(
    "reward",
    ("response_ids", "data_source", "ground_truth", "extra_info"),
    ("response_text", "scores"),
)

# ReMax compares with the answer that validation's sampling gives, which has to be the greedy one
GREEDY = DataflowStep("greedy answers", ("prompt_ids",), ("greedy_scores",))

# at the end of a prompt, which hold a marker that opens the thinking, spelled out or not
_MARKER_TOKENS = 16


@dataclass(frozen=True)
class Scoring:
    """Rows whose scoring has begun: their texts, and what is collected for them, or what an agent
    loop gave."""

    texts: Sequence[str]
    rows: Submitted | Sequence[ScoreResult]


class Scorer:
    """Decodes responses and asks the reward function."""

    def __init__(self, rewards: RewardManager, tokenizer: Tokenizer) -> None:
        self.rewards = rewards
        self.tokenizer = tokenizer

    async def score(self, batch: DataProto) -> DataProto:
        """Columns response_text (objects) and scores [B] f32, as `SCORING` declares, reward_extra
        (objects: {name: value}) where the reward returns more than a score, reward_failure
        (objects: text or None) where rows failed."""
        return await self.finish(self.begin(batch, len(batch)))

    def begin(self, batch: DataProto, size: int) -> list[Scoring]:
        """Begin to score a batch, in parts of `size` rows, for `finish`."""
        columns = [batch[name].tolist() for name in ("data_source", "ground_truth", "extra_info")]
        given = batch[TURN_REWARDS].tolist() if TURN_REWARDS in batch else None
        # of conversations the last answer counts; how it came about is at hand
        if "answer_text" in batch:
            texts = batch["answer_text"].tolist()
            columns[2] = [
                {**(info or {}), "messages": messages}
                for info, messages in zip(columns[2], batch["messages"].tolist(), strict=True)
            ]
            if given is not None:
                columns[2] = [
                    {**info, TURN_REWARDS: rewards}
                    for info, rewards in zip(columns[2], given, strict=True)
                ]
        else:
            pieces = batch.pieces(["response_ids"])
            texts = [
                self.tokenizer.decode_response(row.tolist())
                for piece in pieces
                for row in piece.jagged("response_ids")
            ]
        facts = self._facts(batch)
        columns[2] = [{**(info or {}), **row} for info, row in zip(columns[2], facts, strict=True)]
        groups = batch["uid"].tolist() if "uid" in batch else list(range(len(texts)))
        parts: list[Scoring] = []
        for part in (slice(start, start + size) for start in range(0, len(texts), max(size, 1))):
            if given is not None and _loop_scores(self.rewards.config):
                weight = self.rewards.config.weight
                results = [_loop_result(rewards, weight) for rewards in given[part]]
                parts.append(Scoring(texts[part], results))
            else:
                sources, truths, infos = (column[part] for column in columns)
                submitted = self.rewards.submit(sources, texts[part], truths, infos, groups[part])
                parts.append(Scoring(texts[part], submitted))
        return parts

    def _facts(self, batch: DataProto) -> list[dict[str, Any]]:
        """What the reward wants to know about the prompt of each row."""
        reads_prompt = self.rewards.reads_prompt
        reads_thinking = self.rewards.reads_thinking
        found: list[dict[str, Any]] = [{} for _ in range(len(batch))]
        known: dict[tuple[int, ...], bool] = {}  # the samples of a prompt end in the same tokens
        for facts, row in (
            zip(found, batch.jagged("prompt_ids"), strict=True)
            if reads_prompt or reads_thinking
            else ()
        ):
            if reads_prompt:
                facts[PROMPT] = self.tokenizer.decode(row.tolist())
            if reads_thinking:
                end = tuple(row[-_MARKER_TOKENS:].tolist())
                if end not in known:
                    known[end] = opens_thinking(self.tokenizer.decode(end))
                facts[THINKING_OPEN] = known[end]
        return found

    async def finish(self, parts: Sequence[Scoring]) -> DataProto:
        """The columns of `score` for the rows of all parts, in order; waits for those that are not
        scored yet.

        Raises:
            DataError: what `RewardManager.check` raises.
        """
        texts = [text for part in parts for text in part.texts]
        submitted = [part.rows for part in parts if isinstance(part.rows, Submitted)]
        collected = await self.rewards.collect(submitted)
        self.rewards.check([result for found in collected for result in found])
        left = iter(collected)
        results = [
            one
            for part in parts
            for one in (next(left) if isinstance(part.rows, Submitted) else part.rows)
        ]
        scores = np.array([result.score for result in results], dtype=np.float32)
        found_columns = {"response_text": np.array(texts, dtype=object), "scores": scores}
        if any(result.extra for result in results):
            found_columns["reward_extra"] = np.array(
                [result.extra for result in results], dtype=object
            )
        if any(result.failure for result in results):
            found_columns["reward_failure"] = np.array(
                [result.failure for result in results], dtype=object
            )
        return DataProto.from_columns(found_columns)

    def check_failures(self, batch: DataProto) -> None:
        """Raise DataError for rows that failed after they were scored, as `RewardManager.check`
        does."""
        self.rewards.check(
            [ScoreResult(0.0, failure=text) for text in batch["reward_failure"].tolist()]
        )

    def forget(self, parts: Sequence[Scoring]) -> None:
        """Nobody finishes these parts."""
        for part in parts:
            if isinstance(part.rows, Submitted):
                self.rewards.forget(part.rows)


def _loop_result(rewards: Sequence[float], weight: float) -> ScoreResult:
    """The score of a conversation whose loop rewards its turns."""
    try:
        return result_of({"score": sum(rewards), TURN_REWARDS: rewards}, weight)
    except ValueError as error:
        return ScoreResult(0.0, failure=f"the agent loop gave {error}")


def _loop_scores(config: RewardConfig) -> bool:
    """Whether the rewards that an agent loop gives, if it does, are the score."""
    return config.path is None and not config.combine


def sources_to_score(config: RunConfig, *datasets: Prompts | PreferenceDataset) -> list[str]:
    """The data sources whose rows need a verifier: none where the agent loop gives the rewards."""
    if LOOPS.get(config.rollout.agent.loop).gives_rewards and _loop_scores(config.reward):
        return []
    return [source for dataset in datasets for source in dataset.data_sources]


def check_truths(
    rewards: RewardManager, config: RunConfig, *datasets: Prompts | PreferenceDataset
) -> None:
    """Raise DataError for a ground truth that its verifier cannot use; names file and row."""
    for dataset in datasets:
        if not sources_to_score(config, dataset):
            continue
        rows = dataset.batch(np.arange(len(dataset)))
        # a dataset of one's own
        places = getattr(dataset, "places", [f"row {row}" for row in range(len(dataset))])
        rewards.check_truths(rows["data_source"].tolist(), rows["ground_truth"].tolist(), places)


def open_val_sets(config: RunConfig, tokenizer: Tokenizer) -> dict[str, Prompts]:
    """{name: its prompts} of the validation sets that have files; `open_prompts` says what it
    raises."""
    return {
        name: open_prompts(
            wanted.files,
            tokenizer.with_template(wanted.chat_template_kwargs),
            config.data,
            wanted.max_prompts,
        )
        for name, wanted in val_sets(config).items()
        if wanted.files
    }


class Validator:
    """Answers the prompts of each validation set and scores them.

    Args:
        datasets: {name: its prompts}, from `open_val_sets`.
        folder: of the run.
    """

    def __init__(
        self, config: RunConfig, datasets: Mapping[str, Prompts], scorer: Scorer, folder: Path
    ) -> None:
        self.datasets = dict(datasets)
        self.scorer = scorer
        self.folder = folder
        self.sets = val_sets(config)

    async def run(self, engines: Rollouts, step: int) -> dict[str, float]:
        """The metrics of each set, which begin with "val", or with "val-NAME" for an entry of
        `data.val_sets`. All sets are asked for at once. Nothing without a set."""
        asked = {name: self._prompts(name) for name in self.datasets}
        samples = {name: engines.begin(prompts, training=False) for name, prompts in asked.items()}
        metrics: dict[str, float] = {}
        for name, prompts in asked.items():
            batch = prompts.union(await engines.answers(samples[name]))
            batch = batch.union(await self.scorer.score(batch))
            dump_batch(self.folder / f"validation{tag(name)}", step, batch, self.scorer.tokenizer)
            metrics |= self._metrics(f"val{tag(name)}", batch, self.sets[name].samples)
        return metrics

    def _prompts(self, name: str) -> DataProto:
        """The prompts of a set, each as often as it is answered."""
        dataset = self.datasets[name]
        samples = self.sets[name].samples
        batch = dataset.batch(np.arange(len(dataset)))
        if (most := self.sets[name].sampling.max_new_tokens) is not None:
            batch = batch.with_columns(**{ROOM: np.full(len(batch), most)})
        if name:
            batch = batch.with_columns(**{VAL_SET: np.array([name] * len(batch), object)})
        return (
            batch.with_columns(uid=np.arange(len(batch))).repeat(samples) if samples > 1 else batch
        )

    @staticmethod
    def _metrics(prefix: str, batch: DataProto, samples: int) -> dict[str, float]:
        """score (mean score), accuracy (the same where every score is 0 or 1) and, with several
        answers to a prompt, `answer_statistics`, all by data source too; lengths and means of what
        the reward returned beside the score."""
        metrics = {f"{prefix}/response_length/mean": float(np.mean(batch.lengths("response_ids")))}
        parts = {
            f"/{source}": batch["data_source"] == source
            for source in dict.fromkeys(batch["data_source"].tolist())
        }
        for part, rows in {"": np.ones(len(batch), dtype=bool), **parts}.items():
            scores = batch["scores"][rows]
            metrics[f"{prefix}{part}/score"] = float(np.mean(scores))
            if np.isin(scores, (0.0, 1.0)).all():
                metrics[f"{prefix}{part}/accuracy"] = metrics[f"{prefix}{part}/score"]
            if samples > 1:
                extras = batch["reward_extra"][rows].tolist() if "reward_extra" in batch else None
                found = answer_statistics(scores, samples, extras)
                metrics |= {f"{prefix}{part}/{name}": value for name, value in found.items()}
        return metrics | {
            f"{prefix}/{name}": value
            for name, value in extra_metrics(batch).items()
            if name.endswith("/mean")
        }


def with_failures(batch: DataProto, texts: Sequence[str | None]) -> DataProto:
    """With these rows failed as well, [B] a text or None: their score is 0, and nothing beside it
    counts."""
    before = batch["reward_failure"].tolist() if "reward_failure" in batch else [None] * len(batch)
    merged = [old if old is not None else new for old, new in zip(before, texts, strict=True)]
    scores = np.where([text is None for text in texts], batch["scores"], np.float32(0.0))
    return batch.with_columns(scores=scores, reward_failure=objects(merged))


def without_failed(batch: DataProto, policy: str) -> DataProto:
    """With the policy `drop` (`reward.on_failure`), rows whose scoring failed have no sampled token
    left and, so that the mean of their group stays as it is, the mean score of its other rows."""
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
    """A line for each text with which scoring failed, the most frequent first: the number of rows
    and the first one."""
    rows: dict[str, list[int]] = {}
    for row, text in enumerate(
        batch["reward_failure"].tolist() if "reward_failure" in batch else ()
    ):
        if text is not None:
            rows.setdefault(text, []).append(row)
    ordered = sorted(rows.items(), key=lambda item: -len(item[1]))
    return [
        f"{len(found)} of {len(batch)} rows have no score (row {found[0]} first): {text}"
        for text, found in ordered
    ]


def extra_metrics(batch: DataProto) -> dict[str, float]:
    """reward_extra/NAME/mean, /max and /min over the rows whose reward returned a finite number (or
    true, false) of this name beside the score, and reward/failed, the share of rows whose scoring
    failed."""
    failed = (
        [text is not None for text in batch["reward_failure"].tolist()]
        if "reward_failure" in batch
        else []
    )
    values: dict[str, list[float]] = {}
    for extra in batch["reward_extra"].tolist() if "reward_extra" in batch else ():
        for name, value in extra.items():
            if (number := finite_number(value)) is not None:
                values.setdefault(name, []).append(number)
    spreads = {
        f"reward_extra/{name}/{what}": float(of(found))
        for name, found in values.items()
        for what, of in (("mean", np.mean), ("max", np.max), ("min", np.min))
    }
    return (
        spreads
        | ({"reward/failed": float(np.mean(failed))} if failed else {})
        | _conversation_metrics(batch)
    )


def _conversation_metrics(batch: DataProto) -> dict[str, float]:
    """agent/turns/mean and /max, agent/tool_calls/mean, and agent/failed, the share of
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
