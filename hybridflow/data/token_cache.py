"""Tokens of earlier runs, by the content of what they were made of: files, tokenizer, chat
template, settings, code.

The cache is a folder of parquet files that this user alone can enter. Files appear whole or not at
all, so that runs may share it. It holds at most 8 GiB: what was not used for longest goes first.
Removing it costs time alone.
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
_LEAST_BYTES = 1 << 18  # of the files; smaller ones are encoded in a second
_MOST_BYTES = 8 << 30
_ROWS_TOGETHER = 1 << 14  # are compressed as one
_STALE_S = 86400.0  # a file that a killed run has not finished
_PACKAGES = ("transformers", "tokenizers", "jinja2")


class TokenCache:
    """The entry of the cache for a dataset. Where the cache cannot be used, a run goes on without
    it and says so.

    Args:
        path: of the entry; None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path

    @classmethod
    def of(cls, files: Sequence[str | Path], encoder: Encoder, max_rows: int | None) -> TokenCache:
        """The entry for what an encoder makes of the first `max_rows` rows of files."""
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
        """The tokens; None where there are none, or none that can be read."""
        if self.path is None or not self.path.is_file():
            return None
        try:
            found = read_parquet(self.path)
            os.utime(self.path)
        except (HybridFlowError, OSError) as error:
            log.warning("tokens of an earlier run cannot be read, and are made again: %s", error)
            return None
        log.info("tokens of an earlier run: %s", self.path)
        return found

    def write(self, tokens: DataProto) -> None:
        """Keep the tokens, and make room for them."""
        if self.path is None:
            return
        try:
            write_parquet(self.path, tokens.split(_ROWS_TOGETHER))
            _make_room(self.path.parent)
        except (HybridFlowError, OSError) as error:
            log.warning("the tokens of this run are not kept for the next one: %s", error)


def _private(folder: Path) -> Path | None:
    """The folder, which this user alone can enter; None where that cannot be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            log.warning("%s is no folder of this user; tokens are not kept", folder)
            return None
        folder.chmod(0o700)
    except OSError as error:
        log.warning("%s cannot be used (%s); tokens are not kept", folder, error.strerror)
        return None
    return folder


def _make_room(folder: Path) -> None:
    """Remove what killed runs have left, and the entries used longest ago while all have more than
    `_MOST_BYTES`."""
    left = 0
    found = [(path.stat(), path) for path in folder.iterdir() if path.is_file()]
    found.sort(key=lambda one: -one[0].st_mtime)
    for entry, path in found:
        is_stale = path.suffix == ".tmp" and found[0][0].st_mtime - entry.st_mtime > _STALE_S
        left += entry.st_size
        if is_stale or left > _MOST_BYTES:
            with suppress(FileNotFoundError):  # another run was faster
                path.unlink()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
