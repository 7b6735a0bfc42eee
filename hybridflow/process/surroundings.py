"""What a machine's environment would do to the processes of a run, and what keeps it from that:
proxies between programs of one machine, temporary folders whose names leave no room for sockets,
files that hide other modules."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping
from functools import cache
from urllib.parse import urlsplit

# Python puts neither the working directory nor a script's folder in front of its own modules; every
# Python that a process with this variable starts obeys it, those of libraries too. Pythons before
# 3.11 ignore it.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@cache
def own_addresses() -> tuple[str, ...]:
    """Names and addresses under which programs of this machine reach each other."""
    import psutil

    interfaces = []
    for entries in psutil.net_if_addrs().values():
        interfaces.extend(entries)
    numbers = set()
    for one in interfaces:
        if one.family in (socket.AF_INET, socket.AF_INET6):
            numbers.add(one.address.partition("%")[0])
    return ("localhost", *sorted({"127.0.0.1", "::1", socket.gethostname(), *numbers}))


def is_own(url: str) -> bool:
    """Whether `url` is of this machine, so that no proxy may see or break a call of it."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in own_addresses()
    return address.is_loopback or address.is_unspecified or str(address) in own_addresses()


def proxies(env: Mapping[str, str]) -> list[str]:
    """The variables of `env` that name a proxy, sorted."""
    names = []
    for name, value in env.items():
        if name.lower() in _PROXIES and value:
            names.append(name)
    return sorted(names)


def without_proxy(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep programs from asking a proxy for this machine's addresses, besides
    what `env` exempts already; none where `env` names no proxy."""
    if not proxies(env):
        return {}
    given = []
    for name in ("no_proxy", "NO_PROXY"):
        for item in env.get(name, "").split(","):
            given.append(item.strip())
    exempt = ["*"] if "*" in given else [*filter(None, given), *own_addresses()]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(dict.fromkeys(exempt)))


def import_path() -> list[str]:
    """This process's import path, and at its end, where it hides nothing, the working directory:
    user files may import what lies there."""
    return [*filter(None, sys.path), os.getcwd()]
