"""What one engine serves and with which resources: the same for every kind of engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.errors import EngineError


@dataclass(frozen=True)
class EngineSpec:
    """One engine.

    Args:
        name: used in messages and for its log.
        model_path: Hugging Face folder; without weight files the weights start random and must be
            sent before use.
        tensor, pipeline: sizes; their product is the number of ranks, one process each.
        expert: into how many groups the tensor-parallel ranks divide the experts; 1: each expert is
            cut over all of them.
        data_attention: how many copies of the attention the tensor-parallel ranks hold; 1: one, cut
            over all of them.
        nnodes, node_rank, dist_init_addr: an engine over several nodes is one server a node, equal
            but for `node_rank`; the ranks meet at `dist_init_addr` ("host:port"), where the server
            with node_rank 0 listens; port 0 takes a free one, which `Engine.spec` names after the
            start. Only that server answers requests.
        host: the address at which other nodes reach this one; loopback where all peers are on this
            machine.
        ports: the server takes one of these.
        dtype: float32 | bfloat16.
        max_running_requests: sequences decoded together.
        max_total_tokens: size of the KV cache.
        mem_fraction_static: share of device memory the engine may plan with.
        cache_prefixes: keep the KV cache of prompts for later requests that begin alike.
        extra_args: arguments of the kind's own server by name (`-` or `_`), overriding ours: True
            is a bare flag, False or None removes it, a list becomes several values, a mapping JSON.
        start_timeout_s: deadline of `wait_ready`.
        request_timeout_s: deadline of a control call; an engine that sends no token for so long
            hangs.
        seed: the engine's own random seed.
        device: cpu | cuda.
        return_routed_experts: keep each token's experts, for `generate(with_routes=True)`; costs
            host memory of max_total_tokens x layers x experts a token x 4 bytes.
        max_support: most tokens that `generate(with_support=True)` returns for a token; 0: as the
            server has it.
        tokenizes: read the model's tokenizer, for `SamplingConfig.stop`.
        memory_saver: be able to give device memory back (`Engine.sleep`); only on cuda.
        threads: threads that each rank computes with; only on cpu.
        python: interpreter that has the kind's library; "": this process's.
        fork_server: name of a fork server (`process.fork_server`) that has loaded the kind's
            library; "": none.
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
    tokenizes: bool = False
    memory_saver: bool = False
    threads: int = 1
    python: str = ""
    fork_server: str = ""

    @property
    def ranks(self) -> int:
        """Processes that hold weights, on all nodes together."""
        return self.tensor * self.pipeline


def model_config(spec: EngineSpec) -> dict[str, Any]:
    """The model's Hugging Face config; empty where it cannot be read (the server's log says what is
    wrong)."""
    try:
        found = json.loads((Path(spec.model_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def check_tokens(prompts: Sequence[Sequence[int]], vocabulary: int, name: str) -> None:
    """Refuse a token that the model does not have: servers look it up in their embedding, where
    some end with all their other requests and some read what is padding.

    Args:
        prompts: token ids.
        vocabulary: number of tokens of the model; 0: unknown.
        name: of the engine.

    Raises:
        EngineError: with the prompt's number and the token.
    """
    for number, prompt in enumerate(prompts):
        if not vocabulary or not len(prompt):
            continue
        wrong = max(prompt) if min(prompt) >= 0 else min(prompt)
        if not 0 <= wrong < vocabulary:
            raise EngineError(
                f"prompt {number} has token {wrong}, and the model has {vocabulary}", engine=name
            )


def log_of_start(log_path: Path, number: int) -> Path:
    """The log of an engine that was started `number` times before: `NAME.log`, then `NAME.1.log`
    and so on."""
    return log_path.with_stem(f"{log_path.stem}.{number}") if number else log_path
