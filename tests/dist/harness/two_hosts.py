"""Two nodes on this machine as far apart as two machines: a network namespace, a host name and a
/dev/shm each, and between them one cable (a veth pair), without a route to anywhere else. Needs
root."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ADDRESSES = ("10.78.0.1", "10.78.0.2")
PORT = 20000
MTU = 1400  # smaller than anything that is assumed of a loopback
_NODE = "mount -t tmpfs tmpfs /dev/shm && hostname {name} && echo up && exec sleep infinity"


def may_be_made() -> bool:
    """True where this user may make namespaces and cables."""
    words = [
        "unshare",
        "--net",
        "--mount",
        "--uts",
        "ip",
        "link",
        "add",
        "one",
        "type",
        "veth",
        "peer",
        "name",
        "two",
    ]
    return (
        os.getuid() == 0 and subprocess.run(words, capture_output=True, check=False).returncode == 0
    )


@contextmanager
def two_hosts() -> Iterator[list[list[str]]]:
    """Words that begin a command on each of the two nodes, whose addresses are `ADDRESSES`."""
    made = ["unshare", "--net", "--mount", "--uts", "--propagation", "private", "sh", "-c"]
    keepers = [
        subprocess.Popen(
            [*made, _NODE.format(name=f"node{number}")],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        # in sessions of their own: an interrupt of the tests must not end them first
        for number in range(2)
    ]
    try:
        for keeper in keepers:
            assert keeper.stdout is not None and keeper.stdout.readline() == "up\n"
        # else it would be /
        enter = ["nsenter", "--net", "--mount", "--uts", f"--wd={os.getcwd()}"]
        commands = [[*enter, f"--target={keeper.pid}"] for keeper in keepers]
        ends = [["cable0", "netns", str(keeper.pid), "mtu", str(MTU)] for keeper in keepers]
        words = ["ip", "link", "add", "name", *ends[0], "type", "veth", "peer", "name", *ends[1]]
        subprocess.run(words, check=True)
        for command, address in zip(commands, ADDRESSES, strict=True):
            for set_up in (
                ["addr", "add", f"{address}/24", "dev", "cable0"],
                ["link", "set", "cable0", "up"],
                ["link", "set", "lo", "up"],
            ):
                subprocess.run([*command, "ip", *set_up], check=True)
        yield commands
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.wait()


@contextmanager
def ray(commands: list[list[str]], addresses: Sequence[str], folder: Path) -> Iterator[Path]:
    """Ray by hand on both nodes, which these words reach and which have these addresses. Yields the
    file of the token that clients need, in `folder`."""
    token = folder / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    script = ["bash", str(ROOT / "launch" / "ray" / "cluster.sh")]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    # a cluster that an earlier test of this process has had leaves settings for one machine behind
    rest = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = {**rest, "RAY_AUTH_TOKEN_PATH": str(token), "PATH": path, "FIRST_PORT": str(PORT)}

    def run(node: int, *words: str) -> None:
        done = subprocess.run(
            [*commands[node], *script, *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    try:
        run(0, "head", addresses[0])
        run(1, "join", *addresses)
        yield token
    finally:
        run(0, "stop")
