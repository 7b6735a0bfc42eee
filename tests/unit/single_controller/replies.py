"""Calls on ranks without Ray: the test gives the replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future as Promise
from pathlib import Path
from typing import Any

from hybridflow.single_controller.future import Future, Rank


class Reply(Promise[Any]):
    """The reference to a rank's reply; `set_result` and `set_exception` are the rank's answer."""

    def future(self) -> Reply:
        return self


def call_of(replies: Mapping[int, Reply], pids: Sequence[int] | None = None, **more: Any) -> Future:
    """A call on the ranks with these process ids (0, if there are none: no process), whose value is
    a dictionary."""
    ranks = [Rank(None, "here", Path("log"), None, pid) for pid in pids or [0] * len(replies)]
    return Future(
        "actor", "work", ranks=ranks, refs=replies, **{"collect": dict, "timeout_s": 60.0, **more}
    )
