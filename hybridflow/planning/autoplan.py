"""Auto-mapping of a configuration: the options of its models from the planner, the best mapping as
settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.planning.advice import refused, with_values
from hybridflow.planning.automap import Mapped, Option, Problem, search
from hybridflow.planning.devices import Machines
from hybridflow.planning.generation import Engine
from hybridflow.planning.job import Job, RolePlan, job_of
from hybridflow.planning.plan import PACKED, make_plan
from hybridflow.planning.sizes import layer_shapes
from hybridflow.planning.training import Cut, Training
from hybridflow.reshard.engine_layouts import EngineShape

# by which a search counts more than the memory of training roles
_MARGINS = (1.0, 1.1, 1.25, 1.5, 2.0)
# generations that differ by less are equally long as far as the model can tell: the published one
# is 28% off
_ABOUT = 1.15
_SEVERAL = 4  # engines of which one may end without most of a generation
_TENSOR = (1, 2, 4, 8)
_PIPELINE = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
_EXPERT = (1, 2, 4, 8, 16, 32, 64, 128)

# keys of a layout that a mapping chooses
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
    """The options of the models of a job on any number of devices.

    Attributes:
        memory: bytes of a device. engine_ranks: what an engine may have.
        divides: leave out layouts whose data-parallel ranks cannot share a mini-batch equally; the
            trainer refuses them.
    """

    job: Job
    memory: float
    engine_ranks: int
    divides: bool = True
    _known: dict[tuple[str, int], list[Option]] = field(default_factory=dict)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Devices that a pool may have: parts of a node, then whole nodes in numbers that layouts
        can divide."""
        total = self.job.machines.devices
        node = self.job.machines.devices_per_node
        parts = [size for size in (1, 2, 4) if size < node]
        most = total // node
        nodes = sorted(
            {b << p for b in (1, 3, 5, 7) for p in range(most.bit_length()) if b << p <= most}
            | {most}
        )
        return (*parts, *(number * node for number in nodes if number))

    def options(self, margin: float, model: str, size: int) -> Sequence[Option]:
        """Ways to run a model on `size` devices; `margin` times what a training role takes
        counts."""
        role = self.job.role(model)
        if (model, size) not in self._known:
            found = self._engine_options(size) if role is None else self._role_options(role, size)
            self._known[model, size] = list(found)
        known = self._known[model, size]
        if role is None or margin == 1:
            return known
        options = []
        for option in known:
            options.append(
                replace(option, held=margin * option.held, working=margin * option.working)
            )
        return options

    def _engine_options(self, size: int) -> Iterator[Option]:
        """Engines of all numbers of ranks, but larger ones than are needed for a generation about
        as short as any."""
        found = list(self._all_engines(size))
        shortest = min((option.seconds[0] for option in found), default=0.0)
        near = [option for option in found if option.seconds[0] <= _ABOUT * shortest]
        several = [option for option in near if option.layout.count >= _SEVERAL] or near[:1]
        chosen = min(several, key=lambda option: option.seconds[0], default=None)
        for option in found:
            is_larger = chosen is not None and option.layout.count < chosen.layout.count
            if (
                chosen is None
                or not is_larger
                or option.held + option.working < chosen.held + chosen.working
            ):
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
            seconds = engine.seconds(
                job.samples / count, job.prompts / count, job.prompt_tokens, job.lengths
            )
            # asleep, an engine keeps nothing
            working = engine.weights + engine.kv_bytes + engine.graphs()
            held = 0.0 if job.sleeps else working
            yield Option(
                size,
                held,
                0.0 if held else working,
                (seconds, 0.0, 0.0, 0.0),
                EngineChoice(engine, count),
            )

    def _engines_of(self, ranks: int, size: int) -> int:
        """Engines of so many ranks on `size` devices: each lies on one node, or on whole nodes; 0
        where none does."""
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
            prepared = trained = 0.0
            if role.scored:
                prepared = training.pass_seconds(
                    role.micro_tokens, count * role.scored, length, backward=False
                )
            if role.updates:
                each = count * role.passes / role.updates
                trained = role.updates * training.update_seconds(role.micro_tokens, each, length)
            seconds = (
                (0.0, prepared, trained, 0.0)
                if role.name == "actor"
                else (0.0, prepared, 0.0, trained)
            )
            yield Option(size, held, working, seconds, cut)

    @cached_property
    def _tokens(self) -> float:
        return self.job.samples * self.job.mean_tokens

    def _memory(self, role: RolePlan, training: Training, count: float) -> tuple[float, float]:
        """(held all the time, more while it computes) on the stage with most."""
        held = working = 0.0
        for stage in range(training.cut.pipeline):
            parts = {"weights": training.weights(stage)}
            compute = training.forward_activations(stage, role.micro_tokens)
            if role.updates:
                parts |= {
                    "gradients": training.gradients(stage),
                    "optimizer": training.optimizer(stage),
                }
                compute = training.activations(stage, role.micro_tokens, max(int(count), 1))
            stays = sum(size for part, size in parts.items() if not getattr(role.offload, part))
            more = sum(parts.values()) - stays + compute
            if stays + more > held + working:
                held = stays
                working = more
        return held, working


@dataclass(frozen=True)
class EngineChoice:
    """Engines of one shape."""

    engine: Engine
    count: int


def cuts(training: Training, size: int) -> Iterator[Cut]:
    """The legal layouts of a role on `size` devices."""
    experts = max(layer.experts for layer in layer_shapes(training.decoder))
    for tensor in _TENSOR:
        for pipeline in _PIPELINE:
            for expert in _EXPERT if experts else (1,):
                if size % (tensor * pipeline) or size % (expert * pipeline):
                    continue
                sequence = tensor > 1
                first, last = end_stages(training.decoder.num_layers, pipeline)
                cut = Cut(
                    size,
                    tensor,
                    pipeline,
                    expert=expert,
                    sequence=sequence,
                    first_stage_layers=first,
                    last_stage_layers=last,
                )
                try:
                    training.decoder.check(cut.place())
                except HybridFlowError:
                    continue
                yield cut


def end_stages(layers: int, pipeline: int) -> tuple[int, int]:
    """Layers of the first and of the last stage that leave the others equal numbers; 0: as many as
    the others. The ends, which hold embedding and output layer, have as many as the others or
    fewer."""
    if layers % pipeline == 0:
        return 0, 0
    most = -(-layers // pipeline)
    if pipeline == 2:
        return most, 0
    fewer = most * pipeline - layers
    return max(most - fewer // 2, 0), max(most - (fewer - fewer // 2), 0)


def auto(
    config: RunConfig, machines: Machines, assumed: Any, hf: Any, overlaps: bool
) -> tuple[dict[str, Any], Mapped]:
    """(settings of the shortest step, the mapping).

    Args:
        overlaps: whether generation may run beside training where it has devices of its own.

    Raises:
        ConfigError: nothing fits the cluster.
    """
    job = job_of(config, machines, assumed, hf)
    # contexts alone: what else a process holds, and other models of its pool, the whole plan counts
    reserve = 2 * job.constants.process_gb * 1e9 * machines.is_gpu
    models = ("rollout", *(role.name for role in job.roles))
    memory = (machines.device.memory_gb * 1e9 - reserve) / job.constants.fragmentation
    # the search counts a pool's models by themselves; what a phase holds of the others beside, the
    # whole plan says
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
    nearest = f" The nearest: {'; '.join(why)}." if why else ""
    raise ConfigError(
        f"no mapping of {', '.join(models)} onto {machines.devices} {machines.name} fits; give "
        f"more devices, offload more, or choose actor.recompute=full.{nearest}"
    )


def settings(config: RunConfig, mapped: Mapped, machines: Machines) -> dict[str, Any]:
    """The mapping as settings of the configuration."""
    change: dict[str, Any] = {}
    for pool, devices in zip(mapped.pools, mapped.devices, strict=True):
        names = [name for name, _ in pool]
        owner = (
            "actor"
            if "actor" in names
            else next((name for name in names if name != "rollout"), "rollout")
        )
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
                    # in the policy's processes it followed these
                    change[f"{name}.offload.weights"] = config.actor.offload.weights
    return _simplified(config, change)


def _layout(name: str, cut: Cut) -> dict[str, Any]:
    return {f"{name}.parallel.{key}": getattr(cut, key) for key in _LAYOUT}


def _simplified(config: RunConfig, change: dict[str, Any]) -> dict[str, Any]:
    """A role in the actor's pool and layout lives in its processes."""
    for name in ("critic", "reference", "reward_model"):
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
    """A recipe that is `base` with these settings."""
    import yaml

    nested: dict[str, Any] = {}
    for key, value in change.items():
        *sections, last = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    head = f"# {base} as `hybridflow plan --auto` maps it.\ndefaults:\n  - {base}\n  - _self_\n\n"
    return head + yaml.safe_dump(nested, sort_keys=False)
