"""An engine without a model, in a process of its own: each token follows from those before it.

`python -m tests.faults.stub_engine SOCKET PARENT` speaks lines of JSON over an inherited socket:
{"version": v} are its weights from then on, {"ticket": t, "prompt": [...], "most": m} asks for
tokens, {"forget": true} gives all up. It answers {"told": [[ticket, token, version, end], ...]},
where `end` is "stop", "length" or empty.
"""

from __future__ import annotations

import select
import socket
import sys
import zlib
from collections.abc import Sequence

from hybridflow.process.children import die_with_parent
from hybridflow.rewards.lines import Lines

EOS = 1
PAUSE_S = 0.002  # between the tokens of an answer


def next_token(prefix: Sequence[int]) -> int:
    """What the policy says after these tokens, whatever its weights."""
    drawn = zlib.crc32(",".join(map(str, prefix)).encode()) % 11
    return EOS if drawn == 0 else 2 + drawn


def main() -> None:
    """Answer until the other end closes the connection."""
    die_with_parent(int(sys.argv[2]))
    lines = Lines(socket.socket(fileno=int(sys.argv[1])))
    version = -1
    held: dict[int, tuple[list[int], int]] = {}
    while True:
        if select.select([lines.socket], [], [], PAUSE_S if held else None)[0]:
            messages = lines.received()
            if messages is None:
                return
            for message in messages:
                version = message.get("version", version)
                if "forget" in message:
                    held.clear()
                if "ticket" in message:
                    held[message["ticket"]] = (message["prompt"], message["most"])
        told = []
        for ticket, (prefix, most) in list(held.items()):
            token = next_token(prefix)
            prefix.append(token)
            held[ticket] = (prefix, most - 1)
            end = "stop" if token == EOS else "length" if most == 1 else ""
            told.append([ticket, token, version, end])
            if end:
                del held[ticket]
        if told:
            lines.send({"told": told})


if __name__ == "__main__":
    main()
