"""Memory management per role: moves the parts that a worker method needs to the device, records
peak usage, and explains out-of-memory errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from hybridflow.config.schema import OffloadConfig
from hybridflow.device.platform import Platform
from hybridflow.device.residency import Part, Residency
from hybridflow.errors import MemoryExhaustedError

F = TypeVar("F", bound=Callable[..., Any])


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
        """Return memory statistics, and reset the peaks. Keys: memory (peak bytes per method),
        reserved (peak bytes reserved by the allocator), offloaded (peak bytes moved off the
        device), all since the last call; and parts (current bytes of each part, on or off the
        device).
        """
        taken: dict[str, Any] = {
            "memory": self._peaks,
            "reserved": self._reserved,
            "offloaded": self._offloaded,
        }
        taken["parts"] = self.residency.part_bytes()
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
