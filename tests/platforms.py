"""Every setting that differs between CPUs and GPUs, asked of the code: `python -m tests.platforms`
writes the table of docs/platforms.md."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from hybridflow.config import derived
from hybridflow.config.schema import RolloutConfig, RunConfig
from hybridflow.device.platform import Kind, Platform
from hybridflow.device.residency import Residency
from hybridflow.engines.server import GRACE_S
from hybridflow.engines.sglang import server
from hybridflow.engines.spec import EngineSpec
from hybridflow.mcore import model
from hybridflow.models import family_of
from hybridflow.placement.pools import pools_of
from hybridflow.sync.transports import chosen, part_bytes
from hybridflow.sync.transports.base import TRANSPORTS
from tests.models import DEEPSEEK, TINY

DOCUMENT = Path(__file__).parents[1] / "docs/platforms.md"
HEAD = """# What differs between CPUs and GPUs

This page lists every setting that depends on the kind of device. The code queries `device.Platform`, and nothing else
differs between CPUs and GPUs. "GPU (torch)" is a GPU without Transformer Engine; a run on one prints a warning when it
starts.

`python -m tests.platforms` generates the table by running the code with each kind of platform. The exceptions are
layers, gloo groups and torch.compile, which `mcore` selects on import, and Apex's kernel for weight gradients, which is
used on GPUs if Apex is installed. `tests/unit/device/test_platforms.py` fails if a setting changes without an update of
this table.

| Setting | CPU | GPU (torch) | GPU (Transformer Engine) |
|---|---|---|---|
"""
LANES: tuple[tuple[Kind, bool], ...] = (("cpu", False), ("cuda", False), ("cuda", True))


def settings(kind: Kind, transformer_engine: bool) -> dict[str, Any]:
    """All settings of one kind of platform, by where they are."""
    platform = Platform(kind)
    found = {
        f"`Platform.{name}`": getattr(platform, name)
        for name in ("collective_backend", "weight_transport", "colocated_transport", "cache_bytes")
    }
    with mock.patch("os.sched_getaffinity", lambda process: set(range(8))):
        found["cores that a separate process may use, of 8"] = platform.cores
    for shape, hf_config in (("", TINY), ("latent attention, YaRN: ", DEEPSEEK)):
        for name, value in model.device_settings(
            family_of(hf_config), kind == "cuda", transformer_engine
        ).items():
            found[f"Megatron: {shape}{name}"] = value
    found["Megatron: layers"] = (
        "transformer_engine" if transformer_engine else "mcore/torch_modules.py"
    )
    found["Megatron: additional gloo groups"] = kind == "cpu"
    found["Megatron: torch.compile, state functions of CUDA"] = (
        "off, replaced" if kind == "cpu" else "as they are"
    )
    found["offloaded tensors are kept in"] = _store_of(platform)
    config = RunConfig(rollout=RolloutConfig(tensor=4))
    found["`rollout.sync.commit: null`"] = (
        "staged" if derived.is_staged(config, kind) else "in_place"
    )
    found["transports"] = ", ".join(
        name for name in TRANSPORTS.names() if kind in TRANSPORTS.get(name).devices
    )
    transport = chosen("auto", platform)
    found["bytes of a message's parts (0: whole buckets)"] = part_bytes(transport, platform)
    found["devices of an engine of tensor 4"] = pools_of(config, kind=kind)[-1].groups[-1].devices
    return found | dict(_engine(kind))


def _store_of(platform: Platform) -> str:
    kept: list[str] = []

    class Noted:
        def __init__(self, *_: Any) -> None: ...

        def write(self, *_: Any) -> None: ...

    def noted(name: str) -> Any:
        return lambda: kept.append(name) or Noted()  # type: ignore[func-returns-value]

    with (
        mock.patch("hybridflow.device.residency._FileStore", noted("an unlinked file in TMPDIR")),
        mock.patch("hybridflow.device.residency._PinnedStore", noted("pinned host memory")),
    ):
        parts: Any = dict.fromkeys(("weights", "gradients", "optimizer", "reference"), list)
        Residency(parts, platform).sleep("optimizer")
    return kept[0]


def _engine(kind: Kind) -> Iterator[tuple[str, Any]]:
    spec = EngineSpec(
        name="engine-0",
        model_path="a-name",
        device=kind,
        memory_saver=True,
        tensor=2,
        host="10.0.0.1",
    )
    with mock.patch.dict(os.environ, {"PATH": "/bin"}, clear=True):
        for name, value in server.server_arguments(spec, 1).items():
            yield f"SGLang: --{name}", value
        for name, value in server.environment(spec, "folder").items():
            yield (
                f"SGLang: {name}",
                "of the cores" if name == "SGLANG_CPU_OMP_THREADS_BIND" else value or "(empty)",
            )
    yield "SGLang: seconds until a stopping server is killed", GRACE_S[kind]


def differences() -> dict[str, list[Any]]:
    """The settings that are not the same on all platforms."""
    lanes: list[Mapping[str, Any]] = [settings(kind, engine) for kind, engine in LANES]
    names = list(dict.fromkeys(name for lane in lanes for name in lane))
    values = {name: [lane.get(name, "") for lane in lanes] for name in names}
    return {name: row for name, row in values.items() if len(set(map(str, row))) > 1}


def table() -> str:
    """The document."""
    rows = [
        f"| {name} | {' | '.join('' if v == '' else str(v) for v in row)} |"
        for name, row in differences().items()
    ]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(table(), encoding="utf-8")
