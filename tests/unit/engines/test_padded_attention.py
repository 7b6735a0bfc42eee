"""Attention in padded blocks against one sequence at a time."""

from __future__ import annotations

import pytest
import torch

SLOTS = 4096
CONTEXT = 256


def batch_of(queries: list[int], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The table of slots and each sequence's row in it: shuffled slots, rows out of order."""
    table = torch.full((len(lengths) + 3, CONTEXT), SLOTS - 1)
    requests = torch.randperm(len(lengths) + 3)[: len(lengths)]
    free = torch.randperm(SLOTS - 1)
    for i, length in enumerate(lengths):
        table[requests[i], :length], free = free[:length], free[length:]
    return table, requests


def one_by_one(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: tuple[torch.Tensor, torch.Tensor],
    queries: list[int],
    lengths: list[int],
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    table, requests = batch
    rows = []
    shared = query.shape[1] // k_cache.shape[1]
    done = 0
    for i, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        slots = table[requests[i], :length]
        k, v = (cache[slots].repeat_interleave(shared, 1) for cache in (k_cache, v_cache))
        scores = (
            torch.einsum("qhw,khw->hqk", query[done : done + count], k) * query.shape[2] ** -0.5
        )
        position = torch.arange(length - count, length)[:, None]
        key = torch.arange(length)
        hidden = (
            (key > position) if window is None else (key > position) | (key < position - window)
        )
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, count, 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        rows.append(torch.einsum("hqk,khw->qhw", weights, v))
        done += count
    return torch.cat(rows)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "value_width"), [(4, 2, 16, 16), (4, 1, 24, 16), (3, 3, 8, 8)]
)
@pytest.mark.parametrize("step", ["decode", "prefill", "prefix", "empty"])
@pytest.mark.parametrize("small_blocks", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_blocks_equal_one_sequence_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
    heads: int,
    kv_heads: int,
    width: int,
    value_width: int,
    step: str,
    small_blocks: bool,
    has_sinks: bool,
) -> None:
    """Grouped queries, values narrower than keys (latent attention), windows, sinks, cached
    prefixes, sequences without a query, and several blocks."""
    from hybridflow.engines.sglang.cpu_plugin import attention  # imports SGLang: 10 s

    if small_blocks:
        monkeypatch.setattr(attention, "BLOCK_KEYS", 150)
        monkeypatch.setattr(attention, "BLOCK_SCORES", 2000)
    torch.manual_seed(1)
    lengths = [5, 120, 1, 64, 33, 64, 9]
    queries = {
        "decode": [1] * len(lengths),
        "prefill": lengths,
        "prefix": [5, 20, 1, 3, 33, 64, 2],
        "empty": [0, 20, 1, 0, 33, 0, 2],
    }[step]
    query = torch.randn(sum(queries), heads, width)
    k_cache = torch.randn(SLOTS, kv_heads, width)
    v_cache = torch.randn(SLOTS, kv_heads, width)[..., :value_width]
    k_cache[SLOTS - 1] = v_cache[SLOTS - 1] = float("nan")  # a slot of nobody
    batch = batch_of(queries, lengths)
    sinks = torch.randn(heads) if has_sinks else None
    output = torch.full((sum(queries), heads, value_width), float("nan"))
    blocks = attention.make_blocks(*batch, queries, lengths, window)
    assert len(blocks) > 1 or not small_blocks
    for block in blocks:
        block.attend(query, output, k_cache, v_cache, None, sinks)
    expected = one_by_one(query, k_cache, v_cache, batch, queries, lengths, window, sinks)
    assert float((output - expected).abs().max()) <= 1e-6
