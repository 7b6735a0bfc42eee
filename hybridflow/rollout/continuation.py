"""Continuation of responses on another engine after their engine was lost."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridflow.batch import ROUTES, SUPPORT, DataProto, Jagged, unknown_routes
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig

_OF_TOKENS = ("response_ids", "response_mask", "rollout_log_probs", "response_versions")


def free_routes(config: RunConfig, tokens: int) -> np.ndarray:
    """Return placeholder routes for this many tokens and all layers of the policy, all marked as
    unknown (see `batch.routes`).
    """
    sizes = derived.hf_config(config.model)
    return unknown_routes(
        tokens, int(sizes["num_hidden_layers"]), int(sizes["num_experts_per_tok"])
    )


def continued(prompts: DataProto, answers: DataProto) -> DataProto:
    """Append each row's response so far to its prompt_ids. Other columns are unchanged."""
    asked = prompts.jagged("prompt_ids")
    begun = answers.jagged("response_ids")
    return prompts.with_columns(prompt_ids=_appended(asked, begun))


def joined(begun: DataProto, rest: DataProto) -> DataProto:
    """Append the continuations `rest` to the interrupted responses `begun`, in order."""
    columns: dict[str, Any] = {"finish_reason": rest["finish_reason"]}
    names: tuple[str, ...] = _OF_TOKENS
    if set(SUPPORT) <= set(rest.columns):
        names += SUPPORT
    for name in names:
        columns[name] = _appended(begun.jagged(name), rest.jagged(name))
    versions = [str(row[-1]) if len(row) else "" for row in columns["response_versions"]]
    columns["weight_version"] = np.array(versions, dtype=object)
    # the second engine has processed the prompt and the first part, so it returns the experts of
    # all tokens
    if ROUTES in rest:
        columns[ROUTES] = rest.jagged(ROUTES)
    return DataProto.from_columns(columns)


def _appended(before: Jagged, after: Jagged) -> Jagged:
    """Append each row of `after` to the same row of `before`."""
    rows = list(map(np.concatenate, zip(before, after, strict=True)))
    return Jagged.from_rows(rows, before.values.dtype)
