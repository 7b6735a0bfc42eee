"""The plan of a step, phase by phase: memory per device, duration, bottleneck, and whether the job
fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from hybridflow.config.role_table import ROLES
from hybridflow.models.layout import Coordinates
from hybridflow.planning.constants import FITTED, Constants
from hybridflow.planning.devices import Device
from hybridflow.planning.job import Job, RolePlan
from hybridflow.planning.schedule import Seconds, Stage, Timed, begins, step_seconds
from hybridflow.planning.sizes import adapter_numbers

PACKED = 0.95  # mean fill of a micro-batch relative to its token limit
GENERATION = "generation"
SYNC = "weight sync"
SAVE = "checkpoint"
MOVES = "offload"


@dataclass(frozen=True)
class Phase:
    """A phase of a step.

    Attributes:
        memory: {part: bytes} on the device that uses the most memory.
        pool: `trainer` or `engines`, the owner of that device; `trainer` if they share devices.
        devices, stage: same as in `schedule.Timed`.
    """

    name: str
    seconds: float
    memory: dict[str, float]
    pool: str = "trainer"
    devices: str = "actor"
    stage: Stage = "rest"

    @property
    def peak(self) -> float:
        """Total bytes."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """A planned step."""

    job: Job
    phases: tuple[Phase, ...]
    host_bytes: float  # per node

    @cached_property
    def seconds(self) -> float:
        """Seconds per step. Phases on different devices may overlap."""
        took = defaultdict[tuple[str, Stage], float](float)
        for phase in self.phases:
            took[phase.devices, phase.stage] += phase.seconds
        pools: list[Seconds] = []
        for pool in {phase.devices for phase in self.phases}:
            update = took[pool, "update"]
            updates = (update, 0.0) if pool == "actor" else (0.0, update)
            pools.append((took[pool, "generation"], took[pool, "preparation"], *updates))
        return step_seconds(pools, overlaps=False, rest=took["actor", "rest"])

    @cached_property
    def begins(self) -> list[float]:
        """Start time of each phase, in seconds from the start of the step."""
        timed = [Timed(phase.seconds, phase.devices, phase.stage) for phase in self.phases]
        return begins(timed, self.job.engine_pool)

    @property
    def limit(self) -> float:
        """Memory per device in bytes."""
        return self.job.machines.device.memory_gb * 1e9

    @property
    def fits(self) -> bool:
        """True if device and host memory suffice in every phase and the cluster has enough
        devices."""
        return not self.problems

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """The reasons why the job does not fit, one line each."""
        job = self.job
        found = []
        for phase in self.phases:
            if phase.peak > self.limit:
                largest = _largest(phase.memory)
                sizes = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in largest)
                found.append(
                    f"{phase.name} needs {phase.peak / 1e9:.1f} GB per device, but a device has "
                    f"{self.limit / 1e9:.0f} GB ({phase.pool}): {sizes}"
                )
        if job.placed is not None:
            found.append(job.placed)
        engine = job.engine
        longest = job.prompt_tokens + job.lengths.longest
        if engine.kv_room < longest:
            found.append(
                f"an engine's KV cache fits {engine.kv_room:.0f} tokens in addition to "
                f"{engine.weights / 1e9:.1f} GB of weights per device, but the longest sample "
                f"has {longest:.0f}"
            )
        host_gb = job.machines.host_memory_gb
        if self.host_bytes > host_gb * 1e9:
            found.append(
                f"offloaded state needs {self.host_bytes / 1e9:.0f} GB per node, but a node has "
                f"{host_gb:.0f} GB"
            )
        return tuple(found)

    @property
    def peak(self) -> Phase:
        """The phase with the highest memory use."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def bottleneck(self) -> Phase:
        """The longest phase."""
        return max(self.phases, key=lambda phase: phase.seconds)

    @property
    def device_hours(self) -> float:
        """Device hours per step."""
        return self.job.devices * self.seconds / 3600

    @property
    def tokens_per_second(self) -> float:
        """Sample tokens per second per device."""
        return self.job.samples * self.job.mean_tokens / self.seconds / self.job.devices

    def figures(self) -> dict[str, Any]:
        """Return all results as plain data, in bytes and seconds."""
        job = self.job
        phases = []
        for phase, begin in zip(self.phases, self.begins, strict=True):
            phases.append(
                {
                    "name": phase.name,
                    "pool": phase.pool,
                    "devices": phase.devices,
                    "begin": begin,
                    "seconds": phase.seconds,
                    "bytes": phase.peak,
                    "memory": phase.memory,
                }
            )
        return {
            "fits": self.fits,
            "problems": list(self.problems),
            "device": job.machines.name,
            "devices": job.devices,
            "nodes": job.machines.nodes,
            "device_bytes": self.limit,
            "parameters": sum(map(_whole, job.roles[:1])),
            "trainable_parameters": sum(map(_trainable, job.roles[:1])),
            "step_seconds": self.seconds,
            "device_hours": self.device_hours,
            "tokens_per_second_per_device": self.tokens_per_second,
            "bottleneck": self.bottleneck.name,
            "peak_phase": self.peak.name,
            "peak_bytes": self.peak.peak,
            "host_bytes_per_node": self.host_bytes,
            "engine_kv_tokens": job.engine.kv_room,
            "assumed": {"prompt_tokens": job.prompt_tokens, "response_tokens": job.lengths.mean},
            "phases": phases,
            "resident": resident(job),
        }


def make_plan(job: Job) -> Plan:
    """Plan a step."""
    return Plan(job, tuple(_phases(job)), _host_bytes(job))


def resident(job: Job) -> dict[str, dict[str, float]]:
    """Return {role: {part: bytes}} for each role's largest rank. Comparable to the measurements of
    `RoleMemory` in a run.
    """
    found: dict[str, dict[str, float]] = {}
    for role in job.roles:
        training = role.training
        stage = _heaviest(role)
        if role.name == "reference" and role.is_guest:
            # a second set of the trained weights in the policy's processes
            found["actor"]["reference"] = training.trained_weights(stage)
        else:
            found[role.name] = state_of(role, stage)
    return found


def state_of(role: RolePlan, stage: int) -> dict[str, float]:
    """Return {part: bytes} of a rank in a pipeline stage: weights and, if the role is trained,
    gradients and optimizer state."""
    training = role.training
    parts = {"weights": training.weights(stage)}
    if role.updates:
        parts["gradients"] = training.gradients(stage)
        parts["optimizer"] = training.optimizer(stage)
    return parts


def _phases(job: Job) -> Iterator[Phase]:
    yield _generation(job)
    yield from _scoring(job)
    for role in reversed(job.roles):  # the policy is updated last on its devices
        if role.updates:
            yield _update(job, role)
    yield _sync(job)
    yield from _other(job)


def _generation(job: Job) -> Phase:
    engine = job.engine
    samples = job.samples / job.engines
    prompts = job.prompts / job.engines
    seconds = engine.seconds(samples, prompts, job.prompt_tokens, job.lengths)
    memory = _engine_memory(job) | _held(job, job.engine_pool)
    return Phase(GENERATION, seconds, memory, _side(job), job.engine_pool, "generation")


def _scoring(job: Job) -> Iterator[Phase]:
    for role in sorted(job.roles, key=lambda role: ROLES[role.name].turn):
        if not role.scored:
            continue
        name = role.name
        training = role.training
        stage = _heaviest(role)
        tokens = role.micro_tokens
        memory = _held(job, role.pool, role, "weights")
        if name == "reference" and role.is_guest:
            memory["reference"] = training.trained_weights(stage)
        memory[f"{name} activations"] = training.forward_activations(stage, tokens)
        memory |= _engine_while_training(job, role.pool)
        count = _micro_batches(job, role) * role.scored
        seconds = training.pass_seconds(tokens, count, _length(job), backward=False)
        title = ROLES[name].planned_as
        yield Phase(title, seconds, memory, devices=role.pool, stage="preparation")


def _update(job: Job, role: RolePlan) -> Phase:
    training = role.training
    tokens = role.micro_tokens
    count = _micro_batches(job, role) * role.passes / role.updates
    in_flight = max(int(count), 1)
    seconds = role.updates * training.update_seconds(tokens, count, _length(job))
    most: dict[str, float] = {}
    for stage in range(training.cut.pipeline):
        memory = _held(job, role.pool, role, "weights", "gradients", "optimizer", stage=stage)
        memory[f"{role.name} activations"] = training.activations(stage, tokens, in_flight)
        if sum(memory.values()) > sum(most.values()):
            most = memory
    memory = most | _engine_while_training(job, role.pool)
    return Phase(f"update {role.name}", seconds, memory, devices=role.pool, stage="update")


def _sync(job: Job) -> Phase:
    engine = job.engine
    training = job.actor.training
    nbytes = engine.weights * engine.ranks
    if training.lora is not None and training.lora.sync == "adapter":
        nbytes = _trainable(job.actor) * training.precision.weight
    seconds = sync_seconds(nbytes, job.machines.device, job.sends_slices, job.constants)
    memory = {"engine weights": engine.weights, "staging": 2.0 * job.staging_bytes}
    if job.is_staged:
        memory["staged weights"] = engine.weights
    held = _held(job, "actor", job.actor, "weights") if job.shares else {}
    if job.shares and training.lora is not None:
        held["merged weights"] = training.merged_weights(_heaviest(job.actor))
    if job.shares and not job.sleeps:
        memory |= _engine_memory(job)
    return Phase(SYNC, seconds, memory | held | _process(job, job.engine_pool), _side(job))


def _side(job: Job) -> str:
    """Return the pool under which the memory of the engines' phases is reported."""
    return "trainer" if job.shares else "engines"


def sync_seconds(
    nbytes: float, device: Device, sends_slices: bool, constants: Constants = FITTED
) -> float:
    """Return the duration in seconds of a weight sync of `nbytes`. The rates were published for a
    network of 50 GB/s per device."""
    rate = constants.sync_p2p_gbs if sends_slices else constants.sync_gbs
    share = min(device.network_gbs / 50, 1.0)
    return constants.sync_s + nbytes / (rate * share * 1e9)


def _other(job: Job) -> Iterator[Phase]:
    """Yield the phases for transfers between device and host, and for checkpoints, amortised over
    the steps between them."""
    speed = job.machines.device.host_gbs * 1e9
    moved = defaultdict[str, float](float)
    state = defaultdict[str, float](float)
    for name, parts in resident(job).items():
        role = job.role(name)
        if role is None:
            continue
        parts.pop("reference", None)
        offloaded = sum(getattr(role.offload, part) * size for part, size in parts.items())
        moved[role.pool] += 2 * offloaded  # both directions
    yield Phase(MOVES, max(moved.values()) / speed, {})
    if job.save_every:
        for role in job.roles:
            state[role.pool] += role.training.static(_heaviest(role)) if role.updates else 0.0
        yield Phase(SAVE, max(state.values()) / speed / job.save_every, {})


def _held(
    job: Job, pool: str, computing: RolePlan | None = None, *parts: str, stage: int | None = None
) -> dict[str, float]:
    """Return {part: bytes} of training processes on a pool's fullest device while the role
    `computing` uses its `parts`. Offloaded parts are excluded.
    """
    found = dict(job.others) if pool == "actor" else {}
    for role in job.roles:
        if role.pool != pool:
            continue
        at = stage
        if at is None or at >= role.training.cut.pipeline:
            at = _heaviest(role)
        for part, size in state_of(role, at).items():
            is_needed = role is computing and part in parts
            # the policy's weights stay loaded during a training phase
            stays = role is job.actor and part == "weights" and computing is not None
            if is_needed or stays or not getattr(role.offload, part):
                found[f"{role.name} {part}"] = size * job.constants.fragmentation
    return found | _process(job, pool)


def _engine_memory(job: Job) -> dict[str, float]:
    engine = job.engine
    return {
        "engine weights": engine.weights,
        "engine graphs": engine.graphs(),
        **_process(job, job.engine_pool),
        "KV cache": engine.kv_bytes,
    }


def _engine_while_training(job: Job, pool: str) -> dict[str, float]:
    """Return {part: bytes} for engines on a pool's devices while a role computes there."""
    return {} if pool != job.engine_pool or job.sleeps else _engine_memory(job)


def _process(job: Job, pool: str) -> dict[str, float]:
    """Return the size in bytes of process contexts and communication buffers on one of a pool's
    devices."""
    roles = [role for role in job.roles if role.pool == pool and not role.is_guest]
    communicating = roles or [job.actor]  # a pool of engines alone also has communication buffers
    processes = len(roles) + (pool == job.engine_pool)
    contexts = processes * job.constants.process_gb * 1e9
    buffers = sum(role.training.groups() for role in communicating)
    is_gpu = job.machines.is_gpu
    return {"contexts": contexts * is_gpu, "communication": buffers * is_gpu}


def _host_bytes(job: Job) -> float:
    """Return the size in bytes, per node, of offloaded state and of the copy made for a
    checkpoint."""
    total = 0.0
    for name, parts in resident(job).items():
        role = job.role(name)
        assert role is not None
        moved = 0.0  # offloaded, or copied for a checkpoint
        for part, size in parts.items():
            if getattr(role.offload, "weights" if part == "reference" else part):
                moved += size
        if job.save_every and role.updates:
            moved += parts["weights"] + parts.get("optimizer", 0.0)
        total += moved * min(role.training.cut.ranks, job.machines.devices_per_node)
    return total


def _heaviest(role: RolePlan) -> int:
    training = role.training
    return max(range(training.cut.pipeline), key=lambda stage: training.numbers[stage].total)


def _micro_batches(job: Job, role: RolePlan) -> float:
    tokens = job.samples * job.mean_tokens / role.training.cut.data
    return max(tokens / (role.micro_tokens * PACKED), 1.0)


def _length(job: Job) -> float:
    """Return the token-weighted mean sample length."""
    return job.prompt_tokens + job.lengths.weighted


def _largest(memory: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(memory.items(), key=lambda item: -item[1])[:4]


def _whole(role: RolePlan) -> int:
    return sum(map(prod, role.training.decoder.tensors().values()))


def _trainable(role: RolePlan) -> int:
    training = role.training
    if training.lora is None:
        return _whole(role)
    adapters = adapter_numbers(training.decoder, Coordinates(), training.lora)
    return adapters.factors.total
