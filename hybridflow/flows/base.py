"""The interface of flows: the run, its roles, and the decorator that registers a flow.

    @flow("grpo", roles=("policy", "reference"))
    async def grpo(run):
        async for _ in run.steps():
            batch = await run.samples()
            batch = await run.all(run.policy.log_probs(batch), run.reference.log_probs(batch))
            batch = run.advantages(batch)
            await run.policy.update(batch)
            await run.sync()

Calling a role queues the call for its devices immediately and returns an awaitable. Calls of roles
that share devices run in call order; calls on other devices run concurrently. Calls to a role that
the run does not use (no KL term, no reward model) compute nothing and add no column.

When ranks are lost or a run is resumed, the flow is restarted, and its steps continue after the
last checkpoint. Local variables are lost, and code outside the loop is re-executed. Store values
that must survive in `run.state`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hybridflow.config import role_table
from hybridflow.config.entries import FLOWS, Flow, NoOptions
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from hybridflow.batch import DataProto
    from hybridflow.rollout.answering import Prompt

ROLES = tuple("policy" if name == "actor" else name for name in role_table.ROLES)
_MISSPELT = 0.75  # names this similar to a role's are treated as misspelt, not as another policy's
Body = Callable[["Run"], Coroutine[Any, Any, None]]


class Reference(Protocol):
    """The reference model for KL terms: the initial policy, or another model."""

    def log_probs(self, batch: DataProto) -> Awaitable[DataProto]:
        """Return the batch with the column ref_log_probs added."""


class Teacher(Protocol):
    """A model whose token distribution the policy learns to match."""

    def log_probs(self, batch: DataProto) -> Awaitable[DataProto]:
        """Return the batch with the teacher's log-probs of the sampled tokens, or of its most
        likely tokens (`actor.distillation.loss`)."""


class RewardModel(Protocol):
    """A model that scores answers."""

    def scores(self, batch: DataProto) -> Awaitable[DataProto]:
        """Return the batch with the column rm_scores added."""

    def update(self, pairs: DataProto) -> Awaitable[None]:
        """Run one update on pairs of answers (prompt_ids, chosen_ids, rejected_ids). Requires
        `reward_model.trains`. If the pairs cannot be divided evenly across the ranks, the remaining
        pairs are dropped.
        """


class Critic(Protocol):
    """A value model. For the cost critic, the columns are named cost_values and cost_returns."""

    def values(self, batch: DataProto) -> Awaitable[DataProto]:
        """Return the batch with the column values added."""

    def update(self, batch: DataProto) -> Awaitable[None]:
        """Run all updates of a step. Reads the columns `values` and `returns`."""


class Policy(Protocol):
    """The trained model, whose weights are sent to the engines."""

    def generate(self, prompts: Sequence[Prompt], n: int | None = None) -> Awaitable[DataProto]:
        """Generate `n` (default `rollout.n`) samples per prompt (a text, or a list of chat
        messages) with the weights of the last sync. Returns prompt_ids, uid, response_text and the
        columns that engines add to `samples`, without scores.
        """

    def log_probs(self, batch: DataProto) -> Awaitable[DataProto]:
        """Return the batch with the columns old_log_probs and entropys added. They are omitted if
        the first update computes them anyway and no setting requires them earlier
        (`config.derived.scores_before_update`).
        """

    def update(self, batch: DataProto) -> Awaitable[None]:
        """Run all updates of a step, or none while the critic warms up (`trainer.critic_warmup`).
        Reads the column `advantages`.
        """


class FurtherPolicy(Policy, Protocol):
    """An additional policy, defined under `roles` in the configuration and available as `run.NAME`.
    `log_probs` also adds ref_log_probs, computed with the policy's initial weights, if its loss or
    estimator needs this column.
    """

    def advantages(self, batch: DataProto) -> DataProto:
        """Return the batch with advantages computed from its scores (`algorithm.adv_estimator`)."""

    def take(self, other: Policy) -> Awaitable[None]:
        """Copy the weights of another policy with the same model to this policy's ranks and
        engines, and reset the optimizer. This is the only way in which a frozen policy
        (`roles.NAME.frozen`) changes.
        """


class Run(Protocol):
    """The run as seen by a flow. It handles resuming, validation, checkpoints, dumps, metrics,
    memory and the recovery of lost ranks without help from the flow."""

    @property
    def policy(self) -> Policy:
        """The trained model."""

    @property
    def critic(self) -> Critic:
        """The value model trained on rewards."""

    @property
    def cost_critic(self) -> Critic:
        """The value model trained on costs. Available only if the flow declares this role."""

    @property
    def reference(self) -> Reference:
        """The reference model for KL terms."""

    @property
    def reward_model(self) -> RewardModel:
        """A model that scores answers."""

    @property
    def teacher(self) -> Teacher:
        """The model whose token distribution the policy learns to match."""

    def __getattr__(self, name: str) -> FurtherPolicy:
        """Return the additional policy with this name (`run.NAME`)."""

    @property
    def state(self) -> dict[str, Any]:
        """The flow's own JSON-serializable values, which are saved in checkpoints and restored on
        resume."""

    @property
    def options(self) -> Any:
        """The flow's options: `algorithm.flow_options`, converted to the dataclass that the flow
        declares.
        """

    @property
    def is_tracing(self) -> bool:
        """True while the flow is being checked before the run. The check uses synthetic rows and
        starts no roles.
        """

    def steps(self) -> AsyncIterator[int]:
        """Iterate over the numbers of the remaining steps. Requesting the next step ends the
        current one, which is validated, recorded and saved as configured."""

    def samples(self, *, greedy: bool = False) -> Awaitable[DataProto]:
        """Return the step's samples: prompts, answers and scores. Answers are sampled with weights
        that are at most `trainer.max_staleness` steps old. With `greedy`, also greedy_scores [B],
        the score of the greedy answer to each prompt.
        """

    def all(self, *calls: Awaitable[DataProto]) -> Awaitable[DataProto]:
        """Wait for all calls, and return one batch with the columns of all their results."""

    def advantages(self, batch: DataProto, of: str = "scores") -> DataProto:
        """Return the batch with advantages and, with a critic, returns (`algorithm.adv_estimator`).
        With `of="costs"`, returns cost_advantages and, if there are cost_values, cost_returns,
        computed from the column costs [B], which the flow must set.
        """

    def leave_out(self, batch: DataProto, rows: np.ndarray) -> DataProto:
        """Exclude the rows where `rows` [B] bool is True from loss and statistics, and return the
        batch. The rows stay in the batch, because every step has the same number of rows.
        """

    def later(self, update: Awaitable[None]) -> None:
        """Let an update of a critic on separate devices continue beyond this step. The critic's
        metrics, its next call and checkpoints wait for the update to finish.
        """

    def sync(self) -> Awaitable[None]:
        """Send the weights of all policies updated in this step to their engines."""

    def record(self, **values: float) -> None:
        """Record finite numbers as flow/NAME in this step's metrics. If a name is recorded twice,
        the last value is used.
        """


def flow(
    name: str = "",
    *,
    roles: Iterable[str] | None = None,
    options: type = NoOptions,
    policy_losses: tuple[str, ...] = (),
    rewards: Iterable[str] = (),
) -> Callable[[Body], Body]:
    """Register a flow.

    Args:
        name: value of `algorithm.flow`; for a user's file, the part after `path/to/file.py:`.
        roles: the attributes of `Run` that the flow calls: policy, critic, cost_critic, reference,
            reward_model, teacher, and names of additional policies (`roles` in the configuration).
            A run whose settings start any other role is rejected.
        options: a frozen dataclass whose fields are the keys of `algorithm.flow_options`, with
            types and defaults. The flow reads them as `run.options`.
        policy_losses: values of `actor.policy_loss` that match the definition in the flow's paper;
            empty allows any.
        rewards: names of numbers that the flow reads from the column reward_extra. The reward
            function must return them in addition to the score; an answer without one of them counts
            as failed (`reward.on_failure`).
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"@flow requires the flow's name; write {_decorator(_name_of(name), name)}"
        )

    def registered(body: Body) -> Flow:
        _check_body(name, body)
        if roles is None:
            raise ConfigError(f"flow {name!r} declares no roles; write {_decorator(name, body)}")
        called = _checked_roles(name, roles)
        numbers = (rewards,) if isinstance(rewards, str) else tuple(rewards)
        return Flow(body, called, options, policy_losses, numbers, name, _line_of(body))

    return FLOWS.entry(name, registered)


def _checked_roles(name: str, roles: Iterable[str]) -> tuple[str, ...]:
    given = (roles,) if isinstance(roles, str) else tuple(roles)
    for role in given:
        near = difflib.get_close_matches(str(role), ROLES, n=1, cutoff=_MISSPELT)
        is_own = isinstance(role, str) and role.isidentifier() and not near
        if role not in ROLES and not is_own:
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"flow {name!r}: unknown role {role!r}{hint} (known roles: {', '.join(ROLES)}, and "
                "the policies under `roles` in the configuration)"
            )
    if isinstance(roles, str):
        raise ConfigError(f"flow {name!r}: roles must be a tuple; write roles=({roles!r},)")
    return tuple(dict.fromkeys(given))


def _check_body(name: str, body: object) -> None:
    """Raise ConfigError unless `body` is an async function of one argument."""
    what = f"flow {name!r}"
    if inspect.isasyncgenfunction(body) or inspect.isgeneratorfunction(body):
        raise ConfigError(
            f"{what} contains `yield`: a flow must not be a generator; use `await`, and `continue` "
            "to end a step"
        )
    if not inspect.iscoroutinefunction(body):
        raise ConfigError(
            f"{what} is not an async function; write `async def {_name_of(body)}(run):`"
        )
    try:
        inspect.signature(body).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{what} must take one argument, the run; write `async def {_name_of(body)}(run):` and "
            "read its own settings from run.options"
        ) from error


def _decorator(name: str, body: object) -> str:
    """Return the correct decorator, with all roles that the body uses, for an error message."""
    code = getattr(body, "__code__", None)
    named = [role for role in ROLES if code is not None and role in code.co_names]
    return f"@flow({name!r}, roles={tuple(named or ['policy'])})"


def _name_of(body: object) -> str:
    return str(getattr(body, "__name__", "mine"))


def _line_of(body: Body) -> int | None:
    """Return the line number of the decorator in the user's file."""
    code = getattr(inspect.unwrap(body), "__code__", None)
    return None if code is None else int(code.co_firstlineno)
