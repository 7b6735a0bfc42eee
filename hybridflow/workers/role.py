"""The base class of all workers with a model: the memory of the role's parts, its optimizer,
checkpoints and export.

Worker modules import `hybridflow.mcore` lazily, inside the functions that run on a rank. The driver
imports these modules only to refer to their methods, and importing Megatron would take 3 s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hybridflow.batch import DataProto
from hybridflow.config import derived
from hybridflow.config.schema import OffloadConfig, OptimConfig, RunConfig
from hybridflow.device.platform import Platform
from hybridflow.device.residency import PARTS, Part, Residency
from hybridflow.dispatch import PADDING_META, Dispatch, MeshPosition, register
from hybridflow.errors import MemoryExhaustedError
from hybridflow.workers.backend import Model

F = TypeVar("F", bound=Callable[..., Any])
# one optimizer update: {sums: {metric: (sum, count)}, info: {grad_norm, lr, applied}}
Report = dict[str, Any]


def needs(*parts: Part) -> Callable[[F], F]:
    """Decorator that keeps these model parts on the device for the duration of the method.

    The worker must have `memory: RoleMemory`. Place the decorator below `@register`. An
    out-of-memory error inside the method is converted to a MemoryExhaustedError that names the
    method.
    """

    def mark(function: F) -> F:
        @functools.wraps(function)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            with self.memory.phase(function.__name__, parts):
                return function(self, *args, **kwargs)

        return method  # type: ignore[return-value]

    return mark


class RoleMemory:
    """Memory state of one role (`residency.role`) in one process."""

    def __init__(
        self,
        residency: Residency,
        platform: Platform,
        offload: OffloadConfig,
        layout: str = "actor",
    ) -> None:
        """`layout`: the configuration section whose `parallel` settings determine this role's
        sharding; quoted in messages.
        """
        self.residency = residency
        self.platform = platform
        self.layout = layout
        self._offloads = {
            "weights": offload.weights,
            "gradients": offload.gradients,
            "optimizer": offload.optimizer,
        }
        self._offloads["reference"] = offload.weights
        self._peaks: dict[str, int] = {}
        self._reserved = self._offloaded = 0

    @contextmanager
    def phase(self, name: str, parts: tuple[Part, ...]) -> Iterator[None]:
        """Context manager that keeps `parts` on the device and records the peak memory under
        `name`.

        Raises:
            MemoryExhaustedError: the device (on CPU, the machine) ran out of memory.
        """
        self.platform.reset_peak_memory()
        try:
            # Translate errors twice. Inside, the parts are still resident, so the message lists
            # what the method needs. Outside, errors from moving the parts to the device are caught
            # as well.
            with (
                self._translated(name),
                self.residency.resident(**dict.fromkeys(parts, True)),
                self._translated(name),
            ):
                yield
        finally:
            self._peaks[name] = max(self._peaks.get(name, 0), self.platform.peak_memory_bytes())
            self._reserved = max(self._reserved, self.platform.reserved_memory_bytes())

    def sleep(self, parts: tuple[Part, ...]) -> int:
        """Offload each of `parts` for which offloading is enabled. Returns the bytes freed."""
        freed = self.residency.sleep(*(part for part in parts if self._offloads[part]))
        self._offloaded = max(self._offloaded, self.residency.asleep_bytes())
        return freed

    def take(self) -> dict[str, Any]:
        """Return memory statistics since the last call, and reset the peaks. Keys: memory (peak
        bytes per method), reserved (peak bytes reserved by the allocator) and offloaded (peak bytes
        moved off the device).
        """
        taken: dict[str, Any] = {
            "memory": self._peaks,
            "reserved": self._reserved,
            "offloaded": self._offloaded,
        }
        self._offloaded = self.residency.asleep_bytes()
        self._peaks = {}
        self._reserved = 0
        return taken

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._exhausted(name, error) from error

    def _exhausted(self, name: str, error: BaseException) -> MemoryExhaustedError:
        held = ", ".join(
            f"{part} {_gib(size)}" for part, size in self.residency.resident_bytes().items() if size
        )
        role = self.residency.role
        keys = [
            f"{role}.offload.{part}=true"
            for part in ("weights", "gradients", "optimizer")
            if not self._offloads[part]
        ]
        offload = f", set {' '.join(keys)}" if keys else ""
        return MemoryExhaustedError(
            f"out of memory in {name}: peak {_gib(self.platform.peak_memory_bytes())} of "
            f"{_gib(self.platform.total_memory_bytes())}, of which the model uses "
            f"{held or 'nothing'}. Reduce {role}.max_tokens_per_micro_batch{offload}, raise "
            f"{self.layout}.parallel.tensor, pipeline or expert, or reduce "
            "rollout.mem_fraction_static if engines share the device. "
            f"({str(error).splitlines()[0][:200]})"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` is an out-of-memory error. On CPU, torch raises a plain RuntimeError
    (c10/core/impl/alloc_cpu.cpp).
    """
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator" in text or "CUDA out of memory" in text
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


@dataclass(frozen=True)
class RoleSpec:
    """Arguments shared by all ranks of a role.

    Args:
        config: the run's configuration.
        role: name of the role's section in `config`: actor, critic, reference, reward_model or
            teacher.
        hf_config: the Hugging Face config of the role's model.
        path: the Hugging Face folder to load weights from; None for random weights.
        tokenizer: the folder from which an export copies the tokenizer.
        trains: whether the role ever updates its weights. If False, it has no gradients and, unless
            it is a policy, no checkpoints.
        base: the policy in the same processes whose frozen weights this policy's adapters share;
            None for separate weights.
    """

    config: RunConfig
    role: str
    hf_config: Mapping[str, Any]
    path: str | None
    tokenizer: Path | None
    trains: bool = True
    base: str | None = None


class RoleWorker:
    """One rank of a role. Public methods are collectives: the controller calls them on all
    ranks."""

    def __init__(
        self, spec: RoleSpec, model: Model, hf_config: Mapping[str, Any], platform: Platform
    ) -> None:
        """`hf_config` is written into exports."""
        self.spec = spec
        self.model = model
        self._hf_config = hf_config
        self.config = getattr(spec.config, spec.role)
        residency = Residency(model.memory_parts(), platform, model.settle, spec.role)
        layout = derived.layout_section(spec.config, spec.role)
        self.memory = RoleMemory(residency, platform, self.config.offload, layout)
        self._saver = model.saver(spec.config.trainer.checkpoint_timeout_s) if spec.trains else None

    def mesh_position(self) -> MeshPosition:
        """Return this rank's position for data-parallel calls."""
        return MeshPosition(*self.model.mesh_position())

    def _log_probs(
        self,
        batch: DataProto,
        name: str,
        entropy_name: str | None = None,
        temperature: float | None = None,
    ) -> DataProto | None:
        """Compute log-probs of the response tokens with a language-model head, and return them in
        the column `name`.

        Args:
            batch: the rows, with prompt_ids and response_ids.
            name: the column for the log-probs.
            entropy_name: the column for the entropies; None to skip computing them.
            temperature: sampling temperature; None for the rollout's.
        """
        model: Any = self.model
        found = model.log_probs(
            batch,
            max_tokens=self.config.max_tokens_per_micro_batch,
            temperature=temperature or self.spec.config.rollout.sampling.temperature,
            with_entropy=entropy_name is not None,
        )
        if found is None:
            return None
        columns = {name: found[0]} | ({} if entropy_name is None else {entropy_name: found[1]})
        return DataProto.from_columns(columns)

    @register(Dispatch.ONE_TO_ALL)
    @needs("weights", "gradients", "optimizer")
    def set_optimizer(self, config: OptimConfig) -> None:
        """Start a training phase with a fresh optimizer for the current weights."""
        self.model.set_optimizer(config)

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self, parts: tuple[Part, ...] = PARTS) -> int:
        """Offload each of `parts` that the role's `offload` setting enables.

        They stay off the device until a method needs them or `wake` is called. Returns the bytes
        freed.
        """
        return self.memory.sleep(parts)

    @register(Dispatch.ONE_TO_ALL)
    def wake(self, parts: tuple[Part, ...]) -> None:
        """Move these parts back to the device and keep them there across method calls."""
        self.memory.residency.wake(*parts)

    @register(Dispatch.ONE_TO_ALL)
    def take_observations(self) -> dict[str, Any]:
        """Return the memory statistics since the last call (see `RoleMemory.take`)."""
        return self.memory.take()

    @register(Dispatch.ONE_TO_ALL)
    def part_bytes(self) -> dict[Part, int]:
        """Return the current bytes of each part of the model, on or off the device."""
        return self.memory.residency.part_bytes()

    @register(Dispatch.ONE_TO_ALL)
    @needs(*PARTS)
    def save(self, folder: Path, phase: str, step: int, background: bool) -> None:
        """Save the model, reference, optimizer and random state. If `background` is True, return as
        soon as they have been copied.
        """
        assert self._saver is not None, f"{self.spec.role} does not train"
        (self._saver.start if background else self._saver.save)(folder, phase=phase, step=step)

    @register(Dispatch.ONE_TO_ALL)
    def is_saved(self) -> bool:
        """Return True if this rank has no save in progress.

        Raises CheckpointError if the last background save failed.
        """
        return self._saver is None or self._saver.done()

    @register(Dispatch.ONE_TO_ALL)
    @needs(*PARTS)
    def load(self, folder: Path, optim: OptimConfig) -> None:
        """Restore a checkpoint that `save` wrote in the same phase, using that phase's
        optimizer."""
        self.model.set_optimizer(optim)
        self.model.load(folder)

    @register(Dispatch.ONE_TO_ALL)
    @needs("weights")
    def export(self, folder: Path) -> list[str]:
        """Export the model to a Hugging Face folder. Returns log lines about tensors and files
        copied from the model's original folder.
        """
        source = None if self.spec.path is None else Path(self.spec.path)
        return self.model.export(folder, self._hf_config, self.spec.tokenizer, source=source)


def own_rows(batch: DataProto) -> DataProto:
    """Drop the padding rows that the controller added to make the batch divisible.

    Training on them would count some rows twice.
    """
    return batch.unpad(int(batch.meta.get(PADDING_META, 0)))
