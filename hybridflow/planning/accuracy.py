"""Comparison of the planner's predictions with published runs. Inaccurate predictions are
included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from hybridflow.config.schema import OffloadConfig
from hybridflow.models.published import published
from hybridflow.planning.devices import DEVICES, Machines
from hybridflow.planning.generation import Engine, Lengths
from hybridflow.planning.job import Job, RolePlan
from hybridflow.planning.plan import Plan, make_plan, sync_seconds
from hybridflow.planning.published_points import POINTS, RL_POINTS, SYNC_POINTS, Point, RlPoint
from hybridflow.planning.sizes import decoder_of
from hybridflow.planning.table import markdown
from hybridflow.planning.training import Training
from hybridflow.reshard.engine_layouts import EngineShape

# largest accepted relative error per kind of quantity
STATIC = "weights and optimizer"
MEMORY = "memory"
TIME = "time"
BOUNDS = {STATIC: 0.15, MEMORY: 0.25, TIME: 0.30}


@dataclass(frozen=True)
class Row:
    """A published figure and the planner's prediction for it."""

    run: str
    quantity: str
    kind: str
    unit: str
    published: float
    planned: float
    source: str

    @property
    def error(self) -> float:
        """Relative error of the prediction; positive if it is too high."""
        return self.planned / self.published - 1

    @property
    def is_within(self) -> bool:
        """True if the error is within the bound for its kind."""
        return abs(self.error) <= BOUNDS[self.kind]


def rows() -> list[Row]:
    """Return one comparison per published figure."""
    found: list[Row] = []
    for point in POINTS:
        found.extend(_training_rows(point))
    for rl in RL_POINTS:
        found.extend(_rl_rows(rl))
    for name, device, nbytes, sends_slices, seconds, source in SYNC_POINTS:
        planned = sync_seconds(nbytes, DEVICES[device], sends_slices)
        found.append(Row(name, "weight sync", TIME, "s", seconds, planned, source))
    return found


def _training_rows(point: Point) -> Iterator[Row]:
    training = point.training()
    pipeline = training.cut.pipeline
    stages = range(pipeline) if point.stage is None else [point.stage % pipeline]
    tokens = point.sequence * point.micro
    count = max(point.sequences // (training.cut.data * point.micro), 1)
    stage = stages[0]
    most = max(training.static(s) + training.activations(s, tokens, count) for s in stages)
    # the published anatomy counts every layer once, as with a single micro-batch in flight
    kept = 0.0
    for layer, number in chain.from_iterable(training.layers):
        kept += number * training.layer_activations(layer, tokens)
    weights = training.weights(stage) + training.gradients(stage)
    optimizer = training.optimizer(stage)
    static = training.static(stage)
    sizes: tuple[tuple[str, str, float | None, float], ...] = (
        ("weights and gradients", STATIC, point.weights_gradients_gb, weights),
        ("optimizer", STATIC, point.optimizer_gb, optimizer),
        ("weights, gradients, optimizer", STATIC, point.static_gb, static),
        ("activations of all layers", MEMORY, point.activations_gb, kept),
        ("peak allocated", MEMORY, point.total_gb, most),
    )
    for quantity, kind, figure, nbytes in sizes:
        if figure is not None:
            yield Row(point.name, quantity, kind, "GB", figure, nbytes / 1e9, point.source)
    if point.step_s is not None:
        seconds = training.update_seconds(tokens, count, point.sequence)
        yield Row(point.name, "step", TIME, "s", point.step_s, seconds, point.source)


def _rl_rows(point: RlPoint) -> Iterator[Row]:
    plan = rl_plan(point)
    found = {phase.name: phase.seconds for phase in plan.phases} | {"step": plan.seconds}
    for quantity, seconds in point.seconds.items():
        yield Row(point.name, quantity, TIME, "s", seconds, found[quantity], point.source)


def rl_plan(point: RlPoint) -> Plan:
    """Plan the reinforcement-learning step of a published run."""
    decoder = decoder_of(published(point.model))
    device = DEVICES[point.device]
    training = Training(decoder, point.cut, device, practice=point.practice)
    offload = OffloadConfig(weights=True, gradients=True, optimizer=True)
    actor = RolePlan("actor", training, point.micro_tokens, point.updates, 1, offload, False)
    reference = RolePlan("reference", training, point.micro_tokens, 0, 0, offload, True)
    shape = EngineShape(tensor=point.engine_tensor)
    engine = Engine(decoder, shape, device, memory_fraction=point.memory_fraction)
    devices = point.cut.ranks
    job = Job(
        roles=(actor, reference) if point.with_reference else (actor,),
        engine=engine,
        engines=devices // point.engine_tensor,
        engine_pool="actor",
        sleeps=True,
        prompts=point.prompts,
        samples=point.prompts * point.n,
        prompt_tokens=point.prompt,
        lengths=Lengths(point.response, point.longest),
        machines=Machines(point.device, device, devices // 8, 8),
        staging_bytes=1 << 30,
        is_staged=False,
        sends_slices=False,
        save_every=0,
    )
    return make_plan(job)


def table() -> str:
    """Format all rows as a Markdown table, followed by the number of rows within bounds for each
    kind."""
    found = rows()
    head = ("run", "quantity", "published", "planned", "error", "source")
    cells = []
    for row in found:
        figure = f"{row.published:,.1f} {row.unit}"
        planned = f"{row.planned:,.1f} {row.unit}"
        error = f"{100 * row.error:+.0f}%"
        if not row.is_within:
            error += " (outside)"
        cells.append((row.run, row.quantity, figure, planned, error, row.source))
    counts = []
    for kind, bound in BOUNDS.items():
        within = [row.is_within for row in found if row.kind == kind]
        counts.append(f"{kind} within {100 * bound:.0f}%: {sum(within)} of {len(within)}")
    summary = ", ".join(counts)
    return f"{markdown(head, cells)}\n\n{summary}."
