"""Save and load one role's state, in the background or not: the same for every training backend.

A folder is a checkpoint when it has a `manifest.json`, which is written last: a kill or a full disk
at any moment leaves a folder that is none. An asynchronous save stops the training for one copy of
the state into host memory; a thread of this process, which ends with it however it ends, does the
rest (docs/adr/0009).
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

import hybridflow
from hybridflow.device.platform import Platform
from hybridflow.errors import CheckpointError
from hybridflow.models import Family
from hybridflow.process.exchange import Exchange
from hybridflow.saving.manifest import (
    INDEX,
    MANIFEST,
    FileRecord,
    Manifest,
    differences,
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
    """This rank's part of a checkpoint, as a backend describes it."""

    @property
    def contains(self) -> Sequence[str]:
        """The parts it has: model, adapters, optimizer, reference, rng."""
        ...

    def owned(self) -> Sequence[Any]:
        """The rectangles (`saving.rectangles.Rectangle`) that this rank writes, over live
        memory."""
        ...

    def hf(self) -> Iterable[Any]:
        """Where the HF tensors lie: objects with source, source_start, shape, key, start."""
        ...


class Holder(Protocol):
    """A model, as far as a manifest describes it."""

    @property
    def family(self) -> Family:
        """The family of the model."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the weights."""
        ...

    @property
    def has_optimizer(self) -> bool:
        """Whether there is an optimizer, whose state belongs to a checkpoint."""
        ...

    @property
    def has_reference(self) -> bool:
        """Whether reference weights are held."""
        ...


class Saver:
    """Saves of one role, at most one at a time: the next waits for the one before. All ranks create
    it and call its methods together."""

    def __init__(
        self, open_job: Callable[[Path, str, int, Exchange], Job], timeout_s: float = 1800.0
    ) -> None:
        """Start with no save in progress.

        Args:
            open_job: makes the job of one save from folder, phase, step and exchange; it takes
                everything but the tensors' data from the live state.
            timeout_s: how long a rank that has written its files waits for the slowest, and a save
                for the one before.
        """
        self._open_job = open_job
        self.timeout_s = timeout_s
        # not the shared exchange: an export or a load may use that on the training's thread while a
        # save ends in the background
        self._exchange = Exchange(timeout_s)
        self._staging = Staging()
        self._thread: threading.Thread | None = None
        self._failure: CheckpointError | None = None

    def save(self, folder: Path, *, phase: str = "", step: int = 0) -> None:
        """Write the policy's state to `folder`, which must hold no checkpoint yet.

        Raises:
            CheckpointError: when any rank could not write; nothing is left behind.
        """
        self.wait(self.timeout_s)
        job = self._open_job(folder, phase, step, self._exchange)
        job.write(job.state.owned())

    def start(self, folder: Path, *, phase: str = "", step: int = 0) -> None:
        """The same, in the background: returns when the state has been copied. Ask `done` for the
        outcome."""
        self.wait(self.timeout_s)
        job = self._open_job(folder, phase, step, self._exchange)
        copies = self._staging.copy(job.state.owned())

        def run() -> None:
            try:
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
        """Whether no save is under way.

        Raises:
            CheckpointError: (once) the last save failed; says why.
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
        """Until `done`. CheckpointError after `deadline_s`."""
        end = time.monotonic() + deadline_s
        while not self.done():
            if time.monotonic() > end:
                raise CheckpointError(
                    f"a checkpoint was not written within {deadline_s:.0f} s; is the file system "
                    "hanging?"
                )
            time.sleep(0.005)


class Staging:
    """Host memory for one consistent copy of this rank's state while it is written: one buffer,
    pinned where there is a GPU, that every save uses again. It grows when a later state is larger
    and is never given back."""

    def __init__(self) -> None:
        self._platform = Platform.detect()
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._buffer.numel()

    def copy(self, tensors: Sequence[Any]) -> list[Any]:
        """The same rectangles (dataclasses with `data`) over a copy of their data, taken now. Valid
        until the next call."""
        sizes = [-(-tensor.data.nbytes // _ALIGN) * _ALIGN for tensor in tensors]
        if sum(sizes) > self.size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first: never both
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
    """One save on one rank: everything but the tensors' data is taken when it is created, on the
    training's thread."""

    def __init__(self, state: State, manifest: Manifest, folder: Path, exchange: Exchange) -> None:
        self.state = state
        self.manifest = manifest
        self.folder = folder
        self.exchange = exchange
        self.rank = dist.get_rank()

    def write(self, tensors: Sequence[Any]) -> None:
        """All of the work, in step with the other ranks. CheckpointError on every rank when it
        failed on any."""
        try:
            self._on_first(self._make_room)
            reports = self.exchange.gather_on_first(self._write_own(tensors))
            self._on_first(lambda: self._complete(reports))
        except RuntimeError as error:
            reason = str(error).splitlines()[0].split(" This is typically ")[0]
            raise self._not_written(
                f"another rank is gone, or its files took longer than allowed: {reason}"
            ) from error

    def _write_own(self, tensors: Sequence[Any]) -> str:
        """Write this rank's file; returns, as JSON, what lies where in it, or why it could not be
        written."""
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
            raise CheckpointError(f"{self.folder} already holds a checkpoint")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def _complete(self, texts: Sequence[str]) -> None:
        """On the first rank, when all have written: the index, and last the manifest."""
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
        """Run it on rank 0. CheckpointError on every rank when it failed."""
        failure = ""
        if self.rank == 0:
            try:
                action()
            except Exception as error:
                failure = cause_of(error)
        if failure := self.exchange.gather(failure)[0].strip():
            raise self._not_written(failure)

    def _not_written(self, cause: str) -> CheckpointError:
        """Remove what there is of it; the error to raise."""
        if self.rank == 0 and not (self.folder / MANIFEST).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        return CheckpointError(
            f"the checkpoint {self.folder} could not be written ({cause}); the previous checkpoint "
            "is untouched. Free disk space and run the same command again to resume."
        )


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
    """The manifest of a save without its files; `versions` of more libraries than ours and
    torch."""
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


def checked_manifest(holder: Holder, folder: Path, exchange: Exchange, backend: str) -> Manifest:
    """The manifest, when the files are what it says and the model is the holder's. The ranks share
    the reading; all raise alike.

    Raises:
        CheckpointError: the folder is missing, torn, foreign, of another backend, or of another
            model.
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
    found = list(
        dict.fromkeys(
            text for texts in exchange.gather(json.dumps(problems)) for text in json.loads(texts)
        )
    )
    if found or manifest is None:
        raise CheckpointError(f"{folder} was not loaded: " + "; ".join(found[:6]))
    return manifest


def restore(folder: Path, tensors: Sequence[Any], exchange: Exchange) -> None:
    """Fill this rank's rectangles from a checkpoint that `checked_manifest` has found whole.
    Collective.

    Raises:
        CheckpointError: on all ranks, when one of them cannot read what it needs.
    """
    failure = ""
    try:
        CheckpointFolder(folder).restore(tensors)
    except Exception as error:
        failure = cause_of(error)
    if found := [text for text in dict.fromkeys(exchange.gather(failure)) if text.strip()]:
        raise CheckpointError(f"{folder} could not be loaded: {'; '.join(found[:6])}")


def _mismatches(holder: Holder, manifest: Manifest, backend: str) -> list[str]:
    if manifest.backend != backend:
        return [
            (
                f"another training backend wrote it ({manifest.backend}); set actor.backend as it "
                "was, or bring it over with `hybridflow checkpoint export` and model.path"
            )
        ]
    family = holder.family.hf.get("model_type")
    if manifest.family != family:
        return [f"it is a checkpoint of the family {manifest.family}, the model here is {family}"]
    found = differences(manifest.hf_config, holder.family.hf)
    dtype = str(holder.dtype).removeprefix("torch.")
    if manifest.dtype != dtype:
        found.append(f"dtype is {manifest.dtype} there, {dtype} here")
    wanted = {"optimizer": holder.has_optimizer, "reference": holder.has_reference}
    found += [
        f"it holds no {part}, which is needed here"
        for part, needed in wanted.items()
        if needed and part not in manifest.contains
    ]
    return found


def cause_of(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, OSError):
        return (
            f"{error.strerror}: {error.filename}"
            if error.filename
            else str(error.strerror or error)
        )
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
