"""Checks of a configuration against the devices of this machine, before anything starts; `config.check` knows no
devices."""

from __future__ import annotations

from hybridflow.config.schema import RunConfig
from hybridflow.device.platform import Platform
from hybridflow.errors import ConfigError
from hybridflow.sync.transports.base import TRANSPORTS

FP8_CAPABILITY = (8, 9)


def check_devices(config: RunConfig, platform: Platform) -> None:
    """Raise ConfigError for engines and transports that cannot run on the devices of this platform; says what can."""
    if config.rollout.sync.transport != "auto":
        _check_transport(config, platform)
    if config.rollout.quantization == "fp8":
        _check_fp8(platform)
    if config.rollout.nodes_per_engine > 1 and config.cluster.address is None and platform.kind == "cuda":
        raise ConfigError(
            f"rollout.nodes_per_engine={config.rollout.nodes_per_engine} with cluster.address=null puts all nodes of "
            "an engine on this machine, where each would take the same GPUs; give the address of a cluster, or set "
            "rollout.nodes_per_engine=1"
        )


def _check_transport(config: RunConfig, platform: Platform) -> None:
    name, cluster, nodes = config.rollout.sync.transport, config.cluster, config.rollout.nodes_per_engine
    transport = TRANSPORTS.get(name)
    others = [one for one in TRANSPORTS.names() if platform.kind in TRANSPORTS.get(one).devices]
    if platform.kind not in transport.devices:
        raise ConfigError(
            f"rollout.sync.transport={name} carries {', '.join(transport.devices).upper()} buffers, and the weights "
            f"lie on {platform.kind} devices here; use auto or {', '.join(others)}"
        )
    several = f"cluster.nodes={cluster.nodes}" if cluster.nodes > 1 else ""
    if nodes > 1 and cluster.address is not None:
        several = f"rollout.nodes_per_engine={nodes} in the cluster at {cluster.address}"
    if transport.one_host and several:
        others = [one for one in others if not TRANSPORTS.get(one).one_host]
        raise ConfigError(
            f"rollout.sync.transport={name} needs trainer and engines on one machine, but {several}; use auto or "
            f"{', '.join(others)}"
        )


def _check_fp8(platform: Platform) -> None:
    wanted = ".".join(map(str, FP8_CAPABILITY))
    instead = (
        "set rollout.quantization=null; `hybridflow reshard plan --engine-dtype fp8` plans and proves such a transfer "
        "on any machine"
    )
    if platform.kind == "cpu":
        # sglang/srt/layers/quantization/fp8_utils.py:1809 and fp8.py:827
        raise ConfigError(
            f"rollout.quantization=fp8 needs GPUs of compute capability {wanted} or later, and this is a CPU: an "
            "engine loads fp8 weights there, but computes with them in Triton, which has no driver for CPUs, or with "
            f"AMX and its own kernels; {instead}"
        )
    if (found := platform.capability()) < FP8_CAPABILITY:
        # sglang/srt/layers/quantization/fp8_utils.py:2798
        raise ConfigError(
            f"rollout.quantization=fp8 needs GPUs of compute capability {wanted} or later, and these have "
            f"{found[0]}.{found[1]}: there the engine rearranges fp8 weights for Marlin after each load, and slices "
            f"would land in the wrong form; {instead}"
        )
