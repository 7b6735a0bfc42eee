"""An in-memory index of all samples in a run's dumps: their numeric columns, and their text in
lower case for searching.

Each dump is read once. New, changed and deleted dumps are detected by their folder's modification
time. All other data of a sample is read from its dump when the sample is shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from hybridflow.batch import DataProto, iter_parquet, parquet_rows
from hybridflow.config.outside_text import is_inside
from hybridflow.errors import HybridFlowError
from hybridflow.observe.rollouts import list_dumps
from hybridflow.observe.run_folder import dump_folders

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


class Texts:
    """The text of a dump's rows in lower case, as one UTF-8 buffer that can be scanned at memory
    bandwidth. Samples of a group share one copy of their prompt."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._prompts: dict[bytes, int] = {}  # -> its number
        self._prompt_of: list[int] = []  # number of each row's prompt
        self._parts: list[bytes] = []
        self._rows = _Scanned([])
        self._of_prompts = _Scanned([])

    def add(self, prompt: str, others: Iterable[str]) -> None:
        """Add a row."""
        text = prompt.lower().encode("utf-8", "replace")
        if text not in self._prompts:
            self._prompts[text] = len(self._prompts)
            self.nbytes += len(text)
        self._prompt_of.append(self._prompts[text])
        rest = "\n".join(filter(None, others)).lower().encode("utf-8", "replace")
        self.nbytes += len(rest)
        self._parts.append(rest)

    def seal(self) -> None:
        """Prepare for searching. Call this after the last row has been added."""
        self._rows = _Scanned(self._parts)
        self._of_prompts = _Scanned(list(self._prompts))
        self._numbers = np.array(self._prompt_of, np.int64)
        del self._parts, self._prompts, self._prompt_of

    def containing(self, wanted: str) -> np.ndarray:
        """Return a mask of the rows that contain this text, ignoring case."""
        needle = wanted.lower().replace("\0", "").encode("utf-8", "replace")
        prompts = self._of_prompts.containing(needle)
        found = prompts[self._numbers] if len(prompts) else np.zeros(len(self._numbers), bool)
        return found | self._rows.containing(needle)


class _Scanned:
    """Concatenated texts, each followed by a zero byte."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._whole = b"\0".join([*parts, b""])
        self._starts = np.cumsum([0, *(len(part) + 1 for part in parts)])

    def containing(self, needle: bytes) -> np.ndarray:
        """Return a mask of the texts that contain the needle, which must not contain a zero
        byte."""
        found = np.zeros(len(self._starts) - 1, bool)
        at = self._whole.find(needle)
        while 0 <= at < len(self._whole):
            number = int(np.searchsorted(self._starts, at, "right")) - 1
            found[number] = True
            at = self._whole.find(needle, int(self._starts[number + 1]))
        return found


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


@dataclass(frozen=True)
class Samples:
    """All indexed samples as columns; row i is row `row[i]` of `dumps[dump[i]]`."""

    dumps: tuple[Dump, ...] = ()
    dump: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    row: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    step: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    kind: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.row)


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
        found = [
            f"{path.parent.name}/{path.name}: {why}" for path, (_, why) in self._unreadable.items()
        ]
        more = len(found) - _MOST_MISSING
        found = found[:_MOST_MISSING] + ([f"and {more} more dumps"] if more > 0 else [])
        silent = sorted({one.step for one in self.samples.dumps if one.rows and one.texts is None})
        if silent:
            found.append(
                f"the text of steps {silent[0]} to {silent[-1]} is not searched: all texts "
                f"together are larger than {_MOST_TEXT_BYTES >> 20} MiB"
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
        for folder in folders:
            for step, path in list_dumps(folder):
                wanted.append((folder.name, step, path))
        self._wanted = sorted(wanted, key=lambda one: -one[1])
        there = {path for _, _, path in wanted}
        removed = self._dumps.keys() - there
        for path in removed:
            del self._dumps[path]
        for path in self._unreadable.keys() - there:
            del self._unreadable[path]
        self._signatures = {path: _signature(path) for path in there}
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
            if (rows := parquet_rows(path)) > _MOST_ROWS:
                raise ValueError(f"more than {_MOST_ROWS:,} rows")
            if rows + sum(one.rows for one in self._dumps.values()) > _MOST_SAMPLES:
                raise ValueError(f"more than {_MOST_SAMPLES:,} samples in all dumps")
            self._dumps[path] = self._read(kind, step, path, signature)
        except (HybridFlowError, ValueError, TypeError, OverflowError) as error:
            why = str(error).rsplit(": ", 1)[-1]
            self._unreadable[path] = (signature, f"not readable ({why})")

    def _read(self, kind: str, step: int, path: Path, signature: tuple[int, int, int]) -> Dump:
        left = _MOST_TEXT_BYTES - sum(one.texts.nbytes for one in self._dumps.values() if one.texts)
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
            kind,
            step,
            path,
            signature,
            rows,
            joined,
            codes,
            group_kinds(joined["uid"], joined["score"]),
            np.array(prompts, np.uint64),
            np.array(failed, bool),
            texts if texts.nbytes <= left else None,
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
            dumps,
            np.repeat(np.arange(len(dumps)), counts),
            np.concatenate(list(map(np.arange, counts)) or [np.zeros(0, np.int64)]),
            np.repeat(np.array([one.step for one in dumps], np.int64), counts),
            np.repeat(np.array([kinds.index(one.kind) for one in dumps], np.int64), counts),
            columns,
            kinds,
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
    for prompt, *others in zip(*(_texts(piece, name) for name in _TEXTS), strict=True):
        if texts.nbytes <= most_bytes:
            texts.add(prompt, others)


def _failed(piece: DataProto) -> list[bool]:
    columns = (_texts(piece, "reward_failure"), _texts(piece, "agent_failure"))
    return [any(one) for one in zip(*columns, strict=True)]


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
