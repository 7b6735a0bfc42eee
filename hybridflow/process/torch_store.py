"""The job's store as torch's process groups take it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from hybridflow.process.store import StoreClient

# C++ holds a store without holding the Python object that answers for it
_held: list[TorchStore] = []


class TorchStore(Store):
    """`torch.distributed.Store` over a client, which is held until `release` or the end of this process. `prefix` keeps
    the keys of one process group apart from others'."""

    def __init__(self, client: StoreClient, prefix: str = "") -> None:
        super().__init__()
        self._client, self._prefix = client, prefix
        _held.append(self)

    def release(self) -> None:
        """End the connection of a group that has ended."""
        if self in _held:
            _held.remove(self)
        self._client.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._client.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """The value, waiting for it."""
        return self._client.get(self._prefix + key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of several keys, waiting for them."""
        return self._client.multi_get([self._prefix + key for key in keys])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values."""
        self._client.multi_set([self._prefix + key for key in keys], values)

    def append(self, key: str, value: str | bytes) -> None:
        """Write a value behind the present one."""
        self._client.append(self._prefix + key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return it."""
        return self._client.add(self._prefix + key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` if the value is `expected`; the value then."""
        return self._client.compare_set(self._prefix + key, expected, desired)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have a value."""
        return self._client.check([self._prefix + key for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys have a value."""
        self._client.wait([self._prefix + key for key in keys], timeout)

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return self._client.delete_key(self._prefix + key)

    def num_keys(self) -> int:
        """How many keys there are, with every prefix."""
        return self._client.num_keys()

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are there."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """How long `get` and `wait` wait from now on."""
        self._client.timeout_s = timeout.total_seconds()

    def clone(self) -> TorchStore:
        """Another connection with the same keys."""
        client = self._client
        return TorchStore(StoreClient(client.host, client.port, client.timeout_s), self._prefix)
