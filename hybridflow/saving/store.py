"""The driver's side of checkpoints: naming, contents, selection of the latest complete checkpoint,
and retention.

`checkpoints/global_step_N/` (and `sft_step_N/` for the warm start) contains `policy/` (written by
the ranks), `critic/` if there is a critic, `driver.json` (step, sampler and totals, captured when
the ranks copied their state), and `rollouts.parquet` (partial responses) if prompts are in flight.
The folder gets its final name once everything is on disk; then `latest.json` is updated to point to
it. After a crash at any moment, the previous checkpoint is still current.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hybridflow.config.outside_json import read_outside_json
from hybridflow.errors import CheckpointError
from hybridflow.observe.jsonl import finite
from hybridflow.saving.failures import cause_of, not_written
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

if TYPE_CHECKING:
    from hybridflow.batch import DataProto

DRIVER = "driver.json"
LATEST = "latest.json"
ROLLOUTS = "rollouts.parquet"

_PREFIX = {"sft": "sft_step_", "rl": "global_step_", "reward": "reward_step_"}
_DROPPED = ".dropped"
_UNFINISHED = (".partial", _DROPPED)
_POLL_S = 0.05
_MOST_LATEST_BYTES = 1 << 16


class Saves(Protocol):
    """The interface through which the store saves the state of a role's ranks."""

    async def save(self, folder: Path, *, phase: str, step: int, background: bool) -> None:
        """Write the state to a new folder. In background mode, return as soon as the state has been
        copied; writing continues asynchronously."""
        ...

    async def is_saved(self) -> bool:
        """Return True if no rank is writing. Raises CheckpointError if the last background save
        failed."""
        ...


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint on disk."""

    folder: Path
    phase: str
    step: int
    state: Mapping[str, Any]
    fingerprint: Fingerprint = field(default_factory=Fingerprint)

    @property
    def policy(self) -> Path:
        """The folder written by the policy's ranks."""
        return self.folder / "policy"

    @property
    def critic(self) -> Path:
        """The folder written by the critic's ranks, if the run has a critic."""
        return self.folder / "critic"

    def rollouts(self) -> DataProto | None:
        """Return the partial responses to the prompts in `state`, or None if there are none. Raises
        DataError if the file is damaged."""
        # imported here because numpy and pyarrow would delay the start of an evaluation's engines
        from hybridflow.batch import read_parquet

        path = self.folder / ROLLOUTS
        return read_parquet(path) if path.exists() else None

    def check_parts(self) -> None:
        """Raise CheckpointError if the parts do not match `driver.json` (`problems_of_parts`)."""
        if found := problems_of_parts(self.folder):
            raise CheckpointError(f"could not resume from {self.folder}: {'; '.join(found)}")

    def check_model(self, hf_config: Mapping[str, Any], backend: str) -> None:
        """Raise CheckpointError if the weights belong to another model or training backend. Only
        the fields that both configs have are compared, because a scalar head adds some. The ranks
        compare them all, but only after everything has started.
        """
        manifest = Manifest.read(self.policy)
        common = hf_config.keys() & manifest.hf_config.keys()
        theirs = {key: manifest.hf_config[key] for key in common}
        ours = {key: hf_config[key] for key in common}
        if found := replace(manifest, hf_config=theirs).mismatches(ours, backend):
            raise CheckpointError(
                f"could not resume from {self.folder}: {'; '.join(found[:6])}; restore the "
                "settings, or start a new run with another name=..."
            )

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Convert errors raised in the block while restoring the driver's state to CheckpointError,
        because a file with the right hash may still have unexpected content.
        """
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
                f"{self.folder / DRIVER} has the right hash but does not contain a valid state for "
                f"this run ({type(error).__name__}: {error}); it was written by another version or "
                "edited. Resume from another checkpoint (set its name in latest.json), or start "
                "over with trainer.resume=disable"
            ) from error


@dataclass(frozen=True)
class Retention:
    """Retention rule: keep the newest `last` checkpoints (0 keeps all), and the main job's
    checkpoints at every multiple of `every` steps (0 for none).
    """

    last: int = 0
    every: int = 0

    def dropped(self, oldest_first: list[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints to delete. The newest is never deleted."""
        if self.last < 1:
            return []
        dropped: list[Checkpoint] = []
        for one in oldest_first[: -self.last]:
            if not (self.every > 0 and one.phase == "rl" and one.step % self.every == 0):
                dropped.append(one)
        return dropped


class CheckpointStore:
    """The `checkpoints/` folder of a run. With `background`, saves run while training continues,
    one at a time.

    Attributes:
        fingerprint: the run's `Fingerprint`, stored in each checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        *,
        background: bool = False,
        timeout_s: float = 1800.0,
    ) -> None:
        """Open the folder. `timeout_s` limits how long the next save, or the end of the run, waits
        for a save in progress."""
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
        """Write a checkpoint, or start writing it in the background. A background save takes effect
        once it is complete, and `check` reports failures.

        Further roles passed by keyword (such as `critic=...`) are saved in a folder of that name
        next to `policy/`. `rollouts` contains the partial responses to the prompts in `state`.
        Non-finite numbers in `state` become None when read back.

        Raises:
            CheckpointError: the checkpoint (or the previous background save) could not be written.
                The previous checkpoint remains current.
        """
        await self.wait()
        final = self.folder / f"{_PREFIX[phase]}{step}"
        partial = final.with_name(final.name + ".partial")
        with self._nothing_left(final, partial):
            shutil.rmtree(partial, ignore_errors=True)
            # do not create its parents: a run folder that was moved must not be recreated
            self.folder.mkdir(exist_ok=True)
            partial.mkdir()
            roles = {"policy": policy, **others}
            known: dict[str, Any] = {
                "fingerprint": asdict(self.fingerprint),
                "roles": list(roles),
                "files": {},
            }
            if rollouts is not None:
                from hybridflow.batch import write_parquet

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
        """Raise CheckpointError if the background save has failed. Called between steps."""
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
        """Wait until no save is in progress. Raises CheckpointError like `check`, or after
        `timeout_s`."""
        deadline = time.monotonic() + self.timeout_s
        while self._pending is not None:
            await self.check()
            if self._pending is not None and time.monotonic() > deadline:
                raise CheckpointError(
                    f"the checkpoint {self._pending.final} was not written within "
                    f"{self.timeout_s:.0f} s (trainer.checkpoint_timeout_s); check whether the "
                    "file system hangs"
                )
            await asyncio.sleep(_POLL_S / 5)

    def settle(self) -> None:
        """Stop background commits, because the ranks have exited or are about to exit. A save in
        progress is committed only if the ranks have already written everything.
        """
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.stop()
            with suppress(OSError):  # the previous checkpoint then remains current
                if pending.is_whole():
                    self._commit(pending.partial, pending.final)

    def latest(self) -> Checkpoint | None:
        """Return the current checkpoint, or None in a fresh run. This is the checkpoint named in
        latest.json or, if there is no latest.json, the newest complete one. Another process may be
        saving at the same time.

        Raises:
            CheckpointError: latest.json points to a missing or damaged checkpoint, or to a path
                outside the folder.
        """
        said: str | None = None
        while True:
            before = said
            try:
                said = latest_name(self.folder)
                return read_checkpoint(self.folder / said) if said else None
            except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
                # retry if another process has committed a newer one meanwhile and deleted the one
                # being read
                if said == before:
                    raise CheckpointError(
                        f"{self.folder / LATEST} does not point to a complete checkpoint "
                        f"({error}). Point it to another checkpoint in the same folder, or start "
                        "over with trainer.resume=disable"
                    ) from error

    def left_out(self) -> list[str]:
        """Return one line for each folder that is named like a checkpoint but is incomplete."""
        return left_out(self.folder)

    def of_loop(self) -> dict[int, Checkpoint]:
        """Return the training loop's complete checkpoints, keyed by step. Raises CheckpointError if
        one cannot be read."""
        found: dict[int, Checkpoint] = {}
        for one in self._whole():
            if one.phase == "rl":
                found[one.step] = one
        return found

    # ---- internals

    def _commit(self, partial: Path, final: Path) -> Path:
        """Rename a synced checkpoint to its final name, update latest.json, and apply the retention
        rule."""
        # the same step was saved before: keep that checkpoint until the new one is current
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
                # rename first, so that a partial checkpoint never has a final name
                dropped = old.folder.with_name(old.folder.name + _DROPPED)
                os.replace(old.folder, dropped)
        # also remove those of interrupted saves; no other save is in progress
        for pattern in (f"*{_DROPPED}", "*.partial"):
            for left in self.folder.glob(pattern):
                shutil.rmtree(left, ignore_errors=True)
        return final

    def _points_to(self, folder: Path) -> bool:
        return (self.folder / LATEST).exists() and latest_name(self.folder) == folder.name

    def _whole(self) -> list[Checkpoint]:
        """Return all checkpoints in the folder, oldest first."""
        return list(map(read_checkpoint, _whole(self.folder)))

    @contextmanager
    def _nothing_left(
        self, final: Path, partial: Path, pending: _Pending | None = None
    ) -> Iterator[None]:
        """Context manager: if the block fails, remove all files of the checkpoint, and convert
        system errors to CheckpointError.
        """
        try:
            yield
        except BaseException as error:
            if pending is not None:
                pending.stop()
                self._pending = None
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise not_written(final, cause_of(error)) from error
            raise


class _Pending:
    """A save in progress. A thread commits it once the ranks of all roles have reported that it is
    on disk, independently of training progress."""

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
        """Return True if the save was committed, and False while it is in progress. Raises the
        error if it failed."""
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def is_whole(self) -> bool:
        """Return True if the ranks of every role have written everything, whether or not the save
        is committed yet.
        """
        return all(is_said_saved(self.partial / name) for name in self.roles)

    def stop(self) -> None:
        """Stop the thread without committing."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        try:
            while not self.is_whole():
                if self._stopped.wait(_POLL_S):
                    return
            self.store._commit(self.partial, self.final)
        except BaseException as error:  # `is_over` raises it in the training loop
            self._error = error


def is_name_of_checkpoint(name: str) -> bool:
    """Return True if this is the final name of a checkpoint folder, i.e. of a folder that also
    contains the driver's part.
    """
    return name.startswith(tuple(_PREFIX.values()))


def latest_name(folder: Path) -> str:
    """Return the name of the current checkpoint's folder inside `folder`; an empty string if there
    is none.

    Raises:
        OSError, ValueError, KeyError, TypeError: latest.json cannot be read, or points outside
            `folder`.
    """
    try:
        return plain_name(str(read_outside_json(folder / LATEST, _MOST_LATEST_BYTES)["folder"]))
    except FileNotFoundError:  # killed before the first one was named, or deleted by the user
        whole = _whole(folder)
        return whole[-1].name if whole else ""


def left_out(folder: Path) -> list[str]:
    """Return one line for each folder inside `folder` that is named like a checkpoint but is
    incomplete."""
    lines = []
    for one in sorted(folder.glob("*_step_*")):
        has_ended = (
            is_name_of_checkpoint(one.name) and one.suffix not in _UNFINISHED and one.is_dir()
        )
        if has_ended and (lacking := _lacks(one)):
            lines.append(f"{one} is ignored and cannot be used to resume: {lacking} is missing")
    return lines


def _whole(folder: Path) -> list[Path]:
    """Return the folders of complete checkpoints, oldest first."""
    found = [one for one in folder.glob("*/") if one.suffix not in _UNFINISHED and not _lacks(one)]
    return sorted(found, key=lambda one: (one / DRIVER).stat().st_mtime_ns)


def _lacks(folder: Path) -> str:
    """Return the first file missing from a checkpoint's folder; an empty string if it is
    complete."""
    return next(
        (name for name in (DRIVER, f"policy/{MANIFEST}") if not (folder / name).exists()), ""
    )


def problems_of_parts(folder: Path) -> list[str]:
    """Return a checkpoint's problems, except damage to a role's own files: errors in the driver's
    part, and roles or files that are missing or from another step.
    """
    file = folder / DRIVER
    if not file.exists():
        return [f"{file} is missing: this checkpoint can only be exported, not resumed from"]
    try:
        read_checkpoint(folder)
        driver = read_sealed(file)
        found = []
        for role in map(plain_name, driver.get("roles", ["policy"])):
            manifest = Manifest.read(folder / role)
            if (manifest.phase, manifest.step) != (driver["phase"], driver["step"]):
                found.append(
                    f"{file} is from step {driver['step']} ({driver['phase']}), but "
                    f"{folder / role / MANIFEST} is from step {manifest.step} ({manifest.phase})"
                )
        files = {}
        for name, record in driver.get("files", {}).items():
            files[plain_name(name)] = FileRecord(**record)
        return found + problems_in(folder, files)
    except CheckpointError as error:
        return [str(error)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"{file} does not list the checkpoint's parts ({type(error).__name__}: {error})"]


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder. Raises CheckpointError if its driver.json is missing or
    damaged."""
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
            f"{folder / DRIVER} has the right hash but does not contain a valid phase, step and "
            f"state ({type(error).__name__}: {error})"
        ) from error
