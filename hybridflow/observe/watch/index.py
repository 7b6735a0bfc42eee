"""An in-memory index of all samples in a run's dumps: their numeric columns, and their text in
lower case for searching.

Each dump is read once. New, changed and deleted dumps are detected by their folder's modification
time. All other data of a sample is read from its dump when the sample is shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from hybridflow.batch import DataProto, iter_parquet, parquet_rows
from hybridflow.config.outside_text import is_inside
from hybridflow.errors import HybridFlowError
from hybridflow.observe.rollouts import list_dumps
from hybridflow.observe.run_folder import dump_folders
from hybridflow.observe.run_samples import not_readable
from hybridflow.observe.watch.texts import Texts

NUMBERS = (
    "uid",
    "score",
    "advantage",
    "response_length",
    "logprob_diff_mean",
    "turns",
    "tool_calls",
)
NAMES = ("data_source", "finish_reason")
_TEXTS = (
    "prompt_text",
    "response_text",
    "ground_truth",
    "reward_extra",
    "reward_failure",
    "agent_failure",
)
SOLVED = 1
UNSOLVED = 2
MIXED = 3
EQUAL = 4
GROUPS = {"solved": SOLVED, "unsolved": UNSOLVED, "mixed": MIXED, "equal": EQUAL}

_MOST_ROWS = 500_000  # of a dump
_MOST_SAMPLES = 2_000_000
_MOST_TEXT_BYTES = 1 << 30  # of all texts; the earliest dumps are not searched beyond it
_MOST_CHARACTERS = 1 << 16  # searched of a text
_MOST_GROUP_BYTES = 256 << 20
_MOST_NAMES = 1_000
_MOST_MISSING = 20
_PUBLISH_S = 1.0


@dataclass
class Dump:
    """The samples of one dump.

    Attributes:
        numbers: columns of `NUMBERS` as float64 [rows], NaN where a value is missing.
        names: columns of `NAMES`, as codes into `SampleIndex.known`.
        groups: the kind of each row's group, `SOLVED` and so on; 0 if the group has no score.
        prompts: hash of each row's prompt, the same in all steps; 0 if there is no prompt.
        failed: rows whose scoring or agent loop failed.
        texts: the text of all rows; None if the memory budget is exhausted.
    """

    kind: str
    step: int
    path: Path
    signature: tuple[int, int, int]
    rows: int
    numbers: dict[str, np.ndarray]
    names: dict[str, np.ndarray]
    groups: np.ndarray
    prompts: np.ndarray
    failed: np.ndarray
    texts: Texts | None


def _no_numbers() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Samples:
    """All indexed samples as columns; row i is row `row[i]` of `dumps[dump[i]]`."""

    dumps: tuple[Dump, ...] = ()
    dump: np.ndarray = field(default_factory=_no_numbers)
    row: np.ndarray = field(default_factory=_no_numbers)
    step: np.ndarray = field(default_factory=_no_numbers)
    kind: np.ndarray = field(default_factory=_no_numbers)
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.row)

    def dump_of(self, sample: int) -> Dump:
        """Return the dump that contains a sample."""
        return self.dumps[self.dump[sample]]

    def of_step(self, kind: int, step: int) -> np.ndarray:
        """Return the samples of a step in the dumps of this kind."""
        return np.flatnonzero((self.kind == kind) & (self.step == step))


class SampleIndex:
    """The index of one run folder.

    Attributes:
        samples: an immutable snapshot.
        known: distinct values of each column of `NAMES`.
        version: increases whenever `samples` changes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = Samples()
        self.version = 0
        self.known: dict[str, list[str]] = {name: [] for name in NAMES}
        self._codes: dict[str, dict[str, int]] = {name: {} for name in NAMES}
        self._dumps: dict[Path, Dump] = {}
        self._wanted: list[tuple[str, int, Path]] = []
        self._folders: tuple[tuple[str, int], ...] | None = None
        self._signatures: dict[Path, tuple[int, int, int] | None] = {}
        self._unreadable: dict[Path, tuple[tuple[int, int, int] | None, str]] = {}
        self._lock = threading.Lock()

    def refresh(self) -> Iterator[None]:
        """Read new dumps, the latest first, and pause after each. `samples` is replaced every
        second and at the end."""
        with self._lock:
            changed = self._list()
            published = time.monotonic()
            for kind, step, path in self._wanted:
                if self._is_new(path):
                    changed = True
                    self._add(kind, step, path)
                    if time.monotonic() > published + _PUBLISH_S:
                        self._publish()
                        published = time.monotonic()
                    yield
            if changed:
                self._publish()

    def remarks(self) -> list[str]:
        """Return a sentence for each dump that is not indexed, or whose text is not indexed."""
        found = []
        for path, (_, why) in self._unreadable.items():
            found.append(f"{path.parent.name}/{path.name}: {why}")
        more = len(found) - _MOST_MISSING
        if more > 0:
            found[_MOST_MISSING:] = [f"and {more} more dumps"]
        silent = [one.step for one in self.samples.dumps if one.rows and one.texts is None]
        if silent:
            limit = _MOST_TEXT_BYTES >> 20
            found.append(
                f"the text of steps {min(silent)} to {max(silent)} is not searched: all texts "
                f"together are larger than {limit} MiB"
            )
        return found

    def _list(self) -> bool:
        """List the dumps, if a folder has changed. Returns True if any have disappeared."""
        folders = dump_folders(self.path)
        times = tuple((folder.name, _time(folder)) for folder in folders)
        if times == self._folders:
            return False
        self._folders = times
        wanted = []
        signatures = {}
        for folder in folders:
            for step, path in list_dumps(folder):
                wanted.append((folder.name, step, path))
                signatures[path] = _signature(path)
        self._wanted = sorted(wanted, key=lambda one: -one[1])
        self._signatures = signatures
        removed = self._dumps.keys() - signatures.keys()
        for path in removed:
            del self._dumps[path]
        for path in self._unreadable.keys() - signatures.keys():
            del self._unreadable[path]
        return bool(removed)

    def _is_new(self, path: Path) -> bool:
        signature = self._signatures[path]
        if path in self._unreadable:
            return self._unreadable[path][0] != signature
        return path not in self._dumps or self._dumps[path].signature != signature

    def _add(self, kind: str, step: int, path: Path) -> None:
        self._unreadable.pop(path, None)
        self._dumps.pop(path, None)
        signature = self._signatures[path]
        try:
            if signature is None or not is_inside(path, self.path):
                raise ValueError("not followed, because it links to a file outside the run folder")
            rows = parquet_rows(path)
            if rows > _MOST_ROWS:
                raise ValueError(f"more than {_MOST_ROWS:,} rows")
            already = sum(one.rows for one in self._dumps.values())
            if rows + already > _MOST_SAMPLES:
                raise ValueError(f"more than {_MOST_SAMPLES:,} samples in all dumps")
            self._dumps[path] = self._read(kind, step, path, signature)
        except (HybridFlowError, ValueError, TypeError, OverflowError) as error:
            self._unreadable[path] = (signature, not_readable(error))

    def _read(self, kind: str, step: int, path: Path, signature: tuple[int, int, int]) -> Dump:
        left = _MOST_TEXT_BYTES
        for one in self._dumps.values():
            if one.texts:
                left -= one.texts.nbytes
        numbers: dict[str, list[np.ndarray]] = {name: [] for name in NUMBERS}
        names: dict[str, list[np.ndarray]] = {name: [] for name in NAMES}
        failed: list[bool] = []
        prompts: list[int] = []
        texts = Texts()
        columns = (*NUMBERS, *NAMES, *_TEXTS)
        rows = 0
        for piece in iter_parquet(path, (), columns, most_bytes=_MOST_GROUP_BYTES):
            rows += len(piece)
            for name in NUMBERS:
                numbers[name].append(_numbers(piece, name))
            for name in NAMES:
                names[name].append(self._coded(name, _texts(piece, name)))
            failed += _failed(piece)
            prompts += map(_hash, _texts(piece, "prompt_text"))
            _add_texts(piece, texts, left)
        texts.seal()
        joined = {name: _joined(parts, np.float64) for name, parts in numbers.items()}
        codes = {name: _joined(parts, np.int64) for name, parts in names.items()}
        return Dump(
            kind=kind,
            step=step,
            path=path,
            signature=signature,
            rows=rows,
            numbers=joined,
            names=codes,
            groups=group_kinds(joined["uid"], joined["score"]),
            prompts=np.array(prompts, np.uint64),
            failed=np.array(failed, bool),
            texts=texts if texts.nbytes <= left else None,
        )

    def _coded(self, name: str, values: Iterable[str]) -> np.ndarray:
        codes = self._codes[name]
        found = []
        for value in values:
            if value not in codes and len(codes) < _MOST_NAMES:
                codes[value] = len(codes)
                self.known[name].append(value)
            found.append(codes.get(value, -1))
        return np.array(found, np.int64)

    def _publish(self) -> None:
        dumps = tuple(sorted(self._dumps.values(), key=lambda one: (one.kind, one.step)))
        kinds = tuple(dict.fromkeys(one.kind for one in dumps))
        counts = np.array([one.rows for one in dumps], np.int64)
        steps = np.array([one.step for one in dumps], np.int64)
        kind_of = np.array([kinds.index(one.kind) for one in dumps], np.int64)
        columns: dict[str, np.ndarray] = {}
        if dumps:
            for name in NUMBERS:
                columns[name] = np.concatenate([one.numbers[name] for one in dumps])
            for name in NAMES:
                columns[name] = np.concatenate([one.names[name] for one in dumps])
            columns["group"] = np.concatenate([one.groups for one in dumps])
            columns["prompt"] = np.concatenate([one.prompts for one in dumps])
            columns["failed"] = np.concatenate([one.failed for one in dumps])
        self.samples = Samples(
            dumps=dumps,
            dump=np.repeat(np.arange(len(dumps)), counts),
            row=np.concatenate([_no_numbers(), *map(np.arange, counts)]),
            step=np.repeat(steps, counts),
            kind=np.repeat(kind_of, counts),
            columns=columns,
            kinds=kinds,
        )
        self.version += 1


def group_kinds(uids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Return the kind of each row's group (the rows with the same uid): solved (all scores 1),
    unsolved (all 0), equal (all the same other score) or mixed; 0 if there is no score."""
    found = np.zeros(len(uids), np.int8)
    known = ~np.isnan(scores) & ~np.isnan(uids)
    if not known.any():
        return found
    values = scores[known]
    groups, of_row = np.unique(uids[known], return_inverse=True)
    low = np.full(len(groups), np.inf)
    high = np.full(len(groups), -np.inf)
    np.minimum.at(low, of_row, values)
    np.maximum.at(high, of_row, values)
    kinds = np.full(len(groups), MIXED, np.int8)
    kinds[low == high] = EQUAL
    kinds[(low == 1) & (high == 1)] = SOLVED
    kinds[(low == 0) & (high == 0)] = UNSOLVED
    found[known] = kinds[of_row]
    return found


def _joined(parts: list[np.ndarray], kind: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *parts])


def _add_texts(piece: DataProto, texts: Texts, most_bytes: int) -> None:
    """Add the text of all rows until the byte limit is reached."""
    columns = [_texts(piece, name) for name in _TEXTS]
    for prompt, *others in zip(*columns, strict=True):
        if texts.nbytes <= most_bytes:
            texts.add(prompt, others)


def _failed(piece: DataProto) -> list[bool]:
    rewards = _texts(piece, "reward_failure")
    agents = _texts(piece, "agent_failure")
    return [any(failures) for failures in zip(rewards, agents, strict=True)]


def _hash(prompt: str) -> int:
    return xxhash.xxh3_64_intdigest(prompt.encode("utf-8", "replace")) if prompt else 0


def _numbers(piece: DataProto, name: str) -> np.ndarray:
    if name in piece:
        column = piece[name]
        if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype.kind in "iufb":
            return column.astype(np.float64)
    return np.full(len(piece), np.nan)


def _texts(piece: DataProto, name: str) -> list[str]:
    if name in piece:
        column = piece[name]
        if isinstance(column, np.ndarray) and column.dtype == object and column.ndim == 1:
            return [one[:_MOST_CHARACTERS] if isinstance(one, str) else "" for one in column]
    return [""] * len(piece)


def _time(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except OSError:
        return 0


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
