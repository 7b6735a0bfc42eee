"""A cache of tokenized datasets, keyed by a hash of everything they depend on: files, tokenizer,
chat template, settings and code.

The cache is a folder of parquet files that only this user can access. Files are written atomically,
so runs can share it. It is limited to 8 GiB, evicts the least recently used entries, and can be
deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from hybridflow.batch import DataProto, read_parquet, write_parquet
from hybridflow.data.encoding import Encoder
from hybridflow.errors import HybridFlowError

log = logging.getLogger(__name__)
_LEAST_BYTES = 1 << 18  # total size of the files; smaller ones are encoded within a second
_MOST_BYTES = 8 << 30
_ROWS_TOGETHER = 1 << 14  # rows per row group
_STALE_S = 86400.0  # age of a file that a killed run left unfinished
_PACKAGES = ("transformers", "tokenizers", "jinja2")


class TokenCache:
    """The cache entry for a dataset. If the cache is unusable, the run logs a warning and continues
    without it.

    Args:
        path: the entry's file; None disables caching.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def of(cls, files: Sequence[str | Path], encoder: Encoder, max_rows: int | None) -> TokenCache:
        """Return the entry for an encoder, files and `max_rows`."""
        identity = encoder.tokenizer.identity()
        paths = [Path(file) for file in files if Path(file).is_file()]
        if (
            identity is None
            or len(paths) < len(files)
            or sum(path.stat().st_size for path in paths) < _LEAST_BYTES
        ):
            return cls(None)
        made_of = [
            type(encoder).__name__,
            json.dumps(encoder.settings(), sort_keys=True),
            str(max_rows),
            identity,
            *map(version, _PACKAGES),
            *map(_digest, sorted(Path(__file__).parent.glob("*.py"))),
            *map(_digest, paths),
        ]
        folder = _private(
            Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
            / "hybridflow"
            / "tokens"
        )
        name = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
        return cls(None if folder is None else folder / f"{name}.parquet")

    def read(self) -> DataProto | None:
        """Return the cached tokens, or None if there are none or they are unreadable."""
        if self.path is None or not self.path.is_file():
            return None
        try:
            found = read_parquet(self.path)
            os.utime(self.path)
        except (HybridFlowError, OSError) as error:
            log.warning("could not read the cached tokens; rebuilding them: %s", error)
            return None
        log.info("reading cached tokens: %s", self.path)
        return found

    def write(self, tokens: DataProto) -> None:
        """Store the tokens in the cache, and evict the least recently used entries if needed."""
        if self.path is None:
            return
        try:
            write_parquet(self.path, tokens.split(_ROWS_TOGETHER))
            _make_room(self.path.parent)
        except (HybridFlowError, OSError) as error:
            log.warning("could not write the tokens to the cache: %s", error)


def _private(folder: Path) -> Path | None:
    """Create a folder that only this user can access. Returns None if that fails."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            log.warning("%s is not a folder owned by this user; tokens are not cached", folder)
            return None
        folder.chmod(0o700)
    except OSError as error:
        log.warning("could not use %s (%s); tokens are not cached", folder, error.strerror)
        return None
    return folder


def _make_room(folder: Path) -> None:
    """Remove the temporary files of killed runs, and evict the least recently used entries until
    the cache is no larger than `_MOST_BYTES`."""
    left = 0
    found = [(path.stat(), path) for path in folder.iterdir() if path.is_file()]
    found.sort(key=lambda one: -one[0].st_mtime)
    for entry, path in found:
        is_stale = path.suffix == ".tmp" and found[0][0].st_mtime - entry.st_mtime > _STALE_S
        left += entry.st_size
        if is_stale or left > _MOST_BYTES:
            with suppress(FileNotFoundError):  # another run removed it first
                path.unlink()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
