"""The placements of the HybridFlow paper (arXiv 2409.19256, section 8.3), as the planner predicts
them. `python -m tests.unit.planning.placements` prints the tables of docs/planning.md.

Predictions, not times: they are the same on any machine. The settings are the paper's: PPO, 1,024
prompts and as many responses of 1,024 tokens each, 8 updates, old log-probs that come with the
responses (its preparation stage has passes of critic, reference and reward model alone), nothing
offloaded, gradients reduced after the backward pass (the default of verl, its public code),
pipeline stages of equally many layers (Megatron had no others), the actor generating on its own
devices with the memory that is left for the KV cache, and equally large sets of models on halves of
the devices where they are split. The first table has the planner's network of A100 and its layouts,
the second the paper's: 200 Gb/s between machines, and the parallel sizes of its figure 14.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.support.published import PUBLISHED
from hybridflow.config.schema import OffloadConfig
from hybridflow.planning.automap import Mapped, Option, Problem, partitions, search
from hybridflow.planning.autoplan import Search
from hybridflow.planning.constants import FITTED
from hybridflow.planning.devices import DEVICES, Machines
from hybridflow.planning.generation import Engine, Lengths
from hybridflow.planning.job import Job, RolePlan
from hybridflow.planning.sizes import decoder_of
from hybridflow.planning.table import markdown
from hybridflow.planning.training import Cut, Training
from hybridflow.reshard.engine_layouts import EngineShape

TOKENS = 1024
PROMPTS = 1024
UPDATES = 8
MICRO_TOKENS = 4096
MEMORY_FRACTIONS = (0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.1)  # what may be left for an engine
MODELS = ("actor", "rollout", "reference", "critic", "reward_model")
SHORT = {"actor": "A", "reference": "Ref", "critic": "C", "reward_model": "RM"}
PLACEMENTS: Mapping[str, Sequence[Sequence[str]]] = {
    "colocate": (MODELS,),
    "split": (("actor", "rollout", "reference"), ("critic", "reward_model")),
    "standalone": (("actor", "rollout"), ("reference",), ("critic",), ("reward_model",)),
}
# the result of the paper's own search for a 13B actor and a 70B critic on 128 devices
APART = {frozenset({"actor", "rollout", "reference", "reward_model"}), frozenset({"critic"})}
PAPER = PUBLISHED["placements"]


@dataclass(frozen=True)
class Setting:
    """Models, devices, and the placement that the paper's text calls the fastest, if it names
    one."""

    actor: str
    critic: str
    devices: int
    paper: str | None


SETTINGS = tuple(
    Setting(actor, critic, devices, paper)
    for actor, critic, by_devices in PAPER["fastest"]
    for devices, paper in by_devices.items()
)
STATED = tuple(setting for setting in SETTINGS if setting.paper is not None)


class EnginesInWhatIsLeft(Search):
    """A search over engines of several memory shares and, if `sizes` is given, of one parallel
    size.

    Ranks need not share a mini-batch equally: the paper's sizes on 96 devices make 12 replicas of
    13B for 128 samples. `sizes` has each model's ranks of the paper's figure 14; a training model
    takes another pipeline only where the number of devices does not allow the paper's.
    """

    def __init__(self, job: Job, memory: float, sizes: Mapping[str, Sequence[int]] | None) -> None:
        super().__init__(job, memory, 8, divides=False)
        self.figure_14 = sizes

    def _role_options(self, role: RolePlan, size: int) -> Iterator[Option]:
        layers = role.training.decoder.num_layers
        options = super()._role_options(role, size)
        found = [one for one in options if layers % one.layout.pipeline == 0]
        if self.figure_14:
            tensor, pipeline, _ = self.figure_14[role.name]
            found = [one for one in found if one.layout.tensor == tensor]
            found = [one for one in found if one.layout.pipeline == pipeline] or found
        yield from found

    def _engine_options(self, size: int) -> Iterator[Option]:
        for fraction in MEMORY_FRACTIONS:
            engine = replace(self.job.engine, memory_fraction=fraction)
            plain = Search(replace(self.job, engine=engine), self.memory, self.engine_ranks)
            for one in plain._engine_options(size):
                tensor = one.layout.engine.shape.tensor
                if not self.figure_14 or tensor == self.figure_14["actor"][2]:
                    yield one


def _size_of(setting: Setting, role: str) -> str:
    return setting.actor if role in ("actor", "reference") else setting.critic


def _job(setting: Setting, is_papers: bool, scored: float) -> Job:
    device = DEVICES["A100"]
    if is_papers:
        device = replace(device, network_gbs=25 / device.devices_per_node)
    offload = OffloadConfig(weights=False, gradients=False, optimizer=False)

    def decoder(size: str) -> object:
        return decoder_of({"model_type": "llama", "vocab_size": 32000, **PAPER["models"][size]})

    def role(name: str) -> RolePlan:
        scalar = name in ("critic", "reward_model")
        model = decoder(_size_of(setting, name))
        training = Training(model, Cut(setting.devices), device, scalar_head=scalar)
        updates = UPDATES if name in ("actor", "critic") else 0
        read = scored if name == "actor" else 1.0
        return RolePlan(name, training, MICRO_TOKENS, updates, 1, offload, False, read)

    return Job(
        roles=tuple(map(role, ("actor", "reference", "critic", "reward_model"))),
        engine=Engine(decoder(setting.actor), EngineShape(1), device),
        engines=setting.devices,
        engine_pool="actor",
        sleeps=True,
        prompts=PROMPTS,
        samples=PROMPTS,
        prompt_tokens=TOKENS,
        lengths=Lengths(TOKENS, TOKENS),
        machines=Machines("A100", device, setting.devices // 8, 8),
        staging_bytes=1 << 30,
        is_staged=False,
        sends_slices=False,
        save_every=0,
    )


@functools.cache
def mapped(
    setting: Setting, is_papers: bool = False, scored: float = 0.0
) -> dict[str, Mapped | None]:
    """Return the best mapping of each placement, and as "any" of all in which the actor generates.

    Args:
        setting: models and devices.
        is_papers: with the paper's network and parallel sizes.
        scored: share of the samples whose old log-probs are computed in a pass of the actor.
    """
    job = _job(setting, is_papers, scored)
    reserve = (2 * FITTED.process_gb + 5 * FITTED.group_gb) * 1e9
    memory = (job.machines.device.memory_gb * 1e9 - reserve) / FITTED.fragmentation
    sizes = {role.name: PAPER["sizes"][_size_of(setting, role.name)] for role in job.roles}
    found = EnginesInWhatIsLeft(job, memory, sizes if is_papers else None)
    problem = Problem(
        MODELS,
        setting.devices,
        found.sizes,
        memory,
        lambda model, size: found.options(1.0, model, size),
    )
    every = []
    for partition in partitions([name for name in MODELS if name != "rollout"]):
        every.append([[*pool, *["rollout"] * ("actor" in pool)] for pool in partition])
    best = {name: search(problem, [pools]) for name, pools in PLACEMENTS.items()}
    best["any"] = search(problem, every)
    if setting.actor == setting.critic:
        halves = replace(problem, sizes=(setting.devices // 2,))
        best["split"] = search(halves, [PLACEMENTS["split"]])
    return best


def fastest(found: Mapping[str, Mapped | None]) -> str:
    """Return the one of the paper's three placements with the shortest step."""
    seconds = {name: one.seconds for name in PLACEMENTS if (one := found[name])}
    return min(seconds, key=lambda name: (seconds[name], name))


def agrees(setting: Setting, is_papers: bool = False, scored: float = 0.0) -> bool:
    """Return whether the paper's placement is found: the fastest of three, or its search's
    result."""
    found = mapped(setting, is_papers, scored)
    if setting.paper in PLACEMENTS:
        return fastest(found) == setting.paper
    best = found["any"]
    return best is not None and {frozenset(dict(pool)) for pool in best.pools} == APART


def _described(found: Mapped | None) -> str:
    """Return the seconds of a mapping, and its pools if there are several."""
    if found is None:
        return "does not fit"
    pools = []
    for pool, size in zip(found.pools, found.devices, strict=True):
        names = " ".join(SHORT[name] for name in SHORT if name in dict(pool))
        pools.append(f"{names} {size}")
    return f"{found.seconds:.0f} s" + (f" ({' / '.join(pools)})" if len(pools) > 1 else "")


def table(settings: Sequence[Setting] = SETTINGS, is_papers: bool = False) -> str:
    """Return the settings as Markdown: seconds of a step, the fastest placement and the paper's."""
    head = ("actor, critic", "A100", *PLACEMENTS, "fastest of all", "fastest of three", "paper")
    rows = []
    for setting in settings:
        found = mapped(setting, is_papers)
        differs = setting.paper and not agrees(setting, is_papers)
        three = [found[name] for name in PLACEMENTS]
        rows.append(
            (
                f"{setting.actor}, {setting.critic}",
                str(setting.devices),
                *("does not fit" if one is None else f"{one.seconds:.0f} s" for one in three),
                _described(found["any"]),
                fastest(found),
                (setting.paper or "-") + (" (differs)" if differs else ""),
            )
        )
    return markdown(head, rows)


if __name__ == "__main__":
    print(table())
    print()
    print(table(STATED, is_papers=True))
