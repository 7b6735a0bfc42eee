"""A trial run of a tokenizer and its chat template, both of which are untrusted programs from the
model's author.

transformers renders templates in jinja's sandbox, which protects Python, files and the network but
does not stop endless loops or strings that exhaust memory. The normalizers and patterns in a
tokenizer.json can cause the same problems. Short conversations are therefore rendered, and short
texts encoded, in a process limited to a few seconds of CPU time and one gigabyte of memory.
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
# prose, code and other scripts; then runs of each character with a different last one, which make
# patterns backtrack
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
    """Run the calls in a child process with resource limits. Returns the problem as a predicate
    ("takes more than 5 s"), or "" if all calls return."""
    child = os.fork()
    if child == 0:
        _run(calls)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        return f"takes more than {SECONDS} s"
    # Rust aborts a process that is out of memory
    if os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == _NO_MEMORY:
        return f"takes more than {BYTES >> 30} GiB of memory"
    return "fails" if os.WEXITSTATUS(status) else ""


def render_all(render: Callable[[Sequence[Mapping[str, Any]]], object]) -> None:
    """Render short conversations with the template. Errors other than MemoryError are ignored."""
    for messages in _CONVERSATIONS:
        try:
            render(messages)
        except MemoryError:
            raise
        except Exception:
            continue


def _run(calls: Sequence[Callable[[], object]]) -> None:
    """Run the calls in the child process. Does not return."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            present = int(statm.read().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, present + BYTES, present + BYTES)
        # the second limit sends SIGKILL
        _limit(resource.RLIMIT_CPU, SECONDS, SECONDS + 1)
        _limit(resource.RLIMIT_CORE, 0, 0)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hides the library's panic report
        for call in calls:
            call()
    except MemoryError:
        os._exit(_NO_MEMORY)
    except BaseException:
        os._exit(_FAILED)
    os._exit(0)


def _limit(kind: int, soft: int, hard: int) -> None:
    """Set a resource limit, capped at the process's current hard limit."""
    present = resource.getrlimit(kind)[1]
    if present != resource.RLIM_INFINITY:
        soft, hard = min(soft, present), min(hard, present)
    resource.setrlimit(kind, (soft, hard))
