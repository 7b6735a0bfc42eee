"""Text from outside, made safe to print."""

from __future__ import annotations

import re

# control characters except tab and newline, bidirectional marks, and line separators
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escape characters that move the cursor, set colours or change the writing direction, for
    example as \\x1b."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)
