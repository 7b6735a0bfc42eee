"""Tries a tokenizer and its chat template before they are used: they are programs of the model's
author.

transformers renders templates in jinja's sandbox, which keeps them from Python, files and the
network, but neither from nested loops without an end nor from a string that fills the memory. The
normalizers and patterns of a tokenizer.json can do the same. So a short conversation is rendered,
and short texts are encoded, in a process that may use a few seconds and a gigabyte.
"""

from __future__ import annotations

import os
import resource
import signal
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SECONDS = 5
BYTES = 1 << 30
_CALL = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": 1}},
}
# prose, code and other scripts; and of each character a run that ends otherwise, on which patterns
# backtrack
TEXTS = (
    (
        "What is 1 + 1? It's 2.\n\n\tdef f(x):\r\n        return x ** 2  # Größe, привет, "
        "你好，世界, 🙂 <|end|>\n"
    ),
    *(f"{character * 48}\x00" for character in string.printable),
)
_CONVERSATIONS: tuple[Sequence[Mapping[str, Any]], ...] = (
    [{"role": "user", "content": "What is 1 + 1?"}],
    [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2 + 2?"},
    ],
    [
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [_CALL]},
        {"role": "tool", "content": "2", "tool_call_id": "call00000", "name": "add"},
    ],
)
_NO_MEMORY = 3
_FAILED = 4


def trial(calls: Sequence[Callable[[], object]]) -> str:
    """What is wrong with the calls, as the rest of a sentence; "" when all return. They run in a
    child process."""
    child = os.fork()
    if child == 0:
        _run(calls)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return f"takes more than {SECONDS} s"
    # Rust ends a process that has no memory
    if os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == _NO_MEMORY:
        return f"takes more than {BYTES >> 30} GiB of memory"
    return "fails" if os.WEXITSTATUS(status) else ""


def render_all(render: Callable[[Sequence[Mapping[str, Any]]], object]) -> None:
    """Render short conversations, which a template may refuse."""
    for messages in _CONVERSATIONS:
        try:
            render(messages)
        except MemoryError:
            raise
        except Exception:
            continue


def _run(calls: Sequence[Callable[[], object]]) -> None:
    """Runs in the child and does not return."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        present = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + BYTES, present + BYTES))
    # at the second one the signal would be SIGKILL
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library's report of a panic
    try:
        for call in calls:
            call()
    except MemoryError:
        os._exit(_NO_MEMORY)
    except BaseException:
        os._exit(_FAILED)
    os._exit(0)
