"""Checkpoints on the driver's side: names, what belongs to one, which is the last whole one,
retention.

`checkpoints/global_step_N/` (and `sft_step_N/` of the warm start) holds `policy/` (what the ranks
wrote), with a critic `critic/`, and `driver.json` (step, sampler, totals, as they were when the
ranks copied their state), with prompts under way also `rollouts.parquet` (what engines had made of
them). The folder gets its name when all of it is on the disk, then `latest.json` points to it. A
crash at any moment leaves the previous one in force.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hybridflow.batch import DataProto, read_parquet, write_parquet
from hybridflow.config.outside_json import read_outside_json
from hybridflow.errors import CheckpointError
from hybridflow.observe.jsonl import finite
from hybridflow.saving.fingerprint import Fingerprint
from hybridflow.saving.manifest import (
    MANIFEST,
    FileRecord,
    Manifest,
    digest_of,
    is_said_saved,
    plain_name,
    problems_in,
    read_sealed,
    sync_folder,
    write_json,
    write_sealed,
)

DRIVER = "driver.json"
LATEST = "latest.json"
ROLLOUTS = "rollouts.parquet"

_PREFIX = {"sft": "sft_step_", "rl": "global_step_", "reward": "reward_step_"}
_DROPPED = ".dropped"
_UNFINISHED = (".partial", _DROPPED)
_POLL_S = 0.05
_MOST_LATEST_BYTES = 1 << 16


class Saves(Protocol):
    """What the store needs of the ranks of a role."""

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        """Write the state to a new folder; in the background, return when it has been copied."""
        ...

    async def is_saved(self) -> bool:
        """Whether no rank is writing. CheckpointError when the last background save failed."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint on the disk."""

    folder: Path
    phase: str
    step: int
    state: Mapping[str, Any]
    fingerprint: Fingerprint = field(default_factory=Fingerprint)

    @property
    def policy(self) -> Path:
        """What the policy's ranks wrote."""
        return self.folder / "policy"

    @property
    def critic(self) -> Path:
        """What the critic's ranks wrote, in a run that has one."""
        return self.folder / "critic"

    def rollouts(self) -> DataProto | None:
        """What engines had begun of the prompts in `state`; None where that was nothing. DataError:
        it is damaged."""
        path = self.folder / ROLLOUTS
        return read_parquet(path) if path.exists() else None

    def check_parts(self) -> None:
        """CheckpointError when the parts are not those that the driver wrote beside its own
        (`problems_of_parts`)."""
        if found := problems_of_parts(self.folder):
            raise CheckpointError(f"{self.folder} was not resumed from: {'; '.join(found)}")

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Around what takes over the driver's state: a state that has the right hash and another
        content is a CheckpointError."""
        try:
            yield
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            IndexError,
            OverflowError,
        ) as error:
            raise CheckpointError(
                f"{self.folder / DRIVER} has its right hash and does not hold the state of such a "
                f"run ({type(error).__name__}: {error}): another version wrote it, or it was made "
                "up. Go on from another checkpoint (latest.json names it), or start anew with "
                "trainer.resume=disable"
            ) from error


@dataclass(frozen=True)
class Retention:
    """The newest `last` checkpoints stay (0: all), and those of the main job whose step is a
    multiple of `every` (0: none of them)."""

    last: int = 0
    every: int = 0

    def dropped(self, oldest_first: list[Checkpoint]) -> list[Checkpoint]:
        """Which of them go. Never the newest."""
        if self.last < 1:
            return []
        dropped: list[Checkpoint] = []
        for one in oldest_first[: -self.last]:
            if not (self.every > 0 and one.phase == "rl" and one.step % self.every == 0):
                dropped.append(one)
        return dropped


class CheckpointStore:
    """The `checkpoints/` folder of a run. With `background`, saves go on while the run trains, one
    at a time.

    Attributes:
        fingerprint: what the run's numbers follow from, which each checkpoint keeps.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        *,
        background: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        """`timeout_s`: how long the next save, or the end of the run, waits for a save that is
        under way."""
        self.folder = folder
        self.retention = retention
        self.background = background
        self.timeout_s = timeout_s
        self.fingerprint = Fingerprint()
        self._pending: _Pending | None = None

    async def save(
        self,
        phase: str,
        step: int,
        state: Mapping[str, Any],
        policy: Saves,
        *,
        rollouts: DataProto | None = None,
        **others: Saves,
    ) -> Path:
        """Write a checkpoint, or begin to in the background: it counts when it is whole then, and
        `check` reports a failure.

        `critic=...` is another role whose ranks fill a folder of that name next to `policy/`;
        `rollouts` are answers that belong to `state`. A number in `state` that is not finite is
        None when it is read again.

        Raises:
            CheckpointError: it (or the one before, in the background) could not be written; the
            previous one is in force.
        """
        await self.wait()
        final = self.folder / f"{_PREFIX[phase]}{step}"
        partial = final.with_name(final.name + ".partial")
        with self._nothing_left(final, partial):
            shutil.rmtree(partial, ignore_errors=True)
            # not its parents: a run folder that was moved does not come back
            self.folder.mkdir(exist_ok=True)
            partial.mkdir()
            roles = {"policy": policy, **others}
            known: dict[str, Any] = {
                "fingerprint": asdict(self.fingerprint),
                "roles": list(roles),
                "files": {},
            }
            if rollouts is not None:
                write_parquet(partial / ROLLOUTS, rollouts)
                with (partial / ROLLOUTS).open("rb") as file:
                    os.fsync(file.fileno())
                known["files"][ROLLOUTS] = asdict(digest_of(partial / ROLLOUTS))
            write_sealed(
                partial / DRIVER, {"phase": phase, "step": step, "state": finite(state), **known}
            )
            for name, role in roles.items():
                await role.save(partial / name, phase=phase, step=step, background=self.background)
            if not self.background:
                return self._commit(partial, final)
        self._pending = _Pending(self, partial, final, roles)
        return final

    async def check(self) -> None:
        """Raise CheckpointError if the save in the background has failed; called between steps."""
        pending = self._pending
        if pending is None:
            return
        with self._nothing_left(pending.final, pending.partial, pending):
            if not pending.is_over():
                for role in pending.roles.values():
                    await role.is_saved()
                return
        self._pending = None

    async def wait(self) -> None:
        """Wait until no save is in progress. CheckpointError as from `check`, or after
        `timeout_s`."""
        deadline = time.monotonic() + self.timeout_s
        while self._pending is not None:
            await self.check()
            if self._pending is not None and time.monotonic() > deadline:
                raise CheckpointError(
                    f"the checkpoint {self._pending.final} was not written within "
                    f"{self.timeout_s:.0f} s (trainer.checkpoint_timeout_s); is the file system "
                    "hanging?"
                )
            await asyncio.sleep(_POLL_S / 5)

    def settle(self) -> None:
        """To be called when the ranks have ended, or are about to: a save in progress counts if it
        is whole by now, and never otherwise."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.stop()
            with suppress(OSError):  # the checkpoint before it is in force then
                if pending.is_whole():
                    self._commit(pending.partial, pending.final)

    def latest(self) -> Checkpoint | None:
        """The checkpoint in force, or None in a fresh run: the one that latest.json names, or the
        newest whole one where there is no latest.json. May be asked for while another process goes
        on saving.

        Raises:
            CheckpointError: latest.json leads to nothing, to something torn, or out of the folder.
        """
        said: str | None = None
        while True:
            before = said
            try:
                said = latest_name(self.folder)
                return _read(self.folder / said) if said else None
            except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
                # unless another process has put a newer one in force meanwhile, and dropped what
                # was being read
                if said == before:
                    raise CheckpointError(
                        f"{self.folder / LATEST} does not lead to a whole checkpoint ({error}). "
                        "Let it name another folder of the same place, or start anew with "
                        "trainer.resume=disable"
                    ) from error

    def left_out(self) -> list[str]:
        """A line for each folder with the name of a checkpoint that lacks what a checkpoint
        needs."""
        return left_out(self.folder)

    def of_loop(self) -> dict[int, Checkpoint]:
        """The whole checkpoints of the loop by step. CheckpointError when one cannot be read."""
        found: dict[int, Checkpoint] = {}
        for one in self._whole():
            if one.phase == "rl":
                found[one.step] = one
        return found

    # ---- inside

    def _commit(self, partial: Path, final: Path) -> Path:
        """All of it is on the disk: give it its name, point to it, drop what is no longer
        wanted."""
        # the same step once more: the one in force stays until the new one is
        if final.exists() and self._points_to(final):
            final = final.with_name(f"{final.name}-{int(time.time())}")
        shutil.rmtree(final, ignore_errors=True)
        for said in partial.glob("*.saved"):
            said.unlink(missing_ok=True)
        for folder in (partial, *filter(Path.is_dir, partial.iterdir())):
            sync_folder(folder)
        os.replace(partial, final)
        sync_folder(self.folder)
        write_json(self.folder / LATEST, {"folder": final.name})
        for old in self.retention.dropped(self._whole()):
            if old.folder != final:
                # never half a checkpoint under a good name
                dropped = old.folder.with_name(old.folder.name + _DROPPED)
                os.replace(old.folder, dropped)
        # of saves that were cut short, too: no other is under way
        for pattern in (f"*{_DROPPED}", "*.partial"):
            for left in self.folder.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)
        return final

    def _points_to(self, folder: Path) -> bool:
        return (self.folder / LATEST).exists() and latest_name(self.folder) == folder.name

    def _whole(self) -> list[Checkpoint]:
        """All checkpoints in the folder, oldest first."""
        return list(map(_read, _whole(self.folder)))

    @contextmanager
    def _nothing_left(
        self, final: Path, partial: Path, pending: _Pending | None = None
    ) -> Iterator[None]:
        """After a failure nothing of the checkpoint remains; what the system says becomes a
        CheckpointError."""
        try:
            yield
        except BaseException as error:
            if pending is not None:
                pending.stop()
                self._pending = None
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"the checkpoint {final} could not be written: {error}; the previous "
                    "checkpoint is untouched. Free disk space and run the same command again to "
                    "resume."
                ) from error
            raise


class _Pending:
    """A save under way: a thread commits it as soon as the ranks of each role have said that it is
    on the disk, however long the training's step takes."""

    def __init__(
        self, store: CheckpointStore, partial: Path, final: Path, roles: Mapping[str, Saves]
    ) -> None:
        self.store = store
        self.partial = partial
        self.final = final
        self.roles = roles
        self._error: BaseException | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="commit", daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Whether it was committed; raises what kept it from being."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def is_whole(self) -> bool:
        """Whether the ranks of every role have written all of it (and it has not been committed
        yet)."""
        return all(is_said_saved(self.partial / name) for name in self.roles)

    def stop(self) -> None:
        """Commit no more."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self.is_whole():
                if self._stopped.wait(_POLL_S):
                    return
            self.store._commit(self.partial, self.final)
        except BaseException as error:  # raised to the training by is_over
            self._error = error


def is_name_of_checkpoint(name: str) -> bool:
    """Whether a folder of this name was written as a whole checkpoint, with the driver's part."""
    return name.startswith(tuple(_PREFIX.values()))


def latest_name(folder: Path) -> str:
    """The folder of the checkpoint in force inside `folder`; empty when there is none.

    Raises:
        OSError, ValueError, KeyError, TypeError: latest.json cannot be read, or names something
            outside of `folder`.
    """
    try:
        return plain_name(str(read_outside_json(folder / LATEST, _MOST_LATEST_BYTES)["folder"]))
    except FileNotFoundError:  # killed before the first one was named, or removed by somebody
        whole = _whole(folder)
        return whole[-1].name if whole else ""


def left_out(folder: Path) -> list[str]:
    """A line for each folder inside `folder` with the name of a checkpoint that lacks what a
    checkpoint needs."""
    lines = []
    for one in sorted(folder.glob("*_step_*")):
        has_ended = (
            is_name_of_checkpoint(one.name) and one.suffix not in _UNFINISHED and one.is_dir()
        )
        if has_ended and (lacking := _lacks(one)):
            lines.append(f"{one} is left out, no run resumes from it: {lacking} is missing")
    return lines


def _whole(folder: Path) -> list[Path]:
    """Folders with all that a checkpoint needs, oldest first."""
    found = [one for one in folder.glob("*/") if one.suffix not in _UNFINISHED and not _lacks(one)]
    return sorted(found, key=lambda one: (one / DRIVER).stat().st_mtime_ns)


def _lacks(folder: Path) -> str:
    """The first file that a folder lacks for a checkpoint; empty for a whole one."""
    return next(
        (name for name in (DRIVER, f"policy/{MANIFEST}") if not (folder / name).exists()), ""
    )


def problems_of_parts(folder: Path) -> list[str]:
    """What is wrong with a checkpoint beyond the files of each role: the driver's part, roles and
    files that belong to it and are missing, or are of another step. Empty when all is well."""
    file = folder / DRIVER
    if not file.exists():
        return [
            f"{file} is missing: no run can resume from this checkpoint, which can only be exported"
        ]
    try:
        _read(folder)
        driver = read_sealed(file)
        found = []
        for role in map(plain_name, driver.get("roles", ["policy"])):
            manifest = Manifest.read(folder / role)
            if (manifest.phase, manifest.step) != (driver["phase"], driver["step"]):
                found.append(
                    f"{file} is of step {driver['step']} ({driver['phase']}), and "
                    f"{folder / role / MANIFEST} of step {manifest.step} ({manifest.phase})"
                )
        files = {}
        for name, record in driver.get("files", {}).items():
            files[plain_name(name)] = FileRecord(**record)
        return found + problems_in(folder, files)
    except CheckpointError as error:
        return [str(error)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"{file} does not say which parts belong to it ({type(error).__name__}: {error})"]


def _read(folder: Path) -> Checkpoint:
    driver = read_sealed(folder / DRIVER)
    try:
        phase = driver["phase"]
        step = driver["step"]
        state = driver["state"]
        if (
            phase not in _PREFIX
            or type(step) is not int
            or not 0 <= step < 1 << 53
            or not isinstance(state, dict)
        ):
            raise ValueError(
                f"phase {str(phase)[:40]!r}, step {str(step)[:40]!r}, state {str(state)[:40]!r}"
            )
        return Checkpoint(
            folder, phase, step, state, Fingerprint.read(driver.get("fingerprint", {}))
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder / DRIVER} has its right hash and does not describe a checkpoint "
            f"({type(error).__name__}: {error})"
        ) from error
