"""How far log-probabilities in float32 may be from exact ones: a bound that is measured, since
rounding differs from processor to processor and from one math library to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

# An engine may be this many times as far from float64 as transformers in float32 is with the same
# weights. Seen: 0.4 to 1.9; with `larger_epsilon` 33 and with `larger_scale` 270
FACTOR = 4.0
# a few units in the last place of a log-probability, where transformers happens to be exact
FLOOR = 1e-6

# tokens, the first that has a log-prob, the log-probs from there on
Row = tuple[Sequence[int], int, Sequence[float]]


def distance(
    model: Path,
    rows: Iterable[Row],
    temperature: float = 1.0,
    change: Callable[[Any], None] | None = None,
) -> float:
    """The largest difference of any log-prob from transformers' in float64, in units of the largest
    one of transformers in float32; at most FACTOR where the weights and the mathematics are the
    same.

    Args:
        change: is made to the reference model; a fault that the bound must find.
    """
    wide = [
        (torch.tensor([*tokens]), start, torch.tensor([*found])) for tokens, start, found in rows
    ]
    exact, rounded = (
        _log_probs(model, wide, temperature, dtype, change)
        for dtype in (torch.float64, torch.float32)
    )
    own = max(float((one - other).abs().max()) for one, other in zip(rounded, exact, strict=True))
    theirs = max(
        float((found - one).abs().max()) for (_, _, found), one in zip(wide, exact, strict=True)
    )
    return theirs / max(own, FLOOR)


def _log_probs(
    model: Path,
    rows: Sequence[tuple[torch.Tensor, int, torch.Tensor]],
    temperature: float,
    dtype: torch.dtype,
    change: Callable[[Any], None] | None,
) -> list[torch.Tensor]:
    # others have no float64
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, **eager).eval()
    if change is not None:
        change(reference)
    found = []
    for tokens, start, _ in rows:
        with torch.no_grad():
            logits = reference(tokens[None]).logits[0, start - 1 : -1]
        found.append((logits / temperature).log_softmax(-1).gather(1, tokens[start:, None])[:, 0])
    return found


def larger_epsilon(model: Any) -> None:
    """Add 1e-6 to the epsilon of every norm, or 1e-4 where embeddings are scaled up (Gemma): there
    rounding alone is larger."""
    more = 1e-4 if hasattr(model.get_input_embeddings(), "embed_scale") else 1e-6
    for module in model.modules():
        for name in ("variance_epsilon", "eps"):
            if hasattr(module, name):
                setattr(module, name, getattr(module, name) + more)


def larger_scale(model: Any) -> None:
    """Scale the output projections of attention by 1.0004, and the norms that may follow them."""
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "post_attention_layernorm.weight")) or (
            "post_self_attn_layernorm" in name
        ):
            weight.data.mul_(1.0004)
