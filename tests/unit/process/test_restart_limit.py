"""Restarts are limited within an hour, not within a run."""

from __future__ import annotations

from hybridflow.process.restart_limit import RestartLimit


def test_restarts_are_allowed_again_after_an_hour() -> None:
    now = [0.0]
    limit = RestartLimit(2, clock=lambda: now[0])
    assert [limit.take() for _ in range(3)] == [True, True, False]
    now[0] = 3599.0
    assert not limit.take() and limit.left == 0
    now[0] = 3600.0
    assert [limit.take() for _ in range(3)] == [True, True, False]


def test_zero_allows_none() -> None:
    assert not RestartLimit(0).take()
