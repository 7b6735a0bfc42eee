"""A process that hosts environments, one instance per episode, and handles requests in order.

`python -m hybridflow.agents.episode_host SOCKET` exchanges JSON lines over an inherited socket. The
first message names the environment. Then {"id": n, "episode": e, "row": {...}} starts an episode,
{"id": n, "episode": e, "answer": text} performs a step, and {"episode": e, "end": true} ends the
episode. The reply to the first two is {"id": n, "step": [observation, reward, done]} or {"id": n,
"failure": text}. The process exits when the other end closes the connection.
"""

from __future__ import annotations

import inspect
import math
import numbers
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridflow.agents.environments.base import ENVIRONMENTS, Environment, Step
from hybridflow.config.registry import describe_error
from hybridflow.process.children import die_with_parent
from hybridflow.rewards.lines import Lines, connection_of

_MOST_CHARACTERS = 1 << 16  # of an observation, before it is truncated to tokens


def serve(lines: Lines) -> None:
    """Handle requests until the other end closes the connection."""
    make: Callable[[], Environment] | None = None
    episodes: dict[int, Environment] = {}
    while (messages := lines.received()) is not None:
        for message in messages:
            if make is None:
                die_with_parent(message["parent"])
                make = ENVIRONMENTS.get(message["environment"])
                lines.send({"ready": True})
            elif "end" in message:
                episodes.pop(message["episode"], None)
            else:
                lines.send({"id": message["id"], **_carried_out(make, episodes, message)})


def _carried_out(
    make: Callable[[], Environment], episodes: dict[int, Environment], message: dict[str, Any]
) -> dict[str, Any]:
    try:
        if "row" in message:
            episodes[message["episode"]] = make()
            episodes[message["episode"]].reset(message["row"])
            return {"step": None}
        return {"step": _plain(episodes[message["episode"]].step(message["answer"]))}
    except (Exception, SystemExit) as error:  # raised by user code: only this episode fails
        episodes.pop(message["episode"], None)
        return {
            "failure": (
                f"the environment failed: {describe_error(error, Path(inspect.getfile(make)))}"
            )
        }


def _plain(step: Any) -> list[Any]:
    if not isinstance(step, Step):
        raise TypeError(f"step must return a Step, got {str(step)[:120]!r}")
    reward: Any = step.reward  # user code may return anything
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise ValueError(
            f"step returned the reward {str(reward)[:120]!r}; expected a finite number"
        )
    return [str(step.observation)[:_MOST_CHARACTERS], float(reward), bool(step.done)]


def main(argv: Sequence[str]) -> None:
    """Serve environments over the socket with this file descriptor."""
    serve(connection_of(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
