"""The tokens of a dumped response, as shown in the report: for each token, the difference between
the engine's and the trainer's log-prob, the weight version, and whether it was sampled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hybridflow.batch import DataProto, Jagged, pick_parquet
from hybridflow.config.outside_json import MOST_BYTES
from hybridflow.errors import DataError

MOST_TOKENS = 600  # maximum shown per response
# thresholds of |trainer - engine| log-probability for stronger colours
LEVELS = (1e-3, 1e-2, 0.05, 0.2, 1.0)

_NEEDED = ("response_ids", "rollout_log_probs", "response_mask", "response_versions")
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Token:
    """A token of a response. `kind` is its CSS class: `obs` if the token was not sampled, `same` if
    the log-probs agree, or else a class that encodes how much higher (`more1` to `more5`) or lower
    (`less1` to `less5`) the trainer's log-prob is."""

    text: str
    kind: str
    about: str


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens that were sampled with the same weight version, or not sampled at all."""

    title: str
    tokens: list[Token]


def open_decoder(folder: Path) -> Decode | None:
    """Return a decoder that uses the tokenizer in a run's `model/` folder, or None if there is no
    readable tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        return None
    try:
        import tokenizers
    except ImportError:
        logging.getLogger(__name__).warning(
            "tokenizers is not installed, so the text of individual tokens is omitted"
        )
        return None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except BaseException as error:
        # damaged files raise a bare Exception, and Rust panics are not even an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return None

    def decode(ids: Sequence[int]) -> str:
        try:
            return str(tokenizer.decode(list(ids), skip_special_tokens=False))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ValueError(f"the tokenizer could not decode these tokens: {error}") from error

    return decode


def read_stretches(
    path: Path, rows: Sequence[int], decode: Decode | None, most_bytes: int = 1 << 30
) -> list[list[Stretch]]:
    """Return the stretches of tokens in these rows of a dump, one list per row. The lists are empty
    if the dump contains no tokens, or if a row group has more than `most_bytes` of token data."""
    empty: list[list[Stretch]] = [[] for _ in rows]
    if decode is None:
        return empty
    try:
        picked = pick_parquet(path, rows, (*_NEEDED, "old_log_probs"), most_bytes)
        if any(name not in picked for name in _NEEDED):
            return empty
        return [_stretches(picked, row, decode) for row in range(len(rows))]
    except (DataError, IndexError, ValueError, TypeError, AttributeError, OverflowError):
        # the file was not written by a run
        return empty


def texts_of(ids: Sequence[int], decode: Decode) -> list[str]:
    """Return the text that each token adds to the tokens before it. A character that spans several
    tokens is assigned to the last of them."""
    texts = list[str]()
    start = 0
    shown = ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if text.endswith("\ufffd") and end < len(ids) and end - start < 4 + 32:
            texts.append("")
            continue
        texts.append(text[len(shown) :])
        shown = text
        # tokens far back do not affect the text, and decoding them again for each token is slow
        if end - start > 32:
            start = end - 1
            shown = decode(ids[start:end])
    return texts


def _stretches(batch: DataProto, row: int, decode: Decode) -> list[Stretch]:
    response = _row(batch, "response_ids", row)
    ids = list(map(int, response[:MOST_TOKENS]))
    mask = _of_runs(_row(batch, "response_mask", row), len(response))
    versions = _of_runs(_row(batch, "response_versions", row), len(response))
    engine = _row(batch, "rollout_log_probs", row)
    trainer = _row(batch, "old_log_probs", row) if "old_log_probs" in batch else None
    found: list[Stretch] = []
    answers = 0
    was_sampled: bool | None = None  # of the token before; None for the first one
    last = 0
    for at, text in enumerate(texts_of(ids, decode)):
        sampled = bool(mask[at])
        version = int(versions[at])
        if sampled != was_sampled or (sampled and version != last):
            answers += sampled and not was_sampled
            title = f"answer {answers}, weights {version}"
            if not sampled:
                title = "inserted, not trained on"
            found.append(Stretch(title, []))
        was_sampled = sampled
        last = version
        token = _token(text or "\u00b7", sampled, float(engine[at]), trainer, at)
        found[-1].tokens.append(token)
    left = len(response) - len(ids)
    if left:
        found.append(Stretch(f"{left:,} more tokens", []))
    return found


def _of_runs(runs: np.ndarray, tokens: int) -> np.ndarray:
    """Expand runs [value, length] to one value per token. Raises ValueError if the lengths do not
    match."""
    values, counts = runs.reshape(-1, 2).T
    if (counts < 0).any() or (counts > tokens).any() or counts.sum() != tokens:
        raise ValueError("the run lengths do not match the number of tokens")
    return np.repeat(values, counts)


def _row(batch: DataProto, name: str, row: int) -> np.ndarray:
    column: Jagged = batch.jagged(name)
    begin = column.offsets[row]
    end = column.offsets[row + 1]
    return column.values[begin:end]


def _token(text: str, sampled: bool, engine: float, trainer: np.ndarray | None, at: int) -> Token:
    if not sampled:
        return Token(text, "obs", "")
    if trainer is None:
        return Token(text, "same", f"log p {engine:.4f} in the engine")
    difference = float(trainer[at]) - engine
    level = len(LEVELS)
    if np.isfinite(difference):
        level = sum(abs(difference) >= bound for bound in LEVELS)
    sign = "more" if difference > 0 else "less"
    kind = f"{sign}{level}" if level else "same"
    both = f"log p {engine:.4f} in the engine, {trainer[at]:.4f} in the trainer"
    return Token(text, kind, f"{both}: {difference:+.1e}")
