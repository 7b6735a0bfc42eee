"""What the driver concludes from what another node says of its processes, with a stand-in for Ray's
calls."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from hybridflow.single_controller import remote_node
from hybridflow.single_controller.future import _POLL_S, _STOPPED_LOOKS, Future, Rank
from tests.unit.single_controller.replies import Reply


class Node:
    """A node that answers when the test says so; the clock is the test's too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.asked = list[list[int]]()
        monkeypatch.setattr(remote_node, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(
            ray, "wait", lambda refs, timeout: ([] if self.answer is None else refs, [])
        )
        monkeypatch.setattr(ray, "get", self._get)
        self.answer: dict[int, str] | Exception | None = None
        self.seen = remote_node.RemoteNode("id")
        self.seen._observer = SimpleNamespace(states=SimpleNamespace(remote=self._ask))

    def _ask(self, pids: Sequence[int]) -> str:
        self.asked.append(list(pids))
        return "ref"

    def _get(self, ref: str) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def looks(self, seconds: float, pids: Sequence[int] = (7, 8)) -> list[list[str | None]]:
        """One look at every process in each second."""
        found = []
        for _ in range(int(seconds)):
            self.now += 1.0
            found.append([self.seen.state(pid) for pid in pids])
        return found


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(monkeypatch)


def test_all_processes_are_asked_for_with_one_question_some_seconds_apart(node: Node) -> None:
    assert node.looks(60) == [[None, None]] * 60
    assert node.asked == [[7, 8]]  # the one question is still open
    node.answer = {7: "S", 8: "T"}
    assert node.looks(20)[-1] == ["S", "T"]
    assert 3 <= len(node.asked) <= 5 and all(asked == [7, 8] for asked in node.asked)


def test_an_old_answer_says_nothing(node: Node) -> None:
    node.answer = {7: "T", 8: "T"}
    assert node.looks(7)[-1] == ["T", "T"]
    node.answer = None  # the network is slow
    assert node.looks(10)[-1] == [None, None]


def test_a_process_is_taken_for_stopped_after_two_answers(node: Node) -> None:
    future = Future(
        "actor",
        "work",
        ranks=[Rank(None, "there", None, node.seen, pid) for pid in (7, 8)],  # type: ignore[arg-type]
        refs={0: Reply(), 1: Reply()},
        collect=dict,
        timeout_s=60.0,
    )
    looks: dict[int, int] = {}

    def stopped(times: int) -> list[int | None]:
        found = []
        for _ in range(times):
            node.now += _POLL_S
            found.append(future._stopped(looks))
        return found

    node.answer = {7: "S", 8: "T"}
    stopped(6)  # the first question and its answer
    assert len(node.asked) == 1
    node.answer = None
    assert stopped(20) == [None] * 20  # one answer is not enough
    node.answer = {7: "S", 8: "T"}
    assert 1 in stopped(2 * _STOPPED_LOOKS)


def test_a_node_that_is_lost_says_nothing(node: Node) -> None:
    node.answer = {7: "T", 8: "T"}
    node.looks(7)
    node.answer = ray.exceptions.RayActorError()
    assert node.looks(10)[-1] == [None, None]
