"""The interface of flows: the run, its roles, and the decorator that registers a flow.

    @flow("grpo", roles=("policy", "reference"))
    async def grpo(run):
        async for _ in run.steps():
            batch = await run.samples()
            batch = await run.all(run.policy.log_probs(batch), run.reference.log_probs(batch))
            batch = run.advantages(batch)
            await run.policy.update(batch)
            await run.sync()

Calling a role puts the call into the queue of its devices at once, and returns what is awaited:
calls of roles that share devices are executed in the order in which they are made, calls on other
devices at the same time. A role that the run does not have (no KL term, no reward model) computes
nothing, and adds no column.

A flow is started again after ranks are lost and in a resumed run, and its steps go on after the
last checkpoint: local variables are lost, and what is outside of the loop runs again. Values that
must survive belong in `run.state`.
"""

from __future__ import annotations

import difflib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from hybridflow.config.entries import FLOWS, Flow
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    from hybridflow.batch import DataProto

ROLES = ("policy", "critic", "reference", "reward_model", "teacher")
Body = Callable[["Run"], Coroutine[Any, Any, None]]


class Reference(Protocol):
    """The policy as it was when the run began, or another model: the anchor of KL terms."""

    def log_probs(self, batch: DataProto) -> Awaitable[DataProto]:
        """The batch with ref_log_probs."""


class Teacher(Protocol):
    """A model whose distribution over tokens the policy learns."""

    def log_probs(self, batch: DataProto) -> Awaitable[DataProto]:
        """The batch with the teacher's log-probs of the sampled tokens, or of its most likely
        ones (`actor.distillation.loss_mode`)."""


class RewardModel(Protocol):
    """A model that scores answers."""

    def scores(self, batch: DataProto) -> Awaitable[DataProto]:
        """The batch with rm_scores."""


class Critic(Protocol):
    """The value model."""

    def values(self, batch: DataProto) -> Awaitable[DataProto]:
        """The batch with values."""

    def update(self, batch: DataProto) -> Awaitable[None]:
        """All updates of a step; reads returns."""


class Policy(Protocol):
    """The model that is trained, and whose weights the engines have."""

    def log_probs(self, batch: DataProto) -> Awaitable[DataProto]:
        """The batch with old_log_probs and entropys.

        Without these columns where the first update computes them anyway and nothing of the
        configuration reads them before it (`config.derived.scores_before_update`).
        """

    def update(self, batch: DataProto) -> Awaitable[None]:
        """All updates of a step; reads advantages. None while the critic warms up
        (`trainer.critic_warmup`)."""


class Run(Protocol):
    """The run as a flow sees it. Resuming, validation, checkpoints, dumps, metrics, memory and the
    recovery of lost ranks belong to it and need nothing of the flow."""

    @property
    def policy(self) -> Policy:
        """The model that is trained."""

    @property
    def critic(self) -> Critic:
        """The value model."""

    @property
    def reference(self) -> Reference:
        """The anchor of KL terms."""

    @property
    def reward_model(self) -> RewardModel:
        """A model that scores answers."""

    @property
    def teacher(self) -> Teacher:
        """A model that the policy learns from."""

    @property
    def state(self) -> dict[str, Any]:
        """JSON-able values of the flow's own, which a checkpoint holds and a resumed run has."""

    @property
    def is_tracing(self) -> bool:
        """Whether this is the check before the run, over invented rows and without roles."""

    def steps(self) -> AsyncIterator[int]:
        """The numbers of the steps that are left. Asking for the next one ends a step: it is
        validated, recorded and saved as the configuration says."""

    async def samples(self, *, greedy: bool = False) -> DataProto:
        """The samples of the step: prompts, answers and scores, of weights that are at most
        `trainer.max_staleness` steps old. With `greedy` also greedy_scores [B], the score of the
        most likely answer to each prompt."""

    async def all(self, *calls: Awaitable[DataProto]) -> DataProto:
        """The batch of the calls with the columns of all of them, when all have ended."""

    def advantages(self, batch: DataProto) -> DataProto:
        """The batch with advantages, and returns where there is a critic
        (`algorithm.adv_estimator`)."""

    def later(self, update: Awaitable[None]) -> None:
        """Let an update of the critic last beyond this step where it has devices of its own; its
        metrics, its next call and a checkpoint wait for it."""

    async def sync(self) -> None:
        """Bring the policy's weights to the engines."""


def flow(name: str, *, roles: tuple[str, ...]) -> Callable[[Body], Body]:
    """Register a flow.

    Args:
        name: value of `algorithm.flow`; in a user's file, what follows `path/to/file.py:`.
        roles: the attributes of `Run` that it calls: policy, critic, reference, reward_model,
            teacher. A run whose settings start another role is refused.
    """
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        near = difflib.get_close_matches(unknown[0], ROLES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"flow {name!r}: there is no role {unknown[0]!r}{hint} (there are {', '.join(ROLES)})"
        )
    return FLOWS.entry(name, lambda body: Flow(body, roles))
