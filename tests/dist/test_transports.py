"""Every transport under one contract: exact bytes, typed errors within the deadline, nothing left behind."""

from __future__ import annotations

import pytest

from tests.dist.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("transport", ["p2p"])
def test_a_first_sync_brings_every_element(transport: str) -> None:
    results = run_ranks(6, "tests.dist.transport_cases:first_sync", timeout_s=60, transport=transport)
    assert all(result["right"] for result in results[4:])
    assert sum(r["payload_bytes"] for r in results[:4]) == sum(r["payload_bytes"] for r in results[4:])
