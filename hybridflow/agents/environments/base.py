"""What an environment is, and how one is registered.

A built-in environment is a file of this package that bears its name; one of a user's is named in
`rollout.agent.environment`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hybridflow.config.keys import ENVIRONMENT
from hybridflow.config.registry import Registry


@dataclass(frozen=True)
class Step:
    """What an answer led to.

    Attributes:
        observation: what the policy is shown next; not shown when the episode is over.
        reward: of this answer; the score of a conversation is the sum of its rewards.
        done: whether the episode is over.
    """

    observation: str
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode, in a process beside the driver. Anything random in it is to follow from the row,
    so that a run that is resumed meets the same episodes."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin. `row` has data_source, ground_truth and extra_info of the prompt, which shows the
        first state."""

    def step(self, answer: str) -> Step:
        """Take the policy's answer."""


Maker = Callable[[], Environment]
ENVIRONMENTS: Registry[Maker] = Registry(
    ENVIRONMENT.kind, ENVIRONMENT.package, "rollout.agent.environment"
)


def environment(name: str) -> Callable[[Maker], Maker]:
    """Register a class as the environment of this name; one is made for each episode."""
    return ENVIRONMENTS.entry(name, lambda make: make)
