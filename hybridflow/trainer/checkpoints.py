"""Checkpoints on the driver's side: names, what belongs to one, which is the last whole one, retention.

`checkpoints/global_step_N/` (and `sft_step_N/` of the warm start) holds `policy/` (Megatron's) and `driver.json`; the folder gets its
name when all of it is on the disk, then `latest.json` points to it. A crash at any moment leaves the previous one in force.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.errors import CheckpointError

_PREFIX = {"sft": "sft_step_", "rl": "global_step_"}


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint on the disk."""

    folder: Path
    phase: str
    step: int
    state: Mapping[str, Any]

    @property
    def policy(self) -> Path:
        """What the policy's ranks wrote."""
        return self.folder / "policy"


class CheckpointStore:
    """The `checkpoints/` folder of a run."""

    def __init__(self, folder: Path, max_to_keep: int) -> None:
        self.folder, self.max_to_keep = folder, max_to_keep

    def save(self, phase: str, step: int, state: Mapping[str, Any], write_policy: Callable[[Path], None]) -> Path:
        """Write a checkpoint; `write_policy` is given the folder that the policy's ranks fill.

        Raises:
            CheckpointError: it could not be written; nothing of it is left and the previous one is in force.
        """
        final = self.folder / f"{_PREFIX[phase]}{step}"
        partial = final.with_name(final.name + ".partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write_policy(partial / "policy")
            _write_json(partial / "driver.json", {"phase": phase, "step": step, "state": dict(state)})
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            _write_json(self.folder / "latest.json", {"folder": final.name})
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint {final} could not be written: {error}; the previous one is untouched. Free disk space and run the same "
                "command again to resume."
            ) from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._drop_old(final)
        return final

    def latest(self) -> Checkpoint | None:
        """The last whole checkpoint, or None in a fresh run.

        Raises:
            CheckpointError: latest.json points to something that is gone or torn.
        """
        pointer = self.folder / "latest.json"
        if not pointer.exists():
            return None
        try:
            folder = self.folder / str(json.loads(pointer.read_text())["folder"])
            driver = json.loads((folder / "driver.json").read_text())
            return Checkpoint(folder, str(driver["phase"]), int(driver["step"]), driver["state"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{pointer} does not lead to a whole checkpoint ({error}). Point it to another folder beside it, or start anew with "
                "trainer.resume=disable"
            ) from error

    def _drop_old(self, newest: Path) -> None:
        whole = [path for path in self.folder.iterdir() if (path / "driver.json").exists() and not path.name.endswith(".partial")]
        by_age = sorted(whole, key=lambda path: path.stat().st_mtime)
        for path in by_age[: -self.max_to_keep] if self.max_to_keep > 0 else []:
            if path != newest:
                shutil.rmtree(path, ignore_errors=True)


def _write_json(path: Path, value: Any) -> None:
    """Whole or not at all, on the disk when it returns."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
