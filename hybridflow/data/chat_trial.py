"""Tries a chat template before it is used: it is a program of the model's author.

transformers renders templates in jinja's sandbox, which keeps them from Python, files and the network, but neither from
nested loops without an end nor from a string that fills the memory. So it renders a short conversation first, in a
process that may use a few seconds and a gigabyte.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping, Sequence

SECONDS, BYTES = 5, 1 << 30
TRIALS: tuple[Sequence[Mapping[str, str]], ...] = (
    [{"role": "user", "content": "What is 1 + 1?"}],
    [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And 2 + 2?"},
    ],
)
_NO_MEMORY = 3


def trial(render: Callable[[Sequence[Mapping[str, str]]], object]) -> str:
    """Why the template is not fit for use; "" when it is. A template may refuse these conversations."""
    child = os.fork()
    if child == 0:
        _render_all(render)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return f"a conversation of two turns takes more than {SECONDS} s"
    if os.WEXITSTATUS(status) == _NO_MEMORY:
        return f"a conversation of two turns takes more than {BYTES >> 30} GiB of memory"
    return ""


def _render_all(render: Callable[[Sequence[Mapping[str, str]]], object]) -> None:
    """Runs in the child and does not return."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        present = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + BYTES, present + BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for messages in TRIALS:
        try:
            render(messages)
        except MemoryError:
            os._exit(_NO_MEMORY)
        except BaseException:  # refused, which is the template's right
            continue
    os._exit(0)
