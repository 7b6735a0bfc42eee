"""A step of a job, phase by phase: what each device holds, how long it takes, what is the bottleneck, what fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridflow.planning.constants import FITTED, Constants
from hybridflow.planning.devices import Device
from hybridflow.planning.job import Job, RolePlan

PACKED = 0.95  # tokens of a micro-batch beside its bound
GENERATION, SYNC, SAVE, MOVES = "generation", "weight sync", "checkpoint", "offload"


@dataclass(frozen=True)
class Phase:
    """A phase of a step.

    Attributes:
        memory: bytes on the busiest device of each thing that it holds. pool: `trainer` or `engines`, whose devices
            these are; engines that share the trainer's devices count there.
    """

    name: str
    seconds: float
    memory: dict[str, float]
    pool: str = "trainer"

    @property
    def peak(self) -> float:
        """Bytes in all."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Plan:
    """What the planner found."""

    job: Job
    phases: tuple[Phase, ...]
    host_bytes: float  # of a node

    @cached_property
    def seconds(self) -> float:
        """A step."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def limit(self) -> float:
        """Bytes of a device."""
        return self.job.machines.device.memory_gb * 1e9

    @property
    def fits(self) -> bool:
        """Whether memory is enough in every phase, on the host too, and the cluster has devices for all."""
        return not self.problems

    @cached_property
    def problems(self) -> tuple[str, ...]:
        """Why it does not fit, a line each."""
        found = [
            f"{phase.name} needs {phase.peak / 1e9:.1f} GB on a device of {self.limit / 1e9:.0f} GB ({phase.pool}): "
            + ", ".join(f"{name} {size / 1e9:.1f}" for name, size in _largest(phase.memory))
            for phase in self.phases
            if phase.peak > self.limit
        ]
        machines, job = self.job.machines, self.job
        if job.placed is not None:
            found.append(job.placed)
        longest = job.prompt_tokens + job.lengths.longest
        if job.engine.kv_room < longest:
            found.append(
                f"an engine's KV cache has room for {job.engine.kv_room:.0f} tokens beside "
                f"{job.engine.weights / 1e9:.1f} GB of weights on a device; the longest sample has {longest:.0f}"
            )
        if self.host_bytes > machines.host_memory_gb * 1e9:
            found.append(
                f"offloaded state takes {self.host_bytes / 1e9:.0f} GB of a node's {machines.host_memory_gb:.0f} GB"
            )
        return tuple(found)

    @property
    def peak(self) -> Phase:
        """The phase that takes most memory."""
        return max(self.phases, key=lambda phase: phase.peak)

    @property
    def bottleneck(self) -> Phase:
        """The phase that takes most time."""
        return max(self.phases, key=lambda phase: phase.seconds)

    @property
    def device_hours(self) -> float:
        """Device hours of a step."""
        return self.job.devices * self.seconds / 3600

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all samples, a second and device."""
        return self.job.samples * self.job.mean_tokens / self.seconds / self.job.devices

    def figures(self) -> dict[str, Any]:
        """Everything as plain data; bytes and seconds."""
        job = self.job
        return {
            "fits": self.fits,
            "problems": list(self.problems),
            "device": job.machines.name,
            "devices": job.devices,
            "nodes": job.machines.nodes,
            "device_bytes": self.limit,
            "parameters": sum(_whole(role) for role in job.roles[:1]),
            "step_seconds": self.seconds,
            "device_hours": self.device_hours,
            "tokens_per_second_per_device": self.tokens_per_second,
            "bottleneck": self.bottleneck.name,
            "peak_phase": self.peak.name,
            "peak_bytes": self.peak.peak,
            "host_bytes_per_node": self.host_bytes,
            "engine_kv_tokens": job.engine.kv_room,
            "assumed": {"prompt_tokens": job.prompt_tokens, "response_tokens": job.lengths.mean},
            "phases": [
                {"name": one.name, "pool": one.pool, "seconds": one.seconds, "bytes": one.peak, "memory": one.memory}
                for one in self.phases
            ],
            "resident": resident(job),
        }


def make_plan(job: Job) -> Plan:
    """Plan a step."""
    return Plan(job, tuple(_phases(job)), _host_bytes(job))


def resident(job: Job) -> dict[str, dict[str, float]]:
    """Bytes of each part of each role on the rank that holds most: what `RoleMemory` of a run counts."""
    found: dict[str, dict[str, float]] = {}
    for role in job.roles:
        training = role.training
        stage = _heaviest(role)
        parts = {"weights": training.weights(stage)}
        if role.updates:
            parts |= {"gradients": training.gradients(stage), "optimizer": training.optimizer(stage)}
        if role.name == "reference" and role.is_guest:
            found["actor"]["reference"] = parts["weights"]  # a second set of the policy's weights in its processes
        else:
            found[role.name] = parts
    return found


def _phases(job: Job) -> Iterator[Phase]:
    yield _generation(job)
    yield from _scoring(job)
    for role in job.roles:
        if role.updates:
            yield _update(job, role)
    yield _sync(job)
    yield from _other(job)


def _generation(job: Job) -> Phase:
    engine, engines = job.engine, job.engines
    seconds = engine.seconds(job.samples / engines, job.prompts / engines, job.prompt_tokens, job.lengths)
    memory = _engine_memory(job, with_cache=True)
    if not job.shares:
        return Phase(GENERATION, seconds, memory, "engines")
    return Phase(GENERATION, seconds, memory | _held(job, None, "weights", "gradients", "optimizer"))


def _scoring(job: Job) -> Iterator[Phase]:
    names = {"actor": "log-probs", "reference": "reference", "critic": "values"}
    for role in job.roles:
        if not role.scored:
            continue
        if role.name == "reference" and role.is_guest:
            held = _held(job, role, "weights") | {"reference": role.training.weights(_heaviest(role))}
        else:
            held = _held(job, role, "weights")
        training, stage = role.training, _heaviest(role)
        held |= {f"{role.name} activations": training.forward_activations(stage, role.micro_tokens)}
        yield Phase(
            names.get(role.name, role.name.replace("_", " ")),
            training.pass_seconds(
                role.micro_tokens, _micro_batches(job, role) * role.scored, _length(job), backward=False
            ),
            held | _engine_while_training(job),
        )


def _update(job: Job, role: RolePlan) -> Phase:
    training = role.training
    count = _micro_batches(job, role) * role.passes / role.updates
    seconds = role.updates * training.update_seconds(role.micro_tokens, count, _length(job))
    most: dict[str, float] = {}
    for stage in range(training.cut.pipeline):
        memory = _held(job, role, "weights", "gradients", "optimizer", stage=stage)
        memory[f"{role.name} activations"] = training.activations(stage, role.micro_tokens, max(int(count), 1))
        if sum(memory.values()) > sum(most.values()):
            most = memory
    return Phase(f"update {role.name}", seconds, most | _engine_while_training(job))


def _sync(job: Job) -> Phase:
    engine = job.engine
    seconds = sync_seconds(engine.weights * engine.ranks, job.machines.device, job.sends_slices, job.constants)
    memory = {"engine weights": engine.weights, "staging": 2.0 * job.staging_bytes}
    if job.is_staged:
        memory["staged weights"] = engine.weights
    held = _held(job, job.actor, "weights") if job.shares else {}
    if job.shares and not job.sleeps:
        memory |= _engine_memory(job, with_cache=True)
    return Phase(SYNC, seconds, memory | held | _process(job), "trainer" if job.shares else "engines")


def sync_seconds(nbytes: float, device: Device, sends_slices: bool, constants: Constants = FITTED) -> float:
    """A weight sync of a model of this size: the rates were published for a network of 50 GB/s a device."""
    rate = constants.sync_p2p_gbs if sends_slices else constants.sync_gbs
    return constants.sync_s + nbytes / (rate * min(device.network_gbs / 50, 1.0) * 1e9)


def _other(job: Job) -> Iterator[Phase]:
    """Moves between device and host, and checkpoints, spread over the steps between them."""
    device = job.machines.device
    moved = sum(
        sum(getattr(role.offload, part) * size for part, size in parts.items() if part != "reference") * 2
        for role, parts in ((job.role(name), parts) for name, parts in resident(job).items())
        if role is not None
    )
    yield Phase(MOVES, moved / (device.host_gbs * 1e9), {})
    if job.save_every:
        state = sum(role.training.static(_heaviest(role)) for role in job.roles if role.updates)
        yield Phase(SAVE, state / (device.host_gbs * 1e9) / job.save_every, {})


def _held(job: Job, computing: RolePlan | None, *parts: str, stage: int | None = None) -> dict[str, float]:
    """What training processes hold on the busiest device while `computing` needs `parts` of itself; what is offloaded
    elsewhere is not there."""
    found: dict[str, float] = {}
    device = computing if computing is not None and not computing.is_guest else job.actor
    for role in job.roles:
        if role is not device and not (role.is_guest and device is job.actor):
            continue
        training, at = role.training, _heaviest(role) if stage is None else stage
        sizes = {"weights": training.weights(at)}
        if role.updates:
            sizes |= {"gradients": training.gradients(at), "optimizer": training.optimizer(at)}
        for part, size in sizes.items():
            is_needed = role is computing and part in parts
            # the policy's weights stay over a training phase
            stays = role is job.actor and part == "weights" and computing is not None
            if is_needed or stays or not getattr(role.offload, part):
                found[f"{role.name} {part}"] = size * job.constants.fragmentation
    return found | _process(job)


def _engine_memory(job: Job, with_cache: bool) -> dict[str, float]:
    engine = job.engine
    found = {"engine weights": engine.weights, "engine graphs": engine.graphs()} | _process(job)
    return found | ({"KV cache": engine.kv_bytes} if with_cache else {})


def _engine_while_training(job: Job) -> dict[str, float]:
    """What engines keep on the trainer's devices while the policy computes."""
    return {} if not job.shares or job.sleeps else _engine_memory(job, with_cache=True)


def _process(job: Job) -> dict[str, float]:
    """Contexts of the processes on a device, and the trainer's communication buffers."""
    processes = 2 if job.shares else 1
    return {
        "contexts": processes * job.constants.process_gb * 1e9 * job.machines.is_gpu,
        "communication": job.actor.training.groups() * job.machines.is_gpu,
    }


def _host_bytes(job: Job) -> float:
    """Offloaded state, and the copy of a checkpoint under way, of a node's ranks."""
    total = 0.0
    for name, parts in resident(job).items():
        role = job.role(name)
        assert role is not None
        offloaded = sum(
            size for part, size in parts.items() if getattr(role.offload, "weights" if part == "reference" else part)
        )
        copied = parts["weights"] + parts.get("optimizer", 0.0) if job.save_every and role.updates else 0.0
        total += (offloaded + copied) * min(role.training.cut.ranks, job.machines.devices_per_node)
    return total


def _heaviest(role: RolePlan) -> int:
    training = role.training
    return max(range(training.cut.pipeline), key=lambda stage: training.numbers[stage].total)


def _micro_batches(job: Job, role: RolePlan) -> float:
    tokens = job.samples * job.mean_tokens / role.training.cut.data
    return max(tokens / (role.micro_tokens * PACKED), 1.0)


def _length(job: Job) -> float:
    """Tokens of the sample that a token is in."""
    return job.prompt_tokens + job.lengths.weighted


def _largest(memory: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(memory.items(), key=lambda item: -item[1])[:4]


def _whole(role: RolePlan) -> int:
    from math import prod

    return sum(prod(shape) for shape in role.training.decoder.tensors().values())
