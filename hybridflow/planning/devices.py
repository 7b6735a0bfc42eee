"""Specifications of devices and clusters. Speeds are per device, for dense operations without
sparsity.

Sources: compute and memory from the accelerator tables of stas00/ml-engineering and the vendors'
data sheets, links from MLPerf system descriptions (400 Gb/s per GPU; NVLink in one direction is
half of the printed figure). `memory_gb` is the total that torch reports, in 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Device:
    """A type of device.

    Attributes:
        tflops, fp8_tflops: peak in bfloat16 (cpu: float32) and in fp8; 0 if fp8 is not supported.
        memory_gb, memory_gbs: memory size and bandwidth.
        domain, domain_gbs: number of devices connected by a fast link, and its bandwidth per
            device in one direction.
        network_gbs: bandwidth between such domains per device, in one direction.
        host_gbs: bandwidth to host memory, in one direction.
        devices_per_node: usual number of devices per node.
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
        """Return the peak in operations per second."""
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
    # a process with one core of a current server; its links are the loopback interface
    "cpu": Device(
        0.1, 8, 10, domain=1, domain_gbs=2, network_gbs=1, host_gbs=2, devices_per_node=4
    ),
}


@dataclass(frozen=True)
class Machines:
    """Identical nodes with one type of device."""

    name: str
    device: Device
    nodes: int
    devices_per_node: int
    host_memory_gb: float = 2000.0  # per node

    @property
    def devices(self) -> int:
        """Total number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def is_gpu(self) -> bool:
        """True if the devices are GPUs, on which every process has a context."""
        return self.device.domain > 1


def known_device(name: str, own: Mapping[str, Device] | None = None) -> Device:
    """Look up a device by name, ignoring case.

    Raises:
        ConfigError: no such device. The message lists the known ones.
    """
    known = {**DEVICES, **(own or {})}
    by_name = {key.lower(): device for key, device in known.items()}
    if name.lower() in by_name:
        return by_name[name.lower()]
    hint = did_you_mean(name.lower(), by_name) or "."
    raise ConfigError(
        f"device {name!r} not found{hint} Known: {', '.join(known)}; define others under devices "
        "in a cluster file"
    )


def read_cluster(
    file: Path | None, nodes: int, devices_per_node: int, device: str = "H100"
) -> Machines:
    """Read the cluster from a YAML file or, without a file, build one from the recipe's `nodes` and
    `device`.

    Raises:
        ConfigError: the file cannot be read, or has an unknown key or an invalid number.
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
        raise ConfigError(
            f"{file}: devices.{name} must be a mapping with tflops, memory_gb, memory_gbs, ..."
        )
    _refuse_unknown(file, entry, tuple(field.name for field in fields(Device)), f"devices.{name}.")
    missing = [key for key in ("tflops", "memory_gb", "memory_gbs") if key not in entry]
    if missing:
        raise ConfigError(f"{file}: devices.{name} is missing {', '.join(missing)}")
    whole = ("domain", "devices_per_node")
    numbers = {}
    for key, value in entry.items():
        least = 0 if key == "fp8_tflops" else None
        numbers[key] = _number(file, f"devices.{name}.{key}", value, key in whole, least=least)
    return Device(**numbers)


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
        raise ConfigError(f"{file}: {key} must be a mapping from names to values")
    return found


def _refuse_unknown(
    file: Path, values: Mapping[str, Any], allowed: tuple[str, ...], prefix: str = ""
) -> None:
    for key in values:
        if key not in allowed:
            hint = did_you_mean(str(key), allowed) or "."
            raise ConfigError(f"{file}: unknown key {prefix}{key}{hint} Keys: {', '.join(allowed)}")


def _yaml(file: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--cluster {file}: could not read it: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--cluster {file}: not valid YAML: {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"--cluster {file}: expected a mapping with device, nodes and devices_per_node"
        )
    return values
