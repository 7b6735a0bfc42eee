"""The placements that the HybridFlow paper compares (arXiv 2409.19256, section 8.3, figures 12 and 13), as the planner
predicts them: which is fastest for which models on how many A100.

`make bench NAME=hybridflow_placements` prints the tables of docs/planning.md. Predictions, not times: they are the same
on any machine. The settings are the paper's: PPO, 1,024 prompts and as many responses of 1,024 tokens each, 8 updates,
old log-probs that come with the responses (its preparation stage has passes of critic, reference and reward model
alone), nothing offloaded, gradients reduced after the backward pass (the default of verl, its public code), pipeline
stages of equally many layers (Megatron had no others), the actor generating on its own devices with the memory that is
left for the KV cache, and equally large sets of models on halves of the devices where they are split. The first table
has the planner's network of A100 and its layouts, the second the paper's: 200 Gb/s between machines, and the parallel
sizes of its figure 14.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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

TOKENS, PROMPTS, UPDATES, MICRO_TOKENS = 1024, 1024, 8, 4096
MEMORY_FRACTIONS = (0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.1)  # what may be left for an engine
MODELS = ("actor", "rollout", "reference", "critic", "reward_model")
PLACEMENTS: Mapping[str, Sequence[Sequence[str]]] = {
    "colocate": (MODELS,),
    "split": (("actor", "rollout", "reference"), ("critic", "reward_model")),
    "standalone": (("actor", "rollout"), ("reference",), ("critic",), ("reward_model",)),
}
# what the paper's own search finds for a 13B actor and a 70B critic on 128 devices
APART = {("actor", "rollout", "reference", "reward_model"), ("critic",)}
# hidden size, width of the MLP, layers, heads, key-value heads of Llama (34B: Code Llama, 70B: Llama 2)
LLAMA = {
    "7B": (4096, 11008, 32, 32, 32),
    "13B": (5120, 13824, 40, 40, 40),
    "34B": (8192, 22016, 48, 64, 8),
    "70B": (8192, 28672, 80, 64, 8),
}
# figure 14: tensor and pipeline ranks in training, tensor ranks in generation
SIZES = {"7B": (8, 1, 2), "13B": (8, 1, 4), "34B": (8, 4, 8), "70B": (8, 8, 8)}


@dataclass(frozen=True)
class Setting:
    """Models and devices, and which placement the paper's text calls the fastest; None: it says nothing."""

    actor: str
    critic: str
    devices: int
    paper: str | None


SETTINGS = (
    *(Setting("7B", "7B", devices, None) for devices in (16, 32, 64, 96, 128)),
    *(Setting("13B", "13B", devices, "colocate") for devices in (16, 32, 64)),
    *(Setting("13B", "13B", 96, "split"), Setting("13B", "13B", 128, "standalone")),
    *(Setting("34B", "34B", devices, "colocate") for devices in (32, 64)),
    *(Setting("34B", "34B", devices, "split") for devices in (96, 128)),
    *(Setting("70B", "70B", devices, None) for devices in (64, 96, 128)),
    *(Setting("13B", "70B", devices, "colocate") for devices in (32, 64)),
    *(Setting("13B", "70B", 96, "split"), Setting("13B", "70B", 128, "critic apart")),
)
STATED = tuple(setting for setting in SETTINGS if setting.paper is not None)


class EnginesInWhatIsLeft(Search):
    """Engines that take a larger or a smaller share of a device. Ranks need not share a mini-batch equally: the paper's
    sizes on 96 devices make 12 replicas of 13B for 128 samples."""

    def __init__(self, job: Job, memory: float, engine_ranks: int) -> None:
        super().__init__(job, memory, engine_ranks, divides=False)

    def _role_options(self, role: RolePlan, size: int) -> Iterator[Option]:
        layers = role.training.decoder.num_layers
        yield from (one for one in super()._role_options(role, size) if layers % one.layout.pipeline == 0)

    def _engine_options(self, size: int) -> Iterator[Option]:
        for fraction in MEMORY_FRACTIONS:
            engine = replace(self.job.engine, memory_fraction=fraction)
            yield from Search(replace(self.job, engine=engine), self.memory, self.engine_ranks)._engine_options(size)


class PapersSizes(EnginesInWhatIsLeft):
    """Layouts of the paper's figure 14, for training models only where the number of devices allows them; else their
    tensor ranks with any pipeline."""

    def __init__(self, setting: Setting, job: Job, memory: float, engine_ranks: int) -> None:
        super().__init__(job, memory, engine_ranks)
        self.setting = setting

    def _engine_options(self, size: int) -> Iterator[Option]:
        wanted = SIZES[self.setting.actor][2]
        yield from (one for one in super()._engine_options(size) if one.layout.engine.shape.tensor == wanted)

    def _role_options(self, role: RolePlan, size: int) -> Iterator[Option]:
        model = self.setting.actor if role.name in ("actor", "reference") else self.setting.critic
        tensor, pipeline, _ = SIZES[model]
        found = [one for one in super()._role_options(role, size) if one.layout.tensor == tensor]
        yield from [one for one in found if one.layout.pipeline == pipeline] or found


def job_of(setting: Setting, is_papers: bool = False, scored: float = 0.0) -> Job:
    """The paper's run of this size; `is_papers`: with the paper's network; `scored`: share of the samples whose old
    log-probs are computed in a pass of the actor."""
    device, offload = DEVICES["A100"], OffloadConfig(weights=False, gradients=False, optimizer=False)
    if is_papers:
        device = replace(device, network_gbs=25 / device.devices_per_node)

    def role(name: str, size: str) -> RolePlan:
        training = Training(
            decoder_of(sizes_of(size)), Cut(setting.devices), device, scalar_head=name in ("critic", "reward_model")
        )
        updates = UPDATES if name in ("actor", "critic") else 0
        read = scored if name == "actor" else 1.0
        return RolePlan(name, training, MICRO_TOKENS, updates, 1, offload, False, read)

    actors, critics = (("actor", "reference"), ("critic", "reward_model"))
    return Job(
        roles=(*(role(name, setting.actor) for name in actors), *(role(name, setting.critic) for name in critics)),
        engine=Engine(decoder_of(sizes_of(setting.actor)), EngineShape(1), device),
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


def sizes_of(size: str) -> dict[str, object]:
    """The config of a Llama."""
    hidden, width, layers, heads, groups = LLAMA[size]
    return {
        "model_type": "llama",
        **{"vocab_size": 32000, "hidden_size": hidden, "intermediate_size": width, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": groups},
    }


@functools.cache
def mapped(setting: Setting, is_papers: bool = False, scored: float = 0.0) -> dict[str, Mapped | None]:
    """The best mapping of each placement, and of all placements in which the actor generates; `is_papers`: with the
    paper's network and parallel sizes; `scored` as for `job_of`."""
    job = job_of(setting, is_papers, scored)
    reserve = (2 * FITTED.process_gb + 5 * FITTED.group_gb) * 1e9
    memory = (job.machines.device.memory_gb * 1e9 - reserve) / FITTED.fragmentation
    found = PapersSizes(setting, job, memory, 8) if is_papers else EnginesInWhatIsLeft(job, memory, 8)
    problem = Problem(MODELS, setting.devices, found.sizes, memory, lambda model, size: found.options(1.0, model, size))
    every = [
        [[*pool, *(["rollout"] if "actor" in pool else [])] for pool in partition]
        for partition in partitions([name for name in MODELS if name != "rollout"])
    ]
    best = {name: search(problem, [pools]) for name, pools in PLACEMENTS.items()} | {"any": search(problem, every)}
    if setting.actor == setting.critic:
        best["split"] = search(replace(problem, sizes=(setting.devices // 2,)), [PLACEMENTS["split"]])
    return best


def fastest(found: Mapping[str, Mapped | None]) -> str:
    """Which of the paper's three placements has the shortest step."""
    return min((one.seconds, name) for name, one in found.items() if one is not None and name in PLACEMENTS)[1]


def agrees(setting: Setting, is_papers: bool = False, scored: float = 0.0) -> bool:
    """Whether the placement that the paper states is the one found: the fastest of three, or of all where the paper
    tells what its search finds."""
    found = mapped(setting, is_papers, scored)
    if setting.paper in PLACEMENTS:
        return fastest(found) == setting.paper
    best = found["any"]
    return best is not None and {frozenset(name for name, _ in pool) for pool in best.pools} == set(
        map(frozenset, APART)
    )


def described(found: Mapped | None) -> str:
    """Seconds of a mapping, and its pools where there are several, in short."""
    if found is None:
        return "does not fit"
    short = {"actor": "A", "reference": "Ref", "critic": "C", "reward_model": "RM"}
    pools = [
        f"{' '.join(short[name] for name in short if name in dict(pool))} {size}"
        for pool, size in zip(found.pools, found.devices, strict=True)
    ]
    return f"{found.seconds:.0f} s" + (f" ({' / '.join(pools)})" if len(pools) > 1 else "")


def table(settings: Sequence[Setting] = SETTINGS, is_papers: bool = False) -> str:
    """The settings as Markdown: seconds of a step, the fastest placement and the paper's."""
    head = ("actor, critic", "A100", *PLACEMENTS, "fastest of all", "fastest of three", "paper")
    rows = []
    for setting in settings:
        found = mapped(setting, is_papers)
        seconds = ["does not fit" if one is None else f"{one.seconds:.0f} s" for one in map(found.get, PLACEMENTS)]
        said = setting.paper or "-"
        rows.append((
            f"{setting.actor}, {setting.critic}", str(setting.devices), *seconds, described(found["any"]),
            fastest(found), said if said == "-" or agrees(setting, is_papers) else f"{said} (differs)",
        ))  # fmt: skip
    return markdown(head, rows)


if __name__ == "__main__":
    print(table())
    print()
    print(table(STATED, is_papers=True))
