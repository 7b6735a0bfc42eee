"""Memory and events of a GPU that two processes of one node share.

Memory comes from torch's own allocator and is shared by what `torch.multiprocessing` uses: the storage's handle, which
counts its users, so that the block is not used for anything else before the other process has let go of it. (A process
that is killed lets go of nothing: its block stays allocated in the exporter.) The handle is opened on the importer's
own device, whatever number the exporter's device has there: CUDA maps memory of a peer, visible or not.

Events are kept for as long as the process: an imported event must not be used after the exporter has destroyed it, and
the exporter does not know when the other side has looked for the last time.
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
    """Memory of this process, uint8 `[nbytes]`, and the text by which one other process opens it."""
    torch.cuda.ipc_collect()  # blocks that the other side of an earlier session has let go of
    with _plain_segments():
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    shared = tensor.untyped_storage()._share_cuda_()
    return tensor, json.dumps([_text(part) if isinstance(part, bytes) else part for part in shared[1:]])


def import_memory(text: str, device: torch.device) -> torch.Tensor:
    """The memory of another process's `export`, seen from this process's `device`."""
    handle, nbytes, offset, counter, counter_offset, event, must_wait = json.loads(text)
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index, _bytes(handle), nbytes, offset, _bytes(counter), counter_offset, _bytes(event), must_wait
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


class Events:
    """Events that this process records, and others look at."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device
        with _lock:
            kept = _free.setdefault(device, [])
            self._events = [kept.pop() for _ in range(min(count, len(kept)))]
        while len(self._events) < count:
            self._events.append(torch.cuda.Event(interprocess=True))
        with torch.cuda.device(device):  # an event that was never recorded belongs to the current device
            self.handles = [_text(event.ipc_handle()) for event in self._events]

    def record(self, number: int) -> None:
        """Record what this thread has started on the device."""
        with torch.cuda.device(self._device):
            self._events[number].record()

    def release(self) -> None:
        """Keep them for the next session. Another process may still look at them: what it asked for is done before
        anything that is recorded later."""
        with _lock:
            _free.setdefault(self._device, []).extend(self._events)
        self._events = []


class PeerEvents:
    """Events that another process records."""

    def __init__(self, handles: Sequence[str], device: torch.device) -> None:
        with _lock:
            for handle in handles:
                if handle not in _imported:
                    _imported[handle] = torch.cuda.Event.from_ipc_handle(device, _bytes(handle))
            self._events = [_imported[handle] for handle in handles]

    def is_done(self, number: int) -> bool:
        """Whether what was recorded last is done. False where the driver refuses to say, as it may for an event of a
        process that was killed: whoever waits watches the process too, and names its end."""
        try:
            return bool(self._events[number].query())
        except RuntimeError:
            return False


@contextmanager
def _plain_segments() -> Iterator[None]:
    """Memory of expandable segments cannot be exported by a handle; the allocator leaves them alone meanwhile."""
    settings = next((os.environ[name] for name in _ALLOCATOR if name in os.environ), "")
    if _EXPANDABLE not in settings:
        yield
        return
    torch.cuda.memory._set_allocator_settings(settings.replace(_EXPANDABLE, "expandable_segments:False"))
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(settings)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
