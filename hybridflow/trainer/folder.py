"""The run folder: one driver at a time, and room for a new run of the same name."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError, naming
from hybridflow.observe.progress import Progress
from hybridflow.saving.store import CheckpointStore, Retention


def make_room(config: RunConfig, folder: Path, total_steps: int, progress: Progress) -> None:
    """Move a finished run of this name aside, or with resume=disable any run; nothing is deleted."""
    if not folder.exists():
        return
    finished = (folder / "summary.json").exists()
    latest = CheckpointStore(folder / "checkpoints", Retention()).latest() if config.trainer.resume == "auto" else None
    goes_on = latest is not None and (not finished or latest.step < total_steps)
    if config.trainer.resume == "auto" and (goes_on or not finished):
        (folder / "summary.json").unlink(missing_ok=True)
        return
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    shutil.move(folder, target)
    progress.message(f"the earlier run of this name is now in {target}")


def keep_config(folder: Path, text: str) -> None:
    """Write config.yaml. An earlier start's, where it says something else, stays as config.1.yaml and so on."""
    file = folder / "config.yaml"
    if file.exists() and file.read_text(encoding="utf-8", errors="replace") != text:
        number = 1
        while (earlier := folder / f"config.{number}.yaml").exists():
            number += 1
        file.rename(earlier)
    with naming(file):
        file.write_text(text, encoding="utf-8")


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Lock the run folder: two drivers in it would destroy each other's records. The lock ends with the process."""
    handle: IO[str] = folder.with_name(f".{folder.name}.lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.close()
        raise ConfigError(f"another process is running in {folder}; wait for it, or choose another name=...") from error
    try:
        yield
    finally:
        handle.close()
