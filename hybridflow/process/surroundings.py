"""Protection of a run's processes from the machine's environment: proxies between local programs,
temporary folders whose paths are too long for sockets, and files that shadow other modules."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Mapping
from functools import cache
from urllib.parse import urlsplit

# Python does not put the working directory or a script's folder before its own modules. Applies to
# every Python started with this variable, including those started by libraries; ignored before
# 3.11.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


@cache
def own_addresses() -> tuple[str, ...]:
    """Return the names and addresses that programs on this machine use to reach each other."""
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
    """Return True if `url` is on this machine, so that calls must not go through a proxy."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in own_addresses()
    return address.is_loopback or address.is_unspecified or str(address) in own_addresses()


def proxies(env: Mapping[str, str]) -> list[str]:
    """Return the variables in `env` that set a proxy, as a sorted list."""
    names = []
    for name, value in env.items():
        if name.lower() in _PROXIES and value:
            names.append(name)
    return sorted(names)


def without_proxy(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that exempt this machine's addresses from proxies, in addition to the
    addresses that `env` already exempts. Empty if `env` sets no proxy.
    """
    if not proxies(env):
        return {}
    given = []
    for name in ("no_proxy", "NO_PROXY"):
        for item in env.get(name, "").split(","):
            given.append(item.strip())
    exempt = ["*"] if "*" in given else [*filter(None, given), *own_addresses()]
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(dict.fromkeys(exempt)))


def import_path() -> list[str]:
    """Return this process's import path with the working directory appended, so that user files can
    import from it without shadowing other modules."""
    return [*filter(None, sys.path), os.getcwd()]
