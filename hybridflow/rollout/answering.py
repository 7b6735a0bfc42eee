"""Generation for prompts from outside the dataset: text answers for a program, and training samples
for a flow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridflow.batch import DataProto, Jagged, objects
from hybridflow.config.schema import DataConfig
from hybridflow.data.encoding import AnswerEncoder
from hybridflow.data.files import Row
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError
from hybridflow.rollout.protocols import ROOM, Rollouts

Prompt = str | Sequence[Mapping[str, Any]]


async def answer(
    engines: Rollouts,
    tokenizer: Tokenizer,
    config: DataConfig,
    prompts: Sequence[Prompt],
    max_new_tokens: int | None = None,
) -> list[str]:
    """Return the text of one answer per prompt, sampled as in validation. For conversations, return
    the last answer of each.

    Raises:
        DataError: a prompt is malformed, or longer than `data.max_prompt_length`.
    """
    if not prompts:
        return []
    batch = _batch(prompts, tokenizer, config)
    if max_new_tokens is not None:
        most = min(max_new_tokens, config.max_response_length)
        batch = batch.with_columns(**{ROOM: np.full(len(batch), most)})
    answered = await engines.answers(engines.begin(batch, training=False))
    return _texts(answered, tokenizer)


async def samples(
    engines: Rollouts,
    tokenizer: Tokenizer,
    config: DataConfig,
    prompts: Sequence[Prompt],
    n: int,
) -> DataProto:
    """Generate `n` training samples per prompt with `rollout.sampling`. Returns the columns of
    `Rollouts.batch`, prompt_ids, uid (equal for samples of the same prompt) and response_text.

    Raises:
        DataError: a prompt is malformed, or longer than `data.max_prompt_length`.
    """
    batch = _batch(prompts, tokenizer, config)
    batch = batch.with_columns(uid=np.arange(len(batch), dtype=np.int64)).repeat(n)
    answered = await engines.answers(engines.begin(batch, training=True))
    texts = objects(_texts(answered, tokenizer))
    return batch.union(answered).with_columns(response_text=texts)


def _texts(answered: DataProto, tokenizer: Tokenizer) -> list[str]:
    if "answer_text" in answered:
        texts: list[str] = answered["answer_text"].tolist()
        return texts
    return [tokenizer.decode_response(row.tolist()) for row in answered.jagged("response_ids")]


def _batch(prompts: Sequence[Prompt], tokenizer: Tokenizer, config: DataConfig) -> DataProto:
    """Build a batch in the format of `PromptDataset.batch`."""
    encoder = AnswerEncoder(tokenizer, config, {})
    ids = []
    for number, prompt in enumerate(prompts):
        text = prompt if isinstance(prompt, str) else list(prompt)
        row = Row("prompts", number, {config.prompt_key: text})
        rows = encoder.encode(row).rows
        if not rows:
            raise DataError(
                f"prompts, row {number}: the prompt is longer than "
                f"data.max_prompt_length={config.max_prompt_length} tokens; shorten it"
            )
        ids.append(np.array(rows[0]["prompt_ids"], np.int64))
    count = len(prompts)
    return DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_rows(ids, np.int64),
            "data_source": objects(["prompts"] * count),
            "ground_truth": objects([""] * count),
            "extra_info": objects([{} for _ in range(count)]),
            "index": np.arange(count, dtype=np.int64),
        }
    )
