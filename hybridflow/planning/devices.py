"""Figures of devices and of the clusters they stand in. Speeds are of one device, dense, without
sparsity.

Sources: compute and memory from the accelerator tables of stas00/ml-engineering and the vendors'
data sheets, links from MLPerf system descriptions (400 Gb/s a GPU; NVLink in one direction is half
of the printed figure). `memory_gb` is what torch reports as the total, 10^9 bytes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Attributes:
        tflops, fp8_tflops: peak in bfloat16 (cpu: float32) and fp8; fp8 0: there is none.
        memory_gb, memory_gbs: size and bandwidth of its memory.
        domain, domain_gbs: devices that a fast link joins, and its bandwidth a device in one
            direction.
        network_gbs: bandwidth between such groups, a device, in one direction.
        host_gbs: bandwidth to the host's memory, one direction.
        devices_per_node: as usually built.
    """

    tflops: float
    memory_gb: float
    memory_gbs: float
    fp8_tflops: float = 0.0
    domain: int = 8
    domain_gbs: float = 450.0
    network_gbs: float = 50.0
    host_gbs: float = 50.0
    devices_per_node: int = 8

    def peak(self, fp8: bool) -> float:
        """Operations a second."""
        return (self.fp8_tflops if fp8 and self.fp8_tflops else self.tflops) * 1e12


DEVICES: Mapping[str, Device] = {
    "A100": Device(312, 85, 2039, domain_gbs=300, network_gbs=25, host_gbs=25),
    "H100": Device(989, 85, 3350, 1979),
    "H800": Device(989, 85, 3350, 1979, domain_gbs=200),
    "H200": Device(989, 150, 4800, 1979),
    "H20": Device(148, 102, 4000, 296),
    "B200": Device(2250, 191, 8000, 4500, domain_gbs=900),
    "GB200": Device(
        2450, 191, 8000, 5000, domain=72, domain_gbs=900, host_gbs=200, devices_per_node=4
    ),
    "MI300X": Device(1307, 206, 5300, 2615, domain_gbs=448),  # AMD's data sheet: 7 links of 64 GB/s
    # a process with one core of a present server; links are its loopback
    "cpu": Device(
        0.1, 8, 10, domain=1, domain_gbs=2, network_gbs=1, host_gbs=2, devices_per_node=4
    ),
}


@dataclass(frozen=True)
class Machines:
    """Equal nodes of one kind of device."""

    name: str
    device: Device
    nodes: int
    devices_per_node: int
    host_memory_gb: float = 2000.0  # of a node

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    @property
    def is_gpu(self) -> bool:
        """Whether processes have contexts on the devices."""
        return self.device.domain > 1


def known_device(name: str, own: Mapping[str, Device] | None = None) -> Device:
    """The device of this name, whatever its case.

    Raises:
        ConfigError: there is none; names those there are.
    """
    known = {**DEVICES, **(own or {})}
    by_name = {key.lower(): device for key, device in known.items()}
    if name.lower() in by_name:
        return by_name[name.lower()]
    near = difflib.get_close_matches(name.lower(), by_name, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"no device is called {name!r}{hint} Known: {', '.join(known)}; a cluster file can "
        "describe others under devices"
    )


def read_cluster(
    file: Path | None, nodes: int, devices_per_node: int, device: str = "H100"
) -> Machines:
    """The cluster of a YAML file, or without one `nodes` of `device`, as the recipe has them.

    Raises:
        ConfigError: the file cannot be read, has a key that is not known or a number that is
            impossible.
    """
    if file is None:
        return Machines(device, known_device(device), nodes, devices_per_node)
    values = _yaml(file)
    allowed = ("device", "nodes", "devices_per_node", "host_memory_gb", "devices")
    _refuse_unknown(file, values, allowed)
    own = {
        str(name): _device(file, str(name), entry)
        for name, entry in _mapping(file, values, "devices").items()
    }
    name = str(values.get("device", device))
    numbers = {
        "nodes": _number(file, "nodes", values.get("nodes", nodes), whole=True),
        "devices_per_node": _number(
            file, "devices_per_node", values.get("devices_per_node", devices_per_node), whole=True
        ),
        "host_memory_gb": _number(file, "host_memory_gb", values.get("host_memory_gb", 2000.0)),
    }
    return Machines(
        name,
        known_device(name, own),
        int(numbers["nodes"]),
        int(numbers["devices_per_node"]),
        numbers["host_memory_gb"],
    )


def _device(file: Path, name: str, entry: Any) -> Device:
    if not isinstance(entry, dict):
        raise ConfigError(f"{file}: devices.{name} must give tflops, memory_gb, memory_gbs, ...")
    _refuse_unknown(file, entry, tuple(field.name for field in fields(Device)), f"devices.{name}.")
    missing = [key for key in ("tflops", "memory_gb", "memory_gbs") if key not in entry]
    if missing:
        raise ConfigError(f"{file}: devices.{name} lacks {', '.join(missing)}")
    whole = ("domain", "devices_per_node")
    return Device(
        **{
            key: _number(
                file,
                f"devices.{name}.{key}",
                value,
                key in whole,
                least=0 if key == "fp8_tflops" else None,
            )
            for key, value in entry.items()
        }
    )


def _number(
    file: Path, key: str, value: Any, whole: bool = False, least: float | None = None
) -> Any:
    kind = int if whole else (int, float)
    if (
        isinstance(value, bool)
        or not isinstance(value, kind)
        or not (0 < value < 1e9 or value == least)
    ):
        raise ConfigError(
            f"{file}: {key}={value!r} must be a {'whole number' if whole else 'number'} above 0"
        )
    return value


def _mapping(file: Path, values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values.get(key) or {}
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: {key} must be a mapping from names to figures")
    return found


def _refuse_unknown(
    file: Path, values: Mapping[str, Any], allowed: tuple[str, ...], prefix: str = ""
) -> None:
    for key in values:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"{file}: there is no key {prefix}{key}{hint} Keys: {', '.join(allowed)}"
            )


def _yaml(file: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--cluster {file}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--cluster {file}: not valid YAML: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(f"--cluster {file}: must give device, nodes and devices_per_node")
    return values
