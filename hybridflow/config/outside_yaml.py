"""Untrusted YAML: a mapping of plain values, read in bounded time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridflow.config.outside_text import read_outside_bytes

MOST_BYTES = 1 << 20  # a run's config.yaml is about 10 KB
_MOST_DEPTH = 32


def read_outside_yaml(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a file and the mapping in it.

    Raises:
        OSError: the file is missing or cannot be read.
        ValueError: as for `read_outside_bytes`, or not UTF-8, not YAML, nested too deeply, not a
            mapping, or contains an alias (a few lines of aliases can expand to exhaust memory).
            The message does not name the file.
    """
    import yaml

    try:
        text = read_outside_bytes(path, MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start})") from error
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, loader):  # without building objects or recursion
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(
                event, yaml.CollectionEndEvent
            )
            if depth > _MOST_DEPTH:
                raise ValueError("nested too deeply")
            if isinstance(event, yaml.AliasEvent):
                raise ValueError("aliases are not allowed")
        value = loader(text).get_single_data()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise ValueError(f"not YAML{where}: {getattr(error, 'problem', None) or error}") from error
    except (TypeError, OverflowError, AttributeError) as error:
        # a date or a key that Python cannot represent
        raise ValueError(f"not YAML: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping, got {type(value).__name__}")
    return text, value
