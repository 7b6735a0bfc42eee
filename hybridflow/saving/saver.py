"""Saving and loading of a role's state, optionally in the background. Shared by all training
backends.

A folder is a checkpoint once it contains `manifest.json`, which is written last and is therefore
missing if the process was killed or the disk was full. An asynchronous save pauses training only to
copy the state to host memory; a background thread does the rest (docs/adr/0009).
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

import hybridflow
from hybridflow.device.platform import Platform
from hybridflow.errors import CheckpointError
from hybridflow.models import Family
from hybridflow.observe import spans
from hybridflow.process.exchange import Exchange
from hybridflow.saving.failures import cause_of, not_written
from hybridflow.saving.manifest import (
    INDEX,
    MANIFEST,
    FileRecord,
    Manifest,
    digest_of,
    problems_of,
    say_saved,
    write_json,
)
from hybridflow.saving.reader import CheckpointFolder
from hybridflow.saving.rectangles import check_cover, write_tensors

_ALIGN = 64
_log = logging.getLogger(__name__)


class State(Protocol):
    """This rank's part of a checkpoint, as provided by a backend."""

    @property
    def contains(self) -> Sequence[str]:
        """The saved parts: model, adapters, optimizer, reference, rng."""
        ...

    def owned(self) -> Sequence[Any]:
        """The rectangles (`saving.rectangles.Rectangle`) that this rank writes, as views of live
        memory."""
        ...

    def hf(self) -> Iterable[Any]:
        """The mapping of HF tensors to saved tensors, as objects with the attributes of
        `saving.rectangles.HfSlice`.
        """
        ...


class Holder(Protocol):
    """The model properties that are recorded in a manifest."""

    @property
    def family(self) -> Family:
        """The model's family."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the model's weights."""
        ...

    @property
    def has_optimizer(self) -> bool:
        """True if there is an optimizer, whose state is part of a checkpoint."""
        ...

    @property
    def has_reference(self) -> bool:
        """True if there are reference weights."""
        ...


class Saver:
    """Saves a role's state. Saves never overlap: each waits for the previous one to finish. All
    ranks create it and call its methods collectively.
    """

    def __init__(
        self, open_job: Callable[[Path, str, int, Exchange], Job], timeout_s: float = 1800.0
    ) -> None:
        """Create the saver.

        Args:
            open_job: creates a `Job` from folder, phase, step and exchange, and captures everything
                but the tensor data from the live state.
            timeout_s: maximum time that a rank waits for the slowest rank, and that a save waits
                for the previous save.
        """
        self._open_job = open_job
        self.timeout_s = timeout_s
        # separate from the shared exchange, which an export or a load may use on the training
        # thread while a save finishes in the background
        self._exchange = Exchange(timeout_s)
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def save(self, folder: Path, *, phase: str = "", step: int = 0) -> None:
        """Write the policy's state to `folder`, which must not contain a checkpoint yet.

        Raises:
            CheckpointError: a rank could not write its file. The partial save is removed.
        """
        self.wait(self.timeout_s)
        job = self._open_job(folder, phase, step, self._exchange)
        job.write(job.state.owned())

    def start(self, folder: Path, *, phase: str = "", step: int = 0) -> None:
        """Start a save in the background. Returns once the state has been copied; `done` reports
        the result."""
        self.wait(self.timeout_s)
        job = self._open_job(folder, phase, step, self._exchange)
        copies = self._staging.copy(job.state.owned())

        def run() -> None:
            try:
                with spans.span("write checkpoint"):
                    job.write(copies)  # returns when all ranks have written
                if job.rank == 0:
                    say_saved(folder)
            except CheckpointError as error:
                self._failure = error
            except Exception as error:
                _log.exception("the background save of %s failed", folder)
                self._failure = CheckpointError(
                    f"the checkpoint {folder} could not be written ({type(error).__name__}: "
                    f"{error})"
                )

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Return True if no save is in progress.

        Raises:
            CheckpointError: the last save failed; the message contains the reason. Raised only once
                per failure.
        """
        if self._thread is not None:
            if self._thread.is_alive():
                return False
            self._thread.join()
            self._thread = None
        failure = self._failure
        self._failure = None
        if failure is not None:
            raise failure
        return True

    def wait(self, deadline_s: float) -> None:
        """Wait until `done` returns True. Raises CheckpointError after `deadline_s`."""
        end = time.monotonic() + deadline_s
        while not self.done():
            if time.monotonic() > end:
                raise CheckpointError(
                    f"a checkpoint was not written within {deadline_s:.0f} s; check whether the "
                    "file system hangs"
                )
            time.sleep(0.005)


class Staging:
    """A host memory buffer for a consistent copy of this rank's state while the state is written.

    It is pinned if there is a GPU, reused by every save, grows when needed, and is never freed.
    """

    def __init__(self) -> None:
        self._platform = Platform.detect()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def size(self) -> int:
        """Bytes allocated."""
        return self._buffer.numel()

    def copy(self, tensors: Sequence[Any]) -> list[Any]:
        """Return these rectangles (dataclasses with a field `data`), with copies of their current
        data. The copies are valid until the next call.
        """
        sizes = [-(-tensor.data.nbytes // _ALIGN) * _ALIGN for tensor in tensors]
        if sum(sizes) > self.size:
            # free the old buffer first, so that the two never exist at the same time
            self._buffer = torch.empty(0, dtype=torch.uint8)
            self._buffer = torch.empty(
                sum(sizes), dtype=torch.uint8, pin_memory=self._platform.kind == "cuda"
            )
        memory = self._buffer.numpy()
        start = 0
        copies = []
        for tensor, size in zip(tensors, sizes, strict=True):
            source = tensor.data
            if source.numel():
                target = torch.frombuffer(
                    memory, dtype=source.dtype, count=source.numel(), offset=start
                ).view(source.shape)
                target.copy_(source, non_blocking=True)
            else:
                target = torch.empty_like(source, device="cpu")
            copies.append(replace(tensor, data=target))
            start += size
        self._platform.synchronize()
        return copies


class Job:
    """One rank's part of a save. Everything except the tensor data is captured at creation, on the
    training thread.
    """

    def __init__(self, state: State, manifest: Manifest, folder: Path, exchange: Exchange) -> None:
        self.state = state
        self.manifest = manifest
        self.folder = folder
        self.exchange = exchange
        self.rank = dist.get_rank()

    def write(self, tensors: Sequence[Any]) -> None:
        """Write the checkpoint together with the other ranks. Raises CheckpointError on every rank
        if any rank fails.
        """
        try:
            self._on_first(self._make_room)
            reports = self.exchange.gather_on_first(self._write_own(tensors))
            self._on_first(lambda: self._complete(reports))
        except RuntimeError as error:
            reason = str(error).splitlines()[0].split(" This is typically ")[0]
            raise self._not_written(
                f"another rank has ended, or took too long to write its files: {reason}"
            ) from error

    def _write_own(self, tensors: Sequence[Any]) -> str:
        """Write this rank's file. Returns the tensors' positions in the file, or the error, as
        JSON."""
        try:
            chunks, files = write_tensors(self.folder, self.rank, tensors)
        except Exception as error:
            return json.dumps({"error": f"rank {self.rank}: {cause_of(error)}"})
        hf = []
        for piece in self.state.hf():
            hf.append([piece.source, piece.source_start, piece.shape, piece.key, piece.start])
        return json.dumps(
            {
                "chunks": chunks,
                "files": {name: asdict(record) for name, record in files.items()},
                "hf": hf,
            }
        )

    def _make_room(self) -> None:
        if (self.folder / MANIFEST).exists():
            raise CheckpointError(f"{self.folder} already contains a checkpoint")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def _complete(self, texts: Sequence[str]) -> None:
        """Write the index and then the manifest. Called on rank 0 after all ranks have written."""
        reports = list(map(json.loads, texts))
        errors = [report["error"] for report in reports if "error" in report]
        if errors:
            raise CheckpointError("; ".join(errors))
        files: dict[str, FileRecord] = {}
        chunks: list[Any] = []
        hf: list[Any] = []
        for report in reports:
            for name, record in report["files"].items():
                files[name] = FileRecord(**record)
            chunks += report["chunks"]
            hf += report["hf"]
        check_cover(chunks)
        write_json(self.folder / INDEX, {"chunks": chunks, "hf": hf})
        files[INDEX] = digest_of(self.folder / INDEX)
        replace(self.manifest, files=files).write(self.folder)

    def _on_first(self, action: Callable[[], None]) -> None:
        """Run an action on rank 0. Raises CheckpointError on every rank if the action fails."""
        failure = ""
        if self.rank == 0:
            try:
                action()
            except Exception as error:
                failure = cause_of(error)
        if failure := self.exchange.gather(failure)[0].strip():
            raise self._not_written(failure)

    def _not_written(self, cause: str) -> CheckpointError:
        """Remove the partial save and return the error to raise."""
        if self.rank == 0 and not (self.folder / MANIFEST).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        return not_written(self.folder, cause)


def manifest_of(
    holder: Holder,
    backend: str,
    contains: Sequence[str],
    layout: dict[str, int],
    phase: str,
    step: int,
    *,
    training: dict[str, Any],
    lora: dict[str, Any] | None = None,
    versions: dict[str, str] | None = None,
) -> Manifest:
    """Build the manifest of a save, without the list of files. `versions` adds libraries other than
    HybridFlow and torch."""
    return Manifest(
        phase=phase,
        step=step,
        contains=tuple(contains),
        layout=layout,
        dtype=str(holder.dtype).removeprefix("torch."),
        hf_config=dict(holder.family.hf),
        versions={
            "hybridflow": hybridflow.__version__,
            "torch": torch.__version__,
            **(versions or {}),
        },
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        backend=backend,
        training=training,
        lora=lora or {},
    )


# ---- loading


def check_adapters(manifest: Manifest, ours: Mapping[str, Any], folder: Path) -> None:
    """Raise CheckpointError if the checkpoint's adapters differ from the policy's, whose settings
    are `ours`."""
    theirs = dict(manifest.lora)
    if theirs != ours:
        raise CheckpointError(
            f"{folder} was not loaded: its actor.lora is {_settings(theirs)}, this run's is "
            f"{_settings(ours)}; restore the setting, or continue from merged weights (`hybridflow "
            "checkpoint export`, then model.path)"
        )


def _settings(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in facts.items()) or "rank=0"


def checked_manifest(holder: Holder, folder: Path, exchange: Exchange, backend: str) -> Manifest:
    """Read the manifest, verify the files, and check that the model matches the holder's. Each rank
    verifies some of the files, and all ranks raise the same error.

    Raises:
        CheckpointError: the folder is missing, damaged, not a checkpoint, or from another backend
            or model.
    """
    problems = []
    manifest = None
    try:
        manifest = Manifest.read(folder)
        problems = _mismatches(holder, manifest, backend)
        if not problems:
            problems = problems_of(
                folder, manifest, sorted(manifest.files)[dist.get_rank() :: exchange.world]
            )
    except CheckpointError as error:
        problems = [str(error)]
    every = map(json.loads, exchange.gather(json.dumps(problems)))
    found = list(dict.fromkeys(chain.from_iterable(every)))
    if found or manifest is None:
        raise CheckpointError(f"{folder} was not loaded: " + "; ".join(found[:6]))
    return manifest


def restore(folder: Path, tensors: Sequence[Any], exchange: Exchange) -> None:
    """Fill this rank's rectangles from a checkpoint verified by `checked_manifest`. Collective.

    Raises:
        CheckpointError: raised on all ranks if any of them cannot read its data.
    """
    failure = ""
    try:
        CheckpointFolder(folder).restore(tensors)
    except Exception as error:
        failure = cause_of(error)
    if found := [text for text in dict.fromkeys(exchange.gather(failure)) if text.strip()]:
        raise CheckpointError(f"{folder} could not be loaded: {'; '.join(found[:6])}")


def _mismatches(holder: Holder, manifest: Manifest, backend: str) -> list[str]:
    found = manifest.mismatches(holder.family.hf, backend)
    dtype = str(holder.dtype).removeprefix("torch.")
    if manifest.dtype != dtype:
        found.append(f"dtype is {manifest.dtype} in the checkpoint, {dtype} here")
    wanted = {"optimizer": holder.has_optimizer, "reference": holder.has_reference}
    found += [
        f"it does not contain the {part}, which this role needs"
        for part, needed in wanted.items()
        if needed and part not in manifest.contains
    ]
    return found
