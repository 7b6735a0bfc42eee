"""The policy worker.

It trains the actor, computes log-probs under the actor's and the reference's weights, and sends
weights to the engines. Works with any training backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridflow.batch import ROUTES, SUPPORT, DataProto, Jagged
from hybridflow.config import derived
from hybridflow.config.schema import OptimConfig
from hybridflow.data.image_tokens import IMAGES
from hybridflow.data.packing import RESPONSE_MASK
from hybridflow.device.platform import Kind, Platform
from hybridflow.device.profiler import RankProfiler
from hybridflow.device.residency import PARTS
from hybridflow.dispatch import Dispatch, WorkerContext, register
from hybridflow.models.fp8 import BlockQuantisation
from hybridflow.models.weights import SafetensorsFolder
from hybridflow.process.rendezvous import master_store
from hybridflow.reshard.layout import Catalog
from hybridflow.sync import session
from hybridflow.sync.by_reference import copy_weights
from hybridflow.sync.schedule import (
    EngineLayout,
    PlanFacts,
    make_weight_plan,
    post_catalog,
    sync_catalog,
)
from hybridflow.sync.sender import WeightSender
from hybridflow.sync.session import Order, Outcome
from hybridflow.sync.transports import chosen, part_bytes
from hybridflow.workers.backend import Backend, open_backend
from hybridflow.workers.losses import Noted, PolicyLoss, sft_loss
from hybridflow.workers.role import Report, RoleSpec, RoleWorker, needs, own_rows

if TYPE_CHECKING:
    import torch

    from hybridflow.process.store import MasterStore


class PolicyWorker(RoleWorker):
    """One rank of the policy. Public methods are collectives: the controller calls them on all
    ranks."""

    def __init__(self, context: WorkerContext, spec: RoleSpec) -> None:
        config = spec.config
        platform = Platform.detect()
        platform.set_device(context.local_rank)
        self._neighbours = context.neighbours
        base = None if spec.base is None else context.neighbours[spec.base].model
        self.model: Backend = open_backend(
            config, spec.hf_config, platform, context.local_rank, spec.trains, base
        )
        super().__init__(spec, self.model, spec.hf_config, platform)
        # frozen policies are saved too, because they may have copied another policy's weights
        self._saver = self.model.saver(config.trainer.checkpoint_timeout_s)
        self.platform = platform
        self.host = context.master_addr
        self.sync = config.rollout.sync
        # quantisation of the engines' weights
        self._quantisation = (
            BlockQuantisation.of(spec.hf_config) if config.rollout.quantization == "fp8" else None
        )
        self.rank = context.rank
        self._profiler = RankProfiler(config.trainer.profile)
        self._losses: dict[bool, PolicyLoss] = {}
        self._noted: DataProto | None = None
        self._store: MasterStore | None = None
        self._sender = WeightSender(context.rank, self.model.sent_tensors)

    @register(Dispatch.RANK_ZERO)
    def describe(self) -> dict[str, str]:
        """Return the backend's name and versions, for the run's environment record."""
        return self.model.describe()

    # ---- training

    @register(
        Dispatch.DP_METRIC,
        reads=("prompt_ids", "response_ids"),
        may_read=(RESPONSE_MASK, *IMAGES),
    )
    @needs("weights", "gradients", "optimizer")
    def sft_step(self, batch: DataProto) -> list[Report]:
        """Run one supervised update on the response tokens, or only on those selected by
        `response_mask`.
        """
        sums, info = self.model.train_mini_batch(
            own_rows(batch),
            sft_loss,
            columns=(RESPONSE_MASK,),
            max_tokens=self.config.max_tokens_per_micro_batch,
            temperature=1.0,
            with_entropy=False,
        )
        return [{"sums": sums, "info": info}]

    @register(Dispatch.DP_METRIC)
    @needs("weights", "gradients", "optimizer")
    def update_policy(
        self, batch: DataProto, rows_per_update: int, notes: bool = False
    ) -> list[Report]:
        """Run policy updates over this rank's rows in order, `rows_per_update` rows at a time.
        Returns one report per update.

        Reads prompt_ids, response_ids and the columns declared by the policy loss. If the batch
        contains routed_experts, these routes are replayed. If `notes` is True, the first update
        keeps its log-probs for `take_update_log_probs`. A batch without old_log_probs must form a
        single update, which uses its own log-probs as the old ones.
        """
        with self.model.replay.during("replay") if ROUTES in batch else nullcontext():
            return self._update(batch, rows_per_update, notes)

    def _update(self, batch: DataProto, rows_per_update: int, notes: bool) -> list[Report]:
        config = self.spec.config
        reports = list[Report]()
        loss = self._loss(notes)
        for mini_batch in batch.split(rows_per_update):
            noted = Noted(loss) if notes and not reports else None
            sums, info = self.model.train_mini_batch(
                mini_batch,
                noted or loss,
                columns=loss.columns,
                max_tokens=self.config.max_tokens_per_micro_batch,
                temperature=config.rollout.sampling.temperature,
                with_entropy=(noted or loss).with_entropy,
            )
            if noted is not None:
                self._noted = noted.take(mini_batch)
            reports.append({"sums": sums, "info": info})
        return reports

    def _loss(self, notes: bool) -> PolicyLoss:
        """Return the policy loss, which is made once. With `notes`, its updates note the log-probs
        that later ones read."""
        if notes not in self._losses:
            old = derived.old_log_probs_column(self.spec.config)
            old = None if notes and old == "old_log_probs" else old
            self._losses[notes] = PolicyLoss(self.config, old)
        return self._losses[notes]

    @register(Dispatch.DP, reads=("uid",), writes=("old_log_probs", "entropys"))
    def take_update_log_probs(self, batch: DataProto) -> DataProto | None:
        """Return the log-probs and entropies of the step's first update, computed before the
        weights changed.

        `batch` must have the same rows in the same order. Can be called only once per update.
        """
        noted = self._noted
        self._noted = None
        return noted

    @register(Dispatch.ONE_TO_ALL)
    @needs("weights", "gradients", "optimizer")
    def fill(self, folder: Path) -> None:
        """Load the weights of a Hugging Face folder of the same model, and create a fresh optimizer
        if the policy trains."""
        self.model.load_from(SafetensorsFolder(folder))
        if self.spec.trains:
            self.model.set_optimizer(self.spec.config.actor.optim)

    @register(Dispatch.ONE_TO_ALL)
    @needs("weights", "gradients", "optimizer")
    def take_adapters(self, role: str) -> None:
        """Copy the adapters of the policy `role`, which shares these processes and the base
        weights. Creates a fresh optimizer if this policy trains."""
        self.model.take_trained(self._neighbours[role].model)
        if self.spec.trains:
            self.model.set_optimizer(self.spec.config.actor.optim)

    # ---- log-probs

    @register(
        Dispatch.DP,
        reads=("prompt_ids", "response_ids"),
        writes=("old_log_probs", "entropys"),
        may_read=(*SUPPORT, *IMAGES),
    )
    @needs("weights")
    def compute_log_probs(self, batch: DataProto) -> DataProto | None:
        """Compute log-probs and entropies of the response tokens under the current weights."""
        return self._log_probs(batch, "old_log_probs", "entropys")

    @register(
        Dispatch.DP,
        reads=("prompt_ids", "response_ids"),
        writes=("old_log_probs", "entropys", ROUTES),
        may_read=(*SUPPORT, *IMAGES),
    )
    @needs("weights")
    def compute_log_probs_and_routes(self, batch: DataProto) -> DataProto | None:
        """Compute log-probs and entropies under the current weights, and record the experts of each
        token (R2)."""
        with self.model.replay.during("record"):
            found = self._log_probs(batch, "old_log_probs", "entropys")
            routes = self.model.replay.recorded()
        return None if found is None else found.with_columns(**{ROUTES: routes})

    @register(
        Dispatch.DP,
        reads=("prompt_ids", "response_ids", ROUTES),
        writes=("old_log_probs", "entropys"),
        may_read=(*SUPPORT, *IMAGES),
    )
    @needs("weights")
    def compute_log_probs_along_routes(self, batch: DataProto) -> DataProto | None:
        """Compute log-probs and entropies while replaying the engine's experts (R3).

        With `actor.router_replay=compare`, the engine's experts are only compared with the router's
        own choice.
        """
        with self.model.replay.during(
            "compare" if self.config.router_replay == "compare" else "replay"
        ):
            return self._log_probs(batch, "old_log_probs", "entropys")

    @register(
        Dispatch.DP,
        reads=("prompt_ids", "response_ids", "old_log_probs"),
        writes=("sum_pi_squared",),
        may_read=(*SUPPORT, *IMAGES),
    )
    @needs("weights")
    def compute_sum_pi_squared(self, batch: DataProto) -> DataProto | None:
        """Compute the sum of squared probabilities over the vocabulary at each response token.

        Uses one forward pass at half the temperature T: log pi_{T/2}(token) = 2 log pi_T(token) -
        log sum pi_T^2.
        """
        found = self._log_probs(
            batch, "halved", None, 0.5 * self.spec.config.rollout.sampling.temperature
        )
        if found is None:
            return None
        halved = found.jagged("halved")
        old = batch.jagged("old_log_probs")
        sums = np.exp(2 * old.values - halved.values)
        return DataProto.from_columns({"sum_pi_squared": Jagged(sums, halved.offsets)})

    @register(
        Dispatch.DP,
        reads=("prompt_ids", "response_ids"),
        writes=("ref_log_probs",),
        may_read=(*SUPPORT, *IMAGES),
    )
    @needs("weights", "reference")
    def compute_ref_log_probs(self, batch: DataProto) -> DataProto | None:
        """Compute log-probs of the response tokens under the reference weights. Routes are not
        replayed."""
        with self.model.as_reference():
            return self._log_probs(batch, "ref_log_probs")

    @register(Dispatch.ONE_TO_ALL)
    @needs("weights", "reference")
    def freeze_reference(self) -> None:
        """Save a copy of the current weights as the reference."""
        self.model.freeze_reference()

    @register(Dispatch.ONE_TO_ALL)
    def take_observations(self) -> dict[str, Any]:
        """Return statistics collected since the last call: the fields of `RoleMemory.take`, and
        `routes` from `RouterReplay.take_counts` if routes are replayed. Also contains `trainable`,
        the number of trainable parameters, and `copied`, the bytes that a weight sync copies on
        this rank.
        """
        found = super().take_observations()
        found["trainable"] = self.model.trainable_parameters
        found["copied"] = self.model.copied_bytes
        if self.config.router_replay != "none":
            found["routes"] = self.model.replay.take_counts()
        return found

    @register(Dispatch.ONE_TO_ALL)
    def start_profile(self) -> None:
        """Start a profile on this rank, if `trainer.profile.ranks` contains it."""
        if self.rank in self.spec.config.trainer.profile.ranks:
            self._profiler.start()

    @register(Dispatch.ONE_TO_ALL)
    def stop_profile(self, folder: Path) -> str:
        """Write this rank's profile to `folder`. Returns an error message if that failed."""
        return self._profiler.stop(folder / f"actor-rank{self.rank}.json.gz")

    # ---- weight transfer to the engines

    @register(Dispatch.RANK_ZERO)
    def open_sync_store(self) -> tuple[str, int]:
        """Open the store used by trainer and engines to coordinate syncs, and post the tensor
        catalog to it.

        Returns (host, port).
        """
        self._store = master_store(self.host, 0, self.sync.timeout_s)
        post_catalog(
            self._store,
            self.model.served.tensors(),
            self.spec.config.model.dtype,
            self._quantisation,
            self.model.served_adapters,
        )
        return self.host, self._store.port

    @register(Dispatch.RANK_ZERO)
    def device_kind(self) -> Kind:
        """Return the type of device that holds the weights."""
        return self.platform.kind

    @register(Dispatch.ONE_TO_ALL)
    def plan_weights(
        self, host: str, port: int, engines: Sequence[EngineLayout]
    ) -> PlanFacts | None:
        """Plan and verify the weight transfer.

        Rank 0 creates the plan and returns a summary. Every rank then loads its part of the plan.
        """
        layout = self.model.weight_layout()
        facts = None
        wait_s = self.sync.timeout_s
        if self._store is not None:
            adapters = self.model.served_adapters
            source = layout(sync_catalog(self.model.served, self._quantisation, adapters))
            staging = self.sync.staging_bytes
            transport = chosen(self.sync.transport, self.platform)
            part = part_bytes(transport, self.platform)
            facts = make_weight_plan(
                self._store,
                self.model.served,
                source,
                engines,
                staging,
                wait_s,
                part,
                self._quantisation,
                adapters,
            )
        digests = session.read(session.connect(host, port, wait_s), session.PLANS_KEY, wait_s)
        self._sender.adopt(digests[0], host, port, wait_s, *digests[1:])
        return facts

    @register(Dispatch.ONE_TO_ALL)
    @needs("weights")
    def send_weights(self, orders: Sequence[Order], go_timeout_s: float) -> list[Outcome]:
        """Send this rank's slices for all orders concurrently.

        Returns the outcome of each order in which the rank takes part.
        """
        try:
            return self._sender.send(orders, go_timeout_s)
        finally:
            self.model.release_copies()

    @register(Dispatch.RANK_ZERO)
    @needs("weights")
    def copy_weights(self, target: Mapping[str, torch.Tensor]) -> int:
        """Copy the weights into the tensors of an engine in this process. `target` is keyed by
        Hugging Face name.

        Returns the bytes copied. Requires a policy with a single rank.
        """
        catalog = Catalog.of(self.model.served.tensors())
        try:
            [layout] = self.model.weight_layout()(catalog).classes
            return copy_weights(layout, catalog, self.model.parameters(), target)
        finally:
            self.model.release_copies()

    @register(Dispatch.ONE_TO_ALL)
    @needs(*PARTS)
    def load(self, folder: Path, optim: OptimConfig, with_reference: bool = False) -> None:
        """Restore a checkpoint that `save` wrote in the same phase.

        `optim` and `with_reference` must match that phase.
        """
        if self.spec.trains:
            self.model.set_optimizer(optim)
        if with_reference:
            self.model.freeze_reference()
        self.model.load(folder)
