"""The kind of device, cpu or cuda, and what is asked of it. torch is imported at first use."""

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
    """One kind of device. `Platform.detect()` picks it; `Platform("cpu")` forces it."""

    kind: Kind

    @classmethod
    def detect(cls) -> Platform:
        """cuda when torch sees a device, else cpu; `HYBRIDFLOW_PLATFORM=cpu|cuda` overrides it.

        Raises:
            ResourceError: the override has another value, or asks for cuda where there is none that torch can use;
                with the node and torch's reason (no device is visible, or the driver is too old).
        """
        wish = os.environ.get("HYBRIDFLOW_PLATFORM", "")
        if wish not in ("", "cpu", "cuda"):
            raise ResourceError(f"HYBRIDFLOW_PLATFORM={wish!r}: use cpu or cuda")
        if wish == "cpu":
            return cls("cpu")
        import torch

        available = torch.cuda.is_available()
        if wish == "cuda" and not available:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            raise ResourceError(
                f"HYBRIDFLOW_PLATFORM=cuda, but torch {torch.__version__} sees no CUDA device on node "
                f"{socket.gethostname()} (CUDA_VISIBLE_DEVICES={visible}): {_why_no_cuda()}"
            )
        return cls("cuda" if available else "cpu")

    @property
    def collective_backend(self) -> str:
        """Backend for `torch.distributed.init_process_group`."""
        return "nccl" if self.kind == "cuda" else "gloo"

    @property
    def weight_transport(self) -> str:
        """The fastest of `sync.transports` between ranks of any two hosts."""
        return "p2p" if self.kind == "cuda" else "tcp"

    @property
    def colocated_transport(self) -> str:
        """The one of `sync.transports` between processes that share devices."""
        return "cuda_ipc" if self.kind == "cuda" else self.weight_transport

    @property
    def cache_bytes(self) -> int:
        """Size of pieces that stay in a core's cache while they are read several times; 0 where pieces do not help."""
        return 0 if self.kind == "cuda" else 1 << 20

    @property
    def cores(self) -> int:
        """Cores of this machine that compute; 1 on cuda, where the device computes."""
        return 1 if self.kind == "cuda" else len(os.sched_getaffinity(0))

    def device(self, local_rank: int = 0) -> torch.device:
        """Device of the `local_rank`-th process of a node."""
        import torch

        return torch.device("cuda", local_rank) if self.kind == "cuda" else torch.device("cpu")

    def set_device(self, local_rank: int = 0) -> None:
        """Make the `local_rank`-th device current for this process."""
        if self.kind == "cuda":
            _cuda().set_device(local_rank)

    def current_device(self) -> torch.device:
        """The device that `set_device` chose for this process."""
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if self.kind == "cuda" else torch.device("cpu")

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A CPU tensor on the current device. The host does not wait for what is queued there, as it would in a copy
        of memory that is not pinned."""
        if self.kind == "cpu":
            return tensor
        return tensor.pin_memory().to(self.current_device(), non_blocking=True)

    def device_count(self) -> int:
        """Devices that this process sees; 0 on cpu."""
        return _cuda().device_count() if self.kind == "cuda" else 0

    def capability(self) -> tuple[int, int]:
        """Compute capability of the first device, (9, 0) for example; (0, 0) on cpu."""
        return _cuda().get_device_capability(0) if self.kind == "cuda" else (0, 0)

    def memory_bytes(self) -> int:
        """Bytes this process holds now: allocated by torch on cuda, resident on cpu."""
        if self.kind == "cuda":
            return _cuda().memory_allocated()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def peak_memory_bytes(self) -> int:
        """The most bytes this process has held since the start or `reset_peak_memory` (same meaning as
        `memory_bytes`)."""
        if self.kind == "cuda":
            return _cuda().max_memory_allocated()
        status = Path("/proc/self/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024  # Linux counts in KiB, and a little behind
        return max(peak, self.memory_bytes())

    def reset_peak_memory(self) -> None:
        """Restart `peak_memory_bytes`. Where the kernel refuses (read-only /proc), the peak stays the process's."""
        if self.kind == "cuda":
            _cuda().reset_peak_memory_stats()
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def reserved_memory_bytes(self) -> int:
        """The most bytes that torch's allocator has reserved on cuda; on cpu the same as the peak."""
        return _cuda().max_memory_reserved() if self.kind == "cuda" else self.peak_memory_bytes()

    def total_memory_bytes(self) -> int:
        """Memory of the device (cuda) or of the machine (cpu)."""
        if self.kind == "cuda":
            return int(_cuda().get_device_properties(_cuda().current_device()).total_memory)
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def empty_cache(self) -> None:
        """Give unused cached memory back: to the CUDA driver, or on cpu from the C library's heap to the system."""
        if self.kind == "cuda":
            _cuda().empty_cache()
            return
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it; others keep no large free blocks
        if trim is not None:
            trim(0)

    def synchronize(self) -> None:
        """Wait until the device has done what was queued (nothing is queued on cpu)."""
        if self.kind == "cuda":
            _cuda().synchronize()


def _cuda() -> Any:
    """The module `torch.cuda`."""
    import torch

    return torch.cuda


def _why_no_cuda() -> str:
    """Why torch cannot use a GPU here. `torch.cuda.is_available` says no without the reason, `init` raises with it."""
    import torch

    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # built without CUDA; no device, or the driver is too old
        reason = str(error).splitlines()[0]
        if "driver" in reason:
            return f"{reason} (torch's CUDA is {torch.version.cuda}; update this node's driver or leave the node out)"
        return reason
    return "it could be initialised only at a second attempt; look at the node with nvidia-smi"
