"""The check of an engine's shape before a run and the layouts of its ranks, written apart, accept
the same shapes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.config import check_engines, derived
from hybridflow.config.schema import RolloutConfig
from hybridflow.errors import WeightSyncError
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import family_of
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from tests.unit.random_sizes import PARTS, draw_sizes


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], RolloutConfig]:
    """A tiny model of any family with some sizes changed, and an engine whose own sizes divide each
    other."""
    hf = draw_sizes(draw)
    tensor = draw(PARTS)
    divisors = st.sampled_from([n for n in range(1, tensor + 1) if not tensor % n])
    experts = bool(derived.num_experts(hf))
    return hf, RolloutConfig(
        tensor=tensor,
        pipeline=draw(st.sampled_from([1, 2, 3, 4])),
        expert=draw(divisors) if experts else 1,
        data_parallel_attention=draw(divisors),
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(cases())
def test_the_check_and_the_engines_layouts_accept_the_same_shapes(
    case: tuple[dict[str, Any], RolloutConfig],
) -> None:
    hf, rollout = case
    found = list(check_engines.size_problems(rollout, hf))
    decoder = family_of({"vocab_size": 64, **hf})
    assert isinstance(decoder, Decoder)
    shape = EngineShape(
        rollout.tensor, rollout.expert, rollout.data_parallel_attention, rollout.pipeline
    )
    try:
        engine_layout(decoder, [shape], "float32")
    except WeightSyncError as error:
        assert found, f"the check passes, and {error}"
    else:
        assert not found, found
