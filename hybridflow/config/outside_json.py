"""JSON objects from folders of others: what could fill memory, block or overflow the stack is refused with one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 64 << 20  # the index of a published model of a trillion parameters has about 20 MB


def read_outside_json(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The object in a file.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: no regular file (a pipe or a device would block or never end), larger than `most_bytes`, no JSON,
            nested too deeply, or no object. The message does not name the file.
    """
    if not path.exists():
        raise FileNotFoundError(2, "No such file or directory", str(path))
    if not path.is_file():
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"larger than {most_bytes} bytes")
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} where an object belongs")
    return value
