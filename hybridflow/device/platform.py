"""The device type (cpu or cuda) and the operations that depend on it. torch is imported lazily."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hybridflow.errors import ResourceError

if TYPE_CHECKING:
    import torch

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Platform:
    """The operations of one device type. `Platform.detect()` selects the type; `Platform("cpu")`
    forces cpu.
    """

    kind: Kind

    @classmethod
    def detect(cls) -> Platform:
        """Return cuda if torch sees a device, else cpu. `HYBRIDFLOW_PLATFORM=cpu|cuda` overrides
        the choice.

        Raises:
            ResourceError: the override has an invalid value, or requests cuda but torch cannot use
                it. The message names the node and torch's reason (no visible device, or a driver
                that is too old).
        """
        wish = os.environ.get("HYBRIDFLOW_PLATFORM", "")
        if wish not in ("", "cpu", "cuda"):
            raise ResourceError(f"HYBRIDFLOW_PLATFORM must be cpu or cuda, got {wish!r}")
        if wish == "cpu":
            return cls("cpu")
        import torch

        available = torch.cuda.is_available()
        if wish == "cuda" and not available:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise ResourceError(
                f"HYBRIDFLOW_PLATFORM=cuda, but torch {torch.__version__} sees no CUDA device on "
                f"node {socket.gethostname()} (CUDA_VISIBLE_DEVICES={visible}): {_why_no_cuda()}"
            )
        return cls("cuda" if available else "cpu")

    @property
    def collective_backend(self) -> str:
        """Backend for `torch.distributed.init_process_group`."""
        return "nccl" if self.kind == "cuda" else "gloo"

    @property
    def weight_transport(self) -> str:
        """Name of the fastest transport in `sync.transports` that works between any two hosts."""
        return "p2p" if self.kind == "cuda" else "tcp"

    @property
    def colocated_transport(self) -> str:
        """Name of the transport in `sync.transports` for processes that share devices."""
        return "cuda_ipc" if self.kind == "cuda" else self.weight_transport

    @property
    def cache_bytes(self) -> int:
        """Chunk size in bytes that stays in a core's cache across several reads; 0 if chunking does
        not help."""
        return 0 if self.kind == "cuda" else 1 << 20

    @property
    def cores(self) -> int:
        """Number of CPU cores that this process uses for compute; 1 on cuda."""
        return 1 if self.kind == "cuda" else len(os.sched_getaffinity(0))

    def device(self, local_rank: int = 0) -> torch.device:
        """Return the device for the process with this local rank on its node."""
        import torch

        return torch.device("cuda", local_rank) if self.kind == "cuda" else torch.device("cpu")

    def set_device(self, local_rank: int = 0) -> None:
        """Make the device with index `local_rank` current for this process."""
        if self.kind == "cuda":
            _cuda().set_device(local_rank)

    def current_device(self) -> torch.device:
        """Return the device selected by `set_device`."""
        import torch

        return (
            torch.device("cuda", torch.cuda.current_device())
            if self.kind == "cuda"
            else torch.device("cpu")
        )

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to the current device without blocking the host.

        The tensor is pinned first, because a copy from pageable memory would wait for the work
        queued on the device.
        """
        if self.kind == "cpu":
            return tensor
        return tensor.pin_memory().to(self.current_device(), non_blocking=True)

    def device_count(self) -> int:
        """Return the number of devices visible to this process; 0 on cpu."""
        return _cuda().device_count() if self.kind == "cuda" else 0

    def device_name(self) -> str:
        """Return the name of the first device, for example "NVIDIA H100 80GB HBM3"; "" on cpu."""
        return str(_cuda().get_device_name(0)) if self.kind == "cuda" else ""

    def capability(self) -> tuple[int, int]:
        """Return the compute capability of the first device, for example (9, 0); (0, 0) on cpu."""
        return _cuda().get_device_capability(0) if self.kind == "cuda" else (0, 0)

    def memory_bytes(self) -> int:
        """Return the number of bytes in use by this process: allocated by torch on cuda, resident
        set size on cpu."""
        if self.kind == "cuda":
            return _cuda().memory_allocated()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def peak_memory_bytes(self) -> int:
        """Return the peak of `memory_bytes` since the process started or since
        `reset_peak_memory`."""
        if self.kind == "cuda":
            return _cuda().max_memory_allocated()
        status = Path("/proc/self/status").read_text()
        # Linux reports KiB and may lag slightly
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        return max(peak, self.memory_bytes())

    def reset_peak_memory(self) -> None:
        """Reset `peak_memory_bytes`. If the kernel refuses (read-only /proc), the peak since
        process start is kept."""
        if self.kind == "cuda":
            _cuda().reset_peak_memory_stats()
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def reserved_memory_bytes(self) -> int:
        """Return the peak number of bytes reserved by torch's allocator on cuda; same as
        `peak_memory_bytes` on cpu."""
        return _cuda().max_memory_reserved() if self.kind == "cuda" else self.peak_memory_bytes()

    def total_memory_bytes(self) -> int:
        """Return the total memory of the device (cuda) or the machine (cpu)."""
        if self.kind == "cuda":
            return int(_cuda().get_device_properties(_cuda().current_device()).total_memory)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def empty_cache(self) -> None:
        """Return unused cached memory to the CUDA driver or, on cpu, unused C heap memory to the
        operating system."""
        if self.kind == "cuda":
            _cuda().empty_cache()
            return
        # glibc only; others cache no large free blocks
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

    def synchronize(self) -> None:
        """Wait for all work queued on the device. No-op on cpu."""
        if self.kind == "cuda":
            _cuda().synchronize()


def _cuda() -> Any:
    """Import `torch.cuda` lazily and return it."""
    import torch

    return torch.cuda


def _why_no_cuda() -> str:
    """Return the reason that torch cannot use a GPU on this machine.

    `torch.cuda.is_available` returns False without a reason; `torch.cuda.init` raises an error that
    states it.
    """
    import torch

    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:
        # no CUDA build, no device, or an outdated driver
        reason = str(error).splitlines()[0]
        if "driver" in reason:
            return (
                f"{reason} (torch was built for CUDA {torch.version.cuda}; update this node's "
                "driver, or exclude the node)"
            )
        return reason
    return "initialisation succeeded only on the second attempt; check the node with nvidia-smi"
