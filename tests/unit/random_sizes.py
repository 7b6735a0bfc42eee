"""Tiny models of every family with sizes drawn by hypothesis, which may or may not be cut
evenly."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.models import FAMILIES

PARTS = st.sampled_from([1, 2, 3, 4, 6, 8])
WIDTHS = st.sampled_from([16, 24, 32, 33, 36, 48, 96])


def draw_sizes(draw: st.DrawFn) -> dict[str, Any]:
    """The HF config of a tiny model of any family, with some sizes changed."""
    hf = dict(FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))])
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if hf.get(name):
            hf[name] = draw(WIDTHS)
    hf["num_hidden_layers"] = draw(st.sampled_from([3, 4, 5, 8]))
    if not hf.get("kv_lora_rank"):
        heads = hf["num_attention_heads"] = draw(st.sampled_from([4, 6, 8, 12]))
        hf["num_key_value_heads"] = draw(
            st.sampled_from([n for n in (1, 2, 3, 4) if not heads % n])
        )
    return hf
