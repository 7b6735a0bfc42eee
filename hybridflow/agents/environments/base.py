"""The Environment protocol and the decorator that registers environments. Each built-in environment
is defined in a file of the same name in this package. To use your own, set
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
    """The environment's response to one answer.

    Attributes:
        observation: shown to the policy next, unless the episode is over.
        reward: reward for this answer; the score of a conversation is the sum of its rewards.
        done: True if the episode is over.
    """

    observation: str
    reward: float = 0.0
    done: bool = False


class Environment(Protocol):
    """One episode, run in a separate process. Derive any randomness from the row, so that a resumed
    run gets the same episodes."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """Start the episode. `row` contains the prompt's data_source, ground_truth and extra_info;
        the prompt itself describes the initial state."""

    def step(self, answer: str) -> Step:
        """Apply the policy's answer to the environment and return its response."""


Maker = Callable[[], Environment]
ENVIRONMENTS: Registry[Maker] = Registry(
    ENVIRONMENT.kind, ENVIRONMENT.package, "rollout.agent.environment"
)


def environment(name: str) -> Callable[[Maker], Maker]:
    """Register a class as the environment with this name. One instance is created per episode."""
    return ENVIRONMENTS.entry(name, lambda make: make)
