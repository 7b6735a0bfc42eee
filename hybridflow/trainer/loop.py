"""The training loop around a run's flow: start, checkpoints, resuming, and rollback after the loss
of ranks. `flows` contains the algorithms, and `trainer.run` contains the object passed to them.

                 prompts                responses, log-probs           scores
    dataset ──────────────▶ engines ──────────────────────▶ reward ─────────────┐
                               ▲                                                ▼
                 weights       │       update      advantages       old and reference log-probs
    sync  ◀──────────────── policy ◀─────── group-relative, or GAE ◀─────── policy, critic

Token columns written by workers and engines stay in the object store. The batch contains
references, and reading a column fetches it. One step consumes `data.train_batch_size` prompts (x
`rollout.n` samples) and ends with new weights in every engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from hybridflow.config import derived
from hybridflow.config.registry import is_user_entry
from hybridflow.config.role_table import CRITICS
from hybridflow.config.schema import CriticConfig, RunConfig
from hybridflow.errors import (
    CheckpointError,
    FlowError,
    HybridFlowError,
    ResourceError,
    RunStopped,
    SchemaError,
)
from hybridflow.flows.base import Body
from hybridflow.rollout.evaluation import Validator
from hybridflow.rollout.protocols import Engines
from hybridflow.saving.store import Checkpoint
from hybridflow.trainer.advantages import Advantages
from hybridflow.trainer.devices import Devices, Phases
from hybridflow.trainer.flow_errors import message_of
from hybridflow.trainer.flow_state import kept_state
from hybridflow.trainer.own_policies import Learner
from hybridflow.trainer.protocols import Policy, Role
from hybridflow.trainer.records import Records
from hybridflow.trainer.run import FlowRun
from hybridflow.trainer.samples import Samples
from hybridflow.trainer.session import Session
from hybridflow.workers.model_role import ModelWorker
from hybridflow.workers.policy import PolicyWorker


def check_trained_roles(config: RunConfig, checkpoint: Checkpoint | None) -> None:
    """Check, before anything starts, that a checkpoint of this phase contains every model that this
    run trains.

    Raises:
        CheckpointError: it comes from a run that did not train all of them.
    """
    if checkpoint is None or checkpoint.phase != "rl":
        return
    trained = [
        role
        for role in derived.roles_in_use(config)
        if role != "actor" and derived.trains(config, role)
    ]
    lacks = [name for name in (*trained, *config.roles) if not (checkpoint.folder / name).is_dir()]
    if lacks:
        raise CheckpointError(
            f"{checkpoint.folder} comes from a run that did not train the "
            f"{' and the '.join(lacks)}, but this run does; start a new run with another name=..., "
            "or continue with the settings of the earlier run"
        )


class RLTrainer:
    """The reinforcement-learning loop, driven by the run's flow (`config.derived.flow_name`).

    Args:
        roles: `actor` and, if the run has them, critic, reward_model, teacher and a reference in
            separate processes.
        engines: generate answers, and receive the policy's weights.
        samples: the source of each step's training samples.
        learners: the run's additional policies.
    """

    def __init__(
        self,
        config: RunConfig,
        session: Session,
        roles: Mapping[str, Role],
        engines: Engines,
        samples: Samples,
        validator: Validator,
        learners: Sequence[Learner] = (),
    ) -> None:
        self.config = config
        self.session = session
        self.engines = engines
        self.samples = samples
        self.policy = cast(Policy, roles["actor"])
        self.learners = {one.name: one for one in learners}
        self.others = {name: role for name, role in roles.items() if name != "actor"}
        self.reference = self.others.get("reference")
        self.advantages = Advantages(config)
        self.devices = Devices(partial(derived.devices_of, config), session.timeline)
        self.phases = Phases(config, self.policy, engines, self.others, self.devices.is_busy)
        self.records = Records(config, session, self.others, samples, validator)
        self.last = derived.total_steps(config, samples.num_rows) or 1
        self.step = 0
        self.state: dict[str, Any] = {}  # the flow's own values
        self.left_out: set[str] = set()  # engines excluded from the last sync
        self.run: FlowRun | None = None  # the current flow
        # set by a program that stops between steps (`trainer.stopping`), or runs steps itself
        self.stop: Callable[[], Awaitable[None]] | None = None
        self.body: Body | None = None

    @property
    def critics(self) -> dict[str, Role]:
        """The run's value models, keyed by role."""
        return {name: role for name, role in self.others.items() if name in CRITICS.values()}

    async def fit(self) -> None:
        """Run all remaining steps, with validation before, during and after them."""
        trainer = self.config.trainer
        algorithm = self.config.algorithm
        own = (algorithm.flow or algorithm.adv_estimator).rpartition(":")[2]
        title = own if algorithm.flow else "PPO" if self.critics else own.upper().replace("_", "-")
        with self.session.progress(self.last, title, self.step) as progress:
            if self.step == 0 and self.config.sft.steps:
                # ranks lost from here on are restored from the warm start
                await self.session.store.wait()
            ends_at = self.samples.last_after(self.step)
            last = self.last if ends_at is None else min(self.last, ends_at)
            self.run = run = FlowRun(self, progress, last)
            run.stop = self.stop
            await run.bring_weights()
            for part in run.parts.values():
                await part.bring_weights()
            if self.step == 0 and trainer.val_before_train:
                await self.records.validate(self.engines, self.step, progress)
            if self.stop is not None:
                await self.stop()
            if self.step < last:
                await self._follow(run)

    async def _follow(self, run: FlowRun) -> None:
        """Run the flow. If it fails, the error names the line in the user's file."""
        name = derived.flow_name(self.config)
        try:
            await run.follow(self.body)
        except (Exception, SystemExit) as error:
            # the last two are independent of the flow's code
            if not is_user_entry(name) or isinstance(error, RunStopped | ResourceError):
                raise
            said = message_of(name, error, self.step)
            if isinstance(error, HybridFlowError) and not isinstance(error, SchemaError):
                error.args = (said,)
                raise
            raise FlowError(said) from error

    # ---- checkpoints

    async def save(self) -> Path:
        """Save a checkpoint after `self.step`."""
        state: dict[str, Any] = {
            **self.samples.state(),
            "totals": self.session.totals_now(),
            "advantages": self.advantages.state(),
            "flow": kept_state(self.state),
            "policies": {name: one.advantages.state() for name, one in self.learners.items()},
        }
        others = {
            name: role for name, role in self.others.items() if derived.trains(self.config, name)
        }
        others |= {name: one.policy for name, one in self.learners.items()}
        rollouts = await self.samples.begun()
        return await self.session.store.save(
            "rl", self.step, state, self.policy, rollouts=rollouts, **others
        )

    async def resume(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint of this phase (see `check_trained_roles`)."""
        swapped = derived.needs_reference(self.config) and not self.reference
        await self.policy.call(
            PolicyWorker.load, checkpoint.policy, self.config.actor.optim, swapped
        )
        await self.fill_reference()
        for name, role in self.others.items():
            if derived.trains(self.config, name):
                optim = getattr(self.config, name).optim
                await role.call(ModelWorker.load, checkpoint.folder / name, optim)
        for name, learner in self.learners.items():
            swapped = derived.needs_reference(learner.config)
            optim = learner.config.actor.optim
            await learner.policy.call(PolicyWorker.load, checkpoint.folder / name, optim, swapped)
        with checkpoint.restoring():
            if self.session.has_other_data(checkpoint):
                await self.samples.restore(None)
            else:
                await self.samples.restore(checkpoint.state, checkpoint.rollouts(), checkpoint.step)
            if "advantages" in checkpoint.state:
                self.advantages.restore(checkpoint.state["advantages"])
            for name, kept in checkpoint.state.get("policies", {}).items():
                if name in self.learners:
                    self.learners[name].advantages.restore(kept)
            self.state = dict(checkpoint.state.get("flow", {}))
        self.step = checkpoint.step

    async def go_back(self) -> None:
        """Return to the last checkpoint of this phase, or to its start, after the training ranks
        have been restarted.

        Raises:
            CheckpointError: the run had a warm start, but no checkpoint contains its weights.
        """
        self.session.store.settle()
        checkpoint = self.session.store.latest()
        if checkpoint is not None and checkpoint.phase != "rl":
            checkpoint = None
        if checkpoint is None and self.config.sft.steps:
            raise CheckpointError(
                f"{self.session.folder / 'checkpoints'}: no checkpoint contains the weights of the "
                "warm start, and the ranks have lost them; run the same command again to repeat "
                "the warm start"
            )
        self.session.go_back(checkpoint)
        if checkpoint is not None:
            await self.resume(checkpoint)
            return
        await self.samples.restore(None)
        self.advantages = Advantages(self.config)
        for learner in self.learners.values():
            learner.advantages = Advantages(learner.config)
        self.step = 0
        self.state = {}
        await self.start_from_present_weights()

    async def start_from_present_weights(self) -> None:
        """Start the phase with fresh optimizers. The reference, and critics without a separate
        model, are initialized from the current weights.
        """
        if derived.needs_reference(self.config) and not self.reference:
            await self.policy.call(PolicyWorker.freeze_reference)
        await self.policy.call(PolicyWorker.set_optimizer, self.config.actor.optim)
        for learner in self.learners.values():
            if derived.needs_reference(learner.config):
                await learner.policy.call(PolicyWorker.freeze_reference)
            if not learner.frozen:
                await learner.policy.call(PolicyWorker.set_optimizer, learner.config.actor.optim)
        if self.config.reward_model.trains:
            optim = self.config.reward_model.optim
            await self.others["reward_model"].call(ModelWorker.set_optimizer, optim)
        roles = [
            (self.reference, self.config.reference.path),
            *((role, getattr(self.config, name).path) for name, role in self.critics.items()),
        ]
        if any(role and path is None for role, path in roles):
            await self.policy.call(PolicyWorker.export, self.start_folder)
        await self.fill_reference()
        for name, critic in self.critics.items():
            section: CriticConfig = getattr(self.config, name)
            if section.path is None:
                await critic.call(ModelWorker.fill, self.start_folder)
            await critic.call(ModelWorker.set_optimizer, section.optim)

    async def fill_reference(self) -> None:
        """If the reference runs in separate processes, load the policy's weights from the start of
        the phase into it. A reference with its own model keeps its weights."""
        if self.reference and self.config.reference.path is None:
            await self.reference.call(ModelWorker.fill, self.start_folder)

    @property
    def start_folder(self) -> Path:
        """Hugging Face folder with the policy's weights from the start of the phase. Roles in other
        processes that start from these weights load it.
        """
        return self.session.folder / "model" / "start"
