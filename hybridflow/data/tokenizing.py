"""Tokenization of the rows of data files, in parallel if there are many rows."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import get_context

import numpy as np

from hybridflow.batch import DataProto, Jagged
from hybridflow.data.encoding import Encoder
from hybridflow.data.files import Row
from hybridflow.data.packing import RESPONSE_MASK
from hybridflow.errors import DataError
from hybridflow.process.children import die_with_parent

# column: number of the row that the tokens come from, counted over all files
ROW = "row"
CUT = "cut"  # column: whether the row was truncated
_ROWS_HERE = 2048  # rows encoded in this process; for fewer, starting others is not worth it
_ROWS_AT_ONCE = 256
_MOST_PROCESSES = 16
_LIMIT_S = 300  # per batch of rows
_encoder: Encoder | None = None  # set in a tokenizing process


@dataclass(frozen=True)
class Piece:
    """A run of consecutive rows and their tokens.

    Attributes:
        rows: the rows that were encoded.
        first: row number of the first row.
        tokens: columns `ROW`, `CUT` and the encoder's; a row may have any number of token rows.
        problem: why the row after this piece could not be encoded; if set, this is the last piece.
    """

    rows: Sequence[Row]
    tokens: DataProto
    first: int
    problem: str | None = None

    def counts(self) -> np.ndarray:
        """Return the number of token rows for each row, [rows]."""
        numbers = self.tokens.dense(ROW)
        return np.bincount(numbers - self.first, minlength=len(self.rows))


@dataclass(frozen=True)
class _Made:
    """A tokenized piece as returned by a worker process, without its rows. The first `done` rows
    were encoded."""

    tokens: DataProto
    first: int
    done: int
    problem: str | None

    def of(self, rows: Sequence[Row]) -> Piece:
        """Attach the rows."""
        return Piece(rows[: self.done], self.tokens, self.first, self.problem)


def pieces(rows: Iterable[Row], encoder: Encoder) -> Generator[Piece, None, None]:
    """Tokenize all rows, in order. The first rows are encoded in this process, the others by a pool
    of one process per core.

    Raises:
        DataError: a process ran out of memory or a row took too long.
    """
    orders = _orders(rows)
    first = 0
    processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    for order in orders if processes == 1 else islice(orders, _ROWS_HERE // _ROWS_AT_ONCE):
        yield _encode(order, first, encoder).of(order)
        first += len(order)
    if (following := next(orders, None)) is not None:
        yield from _by_processes(chain([following], orders), first, encoder, processes)


def known_pieces(rows: Iterable[Row], tokens: DataProto) -> Generator[Piece, None, None]:
    """Yield the pieces of all rows, using the cached tokens."""
    first = 0
    numbers = tokens.dense(ROW)
    for order in _orders(rows):
        begin, end = np.searchsorted(numbers, (first, first + len(order)))
        yield Piece(order, tokens.rows(slice(begin, end)), first)
        first += len(order)


def _orders(rows: Iterable[Row]) -> Iterator[list[Row]]:
    remaining = iter(rows)
    while order := list(islice(remaining, _ROWS_AT_ONCE)):
        yield order


def _by_processes(
    orders: Iterator[list[Row]], first: int, encoder: Encoder, processes: int
) -> Iterator[Piece]:
    begun: deque[tuple[list[Row], Future[_Made]]] = deque()
    fork = get_context("fork")  # the tokenizer is inherited and need not be sent
    pool = ProcessPoolExecutor(processes, fork, _begin, (encoder, os.getpid()))
    try:
        for order in orders:
            begun.append((order, pool.submit(_encode_in_time, order, first)))
            first += len(order)
            if len(begun) > 2 * processes:
                yield _result(*begun.popleft())
        while begun:
            yield _result(*begun.popleft())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _result(order: list[Row], future: Future[_Made]) -> Piece:
    try:
        return future.result(2 * _LIMIT_S).of(order)
    except (BrokenProcessPool, TimeoutError) as error:
        raise DataError(
            f"{order[0].path}: the process encoding rows from {order[0].number} on died: it ran "
            f"out of memory, or {len(order)} rows took more than {_LIMIT_S} s; check for very long "
            "rows or a slow pattern in the tokenizer"
        ) from error


def _begin(encoder: Encoder, parent: int) -> None:
    """Initialize a tokenizing process. SIGINT is ignored here because the run handles it."""
    global _encoder
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    _encoder = encoder


def _encode_in_time(rows: list[Row], first: int) -> _Made:
    assert _encoder is not None
    signal.alarm(_LIMIT_S)  # kills this process if it exceeds the limit
    try:
        return _encode(rows, first, _encoder)
    finally:
        signal.alarm(0)


def _encode(rows: Sequence[Row], first: int, encoder: Encoder) -> _Made:
    numbers = list[int]()
    cuts = list[bool]()
    done = 0
    problem = None
    columns: dict[str, list[list[int]]] = {name: [] for name in encoder.columns}
    for number, row in enumerate(rows):
        try:
            encoded = encoder.encode(row)
        except DataError as error:
            problem = str(error)
            break
        done += 1
        for ids in encoded.rows:
            numbers.append(first + number)
            cuts.append(encoded.is_cut)
            for name in encoder.columns:
                columns[name].append(ids[name])
    made = {}
    for name, ids_of_rows in columns.items():
        dtype = bool if name == RESPONSE_MASK else np.int64
        made[name] = Jagged.from_rows(ids_of_rows, dtype)
    tokens = DataProto.from_columns(
        {ROW: np.array(numbers, np.int64), CUT: np.array(cuts, bool), **made}
    )
    return _Made(tokens, first, done, problem)
