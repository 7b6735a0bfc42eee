"""The run folder: locked by one driver at a time, and moved aside for a new run with the same
name."""

from __future__ import annotations

import fcntl
import math
import os
import platform
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError, naming
from hybridflow.observe.progress import Progress
from hybridflow.saving.store import CheckpointStore, Retention


def make_output_dir(config: RunConfig) -> Path:
    """Create `output_dir`, and return the path of the run folder in it. The run folder itself is
    not created.

    Raises:
        ConfigError: the folder cannot be created (for example in /proc, whose mode does not reveal
            this).
    """
    folder = derived.run_dir(config)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir={config.output_dir} could not be created ({error.strerror}); choose "
            "another output_dir"
        ) from error
    return folder


def make_room(config: RunConfig, folder: Path, total_steps: int | None, progress: Progress) -> None:
    """Move aside an earlier run with this name if it has finished or resume=disable. Nothing is
    deleted or changed. A finished run with fewer steps than `total_steps` (or fewer epochs, if
    `total_steps` is None) is continued instead.
    """
    if not folder.exists():
        return
    finished = (folder / "summary.json").exists()
    latest = (
        CheckpointStore(folder / "checkpoints", Retention()).latest()
        if config.trainer.resume == "auto"
        else None
    )
    is_longer = total_steps is None and _epochs(folder) < (config.trainer.total_epochs or 0)
    is_longer = is_longer or (
        total_steps is not None and latest is not None and latest.step < total_steps
    )
    goes_on = latest is not None and (not finished or is_longer)
    if config.trainer.resume == "auto" and (goes_on or not finished):
        return
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    shutil.move(folder, target)
    progress.message(f"the earlier run with this name was moved to {target}")


def _epochs(folder: Path) -> float:
    """Return the number of epochs in the folder's config.yaml; infinity if it is not set there."""
    try:
        trainer = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["trainer"]
        return float(trainer["total_epochs"] or math.inf)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return math.inf


def keep_config(folder: Path, text: str) -> None:
    """Write config.yaml. If an earlier one differs, it is kept as config.1.yaml and so on."""
    file = folder / "config.yaml"
    if file.exists() and file.read_text(encoding="utf-8", errors="replace") != text:
        number = 1
        while (earlier := folder / f"config.{number}.yaml").exists():
            number += 1
        file.rename(earlier)
    with naming(file):
        file.write_text(text, encoding="utf-8")


@contextmanager
def exclusive(folder: Path, say: Callable[[str], object] = lambda text: None) -> Iterator[None]:
    """Lock the run folder, because two drivers would destroy each other's records. The lock is
    released when the process exits.

    The lock file is `.NAME.lock` next to the folder, with mode 0600, because any process that can
    open it can acquire the lock. It contains the lock owner's process id and node. A job cancelled
    by Slurm may still be writing its last checkpoint when the next one starts, so wait up to a
    minute for it, and report this through `say`.

    Raises:
        ConfigError: another process holds the lock, or the file is a link or belongs to another
            user; the file is not changed.
    """
    lock = _take(folder.with_name(f".{folder.name}.lock"), folder, say)
    try:
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        _write_lock(lock, f"process {os.getpid()} on {platform.node()} since {since}")
        try:
            yield
        finally:
            _write_lock(lock, "")
    finally:
        os.close(lock)


# twice Slurm's default grace period for a cancelled job (KillWait)
_PATIENCE_S = 60.0
_POLL_S = 0.2


def _take(path: Path, folder: Path, say: Callable[[str], object]) -> int:
    """Acquire the lock and return its descriptor."""
    deadline = time.monotonic() + _PATIENCE_S
    is_said = False
    while True:
        # reopened each time, because the user may have removed the file as advised
        lock = _open_lock(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held = f"another process is running in {folder} ({_holder(lock)})"
            os.close(lock)
            if not isinstance(error, BlockingIOError) or time.monotonic() > deadline:
                raise ConfigError(
                    f"{held}; wait for it to finish, or choose another name=.... If that process "
                    f"has exited, another process holds the lock: remove {path}"
                ) from error
            if not is_said:
                say(f"{held}; waiting up to {_PATIENCE_S:.0f} s for it to end")
                is_said = True
            time.sleep(_POLL_S)
        else:
            return lock


_LOCK_TEXT = b"hybridflow lock: "
_LOCK_SIZE = 256


def _open_lock(path: Path) -> int:
    """Open the lock file and return its descriptor. Links are rejected, because writing through one
    would modify another file."""
    try:
        lock = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
        )
    except OSError as error:
        raise ConfigError(
            f"could not open the run folder's lock {path} ({error.strerror}): it is a link, a "
            "folder or another user's file. Remove it, or choose another output_dir=..."
        ) from error
    # a network share may map root to nobody
    status = os.fstat(lock)
    owners = (os.getuid(), path.parent.stat().st_uid)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        problem = "is not a regular file with a single link"
    elif status.st_uid not in owners:
        problem = f"belongs to the user with id {status.st_uid}"
    elif not (text := os.pread(lock, _LOCK_SIZE, 0)).startswith(_LOCK_TEXT) and text:
        problem = "is not a HybridFlow lock file"
    else:
        os.fchmod(lock, 0o600)  # an earlier version left it open to others
        return lock
    os.close(lock)
    raise ConfigError(
        f"the run folder's lock {path} {problem}. Remove it, or choose another output_dir=..."
    )


def _holder(lock: int) -> str:
    text = os.pread(lock, _LOCK_SIZE, 0).removeprefix(_LOCK_TEXT).decode(errors="replace").strip()
    return text or "unknown process"


def _write_lock(lock: int, holder: str) -> None:
    with suppress(OSError):  # the lock is effective even if a full disk prevents writing its holder
        os.pwrite(
            lock, _LOCK_TEXT + holder.encode().ljust(_LOCK_SIZE - len(_LOCK_TEXT) - 1) + b"\n", 0
        )
