"""Auto-mapping of a configuration: generates the options of each model with the planner, and
converts the best mapping to settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from hybridflow.config import derived
from hybridflow.config.role_table import ROLES
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.planning.advice import refused, with_values
from hybridflow.planning.automap import Mapped, Option, Problem, search
from hybridflow.planning.devices import Machines
from hybridflow.planning.generation import Engine
from hybridflow.planning.job import Job, RolePlan, job_of
from hybridflow.planning.plan import PACKED, make_plan, state_of
from hybridflow.planning.sizes import layer_shapes
from hybridflow.planning.training import Cut, Training
from hybridflow.reshard.engine_layouts import EngineShape

# factors on the memory of training roles, tried in order until the whole plan fits
_MARGINS = (1.0, 1.1, 1.25, 1.5, 2.0)
# Generation times within this factor count as equal. The model's error on the published generation
# is 28%.
_ABOUT = 1.15
_SEVERAL = 4  # with this many engines, losing one costs only a small part of a generation
_TENSOR = (1, 2, 4, 8)
_PIPELINE = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_EXPERT = (1, 2, 4, 8, 16, 32, 64, 128)

# layout keys that a mapping sets
_LAYOUT = (
    "tensor",
    "pipeline",
    "first_stage_layers",
    "last_stage_layers",
    "layers_per_stage",
    "expert",
    "sequence",
)


@dataclass
class Search:
    """The options for running a job's models on any number of devices.

    Attributes:
        memory: bytes per device.
        engine_ranks: maximum ranks per engine.
        divides: if True, skip layouts whose data-parallel ranks cannot share a mini-batch equally,
            because the trainer rejects them.
    """

    job: Job
    memory: float
    engine_ranks: int
    divides: bool = True
    _known: dict[tuple[str, int], list[Option]] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Allowed numbers of devices per pool: fractions of a node, then numbers of whole nodes
        that layouts can divide evenly."""
        total = self.job.machines.devices
        node = self.job.machines.devices_per_node
        found = {size for size in (1, 2, 4) if size < node}
        most = total // node
        if most:
            found.add(most * node)
        for odd in (1, 3, 5, 7):
            number = odd
            while number <= most:
                found.add(number * node)
                number *= 2
        return tuple(sorted(found))

    def options(self, margin: float, model: str, size: int) -> Sequence[Option]:
        """Return the ways to run a model on `size` devices. The memory of training roles is
        multiplied by `margin`."""
        role = self.job.role(model)
        if (model, size) not in self._known:
            found = self._engine_options(size) if role is None else self._role_options(role, size)
            self._known[model, size] = list(found)
        known = self._known[model, size]
        if role is None or margin == 1:
            return known
        options = []
        for option in known:
            held = margin * option.held
            working = margin * option.working
            options.append(replace(option, held=held, working=working))
        return options

    def _engine_options(self, size: int) -> Iterator[Option]:
        """Yield engine options for all numbers of ranks, excluding engines larger than needed for a
        generation time close to the minimum."""
        found = list(self._all_engines(size))
        shortest = min((option.seconds[0] for option in found), default=0.0)
        near = [option for option in found if option.seconds[0] <= _ABOUT * shortest]
        several = [option for option in near if option.layout.count >= _SEVERAL] or near[:1]
        chosen = min(several, key=lambda option: option.seconds[0], default=None)
        if chosen is None:
            return
        most = chosen.held + chosen.working
        for option in found:
            is_larger = option.layout.count < chosen.layout.count
            if not is_larger or option.held + option.working < most:
                yield option

    def _all_engines(self, size: int) -> Iterator[Option]:
        job = self.job
        for tensor in (1, 2, 4, 8, 16, 32):
            count = self._engines_of(tensor, size)
            if not count or tensor > self.engine_ranks:
                continue
            expert = min(tensor, job.engine.shape.expert) if job.engine.shape.expert > 1 else 1
            engine = replace(job.engine, shape=EngineShape(tensor, expert))
            try:
                engine.shape.check(engine.decoder)
            except HybridFlowError:
                continue
            if engine.kv_room < job.prompt_tokens + job.lengths.longest:
                continue
            samples = job.samples / count
            prompts = job.prompts / count
            seconds = engine.seconds(samples, prompts, job.prompt_tokens, job.lengths)
            # a sleeping engine holds no memory
            working = engine.weights + engine.kv_bytes + engine.graphs()
            held = 0.0 if job.sleeps else working
            yield Option(
                devices=size,
                held=held,
                working=0.0 if held else working,
                seconds=(seconds, 0.0, 0.0, 0.0),
                layout=EngineChoice(engine, count),
            )

    def _engines_of(self, ranks: int, size: int) -> int:
        """Return the number of engines with `ranks` ranks each that fit on `size` devices. An
        engine either fits into one node or occupies whole nodes.
        """
        node = self.job.machines.devices_per_node
        if ranks > node:
            return 0 if ranks % node else size // ranks
        return size // node * (node // ranks) if size >= node else size // ranks

    def _role_options(self, role: RolePlan, size: int) -> Iterator[Option]:
        for cut in cuts(role.training, size):
            if self.divides and role.updates and self.job.samples % (role.updates * cut.data):
                continue
            training = replace(role.training, cut=cut)
            count = max(self._tokens / cut.data / (role.micro_tokens * PACKED), 1.0)
            held, working = self._memory(role, training, count)
            if held + working > self.memory:
                continue
            length = self.job.prompt_tokens + self.job.lengths.weighted
            tokens = role.micro_tokens
            prepared = 0.0
            if role.scored:
                scored = count * role.scored
                prepared = training.pass_seconds(tokens, scored, length, backward=False)
            trained = 0.0
            if role.updates:
                each = count * role.passes / role.updates
                trained = role.updates * training.update_seconds(tokens, each, length)
            updates = (trained, 0.0) if role.name == "actor" else (0.0, trained)
            yield Option(size, held, working, (0.0, prepared, *updates), cut)

    @cached_property
    def _tokens(self) -> float:
        return self.job.samples * self.job.mean_tokens

    def _memory(self, role: RolePlan, training: Training, count: float) -> tuple[float, float]:
        """Return (bytes always allocated, additional bytes while computing) on the stage with the
        largest sum."""
        planned = replace(role, training=training)
        in_flight = max(int(count), 1)
        held = working = 0.0
        for stage in range(training.cut.pipeline):
            parts = state_of(planned, stage)
            if role.updates:
                compute = training.activations(stage, role.micro_tokens, in_flight)
            else:
                compute = training.forward_activations(stage, role.micro_tokens)
            stays = sum(size for part, size in parts.items() if not getattr(role.offload, part))
            more = sum(parts.values()) - stays + compute
            if stays + more > held + working:
                held = stays
                working = more
        return held, working


@dataclass(frozen=True)
class EngineChoice:
    """A choice of engines, all with the same shape."""

    engine: Engine
    count: int


def cuts(training: Training, size: int) -> Iterator[Cut]:
    """Yield the valid layouts of a role on `size` devices."""
    experts = max(layer.experts for layer in layer_shapes(training.decoder))
    for tensor in _TENSOR:
        for pipeline in _PIPELINE:
            for expert in _EXPERT if experts else (1,):
                if size % (tensor * pipeline) or size % (expert * pipeline):
                    continue
                first, last = end_stages(training.decoder.num_layers, pipeline)
                cut = Cut(
                    size,
                    tensor,
                    pipeline,
                    expert=expert,
                    sequence=tensor > 1,
                    first_stage_layers=first,
                    last_stage_layers=last,
                )
                try:
                    training.decoder.check(cut.place())
                except HybridFlowError:
                    continue
                yield cut


def end_stages(layers: int, pipeline: int) -> tuple[int, int]:
    """Return the layer counts of the first and the last stage that leave the same number of layers
    to each other stage; 0 means as many as the other stages. The end stages never have more layers
    than the others, because they also contain the embedding and the output layer.
    """
    if layers % pipeline == 0:
        return 0, 0
    most = -(-layers // pipeline)
    if pipeline == 2:
        return most, 0
    fewer = most * pipeline - layers
    of_first = fewer // 2
    of_last = fewer - of_first
    return max(most - of_first, 0), max(most - of_last, 0)


def auto(
    config: RunConfig, machines: Machines, assumed: Any, hf: Any, overlaps: bool
) -> tuple[dict[str, Any], Mapped]:
    """Find the mapping with the shortest step. Returns (settings for the mapping, the mapping).

    Args:
        overlaps: True if generation on separate devices may run at the same time as training.

    Raises:
        ConfigError: nothing fits the cluster.
    """
    job = job_of(config, machines, assumed, hf)
    # reserve for contexts only; the whole plan counts a process's other memory and the other models
    # of its pool
    reserve = 2 * job.constants.process_gb * 1e9 * machines.is_gpu
    models = ("rollout", *(role.name for role in job.roles))
    memory = (machines.device.memory_gb * 1e9 - reserve) / job.constants.fragmentation
    # The search counts each model of a pool by itself. The whole plan also counts the memory that
    # other models hold during a phase.
    most = machines.devices if derived.engines_may_span_nodes(config) else machines.devices_per_node
    found = Search(job, memory, most)
    why: tuple[str, ...] = ()
    for margin in _MARGINS:
        options = partial(found.options, margin)
        mapped = search(Problem(models, machines.devices, found.sizes, memory, options, overlaps))
        if mapped is None:
            break
        change = settings(config, mapped, machines)
        chosen = with_values(config, change)
        why = tuple(refused(chosen)) or make_plan(job_of(chosen, machines, assumed, hf)).problems
        if not why:
            return change, mapped
    nearest = f" The closest mapping fails because {'; '.join(why)}." if why else ""
    raise ConfigError(
        f"no mapping of {', '.join(models)} onto {machines.devices} {machines.name} fits; add "
        f"devices, offload more, or set actor.recompute=full.{nearest}"
    )


def settings(config: RunConfig, mapped: Mapped, machines: Machines) -> dict[str, Any]:
    """Convert a mapping to settings of the configuration."""
    change: dict[str, Any] = {}
    for pool, devices in zip(mapped.pools, mapped.devices, strict=True):
        names = [name for name, _ in pool]
        owner = "actor"
        if "actor" not in names:
            owner = next((name for name in names if name != "rollout"), "rollout")
        for name, option in pool:
            if name == "rollout":
                engine: EngineChoice = option.layout
                shape = engine.engine.shape
                nodes = max(shape.tensor // machines.devices_per_node, 1)
                change |= {
                    "rollout.num_engines": engine.count,
                    "rollout.tensor": shape.tensor,
                    "rollout.expert": shape.expert,
                    "rollout.nodes_per_engine": nodes,
                    "rollout.pool": None if owner == "rollout" else owner,
                    "rollout.sleep_while_training": owner == "actor",
                }
                continue
            change |= _layout(name, option.layout)
            if name == "actor":
                each = min(devices, machines.devices_per_node)
                change |= {"cluster.nodes": devices // each, "cluster.procs_per_node": each}
            else:
                pool_of = None if owner == name else owner
                change |= {
                    f"{name}.placement": "own",
                    f"{name}.procs": option.layout.ranks,
                    f"{name}.pool": pool_of,
                }
                if name == "reference" and derived.is_colocated(config, name):
                    # in the policy's processes it used the actor's setting
                    change[f"{name}.offload.weights"] = config.actor.offload.weights
    return _simplified(config, change)


def _layout(name: str, cut: Cut) -> dict[str, Any]:
    return {f"{name}.parallel.{key}": getattr(cut, key) for key in _LAYOUT}


def _simplified(config: RunConfig, change: dict[str, Any]) -> dict[str, Any]:
    """Move roles that share the actor's pool and layout into the actor's processes."""
    for name in ROLES:
        if name in ("actor", "teacher"):
            continue
        same = all(
            change.get(f"{name}.parallel.{key}") == change.get(f"actor.parallel.{key}")
            for key in _LAYOUT
        )
        if change.get(f"{name}.pool") == "actor" and same:
            plain = type(config.actor.parallel)()
            for key in _LAYOUT:
                change[f"{name}.parallel.{key}"] = getattr(plain, key)
            change |= {f"{name}.placement": "colocated", f"{name}.pool": None, f"{name}.procs": 1}
            change.pop(f"{name}.offload.weights", None)
    return change


def recipe(base: str, change: dict[str, Any]) -> str:
    """Return the YAML of a recipe that extends `base` with these settings."""
    import yaml

    nested: dict[str, Any] = {}
    for key, value in change.items():
        *sections, last = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    head = f"# {base} as mapped by `hybridflow plan --auto`.\ndefaults:\n  - {base}\n  - _self_\n\n"
    return head + yaml.safe_dump(nested, sort_keys=False)
