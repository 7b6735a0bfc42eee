"""GPU memory and events shared between two processes on one node.

Memory is allocated by torch and shared as in `torch.multiprocessing`, through a reference-counted
storage handle. The block is not reused until the other process has released it. (A killed process
never releases it, so the block stays allocated in the exporter.) The handle is opened on the
importer's own device, regardless of the exporter's device index, because CUDA maps peer memory
whether or not that device is visible.

Events are kept until the process exits. An imported event must not be used after the exporter has
destroyed it, and the exporter cannot know when the importer has queried it for the last time.
"""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_lock = threading.Lock()
_free: dict[torch.device, list[torch.cuda.Event]] = {}
_imported: dict[str, torch.cuda.Event] = {}


def export(nbytes: int, device: torch.device) -> tuple[torch.Tensor, str]:
    """Allocate a shareable uint8 buffer `[nbytes]`. Returns the buffer and a string handle that one
    other process can open."""
    torch.cuda.ipc_collect()  # free blocks of earlier sessions that the other side has released
    with _plain_segments():
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    shared = tensor.untyped_storage()._share_cuda_()
    return tensor, json.dumps(
        [_text(part) if isinstance(part, bytes) else part for part in shared[1:]]
    )


def import_memory(text: str, device: torch.device) -> torch.Tensor:
    """Open a buffer that another process allocated with `export`, mapped on this process's
    `device`."""
    torch.cuda.init()  # without it, torch crashes when it opens the handle
    handle, nbytes, offset, counter, counter_offset, event, must_wait = json.loads(text)
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index,
        _bytes(handle),
        nbytes,
        offset,
        _bytes(counter),
        counter_offset,
        _bytes(event),
        must_wait,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


class Events:
    """CUDA events recorded by this process and queried by others."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        with _lock:
            kept = _free.setdefault(device, [])
            self._events = [kept.pop() for _ in range(min(count, len(kept)))]
        while len(self._events) < count:
            self._events.append(torch.cuda.Event(interprocess=True))
        # an unrecorded event belongs to the current device
        with torch.cuda.device(device):
            self.handles = [_text(event.ipc_handle()) for event in self._events]

    def record(self, number: int) -> None:
        """Record event `number` after the work queued so far on the current stream."""
        with torch.cuda.device(self._device):
            self._events[number].record()

    def release(self) -> None:
        """Return the events to the pool for the next session.

        Another process may still query them. This is safe, because an event that is recorded again
        completes only after the work that the process is waiting for.
        """
        with _lock:
            _free.setdefault(self._device, []).extend(self._events)
        self._events = []


class PeerEvents:
    """CUDA events recorded by another process."""

    def __init__(self, handles: Sequence[str], device: torch.device) -> None:
        with _lock:
            for handle in handles:
                if handle not in _imported:
                    _imported[handle] = torch.cuda.Event.from_ipc_handle(device, _bytes(handle))
            self._events = [_imported[handle] for handle in handles]

    def is_done(self, number: int) -> bool:
        """Return True if all work queued before the event was last recorded has completed.

        Returns False if the driver cannot tell, as can happen for events of a killed process, so
        callers must watch that process as well.
        """
        try:
            return bool(self._events[number].query())
        except RuntimeError:
            return False


@contextmanager
def _plain_segments() -> Iterator[None]:
    """Return a context manager that disables expandable segments, because their memory cannot be
    exported through a handle."""
    settings = next((os.environ[name] for name in _ALLOCATOR if name in os.environ), "")
    if _EXPANDABLE not in settings:
        yield
        return
    torch.cuda.memory._set_allocator_settings(
        settings.replace(_EXPANDABLE, "expandable_segments:False")
    )
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(settings)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
