"""Dataset preparation: `prepare("arithmetic", out)` writes parquet files, a tokenizer and a
manifest to a folder, unless it already contains them.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hybridflow.config.build import build_options, to_plain
from hybridflow.data.prepare.manifest import (
    MANIFEST,
    files_are_intact,
    listed_files,
    read_manifest,
    write_manifest,
)
from hybridflow.data.prepare.options import KEY
from hybridflow.data.prepare.tasks import TASKS, Task
from hybridflow.errors import ConfigError, DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreparedData:
    """The result of a preparation.

    Attributes:
        folder: the folder given as `out`: train.parquet, test.parquet, [sft.parquet], tokenizer/.
        rows: number of rows, keyed by parquet file name.
        reused: True if the folder already had exactly these contents and nothing was written.
    """

    folder: Path
    rows: dict[str, int]
    reused: bool


def prepare(
    task: str, out: Path, source: Path | None = None, options: Mapping[str, object] | None = None
) -> PreparedData:
    """Prepare a dataset in the folder `out`. Returns immediately if it already contains this
    dataset intact.

    `out` is written atomically: a temporary folder next to it is filled, with its manifest written
    last, and then renamed. If `out` was prepared with other options, or its files have changed
    since, it is replaced. If it contains files that no preparation wrote, it is rejected, so user
    files are never deleted.

    Args:
        task: a built-in task, or your own as path/to/file.py:name.
        out: folder that receives train.parquet, test.parquet, [sft.parquet], tokenizer/ and
            manifest.json.
        source: folder of raw files, for tasks that need one; without it, tasks for published
            datasets read the Hugging Face cache.
        options: the task's options, keyed by name; missing ones fall back to their defaults.

    Raises:
        ConfigError: an unknown task or option, an option of the wrong type or out of range, or a
            missing or unused `source`.
        DataError: a raw file is missing or malformed, or `out` contains files that no preparation
            wrote.
    """
    known = TASKS.get(task)
    parsed = build_options(known.options(), options or {}, KEY)
    out = Path(out)
    request: dict[str, object] = {"task": task, "options": to_plain(parsed)}
    if known.published is not None:
        missing = list(known.published.missing(parsed, source))
        if missing and (rows := _rows_if_done(out, request, any_source=True)) is not None:
            # a run on a machine without the raw files can still use the prepared ones
            return PreparedData(out, rows, reused=True)
        if missing:
            raise DataError("\n".join(missing))
        request["source"] = known.published.fingerprint(parsed, source)
    else:
        request["source"] = _source_hashes(task, known, source)
    if (rows := _rows_if_done(out, request)) is not None:
        return PreparedData(out, rows, reused=True)
    _refuse_foreign_files(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".tmp", dir=out.parent))
    try:
        # mkdtemp makes it private, but workers running as another user may have to read the data
        staging.chmod(0o755)
        rows = known.write(parsed, staging, source)
        write_manifest(staging, request, rows)
        _put_in_place(staging, out, request)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    log.info("prepared %s in %s: %s", task, out, rows)
    return PreparedData(out, rows, reused=False)


def _source_hashes(task: str, known: Task, source: Path | None) -> dict[str, str]:
    """Return the SHA-256 of each raw file. The hashes are part of the request, so a changed source
    triggers a new preparation."""
    if not known.source_files:
        if source is not None:
            raise ConfigError(
                f"task {task!r} does not read raw files; remove {str(source)!r} (--source or "
                "data.prepare.source)"
            )
        return {}
    if source is None:
        raise ConfigError(
            f"task {task!r} reads {' and '.join(known.source_files)}; pass the folder that "
            "contains them (--source DIR, or data.prepare.source in a recipe)"
        )
    missing = [name for name in known.source_files if not (source / name).is_file()]
    if missing:
        raise DataError(
            f"{', '.join(missing)} not found in {source}; task {task!r} reads "
            f"{', '.join(known.source_files)} from this folder"
        )
    return listed_files(source, known.source_files)


def _rows_if_done(
    out: Path, request: Mapping[str, object], any_source: bool = False
) -> dict[str, int] | None:
    """Return the number of rows per file if `out` was prepared with the same request and every file
    is intact, else None.

    Args:
        any_source: ignore changes to the raw files.
    """
    found = read_manifest(out)
    if found is None or found["request"] is None or not files_are_intact(out, found):
        return None
    made = {}
    for key, value in found["request"].items():
        if not any_source or key != "source":
            made[key] = value
    if made != request:
        return None
    return dict(found["rows"])


def _refuse_foreign_files(out: Path) -> None:
    """Raise DataError unless `out` is absent, empty, or contains only files that a preparation
    wrote."""
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out} is a file; data.prepare.out must be a folder")
    found = read_manifest(out)
    ours = {MANIFEST, *(found["files"] if found else ())}
    unknown = []
    for p in out.rglob("*"):
        if not p.is_dir() and str(p.relative_to(out)) not in ours:
            unknown.append(str(p.relative_to(out)))
    foreign = sorted(unknown)
    if foreign:
        raise DataError(
            f"{out} contains files not written by `hybridflow prepare` ({', '.join(foreign[:3])}); "
            "choose another data.prepare.out or empty it"
        )


def _put_in_place(staging: Path, out: Path, request: Mapping[str, object]) -> None:
    """Rename `staging` to `out`. A previous preparation is first moved aside, and deleted once the
    rename succeeds."""
    aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
    try:
        if out.exists():
            os.replace(out, aside)
        os.replace(staging, out)
    except OSError as error:
        # Another process may have prepared the same folder in the meantime; nothing to do then.
        if _rows_if_done(out, request) is None:
            raise DataError(f"could not move the prepared data to {out}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
