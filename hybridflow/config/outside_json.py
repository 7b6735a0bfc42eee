"""Reader of untrusted JSON objects. Files that would exhaust memory, block, or overflow the stack
are rejected with a one-line error."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.outside_text import read_outside_bytes

MOST_BYTES = 64 << 20  # the weight index of a published trillion-parameter model is about 20 MB


def read_outside_json(
    path: Path, most_bytes: int = MOST_BYTES, *, unique: bool = False
) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        unique: reject objects with duplicate keys, because readers resolve them differently.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: as for `read_outside_bytes`, or the content is not JSON, nested too deeply, not
            an object, or too large for memory. The message does not name the file.
    """
    value = parse_outside_json(read_outside_bytes(path, most_bytes), unique=unique)
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {type(value).__name__}")
    return value


def parse_outside_json(data: bytes, *, unique: bool = False) -> Any:
    """Return the JSON value in `data`. Raises ValueError like `read_outside_json`."""
    collects = gc.isenabled()
    gc.disable()  # it would scan all lists repeatedly while they are built
    try:
        return json.loads(data, object_pairs_hook=_once if unique else None)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except MemoryError as error:
        raise ValueError("too large for the memory available to this process") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    finally:
        if collects:
            gc.enable()


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:80]!r}")
            seen.add(key)
    return found
