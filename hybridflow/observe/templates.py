"""The HTML templates of `pages/`: their environment, and how text from a run is shown.

All values are escaped. Control characters and those that change the writing direction are made
visible.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.observe.printable import printable

if TYPE_CHECKING:
    import jinja2

TEXT_LIMIT = 1500  # maximum characters shown of a prompt, response or value
_WHOLE_LIMIT = 200_000
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def fill(template: str, **parts: Any) -> str:
    """Return the HTML of the template `pages/TEMPLATE.html.j2`."""
    return _templates().get_template(f"{template}.html.j2").render(parts)


@cache
def _templates() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("pages")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_visible,
    )
    environment.filters["shown"] = shown
    environment.filters["visible"] = visible
    environment.filters["whole"] = whole
    return environment


def shown(text: Any) -> str:
    """Format the text of a prompt or response: truncated if very long, with control characters made
    visible."""
    if text is None:
        return ""
    return visible(cut(text if isinstance(text, str) else plain(text)))


def whole(text: Any) -> str:
    """Format a text like `shown`, but truncate it only after 200,000 characters."""
    plain_text = text if isinstance(text, str) else shown(text)
    more = len(plain_text) - _WHOLE_LIMIT
    rest = f"\n… {more:,} more characters" if more > 0 else ""
    return visible(plain_text[:_WHOLE_LIMIT]) + rest


def visible(text: str) -> str:
    """Return the text with control characters replaced by visible symbols."""
    return _CONTROL.sub(_symbol, text)


def _symbol(character: re.Match[str]) -> str:
    code = ord(character[0])
    return chr(0x2400 + code) if code < 32 else "\u2421"


def plain(value: Any) -> str:
    """Format a number, string or plain data on one line; truncated if very long."""
    if isinstance(value, float):
        return f"{value:.6g}"
    try:
        return cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    except RecursionError:
        return "nested too deeply to be shown"


def cut(text: str) -> str:
    """Truncate a text to `TEXT_LIMIT` characters, and append a line with the number of omitted
    characters.
    """
    more = len(text) - TEXT_LIMIT
    return f"{text[:TEXT_LIMIT]}\n… {more:,} more characters" if more > 0 else text


def _visible(value: Any) -> Any:
    """Escape control characters in a value. Our own markup is left unchanged."""
    return type(value)(printable(value)) if isinstance(value, str) else value
