"""Dispatch of worker methods: `@register` declares how arguments are distributed to the ranks of a
group and how results are collected.

A worker module imports this module but not the controller, so the same class also runs under
`torchrun` or in a plain test. `plan_call` converts a method and its arguments to one call per rank;
`single_controller` executes it. This module imports neither Ray nor torch.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from hybridflow.batch import DataProto
from hybridflow.errors import HybridFlowError, SchemaError

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "__hybridflow_method__"
# key in a chunk's meta: number of padding rows (repeated rows) at its end
PADDING_META = "dp_padding_rows"


class MeshError(HybridFlowError):
    """Raised if the ranks do not form complete data-parallel groups with one collecting rank
    each.
    """


class Dispatch(enum.Enum):
    """The built-in dispatch modes: how the arguments of a call are distributed to the ranks and how
    its results are collected.
    """

    ONE_TO_ALL = "one_to_all"  # every rank gets the same arguments; returns a list of results
    # every argument is a list with one value per rank; returns a list of results
    ALL_TO_ALL = "all_to_all"
    RANK_ZERO = "rank_zero"  # only rank 0 is called; returns its result
    DP = "dp"  # DataProto arguments are split over the data-parallel groups; returns one DataProto
    # split as in DP; returns a list of the collecting ranks' results, by data-parallel rank
    DP_METRIC = "dp_metric"


class Execute(enum.Enum):
    """The ranks that run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class MeshPosition:
    """The position of a rank: its data-parallel group, the number of groups, and whether it returns
    the group's result."""

    dp_rank: int
    dp_size: int
    collects: bool


@dataclass(frozen=True)
class WorkerContext:
    """The first argument of a worker's constructor: `cls(context, *args)`. `log_path` receives the
    worker's stdout and stderr; servers that it starts listen on `ports`. `neighbours` are the
    workers that share its process, by role, as soon as each has been constructed."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    node: str
    log_path: Path
    ports: range = range(20000, 32500)
    neighbours: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Mesh:
    """The validated positions of all ranks of a group.

    Raises:
        MeshError: the sizes disagree, or a data-parallel group has no ranks or does not have
            exactly one collecting rank.
    """

    positions: tuple[MeshPosition, ...]

    def __post_init__(self) -> None:
        if not self.positions:
            raise MeshError("a mesh requires at least one rank")
        sizes = {position.dp_size for position in self.positions}
        if len(sizes) != 1 or min(sizes) < 1:
            raise MeshError(f"ranks disagree on the data-parallel size: {sorted(sizes)}")
        present = {position.dp_rank for position in self.positions}
        missing = set(range(self.dp_size)) - present
        outside = present - set(range(self.dp_size))
        if missing or outside:
            wrong = [f"missing data-parallel ranks {sorted(missing)}"] * bool(missing)
            wrong += [
                f"data-parallel ranks {sorted(outside)} outside 0..{self.dp_size - 1}"
            ] * bool(outside)
            raise MeshError("the mesh does not cover the group: " + ", ".join(wrong))
        collectors = Counter(position.dp_rank for position in self.positions if position.collects)
        bad = {dp: collectors[dp] for dp in range(self.dp_size) if collectors[dp] != 1}
        if bad:
            found = ", ".join(f"{n} in group {dp}" for dp, n in bad.items())
            raise MeshError(
                f"each data-parallel group must have exactly one collecting rank, got {found}"
            )

    @property
    def dp_size(self) -> int:
        """Number of data-parallel groups."""
        return self.positions[0].dp_size

    def of(self, ranks: Sequence[int]) -> Mesh:
        """Return the mesh that consists of only these ranks, renumbered from 0 in the given order.

        Raises:
            MeshError: only some of the ranks in a data-parallel group are given.
        """
        groups = sorted({self.positions[rank].dp_rank for rank in ranks})
        if not ranks:
            raise MeshError("a call requires at least one rank")
        others = {
            position.dp_rank for rank, position in enumerate(self.positions) if rank not in ranks
        }
        if cut := sorted(others.intersection(groups)):
            raise MeshError(f"ranks {list(ranks)} cover data-parallel groups {cut} only partly")
        chosen = []
        for rank in ranks:
            position = self.positions[rank]
            chosen.append(
                MeshPosition(groups.index(position.dp_rank), len(groups), position.collects)
            )
        return Mesh(tuple(chosen))

    @property
    def collectors(self) -> tuple[int, ...]:
        """The collecting rank of each data-parallel group, in order of data-parallel rank."""
        by_dp = {
            position.dp_rank: rank
            for rank, position in enumerate(self.positions)
            if position.collects
        }
        return tuple(by_dp[dp] for dp in range(self.dp_size))


@dataclass(frozen=True)
class RankCall:
    """The arguments for one rank. Ranks that receive the same batch share one object, so that it is
    sent only once."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class CallPlan:
    """One call to a group: the per-rank calls (absent ranks do not run), and the function that
    combines their results into one value."""

    calls: Mapping[int, RankCall]
    collect: Callable[[Mapping[int, Any]], Any]

    def on(self, ranks: Sequence[int]) -> CallPlan:
        """Return the same call with rank i replaced by rank `ranks[i]`."""
        calls = {ranks[i]: call for i, call in self.calls.items()}
        place = {rank: i for i, rank in enumerate(ranks)}
        return CallPlan(
            calls,
            lambda results: self.collect({place[rank]: value for rank, value in results.items()}),
        )


@dataclass(frozen=True)
class CustomDispatch:
    """A custom dispatch mode, for methods that no mode in `Dispatch` fits. Created by
    `custom_dispatch`.

    `split(world_size, mesh, args, kwargs)` returns the call for each rank, and `collect(mesh,
    results by rank)` returns the value of the whole call. `mesh` is None unless `needs_mesh` is
    set.
    """

    name: str
    split: Callable[[int, Mesh | None, tuple[Any, ...], Mapping[str, Any]], Mapping[int, RankCall]]
    collect: Callable[[Mesh | None, Mapping[int, Any]], Any]
    needs_mesh: bool = True


@dataclass(frozen=True)
class MethodSpec:
    """The declaration of a method, as recorded by `@register`."""

    name: str
    dispatch: Dispatch | CustomDispatch
    execute: Execute
    blocking: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    may_read: tuple[str, ...] = ()

    @property
    def needs_mesh(self) -> bool:
        """True if a call needs the mesh positions of the ranks."""
        if isinstance(self.dispatch, CustomDispatch):
            return self.dispatch.needs_mesh
        return self.dispatch in (Dispatch.DP, Dispatch.DP_METRIC)

    def read_of(self, batch: DataProto) -> list[str]:
        """Return the columns that the method reads from the batch, including required columns that
        the batch lacks.
        """
        return [*self.reads, *(name for name in self.may_read if name in batch)]


@dataclass(frozen=True)
class DataflowStep:
    """A step in the training loop that is not a worker method, for use by `check_dataflow`."""

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


_custom: dict[str, CustomDispatch] = {}


def custom_dispatch(
    name: str,
    split: Callable[[int, Mesh | None, tuple[Any, ...], Mapping[str, Any]], Mapping[int, RankCall]],
    collect: Callable[[Mesh | None, Mapping[int, Any]], Any],
    *,
    needs_mesh: bool = True,
) -> CustomDispatch:
    """Register a custom dispatch mode for `@register`. Raises ValueError if the name is taken."""
    if name in _custom or name in {mode.value for mode in Dispatch}:
        raise ValueError(f"a dispatch named {name!r} already exists")
    _custom[name] = CustomDispatch(name, split, collect, needs_mesh)
    return _custom[name]


def register(
    dispatch: Dispatch | CustomDispatch,
    execute: Execute = Execute.ALL,
    blocking: bool = True,
    reads: Sequence[str] = (),
    writes: Sequence[str] = (),
    may_read: Sequence[str] = (),
) -> Callable[[F], F]:
    """Mark a worker method as callable on a group. The function is returned unchanged.

    Args:
        dispatch: how arguments are distributed and results are collected.
        execute: the ranks that run the method.
        blocking: if False, `WorkerGroup.run` returns a `Future` immediately.
        reads: columns that the method needs. With `DP`, only these are sent; empty sends all.
        writes: columns that the method returns. With `DP`, the result must have exactly these;
            empty skips the check. With `ONE_TO_ALL`, each rank returns a separate batch with these
            columns.
        may_read: optional columns, which the method reads if the batch contains them.

    Raises:
        ValueError: a data-parallel method is declared to run only on rank 0, or a column is
            declared twice.
    """
    if execute is Execute.RANK_ZERO and dispatch in (
        Dispatch.DP,
        Dispatch.DP_METRIC,
        Dispatch.ALL_TO_ALL,
    ):
        raise ValueError(
            f"{dispatch} distributes arguments over all ranks, so it cannot run on rank 0 only"
        )
    for columns in (reads, writes, may_read):
        if isinstance(columns, str) or len(set(columns)) != len(columns):
            raise ValueError(
                f"reads and writes must be tuples of distinct column names, got {columns!r}"
            )

    def mark(function: F) -> F:
        spec = MethodSpec(
            function.__name__,
            dispatch,
            execute,
            blocking,
            tuple(reads),
            tuple(writes),
            tuple(may_read),
        )
        setattr(function, _ATTRIBUTE, spec)
        return function

    return mark


def method_spec(function: Callable[..., Any]) -> MethodSpec:
    """Return the declaration recorded by `@register`. Raises TypeError for other functions."""
    spec = getattr(function, _ATTRIBUTE, None)
    if not isinstance(spec, MethodSpec):
        raise TypeError(
            f"{getattr(function, '__qualname__', function)!s} is not a worker method; decorate it "
            "with @register(...)"
        )
    return spec


def check_dataflow(
    steps: Iterable[Callable[..., Any] | DataflowStep], available: Iterable[str]
) -> frozenset[str]:
    """Check, before anything starts, that every column a step reads has been written by then.
    Returns the columns that exist at the end.

    Raises:
        SchemaError: a column does not exist yet. The message names the step, the column, and the
            later step that writes it, if any.
    """
    order = [step if isinstance(step, DataflowStep) else _as_step(step) for step in steps]
    known = set(available)
    for i, step in enumerate(order):
        for column in step.reads:
            if column not in known:
                later = next((s.name for s in order[i:] if column in s.writes), None)
                hint = f"; {later} writes it, but only later" if later else "; no step writes it"
                raise SchemaError(
                    f"{step.name} reads column {column!r}, which does not exist yet{hint}"
                )
        known |= set(step.writes)
    return frozenset(known)


def plan_call(
    spec: MethodSpec,
    world_size: int,
    mesh: Mesh | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> CallPlan:
    """Plan the calls to all ranks and the collection of their results.

    Raises:
        SchemaError: arguments do not match the dispatch mode, or a column is missing.
        MeshError: a data-parallel method is called on workers without mesh positions.
    """
    if spec.needs_mesh and (mesh is None or len(mesh.positions) != world_size):
        raise MeshError(
            f"{spec.name} is data-parallel: the worker class must define mesh_position() -> "
            f"MeshPosition on all {world_size} ranks"
        )
    if isinstance(spec.dispatch, CustomDispatch):
        custom = spec.dispatch
        calls = custom.split(world_size, mesh, args, kwargs)
        if spec.execute is Execute.RANK_ZERO:
            calls = {0: calls[0]}
        return CallPlan(calls, lambda results: custom.collect(mesh, results))
    if spec.dispatch is Dispatch.RANK_ZERO or spec.execute is Execute.RANK_ZERO:
        return CallPlan({0: RankCall(args, kwargs)}, lambda results: results[0])
    if spec.dispatch is Dispatch.ONE_TO_ALL:
        return CallPlan(dict.fromkeys(range(world_size), RankCall(args, kwargs)), in_rank_order)
    if spec.dispatch is Dispatch.ALL_TO_ALL:
        return CallPlan(_spread_lists(spec, world_size, args, kwargs), in_rank_order)
    assert mesh is not None
    return _plan_data_parallel(spec, mesh, args, kwargs)


def _plan_data_parallel(
    spec: MethodSpec, mesh: Mesh, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> CallPlan:
    batches = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]
    if not batches:
        raise SchemaError(f"{spec.name} is data-parallel and requires a DataProto argument")
    lengths = list(map(len, batches))
    rows = lengths[0]
    if lengths.count(rows) != len(lengths):
        raise SchemaError(
            f"{spec.name}: batches must have the same length to be split, got {lengths}"
        )
    _require_reads(spec, batches)
    chunks = {id(batch): _chunks(spec, batch, mesh.dp_size) for batch in batches}

    def part(dp_rank: int, value: Any) -> Any:
        return chunks[id(value)][dp_rank] if isinstance(value, DataProto) else value

    by_dp = [_mapped(partial(part, dp_rank), args, kwargs) for dp_rank in range(mesh.dp_size)]
    calls = {rank: by_dp[position.dp_rank] for rank, position in enumerate(mesh.positions)}
    chunk_rows = -(-rows // mesh.dp_size)
    if spec.dispatch is Dispatch.DP_METRIC:
        return CallPlan(calls, lambda results: [results[rank] for rank in mesh.collectors])
    return CallPlan(calls, lambda results: _concatenate(spec, mesh, results, rows, chunk_rows))


def _require_reads(spec: MethodSpec, batches: Sequence[DataProto]) -> None:
    for column in spec.reads:
        if not any(column in batch for batch in batches):
            have = ", ".join(dict.fromkeys(name for batch in batches for name in batch.columns))
            raise SchemaError(
                f"{spec.name} reads column {column!r}, which is missing from the batch; it has "
                f"{have or 'no columns'}"
            )


def _chunks(spec: MethodSpec, batch: DataProto, dp_size: int) -> list[DataProto]:
    """Split the batch into one piece per data-parallel group. All pieces have the same number of
    rows; training code may rely on this."""
    if spec.reads:
        batch = batch.select(name for name in spec.read_of(batch) if name in batch)
    padded, num_padding = batch.pad_to_divisor(dp_size)
    pieces = padded.chunk(dp_size)
    size = len(pieces[0])
    for i in range(dp_size):
        filled = min(size, max(0, num_padding - (dp_size - 1 - i) * size))
        if filled:
            pieces[i] = pieces[i].with_meta(**{PADDING_META: filled})
    return pieces


def _concatenate(
    spec: MethodSpec, mesh: Mesh, results: Mapping[int, Any], rows: int, chunk_rows: int
) -> DataProto | None:
    parts = [results[rank] for rank in mesh.collectors]
    if all(part is None for part in parts) and not spec.writes:
        return None
    for rank, part in zip(mesh.collectors, parts, strict=True):
        if not isinstance(part, DataProto):
            raise SchemaError(
                f"{spec.name} on rank {rank} must return a DataProto, because it is data-parallel; "
                f"got {type(part).__name__}"
            )
        if len(part) != chunk_rows:
            raise SchemaError(
                f"{spec.name} on rank {rank} must return {chunk_rows} rows, one per input row; got "
                f"{len(part)}"
            )
        _check_writes(spec, rank, part)
    whole = DataProto.concat(list(map(_without_padding_mark, parts)))
    return whole.unpad(len(whole) - rows)


def _check_writes(spec: MethodSpec, rank: int, part: DataProto) -> None:
    if not spec.writes:
        return
    for name in spec.writes:
        if name not in part:
            raise SchemaError(
                f"{spec.name} on rank {rank} did not return column {name!r} declared in writes"
            )
    for name in part.columns:
        if name not in spec.writes:
            raise SchemaError(
                f"{spec.name} on rank {rank} returned column {name!r} not declared in writes"
            )


def _without_padding_mark(part: DataProto) -> DataProto:
    if PADDING_META not in part.meta:
        return part
    meta = {key: value for key, value in part.meta.items() if key != PADDING_META}
    return DataProto(dict(part.items()), meta, part.bfloat16)


def _spread_lists(
    spec: MethodSpec, world_size: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int, RankCall]:
    for name, value in [*enumerate(args), *kwargs.items()]:
        if not isinstance(value, (list, tuple)) or len(value) != world_size:
            got = (
                f"{len(value)} values" if isinstance(value, (list, tuple)) else type(value).__name__
            )
            needed = f"a list with one value for each of {world_size} ranks"
            raise SchemaError(f"{spec.name}: argument {name!r} must be {needed}, got {got}")
    return {rank: _mapped(itemgetter(rank), args, kwargs) for rank in range(world_size)}


def _mapped(
    function: Callable[[Any], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> RankCall:
    return RankCall(
        tuple(map(function, args)), {name: function(value) for name, value in kwargs.items()}
    )


def in_rank_order(results: Mapping[int, Any]) -> list[Any]:
    """Return the results as a list in rank order."""
    return [results[rank] for rank in sorted(results)]


def _as_step(function: Callable[..., Any]) -> DataflowStep:
    spec = method_spec(function)
    return DataflowStep(getattr(function, "__qualname__", spec.name), spec.reads, spec.writes)
