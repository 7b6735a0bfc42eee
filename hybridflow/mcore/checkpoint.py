"""Save and load model, reference, optimizer, schedule and random state, in the format of Megatron's dist_checkpointing.

A folder is a checkpoint when it has a `manifest.json`, which is written last: a kill or a full disk at any moment leaves a folder that is
none. An asynchronous save stops the training for one copy of the state into host memory; a thread of this process, which ends with it
however it ends, does the rest (docs/adr/0009).
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

import hybridflow
from hybridflow.errors import CheckpointError
from hybridflow.manifest import MANIFEST, FileRecord, Manifest, differences, problems_of
from hybridflow.mcore import bootstrap
from hybridflow.mcore.checkpoint_files import write_index, write_tensors
from hybridflow.mcore.exchange import Exchange, shared_exchange
from hybridflow.mcore.optimizer import adam_step, prime_adam_state, set_adam_step
from hybridflow.mcore.parallel import coordinates
from hybridflow.mcore.policy import Policy
from hybridflow.mcore.sharded_state import ShardedState
from hybridflow.mcore.staging import Staging

_log = logging.getLogger(__name__)


class Saver:
    """Saves of one policy, at most one at a time: the next waits for the one before. All ranks create it and call its methods together."""

    def __init__(self, policy: Policy, timeout_s: float = 1800.0) -> None:
        """`timeout_s`: how long a rank that has written its files waits for the slowest, and a save for the one before."""
        self.policy, self.timeout_s = policy, timeout_s
        # its own: an export or a load may use the shared one on the training's thread while a save ends in the background
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
        job = _Job(self.policy, folder, phase, step, self._exchange)
        job.write(job.state.owned())

    def start(self, folder: Path, *, phase: str = "", step: int = 0) -> None:
        """The same, in the background: returns when the state has been copied. Ask `done` for the outcome."""
        self.wait(self.timeout_s)
        job = _Job(self.policy, folder, phase, step, self._exchange)
        copies = self._staging.copy(job.state.owned())

        def run() -> None:
            try:
                job.write(copies)
            except CheckpointError as error:
                self._failure = error
            except Exception as error:
                _log.exception("the background save of %s failed", folder)
                self._failure = CheckpointError(f"the checkpoint {folder} could not be written ({type(error).__name__}: {error})")

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
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return True

    def wait(self, deadline_s: float) -> None:
        """Until `done`. CheckpointError after `deadline_s`."""
        end = time.monotonic() + deadline_s
        while not self.done():
            if time.monotonic() > end:
                raise CheckpointError(f"a checkpoint was not written within {deadline_s:.0f} s; is the file system hanging?")
            time.sleep(0.005)


def save(policy: Policy, folder: Path, *, phase: str = "", step: int = 0) -> None:
    """`Saver.save`, without a saver. Collective."""
    job = _Job(policy, folder, phase, step, shared_exchange())
    job.write(job.state.owned())


def load(policy: Policy, folder: Path) -> None:
    """Restore what was saved, in place, whatever the parallel layout was then. Collective.

    The random state comes back where the number of ranks is the same.

    Raises:
        CheckpointError: the folder is missing, torn, foreign, or of another model; nothing has been loaded then.
    """
    exchange = shared_exchange()
    manifest = _checked(policy, folder, exchange)
    if policy.optimizer is not None:
        prime_adam_state(policy.optimizer.inner)
    state = ShardedState(policy, with_random_state=manifest.layout["world"] == dist.get_world_size() and "rng" in manifest.contains)
    wanted = {str(number): tensor for number, tensor in enumerate(state.tensors)}
    try:
        loaded = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
    except (Exception, CheckpointException) as error:  # dist_checkpointing raises a dozen types; torch's own is no Exception
        raise CheckpointError(f"{folder} could not be loaded: {_cause(error)}") from error
    if policy.optimizer is not None:
        set_adam_step(policy.optimizer.inner, int(loaded["training"]["adam_step"]))
        policy.optimizer.scheduler.num_steps = 0  # load_state_dict adds to it
        policy.optimizer.scheduler.load_state_dict(loaded["training"]["scheduler"])
    if "rng" in state.contains:
        torch.set_rng_state(state.random_state)


# ---- saving ---------------------------------------------------------------------------------------------------------------------------


class _Job:
    """One save on one rank: everything but the tensors' data is taken when it is created, on the training's thread."""

    def __init__(self, policy: Policy, folder: Path, phase: str, step: int, exchange: Exchange) -> None:
        self.folder, self.exchange, self.rank = folder, exchange, dist.get_rank()
        self.state = ShardedState(policy)
        self.training: dict[str, Any] = {}
        if policy.optimizer is not None:
            self.training = {"adam_step": adam_step(policy.optimizer.inner), "scheduler": policy.optimizer.scheduler.state_dict()}
        self.manifest = Manifest(
            phase=phase,
            step=step,
            contains=tuple(self.state.contains),
            layout=_layout(policy),
            dtype=str(policy.dtype).removeprefix("torch."),
            hf_config=dict(policy.family.hf),
            versions={"hybridflow": hybridflow.__version__, "torch": torch.__version__, "megatron_core": bootstrap.MEGATRON_VERSION},
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )

    def write(self, tensors: Sequence[ShardedTensor]) -> None:
        """All of the work, in step with the other ranks. CheckpointError on every rank when it failed on any."""
        try:
            self._raise_if(self._on_first(self._make_room))
            reports = self.exchange.gather(self._write_own(tensors))
            self._raise_if(self._on_first(lambda: self._complete(reports)))
        except RuntimeError as error:
            reason = str(error).splitlines()[0].split(" This is typically ")[0]
            raise self._not_written(f"another rank is gone, or its files took longer than allowed: {reason}") from error

    def _write_own(self, tensors: Sequence[ShardedTensor]) -> str:
        """This rank's file; what became of it, as JSON."""
        try:
            chunks, files = write_tensors(self.folder, self.rank, tensors)
        except Exception as error:
            return json.dumps({"error": f"rank {self.rank}: {_cause(error)}"})
        hf = [[piece.source, piece.source_start, piece.shape, piece.key, piece.start] for piece in self.state.hf()]
        return json.dumps({"chunks": chunks, "files": {name: asdict(record) for name, record in files.items()}, "hf": hf})

    def _make_room(self) -> None:
        if (self.folder / MANIFEST).exists():
            raise CheckpointError(f"{self.folder} already holds a checkpoint")
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def _complete(self, texts: Sequence[str]) -> None:
        """On the first rank, when all have written: what is common to all, and the manifest."""
        reports = [json.loads(text) for text in texts]
        errors = [report["error"] for report in reports if "error" in report]
        if errors:
            raise CheckpointError("; ".join(errors))
        files = {name: FileRecord(**record) for report in reports for name, record in report["files"].items()}
        chunks, hf = ([item for report in reports for item in report[key]] for key in ("chunks", "hf"))
        files |= write_index(self.folder, chunks, hf, {"training": self.training})
        replace(self.manifest, files=files).write(self.folder)

    def _on_first(self, action: Callable[[], None]) -> str:
        """Run it on rank 0; its failure, on every rank, or the empty string."""
        failure = ""
        if self.rank == 0:
            try:
                action()
            except Exception as error:
                failure = _cause(error)
        return self.exchange.gather(failure or " ")[0].strip()

    def _raise_if(self, failure: str) -> None:
        if failure:
            raise self._not_written(failure)

    def _not_written(self, cause: str) -> CheckpointError:
        """Remove what there is of it; the error to raise."""
        if self.rank == 0 and not (self.folder / MANIFEST).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        return CheckpointError(
            f"the checkpoint {self.folder} could not be written ({cause}); the previous checkpoint is untouched. "
            "Free disk space and run the same command again to resume."
        )


def _layout(policy: Policy) -> dict[str, int]:
    at = coordinates()
    sizes = {"tensor": at.tp_size, "pipeline": at.pp_size, "expert": at.ep_size, "expert_tensor": at.etp_size}
    return {"world": dist.get_world_size(), **sizes, "context": policy.config.context}


# ---- loading --------------------------------------------------------------------------------------------------------------------------


def _checked(policy: Policy, folder: Path, exchange: Exchange) -> Manifest:
    """The manifest, when the files are what it says and the model is the policy's. The ranks share the reading; all raise alike."""
    problems, manifest = [], None
    try:
        manifest = Manifest.read(folder)
        problems = _mismatches(policy, manifest)
        if not problems:
            problems = problems_of(folder, manifest, sorted(manifest.files)[dist.get_rank() :: exchange.world])
    except CheckpointError as error:
        problems = [str(error)]
    found = list(dict.fromkeys(text for texts in exchange.gather(json.dumps(problems)) for text in json.loads(texts)))
    if found or manifest is None:
        raise CheckpointError(f"{folder} was not loaded: " + "; ".join(found[:6]))
    return manifest


def _mismatches(policy: Policy, manifest: Manifest) -> list[str]:
    family = policy.family.hf.get("model_type")
    if manifest.family != family:
        return [f"it is a checkpoint of the family {manifest.family}, the model here is {family}"]
    found = differences(manifest.hf_config, policy.family.hf)
    dtype = str(policy.dtype).removeprefix("torch.")
    if manifest.dtype != dtype:
        found.append(f"dtype is {manifest.dtype} there, {dtype} here")
    wanted = {"optimizer": policy.optimizer is not None, "reference": policy.has_reference}
    found += [f"it holds no {part}, which is needed here" for part, needed in wanted.items() if needed and part not in manifest.contains]
    return found


def _cause(error: BaseException) -> str:
    """What went wrong; of torch's CheckpointException the ranks' own exceptions (none but on the coordinator), without tracebacks."""
    if isinstance(error, CheckpointException):
        return "; ".join(dict.fromkeys(str(failure[0]) for failure in error.failures.values())) or "another rank failed"
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror or error)
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
