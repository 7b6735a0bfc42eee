"""Table of the models that a run may have in addition to its engines: when each is used, its head,
whether it trains, and its pass in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from hybridflow.config.entries import ESTIMATORS, FLOWS
from hybridflow.config.schema import RunConfig

Head = Literal["vocabulary", "value", "score"]


@dataclass(frozen=True)
class ModelRole:
    """A model used by `hybridflow train`.

    Attributes:
        is_used: returns True if a run with these settings uses the model.
        turn: position of its pass among the passes of a step.
        phase: name of its pass in timelines and metrics.
        planned_as: name of its pass in a plan.
        head: output head: over the vocabulary, one value per token, or one score per sequence.
        trains: whether its weights are updated.
        comes_with: the settings that start it, for messages ("set ...").
        predicts: for a critic, the batch column (scores or costs) whose sum its values predict.
        prefix: for a critic, the prefix of its columns values, returns and advantages.
    """

    is_used: Callable[[RunConfig], bool]
    turn: int
    phase: str
    planned_as: str
    head: Head = "vocabulary"
    trains: bool = False
    comes_with: str = ""
    predicts: str = ""
    prefix: str = ""


def _needs_reference(config: RunConfig) -> bool:
    if config.actor.kl_loss_coef != 0 or config.algorithm.kl_coef != 0:
        return True
    return "ref_log_probs" in ESTIMATORS.get(config.algorithm.adv_estimator).reads


def _is_called(role: str, config: RunConfig) -> bool:
    """Return True if the flow selected by the configuration calls this role."""
    flow = config.algorithm.flow
    return flow is not None and role in FLOWS.get(flow).roles


# by configuration section, in start order
ROLES: dict[str, ModelRole] = {
    "actor": ModelRole(
        is_used=lambda _: True, turn=1, phase="old_log_prob", planned_as="log-probs", trains=True
    ),
    "critic": ModelRole(
        is_used=lambda config: ESTIMATORS.get(config.algorithm.adv_estimator).needs_critic,
        turn=4,
        phase="values",
        planned_as="values",
        head="value",
        trains=True,
        comes_with="algorithm.adv_estimator=gae",
        predicts="scores",
    ),
    "cost_critic": ModelRole(
        is_used=partial(_is_called, "cost_critic"),
        turn=5,
        phase="cost_values",
        planned_as="cost values",
        head="value",
        trains=True,
        comes_with="algorithm.flow to one whose roles include cost_critic (safe_rlhf)",
        predicts="costs",
        prefix="cost_",
    ),
    "reward_model": ModelRole(
        is_used=lambda config: config.reward_model.path is not None,
        turn=0,
        phase="reward_model",
        planned_as="reward model",
        head="score",
    ),
    "reference": ModelRole(is_used=_needs_reference, turn=2, phase="ref", planned_as="reference"),
    "teacher": ModelRole(
        is_used=lambda config: config.teacher.path is not None,
        turn=3,
        phase="teacher",
        planned_as="teacher",
    ),
}

# {column of the samples: the critic that predicts its sum}
CRITICS = {role.predicts: name for name, role in ROLES.items() if role.head == "value"}
