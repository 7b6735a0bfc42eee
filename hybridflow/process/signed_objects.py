"""Authentication of torch's object collectives, which unpickle received data: only objects pickled
by a rank of this job are accepted.

Megatron (megatron/core/optimizer/__init__.py:181) and torch's checkpoints gather objects. A gloo
connection does not authenticate its other end, so each pickle carries an HMAC under the job's
secret, which is checked before unpickling.
"""

from __future__ import annotations

import hmac
import io
import pickle
from typing import IO, Any

from hybridflow.process.secret import digest

_MAC_BYTES = 32
_USE = "object"


class _Pickler:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def dump(self, value: Any) -> None:
        data = pickle.dumps(value)
        self._file.write(digest(_USE, data) + data)


class _Unpickler:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def load(self) -> Any:
        mac = self._file.read(_MAC_BYTES)
        data = self._file.read()
        if not hmac.compare_digest(mac, digest(_USE, data)):
            raise RuntimeError(
                "an object received in a collective was not sent by a rank of this job"
            )
        return pickle.Unpickler(io.BytesIO(data)).load()


def sign_objects() -> None:
    """Replace the pickler and unpickler that torch's object collectives use in this process. Raises
    RuntimeError if this torch version names them differently, because its object collectives would
    stay unprotected.
    """
    from torch.distributed import distributed_c10d

    for name in ("_pickler", "_unpickler"):
        if not hasattr(distributed_c10d, name):
            raise RuntimeError(
                f"this torch.distributed has no {name}; use the torch version in requirements/"
            )
    vars(distributed_c10d).update(_pickler=_Pickler, _unpickler=_Unpickler)
