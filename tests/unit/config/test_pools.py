"""Which sections may share devices."""

from __future__ import annotations

import pytest

from tests.unit.config.small import found

pytestmark = pytest.mark.usefixtures("elsewhere")
CRITIC = ("algorithm.adv_estimator=gae", "critic.placement=own")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("rollout.pool=actor",),
        ("rollout.packing=whole_nodes",),
        (*CRITIC, "critic.pool=rollout", "critic.procs=1"),
        (*CRITIC, "rollout.pool=critic"),
    ],
)
def test_pools_that_make_sense_pass(overrides: tuple[str, ...]) -> None:
    assert found(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("rollout.pool=rollout",),
            "rollout.pool=rollout: that section has no separate devices in this run; choose one",
        ),
        (("rollout.pool=teacher",), "choose one of actor, or null"),
        (
            (*CRITIC, "critic.pool=rollout", "rollout.pool=critic"),
            "critic.pool=rollout: that section has no separate devices",
        ),
        (
            ("rollout.pool=actor", "rollout.packing=spread"),
            "rollout.packing=spread has no effect with",
        ),
        (
            ("algorithm.adv_estimator=gae", "critic.pool=rollout"),
            "critic.placement=colocated; remove them, or set",
        ),
    ],
)
def test_pools_that_cannot_be_are_refused(overrides: tuple[str, ...], message: str) -> None:
    assert any(message in line for line in found(*overrides)), found(*overrides)
