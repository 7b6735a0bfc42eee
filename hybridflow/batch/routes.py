"""The batch column with the experts that computed each token, made of what engines return."""

from __future__ import annotations

import numpy as np

from hybridflow.errors import RouterReplayError

ROUTES = "routed_experts"  # jagged int16 [prompt + response tokens, layers, experts a token]
ROUTED = "routed_tokens"  # [B] int64: how many tokens of each row have routes, where that does not follow from lengths
FREE = -1  # no route is known: the router decides. All k entries of a (token, layer) are free, or none


def with_free_end(routes: np.ndarray, tokens: int, layers: int, what: str) -> np.ndarray:
    """An engine's routes as rows of the column.

    Args:
        routes: [tokens - 1, layers x k]: an engine routes a token when it computes the next one, so the last token has
            none. The trainer does not read it either: it predicts no token of the sample.
        tokens: tokens of prompt and response.
        layers: layers of the model, including those without experts.
        what: whose routes they are, for messages.

    Returns:
        [tokens, layers, k] int16, the last row `FREE`.

    Raises:
        RouterReplayError: the number of rows is not `tokens` - 1, or their width is not a multiple of `layers`.
    """
    if routes.ndim != 2 or len(routes) != tokens - 1 or routes.shape[1] % layers or not routes.shape[1]:
        raise RouterReplayError(f"{what}: routes of shape {list(routes.shape)} for {tokens} tokens and {layers} layers")
    if routes.min(initial=0) < 0 or routes.max(initial=0) > np.iinfo(np.int16).max:
        raise RouterReplayError(f"{what}: expert ids {routes.min()} to {routes.max()}")
    column = np.full((tokens, layers, routes.shape[1] // layers), FREE, dtype=np.int16)
    column[:-1] = routes.reshape(tokens - 1, layers, -1)
    return column


def unknown_routes(tokens: int, layers: int, topk: int) -> np.ndarray:
    """Routes `[tokens, layers, k]` of which none is known."""
    return np.full((tokens, layers, topk), FREE, dtype=np.int16)
