"""The job's store as a `torch.distributed.Store` for process groups."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from hybridflow.process.store import Keys, StoreClient

# C++ keeps a store alive, but not the Python object that implements it
_held: list[TorchStore] = []


class TorchStore(Keys, Store):
    """A `torch.distributed.Store` that uses the connection of `keys`, which stays open until
    `release` is called or this process ends. `prefix` separates the keys of different process
    groups.
    """

    def __init__(self, keys: Keys, prefix: str = "") -> None:
        Store.__init__(self)
        Keys.__init__(self, keys.connection, prefix)
        self._keys = keys  # for a master, this keeps the server alive
        _held.append(self)

    def release(self) -> None:
        """Close the connection of a destroyed process group."""
        if self in _held:
            _held.remove(self)
        self.close()

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return True, because `append`, `multi_get` and `multi_set` are available."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later `get` and `wait` calls."""
        self.connection.timeout_s = timeout.total_seconds()

    def clone(self) -> TorchStore:
        """Open another connection to the same keys."""
        own = self.connection
        return TorchStore(StoreClient(own.host, own.port, own.timeout_s), self._prefix)
