"""The command line and environment of one SGLang server."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from hybridflow.engines.server import HOST, common_environment
from hybridflow.engines.sglang.server_changes import SCHEME
from hybridflow.engines.spec import EngineSpec, has_weights
from hybridflow.errors import EngineError
from hybridflow.process.importing import without_compiler

LOADER = "hybridflow.engines.sglang.weight_receiver.load"


KEYS = "keys.yaml"
# file in srt/models that defines an architecture's class; for others SGLang searches all files
MODEL_FILES = {
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "Ernie4_5ForCausalLM": "ernie4",
    "Ernie4_5_MoeForCausalLM": "ernie4",
    "Gemma3ForCausalLM": "gemma3_causal",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GptOssForCausalLM": "gpt_oss",
    "LlamaForCausalLM": "llama",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "Ministral3ForCausalLM": "ministral3",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    # no own file: transformers' modules around SGLang's attention and linear layers
    "SeedOssForCausalLM": "transformers",
}
# the same for the class that drafts with the model's head
DRAFT_FILES = {
    "DeepseekV3ForCausalLM": "deepseek_nextn",
    "Glm4MoeForCausalLM": "glm4_moe_nextn",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite_nextn",
}
_CHANGES = "json-model-override-args"
_ONE_CACHE = "disable-hybrid-swa-memory"
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def server_arguments(spec: EngineSpec, port: int) -> dict[str, Any]:
    """Return SGLang's command-line arguments for the spec as {name: value}."""
    arguments: dict[str, Any] = {
        "model-path": spec.model_path,
        "host": HOST,
        "port": port,
        "tp-size": spec.tensor,
        "dtype": spec.dtype,
        "mem-fraction-static": spec.mem_fraction_static,
        "max-running-requests": spec.max_running_requests,
        "max-total-tokens": spec.max_total_tokens,
        "random-seed": spec.seed,
        # we send and receive token ids; this also skips detokenization
        "skip-tokenizer-init": not spec.tokenizes,
        # an event contains only the tokens since the previous one
        "incremental-streaming-output": True,
        "skip-server-warmup": True,  # wait_ready makes its own one-token request
        "grammar-backend": "none",
        "log-level-http": "warning",
        "custom-weight-loader": [LOADER],
        # otherwise an idle scheduler busy-polls and takes a core from the trainer
        "sleep-on-idle": True,
    }
    if spec.device == "cpu":
        arguments["device"] = "cpu"
        arguments[_ONE_CACHE] = True
    if not spec.cache_prefixes:
        arguments["disable-radix-cache"] = True
    if spec.return_routed_experts:
        arguments["enable-return-routed-experts"] = True
    if spec.max_support:
        arguments["sampling-mask-max-tokens"] = spec.max_support
    if spec.draft_tokens:
        # by the head in the model's own folder, as a chain
        arguments |= {
            "speculative-algorithm": "EAGLE",
            "speculative-num-steps": spec.draft_tokens,
            "speculative-eagle-topk": 1,
            "speculative-num-draft-tokens": spec.draft_tokens + 1,
        }
    if spec.memory_saver and spec.device == "cuda":
        arguments["enable-memory-saver"] = True  # on CPU the server would crash at start-up
        # the default backend's graphs cannot release their memory, so the server would crash at
        # start-up (sglang/srt/model_executor/runner_backend/breakable_cuda_graph_backend.py:92)
        arguments["cuda-graph-backend-prefill"] = "disabled"
    if _read_config(spec.model_path).get("vision_config"):
        # otherwise a tower in CUDA graphs interpolates position embeddings unlike transformers
        # (sglang/srt/models/qwen3_vl.py:524)
        arguments["enable-precise-embedding-interpolation"] = True
    if not has_weights(spec.model_path):
        arguments["load-format"] = "dummy"
    if spec.pipeline > 1:
        arguments["pp-size"] = spec.pipeline
    if spec.expert > 1:
        arguments["ep-size"] = spec.expert
    if spec.data_attention > 1:
        arguments |= {"dp-size": spec.data_attention, "enable-dp-attention": True}
    if spec.nnodes > 1:
        arguments |= {
            "nnodes": spec.nnodes,
            "node-rank": spec.node_rank,
            "dist-init-addr": spec.dist_init_addr,
        }
    return arguments | _own_arguments(spec)


def _own_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the user's server arguments (`EngineSpec.extra_args`), with `config_changes` added.

    Raises:
        EngineError: an argument is not supported on CPUs.
    """
    own = {name.replace("_", "-"): value for name, value in spec.extra_args.items()}
    if spec.device == "cpu" and not own.get(_ONE_CACHE, True):
        raise EngineError(
            f"rollout.extra_args.{_ONE_CACHE}={own[_ONE_CACHE]}: on CPUs, the engine's attention "
            "reads one cache for all layers, with sliding windows or without; remove it",
            engine=spec.name,
        )
    if changes := config_changes(spec.model_path):
        given = own.get(_CHANGES, {})
        own[_CHANGES] = changes | (json.loads(given) if isinstance(given, str) else given)
    return own


def core_binding(ranks: int, cores: list[int]) -> str:
    """Return the value of SGLANG_CPU_OMP_THREADS_BIND, which lists each rank's cores: `0,1|2,3`.
    Ranks share cores if there are fewer cores than ranks.

    Otherwise SGLang assigns one NUMA node to each rank on CPU, and rejects more ranks than nodes.
    """
    share = max(1, len(cores) // ranks)
    parts = [
        [cores[(rank * share + i) % len(cores)] for i in range(share)] for rank in range(ranks)
    ]
    return "|".join(",".join(str(core) for core in part) for part in parts)


def unused_model_files(model_path: str, drafts: bool = False) -> list[str]:
    """Return the names of the SGLang model files that this model does not need: all except the file
    for its architecture and, with `drafts`, the file for its prediction head. Empty if the
    architecture is not in `MODEL_FILES`.

    SGLang imports every model file to find one class (sglang/srt/models/registry.py:118), which
    takes about one CPU second per start. It skips files listed in SGLANG_DISABLED_MODEL_ARCHS.
    """
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        return []
    architectures = _read_config(model_path).get("architectures") or []
    used = {MODEL_FILES.get(name) for name in architectures}
    if drafts:
        used |= {DRAFT_FILES.get(name) for name in architectures}
    files = {
        path.stem
        for path in (Path(package.submodule_search_locations[0]) / "srt" / "models").glob("*.py")
    }
    return sorted(files - used) if used and used <= files else []


def config_changes(model_path: str) -> dict[str, Any]:
    """Return overrides for fields of config.json that SGLang and transformers name differently.
    Without the overrides, SGLang would compute a different model.
    """
    config = _read_config(model_path)
    kind = config.get("model_type")
    if kind == "ernie4_5":
        return {"architectures": ["Ernie4_5_ForCausalLM"]}
    if kind == "gpt_oss" and "swiglu_alpha" in config:
        return {"hidden_act_alpha": config["swiglu_alpha"]}
    if kind == "glm4_moe_lite" and "first_k_dense_replace" not in config:
        return {
            "first_k_dense_replace": (config.get("mlp_layer_types") or ["dense"]).count("dense")
        }
    if kind == "minimax_m2":
        # fields of the published config, which transformers does not write
        rotary = config.get("rope_parameters") or config
        share = rotary.get("partial_rotary_factor", 1.0)
        wanted = {
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "scoring_func": "sigmoid",
            "rotary_dim": int(share * (config.get("head_dim") or 128)),
        }
        return {name: value for name, value in wanted.items() if config.get(name) is None}
    return {}


def _read_config(model_path: str) -> dict[str, Any]:
    """Return the contents of config.json, or {} if the file cannot be read. SGLang reports that
    error itself."""
    path = Path(model_path) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def sglang_environment(device: str) -> dict[str, str]:
    """Return the environment variables common to all SGLang servers. SGLang and its libraries read
    some of them at import."""
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        # Otherwise each /health request sleeps a second and generates a token
        # (sglang/srt/entrypoints/http_server.py:721).
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    if device == "cpu":
        # Ranks compare their free memory before loading (sglang/srt/distributed/bootstrap.py:441),
        # but the host's free memory fluctuates.
        env |= {"CUDA_VISIBLE_DEVICES": "", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
        env |= without_compiler()
    return env


def environment(spec: EngineSpec, folder: str) -> dict[str, str]:
    """Return the server's environment: this process's environment, without its distributed rank and
    restricted to loopback."""
    env = common_environment(spec, folder) | sglang_environment(spec.device)
    # torch's TCPStore listens on every interface regardless of its host name. A file needs no
    # listener (sglang/srt/distributed/bootstrap.py:238).
    env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/rendezvous"
    # Address at which other ranks reach this rank's queues. SGLang's default is the address of the
    # internet route, or every interface if there is none (sglang/srt/utils/network.py:391).
    env["SGLANG_HOST_IP"] = spec.host
    # torch_memory_saver rejects expandable segments, which the trainer uses
    for name in ALLOCATOR_SETTINGS:
        env.pop(name, None)
    # This fusion permutes expert weights after each load without undoing the last permutation, so
    # an order that only describes, or fails, would permute twice
    # (sglang/srt/layers/quantization/unquant.py:936).
    env["SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"] = "0"
    if spec.memory_saver and spec.device == "cuda":
        # CUDA graphs take gigabytes; `Engine.sleep` releases them
        env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    if unused := unused_model_files(spec.model_path, spec.draft_tokens > 0):
        env.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(unused))
    if spec.device == "cpu" and spec.ranks > 1:
        ranks_here = spec.ranks // spec.nnodes
        env.setdefault(
            "SGLANG_CPU_OMP_THREADS_BIND", core_binding(ranks_here, sorted(os.sched_getaffinity(0)))
        )
    if spec.nnodes > 1:
        # The ranks of all nodes meet in the job's store, served by the first node's engine
        # (`SglangEngine._prepare`). By default rank 0 would serve torch's store, which listens on
        # every interface and answers anyone.
        host, port = meeting_address(spec)
        env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"{SCHEME}://{host}:{port}"
    return env


def meeting_address(spec: EngineSpec) -> tuple[str, int]:
    """Parse the rendezvous address of an engine that spans several nodes. Raises EngineError if the
    spec has none."""
    host, _, port = spec.dist_init_addr.rpartition(":")
    if not host or not port.isdigit():
        raise EngineError(
            f"dist_init_addr must be HOST:PORT with nnodes={spec.nnodes}, got "
            f"{spec.dist_init_addr!r}",
            engine=spec.name,
        )
    return host, int(port)
