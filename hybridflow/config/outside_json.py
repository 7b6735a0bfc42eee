"""Reader of untrusted JSON objects: files that would fill memory, block or overflow the stack are
rejected with one line."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.config.outside_text import read_outside_bytes

MOST_BYTES = 64 << 20  # the index of a published model of a trillion parameters has about 20 MB


def read_outside_json(
    path: Path, most_bytes: int = MOST_BYTES, *, unique: bool = False
) -> dict[str, Any]:
    """Return the object in a file.

    Args:
        unique: reject an object with duplicate keys, which readers resolve differently.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: as for `read_outside_bytes`; or not JSON, nested too deeply, not an object, or
            too large for memory. The message does not name the file.
    """
    value = parse_outside_json(read_outside_bytes(path, most_bytes), unique=unique)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} where an object belongs")
    return value


def parse_outside_json(data: bytes, *, unique: bool = False) -> Any:
    """Return the value that `data` describes. Raises ValueError as `read_outside_json` does."""
    collects = gc.isenabled()
    gc.disable()  # it would look at all lists again and again as their number grows
    try:
        return json.loads(data, object_pairs_hook=_once if unique else None)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except MemoryError as error:
        raise ValueError("larger than the memory that this process may use") from error
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
                raise ValueError(f"not JSON of ours: the key {key[:80]!r} is there twice")
            seen.add(key)
    return found
