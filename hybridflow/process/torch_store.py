"""The job's store as torch's process groups take it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from hybridflow.process.store import Keys, StoreClient

# C++ holds a store without holding the Python object that answers for it
_held: list[TorchStore] = []


class TorchStore(Keys, Store):
    """`torch.distributed.Store` over the connection of `keys`, which is held until `release` or
    this process's end. `prefix` keeps the keys of one process group apart from others'."""

    def __init__(self, keys: Keys, prefix: str = "") -> None:
        Store.__init__(self)
        Keys.__init__(self, keys.connection, prefix)
        self._keys = keys  # those of a master hold the server
        _held.append(self)

    def release(self) -> None:
        """End the connection of a group that has ended."""
        if self in _held:
            _held.remove(self)
        self.close()

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are there."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait from now on."""
        self.connection.timeout_s = timeout.total_seconds()

    def clone(self) -> TorchStore:
        """Another connection with the same keys."""
        own = self.connection
        return TorchStore(StoreClient(own.host, own.port, own.timeout_s), self._prefix)
