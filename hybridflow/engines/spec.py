"""The specification of one engine: its model and resources, independent of the kind of engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.config.model_config import flattened


@dataclass(frozen=True)
class EngineSpec:
    """The specification of one engine.

    Args:
        name: name of the engine, used in messages and for its log.
        model_path: Hugging Face folder. If it contains no weight files, the engine starts with
            random weights, and real ones must be sent before use.
        tensor, pipeline: parallel sizes; their product is the number of ranks, one process each.
        expert: expert-parallel size within the tensor-parallel ranks; if 1, each expert is sharded
            across all of them.
        data_attention: number of data-parallel copies of the attention among the tensor-parallel
            ranks; if 1, it is sharded across all of them.
        nnodes, node_rank, dist_init_addr: an engine that spans several nodes has one server per
            node; their specs differ only in `node_rank`. The ranks rendezvous at `dist_init_addr`
            ("host:port"), where the server with node_rank 0 listens; if its port is 0, a free port
            is chosen, which `Engine.spec` contains after the start. Only that server serves
            requests.
        host: the address at which other nodes reach this one; loopback if all peers are on this
            machine.
        ports: range from which the server's port is chosen.
        dtype: float32 | bfloat16.
        max_running_requests: sequences decoded concurrently.
        max_total_tokens: size of the KV cache.
        mem_fraction_static: fraction of device memory available to the engine.
        cache_prefixes: keep the KV cache of prompts for later requests with the same prefix.
        extra_args: additional server arguments, keyed by name (with `-` or `_`), which override
            HybridFlow's. True becomes a bare flag, False or None removes the argument, a list
            becomes several values, and a mapping becomes JSON.
        start_timeout_s: deadline of `wait_ready`.
        request_timeout_s: deadline of a control call; an engine that sends no token for this long
            counts as hung.
        seed: the engine's random seed.
        device: cpu | cuda.
        return_routed_experts: record each token's experts, for `generate(with_routes=True)`; uses
            max_total_tokens x layers x experts per token x 4 bytes of host memory.
        max_support: maximum support size that `generate(with_support=True)` returns per token; 0
            uses the server's default.
        draft_tokens: tokens that the model's multi-token-prediction head drafts for each pass of
            the model; 0 for none.
        tokenizes: load the model's tokenizer, for `SamplingConfig.stop`.
        memory_saver: allow releasing device memory (`Engine.sleep`); only on cuda.
        threads: compute threads per rank; only on cpu.
        python: interpreter in which the inference library is installed; "" for this process's.
        fork_server: name of a fork server (`process.fork_server`) that has loaded the inference
            library; "" for none.
        devices: the CUDA devices visible to the engine; if empty, the same as for this process.
    """

    name: str
    model_path: str
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    data_attention: int = 1
    nnodes: int = 1
    node_rank: int = 0
    dist_init_addr: str = ""
    host: str = "127.0.0.1"
    ports: range = range(20000, 32500)
    dtype: str = "float32"
    max_running_requests: int = 64
    max_total_tokens: int = 16384
    mem_fraction_static: float = 0.1
    cache_prefixes: bool = True
    extra_args: dict[str, Any] = field(default_factory=dict)
    start_timeout_s: float = 300.0
    request_timeout_s: float = 300.0
    seed: int = 1
    device: str = "cpu"
    return_routed_experts: bool = False
    max_support: int = 0
    draft_tokens: int = 0
    tokenizes: bool = False
    memory_saver: bool = False
    threads: int = 1
    python: str = ""
    fork_server: str = ""
    devices: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of processes that store weights, across all nodes."""
        return self.tensor * self.pipeline


def model_config(spec: EngineSpec) -> dict[str, Any]:
    """Return the model's Hugging Face config in flat form (`flattened`), or an empty dict if it
    cannot be read (the server logs the reason)."""
    try:
        found = json.loads((Path(spec.model_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return flattened(found) if isinstance(found, dict) else {}


def log_of_start(log_path: Path, number: int) -> Path:
    """Return the log path of an engine after `number` restarts: `NAME.log` for 0, `NAME.1.log` for
    1, and so on."""
    return log_path.with_stem(f"{log_path.stem}.{number}") if number else log_path


def has_weights(model_path: str) -> bool:
    """Return True if the folder contains weight files. A name that is not a folder is treated as a
    hub id, which is assumed to include weights."""
    folder = Path(model_path)
    return not folder.is_dir() or any(
        next(folder.glob(pattern), None) for pattern in ("*.safetensors", "*.bin", "*.pt")
    )
