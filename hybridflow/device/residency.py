"""Byte-exact offloading of weights, gradients, optimizer state and reference weights.

Tensor objects keep their identity. A storage is resized to zero and later back to its old size, so
all views stay valid: Megatron's flat buffers and the parameters in them, the distributed
optimizer's shards, and `main_grad`. Only the address changes. Megatron-Core 0.16.1 retains no
addresses across steps, except with NCCL-registered buffers (`nccl_ub`), which are not used.

On CUDA the bytes are copied to pinned host memory that is allocated once. On CPU, device memory is
process memory, so the bytes are written to an unlinked temporary file in TMPDIR, which disappears
with the process.

`HoldsReference` is the policy's frozen reference, a second copy of its weights, implemented
independently of the training backend.
"""

from __future__ import annotations

import ctypes
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any, Literal

import torch

from hybridflow.device.platform import Platform
from hybridflow.errors import ResourceError

Part = Literal["weights", "gradients", "optimizer", "reference"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer", "reference")
# bytes; smaller tensors (step counters) stay, because thousands of tiny copies are not worth it
_SMALL = 4096
_WRITABLE = 0x200  # PyBUF_WRITE
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.restype = ctypes.py_object
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class Residency:
    """Tracks which parts of one role are on the device, and moves them."""

    def __init__(
        self,
        tensors: Mapping[Part, Callable[[], Iterable[torch.Tensor]]],
        platform: Platform,
        settle: Callable[[], None] = lambda: None,
        role: str = "actor",
    ) -> None:
        """Register the parts of a role. All of them start on the device.

        Args:
            tensors: for each part, a function that lists its tensors. A storage shared by two parts
                belongs to the one that comes first in `PARTS`.
            platform: the type of device that stores the parts.
            settle: called before weights are offloaded, to wait for communication that still writes
                to them.
            role: the role that owns these parts; used in messages to name configuration keys.
        """
        self._tensors = tensors
        self._platform = platform
        self._settle = settle
        self.role = role
        self._asleep: dict[Part, list[tuple[torch.UntypedStorage, int]]] = {}
        self._store: dict[Part, _FileStore | _PinnedStore] = {}

    @property
    def asleep(self) -> frozenset[Part]:
        """The parts that are currently offloaded."""
        return frozenset(self._asleep)

    def resident_bytes(self) -> dict[Part, int]:
        """Return the number of bytes that each part occupies on the device."""
        sizes: dict[Part, int] = {}
        for part, storages in self._storages().items():
            sizes[part] = sum(storage.nbytes() for storage in storages)
        return sizes

    def asleep_bytes(self) -> int:
        """Return the total number of offloaded bytes."""
        return sum(size for storages in self._asleep.values() for _, size in storages)

    def part_bytes(self) -> dict[Part, int]:
        """Return the total size of each part in bytes, whether on the device or offloaded."""
        asleep = {}
        for part, storages in self._asleep.items():
            asleep[part] = sum(size for _, size in storages)
        return {part: size + asleep.get(part, 0) for part, size in self.resident_bytes().items()}

    def sleep(self, *parts: Part) -> int:
        """Offload these parts, skipping parts already offloaded. Returns the bytes freed.

        Raises:
            ResourceError: there is not enough space to store a part. That part and all later ones
                stay on the device.
        """
        freed = 0
        for part in parts:
            if part in self._asleep:
                continue
            if part == "weights":
                self._settle()
            storages = [storage for storage in self._storages()[part] if storage.nbytes() >= _SMALL]
            store = self._store.setdefault(
                part, _FileStore() if self._platform.kind == "cpu" else _PinnedStore()
            )
            store.write(self._key(part), storages)
            self._asleep[part] = [(storage, storage.nbytes()) for storage in storages]
            for storage in storages:
                freed += storage.nbytes()
                storage.resize_(0)
        if freed:
            self._platform.empty_cache()
        return freed

    def wake(self, *parts: Part) -> None:
        """Bring these parts back to the device, skipping parts already there."""
        for part in parts:
            for storage, size in self._asleep.get(part, ()):
                storage.resize_(size)
            if part in self._asleep:
                self._store[part].read([storage for storage, _ in self._asleep.pop(part)])

    @contextmanager
    def resident(
        self,
        *,
        weights: bool = False,
        gradients: bool = False,
        optimizer: bool = False,
        reference: bool = False,
    ) -> Iterator[None]:
        """Return a context manager that keeps these parts on the device.

        Parts that were offloaded on entry are offloaded again on exit. Can be nested.
        """
        wanted = zip(PARTS, (weights, gradients, optimizer, reference), strict=True)
        parts = []
        for part, wish in wanted:
            if wish and part in self._asleep:
                parts.append(part)
        brought: tuple[Part, ...] = tuple(parts)
        self.wake(*brought)
        try:
            yield
        finally:
            self.sleep(*brought)

    def _key(self, part: Part) -> str:
        """Return the configuration key that controls offloading of the part; the reference uses the
        key of the weights."""
        return f"{self.role}.offload.{'weights' if part == 'reference' else part}"

    def _storages(self) -> dict[Part, list[torch.UntypedStorage]]:
        """Return the storages of each part. A storage is listed only once, even if tensors share
        it.
        """
        seen: set[int] = set()
        found: dict[Part, list[torch.UntypedStorage]] = {part: [] for part in PARTS}
        for part in PARTS:
            for tensor in self._tensors[part]():
                storage = tensor.untyped_storage()
                if storage._cdata in seen:
                    continue
                seen.add(storage._cdata)
                if not storage.resizable():
                    raise ResourceError(
                        f"cannot offload {part}: a tensor of shape {list(tensor.shape)} shares its "
                        "memory, for example with numpy; set "
                        f"{self._key(part)}=false"
                    )
                found[part].append(storage)
        return found


class _FileStore:
    """An unlinked temporary file, overwritten by each offload.

    `key` is the configuration key that enables offloading of the part, used in messages.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def write(self, key: str, storages: list[torch.UntypedStorage]) -> None:
        try:
            if self._file is None:
                # (open as long as this object exists)
                self._file = tempfile.TemporaryFile(prefix="hybridflow-offload-")  # noqa: SIM115
            self._file.seek(0)
            for storage in storages:
                self._file.write(memory_of(_bytes(storage)))
            self._file.flush()
        except OSError as error:
            size = sum(storage.nbytes() for storage in storages)
            raise ResourceError(
                f"could not offload {size / 2**20:.0f} MiB ({key}) to a file in "
                f"{tempfile.gettempdir()}: {error.strerror}. The data is still in memory. Set "
                f"TMPDIR to a folder with enough space, or {key}=false"
            ) from error

    def read(self, storages: list[torch.UntypedStorage]) -> None:
        assert self._file is not None
        self._file.seek(0)
        for storage in storages:
            got = self._file.readinto(memory_of(_bytes(storage)))  # type: ignore[attr-defined]
            if got != storage.nbytes():
                raise ResourceError(
                    f"the offload file is truncated: expected {storage.nbytes()} bytes, got {got}"
                )


class _PinnedStore:
    """Pinned host memory, one block per storage.

    Blocks are reused, since pinning costs more than the copy. `key` has the same meaning as in
    `_FileStore`.
    """

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    def write(self, key: str, storages: list[torch.UntypedStorage]) -> None:
        if list(map(len, self._blocks)) != [storage.nbytes() for storage in storages]:
            self._blocks = []
            try:
                self._blocks = [
                    torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
                    for storage in storages
                ]
            except RuntimeError as error:
                size = sum(storage.nbytes() for storage in storages)
                raise ResourceError(
                    f"could not allocate {size / 2**20:.0f} MiB ({key}) of pinned host memory: "
                    f"{error}. The data is still on the device. Free host memory, or set "
                    f"{key}=false"
                ) from error
        for block, storage in zip(self._blocks, storages, strict=True):
            block.copy_(_bytes(storage), non_blocking=True)
        torch.cuda.synchronize()  # before the caller frees the source

    def read(self, storages: list[torch.UntypedStorage]) -> None:
        for block, storage in zip(self._blocks, storages, strict=True):
            _bytes(storage).copy_(block, non_blocking=True)
        torch.cuda.synchronize()  # the next offload may overwrite the blocks


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return a writable view of a contiguous host tensor's bytes, valid for as long as the tensor
    is alive.

    `Tensor.numpy()` does not work here, because torch refuses to resize a storage that was exposed
    to numpy. A ctypes array would be slow, because each length needs a new type.
    """
    return _view(tensor.data_ptr(), tensor.nbytes, _WRITABLE)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the whole storage as a flat uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class HoldsReference(ABC):
    """Base class for models that may have an optimizer and a frozen copy of their weights."""

    optimizer: Any = None
    _reference: dict[str, torch.Tensor] | None = None

    @abstractmethod
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's live tensors, keyed by name. A reference is a copy of them."""

    @property
    def has_optimizer(self) -> bool:
        """True once `set_optimizer` has been called."""
        return self.optimizer is not None

    @property
    def has_reference(self) -> bool:
        """True once `freeze_reference` has been called or a reference has been loaded."""
        return self._reference is not None

    @torch.no_grad()
    def freeze_reference(self) -> None:
        """Keep a copy of the current weights as the reference policy."""
        self._reference = {name: tensor.detach().clone() for name, tensor in self.weights().items()}

    def reference_state(self) -> dict[str, torch.Tensor]:
        """Return the reference's local tensors, keyed by the same names as `weights`.

        Raises RuntimeError if there is no reference.
        """
        if self._reference is None:
            raise RuntimeError("no reference weights: freeze_reference was not called")
        return self._reference

    @torch.no_grad()
    def take_trained(self, other: HoldsReference) -> None:
        """Copy the weights of another model with the same parameters and layout, and drop the
        optimizer. Call `set_optimizer` again afterwards."""
        theirs = other.weights()
        for name, tensor in self.weights().items():
            tensor.copy_(theirs[name])
        self.optimizer = None

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Return a context manager that swaps in the reference weights.

        Weights are swapped in place, so no second model is needed.
        """
        live = self.weights()
        held = self.reference_state()
        _exchange(live, held)
        try:
            yield
        finally:
            _exchange(live, held)


@torch.no_grad()
def _exchange(live: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
    # swap values, not storages, because optimizers and gradient buffers have views of the weights
    for name, tensor in live.items():
        before = tensor.detach().clone()
        tensor.copy_(held[name])
        held[name].copy_(before)
