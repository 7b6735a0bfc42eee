"""Search over the user's documents. Returns the passages that BM25 ranks highest (Robertson and
Zaragoza, 2009).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import bm25s
import numpy as np
import pyarrow.parquet as pq

from hybridflow.agents.tools.base import tool
from hybridflow.config.keys import PositiveInt
from hybridflow.errors import ConfigError

_KEY = "rollout.agent.tool_options.retrieval"
_TEXTS = (".txt", ".md")
_TABLES = (".jsonl", ".parquet")
_WORD = re.compile(r"\w+")
# Han, Hiragana, Katakana, Thai, Lao, Khmer and Burmese
_UNSPACED = re.compile(
    "([\u3005\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff]+)"
)
_FORMAT = 2  # version of the saved index; others are rebuilt
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """Options of the tool `retrieval`."""

    # a .jsonl or .parquet file with one passage per row, or a folder of such files and of .txt and
    # .md files
    documents: str = ""
    text_column: str = "text"  # column of .jsonl and .parquet files
    top_k: PositiveInt = 3  # number of passages shown
    # text files are cut into passages of at most this length; longer rows are truncated
    passage_characters: PositiveInt = 1000
    index: str | None = None  # folder in which the index is saved; null: next to the documents


@tool("retrieval", options=Options)
def retrieval(options: Options) -> Callable[[str], str]:
    """Load the documents and their index, which is rebuilt if it is missing or the documents have
    changed.

    Raises:
        ConfigError: there are no documents, or one cannot be read; the message names the key and
            the file.
    """
    for name in ("top_k", "passage_characters"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{_KEY}.{name}={getattr(options, name)} must be at least 1")
    index = _index(options)

    def search(query: str) -> str:
        """Search the documents and return the passages that best match the query."""
        found = index.best(query, options.top_k)
        texts = [passage[: options.passage_characters] for passage in found]
        return (
            "\n\n".join(f"[{place}] {text}" for place, text in enumerate(texts, 1))
            or "nothing was found"
        )

    return search


class _Index:
    """A set of passages and its BM25 index."""

    def __init__(self, passages: Sequence[str], ranked: bm25s.BM25) -> None:
        self.passages = passages
        self.ranked = ranked

    def best(self, query: str, count: int) -> list[str]:
        """Return the passages with the highest positive scores. Ties are kept in document order."""
        words = [word for word in _words(query) if word in self.ranked.vocab_dict]
        if not words:
            return []
        scores = np.asarray(self.ranked.get_scores(words))
        order = np.argsort(-scores, kind="stable")[:count]
        return [self.passages[place] for place in order if scores[place] > 0]


@functools.lru_cache(maxsize=8)
def _index(options: Options) -> _Index:
    """Return the index of these documents, cached per process."""
    if not options.documents:
        raise ConfigError(
            f"{_KEY}.documents is not set; set it to a .jsonl or .parquet file, or a folder"
        )
    source = Path(options.documents)
    files = _files(source)
    passages: list[str] = []
    for file in files:
        passages += _passages(file, options)
    if not passages:
        raise ConfigError(f"{_KEY}.documents={source} contains no text")
    kept = (
        Path(options.index)
        if options.index
        else source.resolve().with_name(f"{source.resolve().name}.bm25")
    )
    digest = hashlib.sha256(
        json.dumps([_FORMAT, bm25s.__version__, passages]).encode()
    ).hexdigest()[:16]
    ranked = _loaded(kept / digest, len(passages))
    if ranked is None:
        ranked = bm25s.BM25(backend="numpy")
        ranked.index(list(map(_words, passages)), show_progress=False)
        _keep(ranked, kept, digest)
    return _Index(passages, ranked)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        if source.suffix not in _TABLES + _TEXTS:
            raise ConfigError(
                f"{_KEY}.documents={source}: expected a file ending in "
                f"{', '.join(_TABLES + _TEXTS)}"
            )
        return [source]
    if not source.is_dir():
        raise ConfigError(
            f"{_KEY}.documents={source}: no such file or folder (looked in {Path.cwd()})"
        )
    found = sorted(
        path for path in source.rglob("*") if path.suffix in _TABLES + _TEXTS and path.is_file()
    )
    if not found:
        raise ConfigError(
            f"{_KEY}.documents={source}: the folder has no {', '.join(_TABLES + _TEXTS)} files"
        )
    return found


def _passages(file: Path, options: Options) -> Iterator[str]:
    try:
        if file.suffix in _TEXTS:
            text = file.read_text(encoding="utf-8")
            if not text.strip():
                raise ConfigError(f"{_KEY}.documents: {file} is empty; remove it")
            yield from _parts(text, options.passage_characters)
            return
        for number, row in enumerate(
            _json_rows(file) if file.suffix == ".jsonl" else _rows(file, options), 1
        ):
            cell = row.get(options.text_column) if isinstance(row, dict) else None
            if not isinstance(cell, str):
                has = (
                    f" (it has: {', '.join(map(str, row)) or 'none'})"
                    if isinstance(row, dict)
                    else ""
                )
                raise ConfigError(
                    f"{_KEY}.text_column={options.text_column}: row {number} of {file} has no text "
                    f"in this column{has}"
                )
            if not cell.strip():
                raise ConfigError(f"{_KEY}.documents: row {number} of {file} is empty; remove it")
            yield cell.strip()
    except (OSError, ValueError) as error:  # including invalid UTF-8, JSON or parquet
        raise ConfigError(f"{_KEY}.documents: {file} cannot be read: {error}") from error


def _json_rows(file: Path) -> Iterator[object]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number} is not valid JSON ({error})") from error


def _rows(file: Path, options: Options) -> Iterator[object]:
    with pq.ParquetFile(file) as table:
        if options.text_column not in table.schema_arrow.names:
            has = ", ".join(table.schema_arrow.names)
            raise ConfigError(
                f"{_KEY}.text_column={options.text_column}: {file} has no such column (it has: "
                f"{has})"
            )
        for batch in table.iter_batches(columns=[options.text_column]):
            yield from batch.to_pylist()


def _parts(text: str, most: int) -> Iterator[str]:
    """Merge paragraphs into passages of at most `most` characters. Longer paragraphs are split
    between words."""
    part = ""
    for paragraph in filter(None, map(str.strip, re.split(r"\n\s*\n", text))):
        for piece in _cut(paragraph, most):
            if part and len(part) + len(piece) + 1 > most:
                yield part
                part = ""
            part = f"{part}\n{piece}" if part else piece
    if part:
        yield part


def _cut(paragraph: str, most: int) -> Iterable[str]:
    while len(paragraph) > most:
        end = paragraph.rfind(" ", 1, most + 1)
        end = most if end < 0 else end
        yield paragraph[:end].rstrip()
        paragraph = paragraph[end:].lstrip()
    yield paragraph


def _words(text: str) -> list[str]:
    """Split text into index terms: words and, for scripts without spaces between words, character
    bigrams.
    """
    return list(chain.from_iterable(map(_parts_of, _WORD.findall(text.lower()))))


def _parts_of(word: str) -> Iterator[str]:
    for run in _UNSPACED.split(word):
        if not _UNSPACED.fullmatch(run):
            yield from filter(None, [run])
        elif len(run) == 1:
            yield run
        else:
            yield from (run[place : place + 2] for place in range(len(run) - 1))


def _loaded(folder: Path, count: int) -> bm25s.BM25 | None:
    """Load the saved index of `count` passages. Returns None if it does not exist or cannot be
    read.

    The files contain numpy arrays and JSON, never pickles.
    """
    try:
        ranked = bm25s.BM25.load(folder, allow_pickle=False, show_progress=False)
        data, indices, indptr = (
            np.asarray(ranked.scores[name]) for name in ("data", "indices", "indptr")
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        return None
    whole = (
        len(data) == len(indices) == indptr[-1]
        and len(indptr) > max(ranked.vocab_dict.values(), default=0) - 1
    )
    return (
        ranked
        if whole and ranked.scores["num_docs"] == count and indices.max(initial=0) < count
        else None
    )


def _keep(ranked: bm25s.BM25, kept: Path, digest: str) -> None:
    """Save the index and remove older versions. If saving fails, the next process rebuilds the
    index."""
    made = None
    try:
        kept.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=kept))
        ranked.save(made, allow_pickle=False, show_progress=False)
        for old in kept.iterdir():
            if old != made and re.fullmatch(r"[0-9a-f]{16}", old.name):
                shutil.rmtree(old, ignore_errors=True)
        os.rename(made, kept / digest)
    except OSError as error:
        _log.warning("could not save the index of %s in %s: %s", _KEY, kept, error)
        if made is not None:
            with suppress(OSError):
                shutil.rmtree(made)
