"""Checks of a configuration against the kind of devices that the run's machines have;
`config.check` knows no devices, and what a single node has is checked by the workers there."""

from __future__ import annotations

from hybridflow.config import derived
from hybridflow.config.schema import RunConfig
from hybridflow.errors import ConfigError
from hybridflow.sync.transports.base import TRANSPORTS


def check_devices(config: RunConfig, kind: str) -> None:
    """Raise ConfigError for engines, transports and dispatchers that devices of this kind cannot
    run; says what can."""
    if config.rollout.sync.transport != "auto":
        _check_transport(config, kind)
    if kind == "cpu" and config.actor.parallel.moe_dispatcher == "deepep":
        raise ConfigError(
            "actor.parallel.moe_dispatcher=deepep needs GPUs, whose memory its kernels write "
            "between ranks, and this is a CPU; use alltoall or allgather"
        )
    if kind == "cpu" and config.rollout.quantization == "fp8":
        # sglang/srt/layers/quantization/fp8_utils.py:1809 and fp8.py:827
        raise ConfigError(
            "rollout.quantization=fp8 needs GPUs of compute capability 8.9 or later, and this is a "
            "CPU: an engine loads fp8 weights there, but computes with them in Triton, which has "
            "no driver for CPUs, or with AMX and its own kernels; set rollout.quantization=null; "
            "`hybridflow reshard plan --engine-dtype fp8` plans and proves such a transfer on any "
            "machine"
        )


def _check_transport(config: RunConfig, kind: str) -> None:
    name = config.rollout.sync.transport
    cluster = config.cluster
    nodes = config.rollout.nodes_per_engine
    transport = TRANSPORTS.get(name)
    others = [one for one in TRANSPORTS.names() if kind in TRANSPORTS.get(one).devices]
    if kind not in transport.devices:
        raise ConfigError(
            f"rollout.sync.transport={name} carries {', '.join(transport.devices).upper()} "
            f"buffers, and the weights lie on {kind} devices here; use auto or {', '.join(others)}"
        )
    if kind == "cuda" and derived.shares_devices(config) and not transport.shares_devices:
        others = [one for one in others if TRANSPORTS.get(one).shares_devices]
        raise ConfigError(
            "rollout.pool=actor puts engines and trainer on the same GPUs, and "
            f"rollout.sync.transport={name} does not go there: NCCL takes each GPU once; use auto "
            f"or {', '.join(others)}, or set rollout.pool=null"
        )
    several = f"cluster.nodes={cluster.nodes}" if cluster.nodes > 1 else ""
    if nodes > 1 and cluster.address is not None:
        several = f"rollout.nodes_per_engine={nodes} in the cluster at {cluster.address}"
    if transport.one_host and several:
        others = [one for one in others if not TRANSPORTS.get(one).one_host]
        raise ConfigError(
            f"rollout.sync.transport={name} needs trainer and engines on one machine, but "
            f"{several}; use auto or {', '.join(others)}"
        )
