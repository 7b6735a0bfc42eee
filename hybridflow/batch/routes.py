"""The batch column of expert routes (the experts that processed each token), built from engine
output."""

from __future__ import annotations

import numpy as np

from hybridflow.errors import RouterReplayError

ROUTES = "routed_experts"  # jagged int16 [prompt + response tokens, layers, experts per token]
# [B] int64: number of routed tokens per row, if it does not follow from the lengths
ROUTED = "routed_tokens"
FREE = -1  # unknown route: the router decides. Either all k entries of a (token, layer) or none


def with_free_end(routes: np.ndarray, tokens: int, layers: int, what: str) -> np.ndarray:
    """Convert the routes returned by an engine to the layout of the batch column.

    Args:
        routes: [tokens - 1, layers x k]. An engine routes a token when it computes the next token,
            so the last token has no route. The trainer does not need it, because nothing is
            predicted from the last token.
        tokens: number of prompt and response tokens.
        layers: number of model layers, including those without experts.
        what: source of the routes, for error messages.

    Returns:
        [tokens, layers, k] int16; the last row is `FREE`.

    Raises:
        RouterReplayError: the number of rows is not `tokens` - 1, or the row width is not a
            multiple of `layers`.
    """
    if (
        routes.ndim != 2
        or len(routes) != tokens - 1
        or routes.shape[1] % layers
        or not routes.shape[1]
    ):
        raise RouterReplayError(
            f"{what}: routes of shape {list(routes.shape)} do not match {tokens} tokens and "
            f"{layers} layers"
        )
    if routes.min(initial=0) < 0 or routes.max(initial=0) > np.iinfo(np.int16).max:
        raise RouterReplayError(
            f"{what}: expert ids must be 0 to {np.iinfo(np.int16).max}, got {routes.min()} to "
            f"{routes.max()}"
        )
    column = np.full((tokens, layers, routes.shape[1] // layers), FREE, dtype=np.int16)
    column[:-1] = routes.reshape(tokens - 1, layers, -1)
    return column


def unknown_routes(tokens: int, layers: int, topk: int) -> np.ndarray:
    """Return routes `[tokens, layers, k]` filled with `FREE`."""
    return np.full((tokens, layers, topk), FREE, dtype=np.int16)
