"""Wrong map entries put into a real Megatron model: what they do to log-probs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from hybridflow.models.layout import Coordinates, LocalTensor, Piece
from tests.dist.harness.policies import batch_of, policy_of, weights_of

Change = Callable[[LocalTensor], LocalTensor]


def renamed(change: Callable[[str], str]) -> Change:
    """Pieces come from other HF tensors."""

    def apply(local: LocalTensor) -> LocalTensor:
        return replace(
            local,
            pieces=tuple(replace(piece, source=change(piece.source)) for piece in local.pieces),
        )

    return apply


def exchange(first: str, second: str) -> Change:
    """Every piece of the one from the other."""
    return renamed(
        lambda name: re.sub(f"{first}|{second}", lambda m: second if m[0] == first else first, name)
    )


def next_expert(name: str) -> str:
    """One expert off; the last takes the first's."""
    return re.sub(r"experts\.(\d+)\.", lambda m: f"experts.{(int(m[1]) + 1) % 4}.", name)


def without_last_piece(kind: str) -> Change:
    """Nothing fills what the last piece would."""
    return lambda local: replace(local, pieces=local.pieces[:-1]) if kind in local.name else local


def shifted_rows(kind: str) -> Change:
    """The halves of every piece's rows exchanged."""

    def apply(local: LocalTensor) -> LocalTensor:
        if kind not in local.name or not local.pieces:
            return local
        return replace(
            local, pieces=tuple(part for piece in local.pieces for part in halves_exchanged(piece))
        )

    return apply


def halves_exchanged(piece: Piece) -> Sequence[Piece]:
    """The upper half of the rows from where the lower half is, and the other way round."""
    half = piece.shape[0] // 2
    rest = piece.shape[1:]
    if 2 * half != piece.shape[0]:
        return (piece,)
    low = piece.source_start
    high = (piece.source_start[0] + half, *piece.source_start[1:])
    place = piece.local_start
    return (
        Piece(piece.source, high, place, (half, *rest)),
        Piece(piece.source, low, (place[0] + half, *place[1:]), (half, *rest)),
    )


MUTATIONS: dict[str, Change] = {
    "gate and up exchanged": lambda local: exchange("w1.weight", "w3.weight")(
        exchange("gate_proj", "up_proj")(local)
    ),
    "key and value exchanged": exchange("k_proj", "v_proj"),
    "one expert off": renamed(next_expert),
    "norms exchanged": exchange("input_layernorm", "post_attention_layernorm"),
    "norms of query and key exchanged": exchange("q_norm", "k_norm"),
    "next layer's output projection": renamed(
        lambda name: re.sub(r"layers\.1\.(self_attn\.o_proj)", r"layers.0.\1", name)
    ),
    "no bias": without_last_piece("linear_qkv.bias"),
    "no expert bias": without_last_piece("expert_bias"),
    "router's rows exchanged": shifted_rows("router.weight"),
    "rows of the latents' up projection exchanged": shifted_rows("linear_kv_up_proj.weight"),
    "rows of the query's up projection exchanged": shifted_rows("linear_q_up_proj.weight"),
}


def log_prob_changes(models: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """{model: {mutation that changes the map: largest change of a response's log-prob}}, each in a
    real model of one process."""
    found: dict[str, dict[str, float]] = {}
    for name, hf in models.items():
        policy = policy_of({}, hf)
        right = policy.log_probs(
            batch_of(4, 3), max_tokens=4096, temperature=1.0, with_entropy=False
        )[0].values
        found[name] = {}
        for mutation, change in MUTATIONS.items():
            if (wrong := _changed(policy, change)) is not None:
                found[name][mutation] = float(abs(wrong - right).max())
    return found


def _changed(policy: Any, change: Change) -> Any:
    from hybridflow.mcore.model import load_weights

    original = policy.family.local_tensors

    def local_tensors(at: Any) -> list[LocalTensor]:
        return [change(local) for local in original(at)]

    if local_tensors(Coordinates()) == original(Coordinates()):
        return None
    with mock.patch.object(policy.family, "local_tensors", local_tensors):
        load_weights(policy.stages, policy.family, weights_of(policy.family))
    return policy.log_probs(batch_of(4, 3), max_tokens=4096, temperature=1.0, with_entropy=False)[
        0
    ].values
