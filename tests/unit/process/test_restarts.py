"""Restarts are a rate, not a number for the life of a run."""

from __future__ import annotations

from hybridflow.process.restarts import RestartBudget


def test_restarts_come_back_an_hour_after_they_were_taken() -> None:
    now = [0.0]
    budget = RestartBudget(2, clock=lambda: now[0])
    assert budget.take()
    now[0] = 1800.0
    assert budget.take() and not budget.take() and budget.left == 0
    now[0] = 3599.0
    assert not budget.take()
    now[0] = 3600.0  # the first restart is an hour ago, the second half an hour
    assert budget.left == 1 and budget.take() and not budget.take()
    now[0] = 9000.0
    assert budget.left == 2


def test_a_budget_of_none_allows_none() -> None:
    assert not RestartBudget(0).take()
