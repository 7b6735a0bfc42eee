"""How a worker method is called: `@register` says how arguments reach the ranks of a group and how
results come back.

A worker module imports this and nothing of the controller, so that the same class also runs under
`torchrun` or in a plain test. `plan_call` turns a method and its arguments into the call of every
rank; `single_controller` carries it out. Neither Ray nor torch is imported here.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from hybridflow.batch import DataProto
from hybridflow.errors import HybridFlowError, SchemaError

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "__hybridflow_method__"
# key of a chunk's meta: how many of its last rows are repeated rows that fill it up
PADDING_META = "dp_padding_rows"


class MeshError(HybridFlowError):
    """The ranks of a group do not form whole data-parallel groups with one collecting rank each."""


class Dispatch(enum.Enum):
    """How the arguments of a call reach the ranks, and what comes back."""

    ONE_TO_ALL = "one_to_all"  # every rank gets the same arguments; returns the list of results
    # every argument is a list with one value per rank; returns the list of results
    ALL_TO_ALL = "all_to_all"
    RANK_ZERO = "rank_zero"  # only rank 0 is called; returns its result
    DP = "dp"  # DataProto arguments are split over the data-parallel groups; returns one DataProto
    # split likewise; returns the list of the collecting ranks' results, by data-parallel rank
    DP_METRIC = "dp_metric"


class Execute(enum.Enum):
    """Which ranks run the method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class MeshPosition:
    """The data-parallel group of a rank, the number of groups, and whether the rank returns the
    group's result."""

    dp_rank: int
    dp_size: int
    collects: bool


@dataclass(frozen=True)
class WorkerContext:
    """First argument of a worker's constructor: `cls(context, *args)`. `log_path` receives its
    stdout and stderr, and what the worker starts listens on `ports`."""

    rank: int
    world_size: int
    local_rank: int
    master_addr: str
    master_port: int
    node: str
    log_path: Path
    ports: range = range(20000, 32500)


@dataclass(frozen=True)
class Mesh:
    """Positions of all ranks of a group, checked.

    Raises:
        MeshError: disagreeing sizes, a data-parallel group without ranks, or with no or several
            collecting ranks.
    """

    positions: tuple[MeshPosition, ...]

    def __post_init__(self) -> None:
        if not self.positions:
            raise MeshError("a mesh needs at least one rank")
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
                f"each data-parallel group needs exactly one collecting rank, found {found}"
            )

    @property
    def dp_size(self) -> int:
        """Number of data-parallel groups."""
        return self.positions[0].dp_size

    def of(self, ranks: Sequence[int]) -> Mesh:
        """The mesh of these ranks alone, renumbered from 0 in the given order.

        Raises:
            MeshError: some ranks of a data-parallel group are given and others are not.
        """
        groups = sorted({self.positions[rank].dp_rank for rank in ranks})
        if not ranks:
            raise MeshError("a call needs at least one rank")
        others = {
            position.dp_rank for rank, position in enumerate(self.positions) if rank not in ranks
        }
        if cut := sorted(others.intersection(groups)):
            raise MeshError(f"ranks {list(ranks)} are only parts of data-parallel groups {cut}")
        chosen = []
        for rank in ranks:
            position = self.positions[rank]
            chosen.append(
                MeshPosition(groups.index(position.dp_rank), len(groups), position.collects)
            )
        return Mesh(tuple(chosen))

    @property
    def collectors(self) -> tuple[int, ...]:
        """The collecting rank of each group, by data-parallel rank."""
        by_dp = {
            position.dp_rank: rank
            for rank, position in enumerate(self.positions)
            if position.collects
        }
        return tuple(by_dp[dp] for dp in range(self.dp_size))


@dataclass(frozen=True)
class RankCall:
    """Arguments of one rank. Ranks that get the same batch have the same object here, so that it is
    sent once."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class CallPlan:
    """One call of a group: the calls by rank (ranks that are absent do not run), and what makes one
    value of their results."""

    calls: Mapping[int, RankCall]
    collect: Callable[[Mapping[int, Any]], Any]

    def on(self, ranks: Sequence[int]) -> CallPlan:
        """The same call, with rank `ranks[i]` in place of rank i."""
        calls = {ranks[i]: call for i, call in self.calls.items()}
        place = {rank: i for i, rank in enumerate(ranks)}
        return CallPlan(
            calls,
            lambda results: self.collect({place[rank]: value for rank, value in results.items()}),
        )


@dataclass(frozen=True)
class CustomDispatch:
    """A pair of functions for a method that no mode of `Dispatch` fits; `custom_dispatch` makes
    them.

    `split(world_size, mesh, args, kwargs)` returns the call of each rank, `collect(mesh, results by
    rank)` the value of the call. `mesh` is None without `needs_mesh`.
    """

    name: str
    split: Callable[[int, Mesh | None, tuple[Any, ...], Mapping[str, Any]], Mapping[int, RankCall]]
    collect: Callable[[Mesh | None, Mapping[int, Any]], Any]
    needs_mesh: bool = True


@dataclass(frozen=True)
class MethodSpec:
    """What `@register` recorded about a method."""

    name: str
    dispatch: Dispatch | CustomDispatch
    execute: Execute
    blocking: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    may_read: tuple[str, ...] = ()

    @property
    def needs_mesh(self) -> bool:
        """Whether a call needs the positions of the ranks."""
        if isinstance(self.dispatch, CustomDispatch):
            return self.dispatch.needs_mesh
        return self.dispatch in (Dispatch.DP, Dispatch.DP_METRIC)

    def read_of(self, batch: DataProto) -> list[str]:
        """The columns of the batch that the method reads; what it needs and the batch lacks is
        among them."""
        return [*self.reads, *(name for name in self.may_read if name in batch)]


@dataclass(frozen=True)
class DataflowStep:
    """A step of the loop that is not a worker method, for `check_dataflow`."""

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
    """Register a pair of functions under a name that is not taken, for `@register`."""
    if name in _custom or name in {mode.value for mode in Dispatch}:
        raise ValueError(f"a dispatch named {name!r} exists already")
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
    """Mark a worker method as callable on a group. The function itself is returned unchanged.

    Args:
        dispatch: how arguments are spread and results gathered.
        execute: which ranks run it.
        blocking: False makes `WorkerGroup.run` return a `Future` at once.
        reads: columns the method needs; with `DP`, only these are sent. Empty: all columns.
        writes: columns the method returns; with `DP`, the result must have exactly these. Empty:
            not checked. With `ONE_TO_ALL`, each rank returns a batch of its own with these columns.
        may_read: columns the method reads where the batch has them.

    Raises:
        ValueError: a data-parallel method that only rank 0 runs, or a column declared twice.
    """
    if execute is Execute.RANK_ZERO and dispatch in (
        Dispatch.DP,
        Dispatch.DP_METRIC,
        Dispatch.ALL_TO_ALL,
    ):
        raise ValueError(
            f"{dispatch} spreads arguments over all ranks and cannot be run by rank 0 alone"
        )
    for columns in (reads, writes, may_read):
        if isinstance(columns, str) or len(set(columns)) != len(columns):
            raise ValueError(
                f"reads and writes are tuples of different column names, got {columns!r}"
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
    """What `@register` recorded; TypeError for a function without it."""
    spec = getattr(function, _ATTRIBUTE, None)
    if not isinstance(spec, MethodSpec):
        raise TypeError(
            f"{getattr(function, '__qualname__', function)!s} is not a worker method: it lacks "
            "@register(...)"
        )
    return spec


def check_dataflow(
    steps: Iterable[Callable[..., Any] | DataflowStep], available: Iterable[str]
) -> frozenset[str]:
    """Check before anything starts that every step's `reads` exist by then; returns the columns at
    the end.

    Raises:
        SchemaError: names the step, the column, and the later step that writes it, if there is one.
    """
    order = [step if isinstance(step, DataflowStep) else _as_step(step) for step in steps]
    known = set(available)
    for i, step in enumerate(order):
        for column in step.reads:
            if column not in known:
                later = next((s.name for s in order[i:] if column in s.writes), None)
                hint = f"; {later} writes it, but not before" if later else "; no step writes it"
                raise SchemaError(
                    f"{step.name} reads column {column!r}, which is not there yet{hint}"
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
    """The calls of all ranks, and how their results become one value.

    Raises:
        SchemaError: arguments that do not fit the dispatch mode, or a missing column.
        MeshError: a data-parallel call on workers without positions.
    """
    if spec.needs_mesh and (mesh is None or len(mesh.positions) != world_size):
        raise MeshError(
            f"{spec.name} is data-parallel: the worker class needs mesh_position() -> MeshPosition "
            f"on all {world_size} ranks"
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
        raise SchemaError(f"{spec.name} is data-parallel and needs a DataProto argument to split")
    lengths = list(map(len, batches))
    rows = lengths[0]
    if lengths.count(rows) != len(lengths):
        raise SchemaError(
            f"{spec.name}: batches of different lengths {lengths} cannot be split together"
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
                f"{spec.name} reads column {column!r}, which the batch lacks; it has "
                f"{have or 'no columns'}"
            )


def _chunks(spec: MethodSpec, batch: DataProto, dp_size: int) -> list[DataProto]:
    """One piece for each data-parallel group, all with the same number of rows, on which training
    code may rely."""
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
                f"{spec.name} on rank {rank} returned {type(part).__name__}; a data-parallel "
                "method returns a DataProto"
            )
        if len(part) != chunk_rows:
            raise SchemaError(
                f"{spec.name} on rank {rank} returned {len(part)} rows for a chunk of {chunk_rows}"
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
                f"{spec.name} on rank {rank} did not return column {name!r}, which it declares in "
                "writes"
            )
    for name in part.columns:
        if name not in spec.writes:
            raise SchemaError(
                f"{spec.name} on rank {rank} returned column {name!r}, which it does not declare "
                "in writes"
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
    """The results, rank after rank."""
    return [results[rank] for rank in sorted(results)]


def _as_step(function: Callable[..., Any]) -> DataflowStep:
    spec = method_spec(function)
    return DataflowStep(getattr(function, "__qualname__", spec.name), spec.reads, spec.writes)
