"""The batch column of expert routes, built from engine output: the experts that computed each
token."""

from __future__ import annotations

import numpy as np

from hybridflow.errors import RouterReplayError

ROUTES = "routed_experts"  # jagged int16 [prompt + response tokens, layers, experts per token]
# [B] int64: number of tokens with routes per row, for rows where it does not follow from the
# lengths
ROUTED = "routed_tokens"
FREE = -1  # no known route: the router decides. All k entries of a (token, layer) are FREE, or none


def with_free_end(routes: np.ndarray, tokens: int, layers: int, what: str) -> np.ndarray:
    """Convert an engine's routes to rows of the column.

    Args:
        routes: [tokens - 1, layers x k]. An engine routes a token when it computes the next one, so
            the last token has no route. The trainer does not need it either, because the last token
            predicts no token of the sample.
        tokens: number of prompt and response tokens.
        layers: number of model layers, including those without experts.
        what: source of the routes, for error messages.

    Returns:
        [tokens, layers, k] int16, the last row `FREE`.

    Raises:
        RouterReplayError: the number of rows is not `tokens` - 1, or their width is not a multiple
            of `layers`.
    """
    if (
        routes.ndim != 2
        or len(routes) != tokens - 1
        or routes.shape[1] % layers
        or not routes.shape[1]
    ):
        raise RouterReplayError(
            f"{what}: routes of shape {list(routes.shape)} for {tokens} tokens and {layers} layers"
        )
    if routes.min(initial=0) < 0 or routes.max(initial=0) > np.iinfo(np.int16).max:
        raise RouterReplayError(f"{what}: expert ids {routes.min()} to {routes.max()}")
    column = np.full((tokens, layers, routes.shape[1] // layers), FREE, dtype=np.int16)
    column[:-1] = routes.reshape(tokens - 1, layers, -1)
    return column


def unknown_routes(tokens: int, layers: int, topk: int) -> np.ndarray:
    """Return routes `[tokens, layers, k]` that are all `FREE`."""
    return np.full((tokens, layers, topk), FREE, dtype=np.int16)
