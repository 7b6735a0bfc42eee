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
_MISSPELT = 0.75  # so near to a role's name is no name of another policy
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

    def update(self, pairs: DataProto) -> Awaitable[None]:
        """One update on pairs of answers, prompt_ids, chosen_ids and rejected_ids, in a run with
        `reward_model.trains`. Over several ranks the last pairs that do not divide are left out."""


class Critic(Protocol):
    """The value model."""

    def values(self, batch: DataProto) -> Awaitable[DataProto]:
        """The batch with values."""

    def update(self, batch: DataProto) -> Awaitable[None]:
        """All updates of a step; reads returns."""


class Policy(Protocol):
    """The model that is trained, and whose weights the engines have."""

    def generate(self, prompts: Sequence[Prompt], n: int | None = None) -> Awaitable[DataProto]:
        """`n` samples (`rollout.n`) of each prompt, a text or a list of chat messages, with the
        weights of the last sync: prompt_ids, uid, response_text and the columns of `samples` that
        engines write. They have no scores."""

    def log_probs(self, batch: DataProto) -> Awaitable[DataProto]:
        """The batch with old_log_probs and entropys.

        Without these columns where the first update computes them anyway and nothing of the
        configuration reads them before it (`config.derived.scores_before_update`).
        """

    def update(self, batch: DataProto) -> Awaitable[None]:
        """All updates of a step; reads advantages. None while the critic warms up
        (`trainer.critic_warmup`)."""


class FurtherPolicy(Policy, Protocol):
    """A policy of `roles` in the configuration, `run.NAME`. Its log_probs also adds ref_log_probs
    of the weights that it began with, where its loss or estimator reads them."""

    def advantages(self, batch: DataProto) -> DataProto:
        """The batch with advantages of its scores (`algorithm.adv_estimator`)."""

    def take(self, other: Policy) -> Awaitable[None]:
        """The weights of another policy of the same model, in ranks and engines; the optimizer is
        fresh. A policy that is frozen (`roles.NAME.frozen`) changes by this alone."""


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

    def __getattr__(self, name: str) -> FurtherPolicy:
        """A further policy by its name."""

    @property
    def state(self) -> dict[str, Any]:
        """JSON-able values of the flow's own, which a checkpoint holds and a resumed run has."""

    @property
    def options(self) -> Any:
        """The options of the flow: `algorithm.flow_options` as the dataclass that it declares."""

    @property
    def is_tracing(self) -> bool:
        """Whether this is the check before the run, over invented rows and without roles."""

    def steps(self) -> AsyncIterator[int]:
        """The numbers of the steps that are left. Asking for the next one ends a step: it is
        validated, recorded and saved as the configuration says."""

    def samples(self, *, greedy: bool = False) -> Awaitable[DataProto]:
        """The samples of the step: prompts, answers and scores, of weights that are at most
        `trainer.max_staleness` steps old. With `greedy` also greedy_scores [B], the score of the
        most likely answer to each prompt."""

    def all(self, *calls: Awaitable[DataProto]) -> Awaitable[DataProto]:
        """The batch of the calls with the columns of all of them, when all have ended."""

    def advantages(self, batch: DataProto) -> DataProto:
        """The batch with advantages, and returns where there is a critic
        (`algorithm.adv_estimator`)."""

    def leave_out(self, batch: DataProto, rows: np.ndarray) -> DataProto:
        """The batch in which these rows, [B] bool, enter no loss and no statistic. They keep their
        place: every step has the same number of rows."""

    def later(self, update: Awaitable[None]) -> None:
        """Let an update of the critic last beyond this step where it has devices of its own; its
        metrics, its next call and a checkpoint wait for it."""

    def sync(self) -> Awaitable[None]:
        """Bring the weights of all policies that the step has updated to their engines."""

    def record(self, **values: float) -> None:
        """Record finite numbers with the metrics of this step, as flow/NAME; the last value of a
        name counts."""


def flow(
    name: str = "",
    *,
    roles: Iterable[str] | None = None,
    options: type = NoOptions,
    policy_losses: tuple[str, ...] = (),
) -> Callable[[Body], Body]:
    """Register a flow.

    Args:
        name: value of `algorithm.flow`; in a user's file, what follows `path/to/file.py:`.
        roles: the attributes of `Run` that it calls: policy, critic, reference, reward_model,
            teacher, and the names of further policies (`roles` in the configuration). A run whose
            settings start another role is refused.
        options: a frozen dataclass whose fields are the keys of `algorithm.flow_options`, with
            types and defaults. The flow reads them as `run.options`.
        policy_losses: the values of `actor.policy_loss` under which it is what its paper defines;
            empty: any.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"@flow takes the name of the flow: write {_decorator(_name_of(name), name)}"
        )

    def registered(body: Body) -> Flow:
        _check_body(name, body)
        if roles is None:
            raise ConfigError(f"flow {name!r} names no roles: write {_decorator(name, body)}")
        return Flow(body, _checked_roles(name, roles), options, policy_losses, name, _line_of(body))

    return FLOWS.entry(name, registered)


def _checked_roles(name: str, roles: Iterable[str]) -> tuple[str, ...]:
    given = (roles,) if isinstance(roles, str) else tuple(roles)
    for role in given:
        near = difflib.get_close_matches(str(role), ROLES, n=1, cutoff=_MISSPELT)
        is_own = isinstance(role, str) and role.isidentifier() and not near
        if role not in ROLES and not is_own:
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"flow {name!r}: there is no role {role!r}{hint} (there are {', '.join(ROLES)}, "
                "and the policies under `roles` in the configuration)"
            )
    if isinstance(roles, str):
        raise ConfigError(f"flow {name!r}: roles are a tuple; write roles=({roles!r},)")
    return tuple(dict.fromkeys(given))


def _check_body(name: str, body: object) -> None:
    """Refuse what is no async function of one argument."""
    what = f"flow {name!r}"
    if inspect.isasyncgenfunction(body) or inspect.isgeneratorfunction(body):
        raise ConfigError(
            f"{what} has a `yield`: a flow is no generator; use `await`, and `continue` to end a "
            "step"
        )
    if not inspect.iscoroutinefunction(body):
        raise ConfigError(f"{what} is no async function: write `async def {_name_of(body)}(run):`")
    try:
        inspect.signature(body).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"{what} takes one argument, the run: write `async def {_name_of(body)}(run):`; "
            "settings of its own are run.options"
        ) from error


def _decorator(name: str, body: object) -> str:
    """The decorator with the roles that the body's code names."""
    code = getattr(body, "__code__", None)
    named = [role for role in ROLES if code is not None and role in code.co_names]
    return f"@flow({name!r}, roles={tuple(named or ['policy'])})"


def _name_of(body: object) -> str:
    return str(getattr(body, "__name__", "mine"))


def _line_of(body: Body) -> int | None:
    """The line of the decorator."""
    code = getattr(inspect.unwrap(body), "__code__", None)
    return None if code is None else int(code.co_firstlineno)
