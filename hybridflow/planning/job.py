"""The planner's input: roles, engines and batch of a configuration on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.config import derived
from hybridflow.config.role_table import ROLES
from hybridflow.config.schema import (
    LoraConfig,
    ModelConfig,
    OffloadConfig,
    ParallelConfig,
    RunConfig,
)
from hybridflow.errors import ConfigError, ResourceError
from hybridflow.placement import ClusterShape, place, pools_of
from hybridflow.planning.constants import FITTED, Constants
from hybridflow.planning.devices import Machines
from hybridflow.planning.generation import Engine, Lengths
from hybridflow.planning.sizes import decoder_of
from hybridflow.planning.training import Cut, Practice, Precision, Training
from hybridflow.reshard.engine_layouts import EngineShape


def recomputed(config: RunConfig) -> frozenset[str]:
    """Return the modules that `actor.recompute` recomputes, named as in `Practice`."""
    actor = config.actor
    return {"none": frozenset[str](), "full": frozenset({"full"})}.get(
        actor.recompute, frozenset(actor.recompute_modules)
    )


@dataclass(frozen=True)
class Assumed:
    """Assumed values that the configuration does not specify: mean tokens per prompt and per
    response. None means half of the maximum.
    """

    prompt: float | None = None
    response: float | None = None


@dataclass(frozen=True)
class RolePlan:
    """A model that runs in training processes.

    Attributes:
        micro_tokens: tokens per micro-batch, over all context ranks.
        updates: optimizer updates per step; 0 for a model that is not trained.
        passes: number of times the batch is trained on.
        scored: fraction of the samples in the pass without gradients.
    """

    name: str
    training: Training
    micro_tokens: int
    updates: int
    passes: int
    offload: OffloadConfig
    is_guest: bool  # runs in the actor's processes
    scored: float = 1.0
    pool: str = "actor"  # section whose devices it uses


@dataclass(frozen=True)
class Job:
    """A step of a run.

    Attributes:
        engines: number of engines.
        engine_pool: section whose devices the engines use.
        sleeps: True if engines release memory while the policy trains.
        others: {part: bytes} that other policies with the same base keep on the actor's devices.
    """

    roles: tuple[RolePlan, ...]
    engine: Engine
    engines: int
    engine_pool: str
    sleeps: bool
    prompts: int
    samples: int
    prompt_tokens: float
    lengths: Lengths
    machines: Machines
    staging_bytes: int
    is_staged: bool
    # a weight sync sends from rank to rank instead of using broadcasts or shared buffers
    sends_slices: bool
    save_every: int
    placed: str | None = None  # why the processes cannot be placed on the cluster, or None
    others: Mapping[str, float] = field(default_factory=dict)
    constants: Constants = FITTED

    def role(self, name: str) -> RolePlan | None:
        """Return the role with this name, or None if the job does not have it."""
        return next((role for role in self.roles if role.name == name), None)

    @property
    def actor(self) -> RolePlan:
        """The policy."""
        return self.roles[0]

    @property
    def mean_tokens(self) -> float:
        """Mean tokens per sample."""
        return self.prompt_tokens + self.lengths.mean

    @property
    def engine_devices(self) -> int:
        """Number of devices used by the engines."""
        return self.engines * self.engine.ranks

    @property
    def shares(self) -> bool:
        """True if engines and policy alternate on the same devices."""
        return self.engine_pool == "actor"

    @property
    def pools(self) -> dict[str, int]:
        """Number of devices in each pool, keyed by owning section."""
        pools = {self.engine_pool: self.engine_devices}
        for role in self.roles:
            pools[role.pool] = max(pools.get(role.pool, 0), role.training.cut.ranks)
        return pools

    @property
    def devices(self) -> int:
        """Total number of devices in the job."""
        return sum(self.pools.values())


def job_of(
    config: RunConfig,
    machines: Machines,
    assumed: Assumed | None = None,
    hf: Any = None,
    frozen: bool = False,
    shares_base: bool = False,
) -> Job:
    """Build the job of a validated configuration.

    Args:
        hf: the policy's Hugging Face config, needed if the configuration does not determine it (the
            vocabulary size may come from the tokenizer).
        frozen: True if the policy has no optimizer (`roles.NAME.frozen`).
        shares_base: True if its adapters share another policy's weights (`roles.NAME.base`).

    Raises:
        ConfigError, ModelError: the model's folder or sizes are incomplete.
    """
    given = assumed or Assumed()
    sizes = dict(derived.run_hf_config(config) if hf is None else hf)
    if "vocab_size" not in sizes:
        raise ConfigError(
            "model.hf_config.vocab_size is not set (a run reads it from the tokenizer); set "
            "model.hf_config.vocab_size=N to plan this recipe"
        )
    roles = _roles(config, machines, sizes, frozen, shares_base)
    rollout = config.rollout
    data = config.data
    response = given.response or max(data.max_response_length / 2, 1.0)
    return Job(
        roles=tuple(roles),
        engine=_engine(config, machines, sizes),
        engines=rollout.num_engines,
        engine_pool=derived.pool_of(config, "rollout"),
        placed=_placement_problem(config, machines),
        sleeps=rollout.sleep_while_training,
        prompts=data.train_batch_size,
        samples=derived.samples_per_step(config),
        prompt_tokens=min(given.prompt or data.max_prompt_length / 2, data.max_prompt_length),
        lengths=Lengths(min(response, data.max_response_length), data.max_response_length),
        machines=machines,
        staging_bytes=rollout.sync.staging_bytes,
        is_staged=derived.is_staged(config, "cuda" if machines.is_gpu else "cpu"),
        sends_slices=_sends_slices(config, machines),
        save_every=config.trainer.save_every_steps,
    )


def _engine(config: RunConfig, machines: Machines, sizes: Any) -> Engine:
    rollout = config.rollout
    weight = Precision.of(config.model.dtype).weight
    return Engine(
        decoder_of(sizes, mtp=rollout.speculative.method == "mtp"),
        EngineShape(
            rollout.tensor, rollout.expert, rollout.data_parallel_attention, rollout.pipeline
        ),
        machines.device,
        item=1.03 if rollout.quantization == "fp8" else weight,
        kv_item=weight,
        running=rollout.max_running_requests,
        kv_tokens=rollout.max_total_tokens,
        memory_fraction=rollout.mem_fraction_static,
    )


def _sends_slices(config: RunConfig, machines: Machines) -> bool:
    name = config.rollout.sync.transport
    return name == "p2p" or (
        name == "auto" and machines.is_gpu and derived.pool_of(config, "rollout") != "actor"
    )


def _placement_problem(config: RunConfig, machines: Machines) -> str | None:
    """Return the reason why the run cannot be placed on the cluster, or None."""
    if not machines.is_gpu:
        return None  # a local cluster has no limit on processes
    try:
        place(ClusterShape.uniform(machines.nodes, machines.devices_per_node), pools_of(config))
    except ResourceError as error:
        return str(error)
    return None


def _roles(
    config: RunConfig, machines: Machines, sizes: Any, frozen: bool, shares_base: bool
) -> list[RolePlan]:
    roles = []
    for name in derived.models_in_use(config):
        trains = derived.trains(config, name) and not (frozen and name == "actor")
        roles.append(_role(config, machines, name, sizes, trains))
    if frozen and shares_base:  # it computes with the adapters that it takes
        training = replace(roles[0].training, lora=config.actor.lora)
        roles[0] = replace(roles[0], training=training)
    return roles


def _role(config: RunConfig, machines: Machines, name: str, sizes: Any, trains: bool) -> RolePlan:
    section: Any = getattr(config, name)
    path = None if name == "actor" else section.path
    if path is not None:
        sizes = dict(derived.run_hf_config(config, ModelConfig(path=path)))
    is_guest = name != "actor" and derived.is_colocated(config, name)
    layout = derived.role_layout(config, name)
    cut = cut_of(layout, derived.role_world_size(config, name))
    precision = Precision.of(config.model.dtype, section.optim if trains else None)
    with_heads = name == "actor" and trains and config.actor.mtp.train
    if name == "actor" and config.actor.backend == "fsdp":
        cut = replace(cut, fully_sharded=True)
        precision = replace(precision, weight=4, main=0)
    return RolePlan(
        name=name,
        training=Training(
            decoder_of(sizes, mtp=with_heads),
            cut,
            machines.device,
            precision,
            _practice(config, layout, trains, with_heads),
            scalar_head=ROLES[name].head != "vocabulary",
            lora=_adapters(config, name, trains, is_guest),
        ),
        micro_tokens=section.max_tokens_per_micro_batch,
        updates=derived.role_updates_per_step(config, name) if trains else 0,
        passes=getattr(section, "ppo_epochs", 1) if trains else 0,
        # a colocated reference uses the actor's setting
        offload=config.actor.offload if name == "reference" and is_guest else section.offload,
        is_guest=is_guest,
        pool=derived.pool_of(config, name),
        scored=derived.share_scored_before_update(config) if name == "actor" else 1.0,
    )


def _adapters(config: RunConfig, name: str, trains: bool, is_guest: bool) -> LoraConfig | None:
    """Return a role's adapters. A colocated reference uses the policy's frozen base weights and a
    separate copy of its adapters."""
    lora = config.actor.lora
    has_them = trains if name == "actor" else name == "reference" and is_guest
    return lora if lora.rank and has_them else None


def _practice(
    config: RunConfig, layout: ParallelConfig, trains: bool, with_heads: bool
) -> Practice:
    return Practice(
        recomputed(config) if trains else frozenset(),
        dispatch=layout.moe_dispatcher,
        overlaps_gradients=layout.overlap_grad_reduce,
        overlaps_weights=layout.overlap_param_gather,
        logits_chunk=config.actor.logits_chunk_tokens,
        trains_heads=with_heads,
    )


def cut_of(parallel: ParallelConfig, ranks: int) -> Cut:
    """Return a section's parallel sizes for `ranks` processes."""
    return Cut.of(
        parallel,
        ranks,
        sequence=parallel.sequence,
        distributed_optimizer=parallel.distributed_optimizer,
    )
