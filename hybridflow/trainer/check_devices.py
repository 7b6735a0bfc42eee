"""Checks of a configuration against the cluster's device type. `config.check` runs before the
devices are known, and workers only check their own node."""

from __future__ import annotations

from hybridflow.config import derived
from hybridflow.config.schema import RolloutConfig, RunConfig
from hybridflow.errors import ConfigError
from hybridflow.sync.transports.base import TRANSPORTS

_SERVER = RolloutConfig().engine
_DELTA_NETS = ("qwen3_next", "qwen3_5")  # beginnings of model_types with gated delta nets


def check_devices(config: RunConfig, kind: str) -> None:
    """Raise ConfigError for engines, transports and dispatchers that this device type does not
    support. The message lists the alternatives."""
    if config.rollout.sync.transport != "auto":
        _check_transport(config, kind)
    if kind == "cpu" and config.actor.parallel.moe_dispatcher == "deepep":
        raise ConfigError(
            "actor.parallel.moe_dispatcher=deepep requires GPUs, because its kernels write to "
            "other ranks' GPU memory, but this run uses CPUs; use alltoall or allgather"
        )
    if kind == "cpu" and config.trainer.profile.steps and config.trainer.profile.tool == "nsys":
        raise ConfigError(
            "trainer.profile.tool=nsys requires the CUDA profiler, but this run uses CPUs; set "
            "tool=torch"
        )
    if kind == "cpu" and _is_served(config):
        _check_model(str(derived.run_hf_config(config).get("model_type")))
    if kind == "cpu" and config.rollout.quantization == "fp8":
        # sglang/srt/layers/quantization/fp8_utils.py:1809 and fp8.py:827
        raise ConfigError(
            "rollout.quantization=fp8 requires GPUs of compute capability 8.9 or later, but this "
            "run uses CPUs: an engine can load fp8 weights there, but its fp8 layers require "
            "Triton (which has no CPU driver) or AMX kernels; set rollout.quantization=null; "
            "`hybridflow reshard plan --engine-dtype fp8` plans and verifies such a transfer on "
            "any machine"
        )


def _is_served(config: RunConfig) -> bool:
    is_apart = derived.generates(config) and not config.cluster.in_process
    return is_apart and config.rollout.engine == _SERVER


def _check_model(model_type: str) -> None:
    """Raise ConfigError if SGLang cannot serve this model on CPUs."""
    if model_type.startswith(_DELTA_NETS):
        # sglang/srt/arg_groups/mamba_hook.py:120
        raise ConfigError(
            f"rollout.engine={_SERVER} requires GPUs for model_type={model_type}, because it "
            "cannot store the states of gated delta nets on CPUs; set rollout.engine=hf with "
            "cluster=in-process"
        )


def _check_transport(config: RunConfig, kind: str) -> None:
    name = config.rollout.sync.transport
    cluster = config.cluster
    nodes = config.rollout.nodes_per_engine
    transport = TRANSPORTS.get(name)
    others = [one for one in TRANSPORTS.names() if kind in TRANSPORTS.get(one).devices]
    if kind not in transport.devices:
        raise ConfigError(
            f"rollout.sync.transport={name} supports only {', '.join(transport.devices).upper()} "
            f"buffers, but the weights are on {kind} devices here; use auto or {', '.join(others)}"
        )
    if kind == "cuda" and derived.shares_devices(config) and not transport.shares_devices:
        others = [one for one in others if TRANSPORTS.get(one).shares_devices]
        raise ConfigError(
            "rollout.pool=actor places engines and trainer on the same GPUs, which "
            f"rollout.sync.transport={name} does not support: NCCL allows only one rank per GPU; "
            f"use auto or {', '.join(others)}, or set rollout.pool=null"
        )
    several = f"cluster.nodes={cluster.nodes}" if cluster.nodes > 1 else ""
    if nodes > 1 and cluster.address is not None:
        several = f"rollout.nodes_per_engine={nodes} in the cluster at {cluster.address}"
    if transport.one_host and several:
        others = [one for one in others if not TRANSPORTS.get(one).one_host]
        raise ConfigError(
            f"rollout.sync.transport={name} requires trainer and engines on one machine, but "
            f"{several}; use auto or {', '.join(others)}"
        )
