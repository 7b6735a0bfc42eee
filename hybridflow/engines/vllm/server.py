"""Checks, command line and environment of one vLLM server."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from hybridflow.engines.server import HOST, common_environment
from hybridflow.engines.spec import EngineSpec, has_weights, model_config
from hybridflow.engines.vllm.door import KEY
from hybridflow.errors import EngineError
from hybridflow.process.surroundings import SAFE_PATH

BLOCK_TOKENS = 32  # tokens per KV-cache block, the minimum for vLLM's CPU attention
# required modules; our code in the ranks imports the last three
NEEDED = ("vllm", "torch", "numpy", "xxhash")
IMPORTS = "imports"  # folder with a link to this package
_LOOK = f"import importlib.util as u; print(*(n for n in {NEEDED} if u.find_spec(n) is None))"
_LOOK_S = 60.0


def check_spec(spec: EngineSpec) -> None:
    """Raise EngineError for unsupported settings. The message names the key and the remedy."""
    other = "choose another rollout.engine"
    sizes = {
        "rollout.nodes_per_engine": spec.nnodes,
        "rollout.pipeline": spec.pipeline,
        "rollout.expert": spec.expert,
        "rollout.data_parallel_attention": spec.data_attention,
    }
    for key, size in sizes.items():
        if size > 1:
            raise EngineError(
                f"{key}={size} is not supported with vLLM; set it to 1, or {other}",
                engine=spec.name,
            )
    if spec.return_routed_experts:
        raise EngineError(
            "returning routed experts is not supported with vLLM; set actor.router_replay to none "
            f"or r2, or {other}",
            engine=spec.name,
        )
    if model_config(spec).get("quantization_config"):
        said = (
            "quantised weights are not supported with vLLM; set rollout.quantization=null, or "
            f"{other}"
        )
        raise EngineError(said, engine=spec.name)


def check_python(spec: EngineSpec) -> None:
    """Raise EngineError if a required module is missing from the server's interpreter. Takes about
    50 ms."""
    python = spec.python or sys.executable
    remedy = (
        "install vLLM and xxhash in a separate environment, and set rollout.python to its "
        "interpreter (docs/adr/0050-vllm-as-a-kind-of-engine.md)"
    )
    try:
        found = subprocess.run(
            [python, "-c", _LOOK],
            env=os.environ | SAFE_PATH,
            capture_output=True,
            text=True,
            timeout=_LOOK_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(
            f"could not run rollout.python={python}: {error}; {remedy}", engine=spec.name
        ) from error
    if missing := found.stdout.split():
        raise EngineError(
            f"{', '.join(missing)} not found in rollout.python={python}; {remedy}",
            engine=spec.name,
        )


def server_arguments(spec: EngineSpec, port: int) -> dict[str, Any]:
    """Return vLLM's command-line arguments for the spec as {name: value}."""
    longest = model_config(spec).get("max_position_embeddings") or spec.max_total_tokens
    blocks = -(-spec.max_total_tokens // BLOCK_TOKENS)
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "host": HOST,
        "port": port,
        "tensor-parallel-size": spec.tensor,
        "dtype": spec.dtype,
        "gpu-memory-utilization": spec.mem_fraction_static,
        "max-num-seqs": spec.max_running_requests,
        "max-model-len": min(longest, blocks * BLOCK_TOKENS),
        "block-size": BLOCK_TOKENS,
        "seed": spec.seed,
        "skip-tokenizer-init": True,  # we send and receive token ids
        "generation-config": "vllm",  # ignore the model's own sampling settings
        "enable-scale-out": True,  # the path for token ids in and out
        "logprobs-mode": "processed_logprobs",
        # tokens between events; the first token and the last also send one
        "stream-interval": 64,
        "middleware": "hybridflow.engines.vllm.door.Door",
        "worker-extension-cls": "hybridflow.engines.vllm.worker.WeightExtension",
        "disable-log-stats": True,
        "disable-uvicorn-access-log": True,
    }
    if not spec.cache_prefixes:
        arguments["no-enable-prefix-caching"] = True
    if spec.ranks == 1:
        # a single rank runs in the scheduler's process: no rendezvous, no listener
        arguments["distributed-executor-backend"] = "uni"
    if spec.device == "cpu":
        arguments["enforce-eager"] = True  # compiling on a CPU needs a C++ toolchain and minutes
        # vLLM keeps one block unused. On a GPU the memory fraction decides, because an explicit
        # number would be used even if memory is insufficient.
        arguments["num-gpu-blocks-override"] = blocks + 1
    if spec.memory_saver and spec.device == "cuda":
        arguments["enable-sleep-mode"] = True
    if not has_weights(spec.model_path):
        arguments["load-format"] = "dummy"
    return arguments | {name.replace("_", "-"): value for name, value in spec.extra_args.items()}


def environment(spec: EngineSpec, folder: str, key: str) -> dict[str, str]:
    """Return the server's environment: this process's environment, without its distributed rank and
    restricted to loopback."""
    env = common_environment(spec, folder)
    env |= {
        KEY: key,  # not on the command line, which every user of the machine can read
        # shares only this package, because vLLM's environment has a separate torch
        "PYTHONPATH": os.path.join(folder, IMPORTS),
        "VLLM_SERVER_DEV_MODE": "1",  # pause, sleep and collective_rpc; protected by `door`
        "VLLM_HOST_IP": HOST,
        "VLLM_NO_USAGE_STATS": "1",
        # the caller's environment may enable pickles in calls
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if spec.device == "cpu":
        env |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_COMPILE_DISABLE": "1"}
        # GiB; the number of blocks decides how much is used
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # otherwise all engines on a machine would be bound to the first cores
        env.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return env
