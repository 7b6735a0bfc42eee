"""Answers that another engine goes on with, after the one that had begun them was lost."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.batch import ROUTES, SUPPORT, DataProto, Jagged, unknown_routes
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig

_OF_TOKENS = ("response_ids", "response_mask", "rollout_log_probs", "response_versions")


def free_routes(config: RunConfig, tokens: int) -> np.ndarray:
    """Experts of the policy's layers for so many tokens, of which none is known
    (`batch.routes`)."""
    sizes = derived.hf_config(config.model)
    return unknown_routes(
        tokens, int(sizes["num_hidden_layers"]), int(sizes["num_experts_per_tok"])
    )


def continued(prompts: DataProto, answers: DataProto) -> DataProto:
    """prompt_ids of each row with the tokens of its answer so far behind them; the other columns
    stay."""
    asked = prompts.jagged("prompt_ids")
    begun = answers.jagged("response_ids")
    rows = [np.concatenate([prompt, tokens]) for prompt, tokens in zip(asked, begun, strict=True)]
    return prompts.with_columns(prompt_ids=Jagged.from_rows(rows, asked.values.dtype))


def joined(begun: DataProto, rest: DataProto) -> DataProto:
    """The answers of `begun`, which were cut short, with what `rest` adds to each, in order."""
    columns: dict[str, Any] = {"finish_reason": rest["finish_reason"]}
    for name in (*_OF_TOKENS, *(SUPPORT if all(name in rest for name in SUPPORT) else ())):
        before = begun.jagged(name)
        after = rest.jagged(name)
        rows = [np.concatenate(pair) for pair in zip(before, after, strict=True)]
        columns[name] = Jagged.from_rows(rows, before.values.dtype)
    versions = [str(row[-1]) if len(row) else "" for row in columns["response_versions"]]
    columns["weight_version"] = np.array(versions, dtype=object)
    # the engine that went on has read prompt and beginning, and knows the experts of all of it
    if ROUTES in rest:
        columns[ROUTES] = rest.jagged(ROUTES)
    return DataProto.from_columns(columns)
