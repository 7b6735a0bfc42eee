"""The run folder: one driver at a time, and room for a new run of the same name."""

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
    """Create `output_dir` and return the run folder in it, which is not created.

    Raises:
        ConfigError: the folder cannot be created (in /proc, for example, which its mode does not
            show).
    """
    folder = derived.run_dir(config)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir={config.output_dir} cannot be made ({error.strerror}); choose another "
            "output_dir"
        ) from error
    return folder


def make_room(config: RunConfig, folder: Path, total_steps: int | None, progress: Progress) -> None:
    """Move a finished run of this name aside, or with resume=disable any run; nothing is deleted or
    changed. A finished run of fewer steps goes on, or of fewer epochs where `total_steps` is
    None."""
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
    progress.message(f"the earlier run of this name is now in {target}")


def _epochs(folder: Path) -> float:
    """The epochs of the run in a folder, as its config.yaml says; infinite where it does not."""
    try:
        trainer = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["trainer"]
        return float(trainer["total_epochs"] or math.inf)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return math.inf


def keep_config(folder: Path, text: str) -> None:
    """Write config.yaml. An earlier start's, where it says something else, stays as config.1.yaml
    and so on."""
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
    """Lock the run folder: two drivers in it would destroy each other's records. The lock ends with
    the process.

    The lock is `.NAME.lock` beside the folder, of mode 0600 because whoever can open it can hold
    it, and says which process of which node has it. A job that Slurm has cancelled writes its last
    checkpoint while the next one may already start: its end is awaited for a minute, and `say` is
    told so.

    Raises:
        ConfigError: another process keeps it, or the file is a link or somebody else's; it is left
            as it is then.
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


# twice the time that Slurm by default leaves a cancelled job (KillWait)
_PATIENCE_S = 60.0
_POLL_S = 0.2


def _take(path: Path, folder: Path, say: Callable[[str], object]) -> int:
    """The descriptor of the lock, held."""
    deadline = time.monotonic() + _PATIENCE_S
    is_said = False
    while True:
        # anew each time: who was told to remove the file has made room for another
        lock = _open_lock(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            held = f"another process is running in {folder} ({_holder(lock)})"
            os.close(lock)
            if not isinstance(error, BlockingIOError) or time.monotonic() > deadline:
                raise ConfigError(
                    f"{held}; wait for it, or choose another name=.... If that process has ended, "
                    f"something else keeps the lock: remove {path}"
                ) from error
            if not is_said:
                say(f"{held}; its end is awaited for {_PATIENCE_S:.0f} s")
                is_said = True
            time.sleep(_POLL_S)
        else:
            return lock


_LOCK_TEXT = b"hybridflow lock: "
_LOCK_SIZE = 256


def _open_lock(path: Path) -> int:
    """A descriptor of the lock file. A link in its place would have us write into a file of the
    user's."""
    try:
        lock = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600
        )
    except OSError as error:
        raise ConfigError(
            f"the lock {path} of the run folder cannot be opened ({error.strerror}): it is a link, "
            "a folder or another user's file. Remove it, or choose another output_dir=..."
        ) from error
    # a share may make root nobody
    status = os.fstat(lock)
    owners = (os.getuid(), path.parent.stat().st_uid)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        problem = "is no file of its own"
    elif status.st_uid not in owners:
        problem = f"belongs to the user with the number {status.st_uid}"
    elif not (text := os.pread(lock, _LOCK_SIZE, 0)).startswith(_LOCK_TEXT) and text:
        problem = "holds something else than a lock of HybridFlow"
    else:
        os.fchmod(lock, 0o600)  # an earlier version left it open to others
        return lock
    os.close(lock)
    raise ConfigError(
        f"the lock {path} of the run folder {problem}. Remove it, or choose another output_dir=..."
    )


def _holder(lock: int) -> str:
    text = os.pread(lock, _LOCK_SIZE, 0).removeprefix(_LOCK_TEXT).decode(errors="replace").strip()
    return text or "it does not say which"


def _write_lock(lock: int, holder: str) -> None:
    with suppress(OSError):  # the lock holds also where a full disk does not take who has it
        os.pwrite(
            lock, _LOCK_TEXT + holder.encode().ljust(_LOCK_SIZE - len(_LOCK_TEXT) - 1) + b"\n", 0
        )
