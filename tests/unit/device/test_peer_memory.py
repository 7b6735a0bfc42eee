"""Events of another process, without a GPU."""

from __future__ import annotations

import base64

import pytest
import torch

from hybridflow.device.peer_memory import PeerEvents


class Event:
    def __init__(self, answer: bool | None) -> None:
        self.answer = answer

    def query(self) -> bool:
        if self.answer is None:
            raise torch.AcceleratorError("CUDA error: invalid resource handle")
        return self.answer


def test_an_event_of_a_process_that_was_killed_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    events = {b"done": Event(True), b"running": Event(False), b"killed": Event(None)}
    imported = staticmethod(lambda device, handle: events[handle])
    monkeypatch.setattr(torch.cuda.Event, "from_ipc_handle", imported, raising=False)
    peer = PeerEvents([base64.b64encode(name).decode() for name in events], torch.device("cpu"))
    assert [peer.is_done(number) for number in range(3)] == [True, False, False]
