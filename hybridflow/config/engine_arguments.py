"""Engine server arguments that `rollout.extra_args` must not set, because they affect sampling,
weights, the data returned to the trainer, or access to the engine. Names are those of SGLang and
vLLM; `*` matches any ending.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

# {reason for rejection; remedy: names}
_REFUSED: dict[str, str] = {
    "engines listen only on loopback, with a port and keys that the job chooses; remove it": (
        "host port api-key admin-api-key ssl-* uds config grpc-* smg-* sidecar* root-path "
        "fastapi-root-path middleware nccl-port nccl-init-addr dist-init-addr master-addr "
        "master-port gated-launch-port engine-info-bootstrap-port load-publish-endpoint "
        "kv-events-config kv-transfer-config allowed-origins allowed-methods allowed-headers "
        "allow-credentials enable-ssl-refresh enable-http2 enable-http-worker-reuseport "
        "encoder-register-urls headless"
    ),
    (
        "it runs code from files outside the job's control; set your own engine kind as "
        "rollout.engine"
    ): (
        "trust-remote-code forward-hooks worker-cls worker-extension-cls scheduler-cls tool-server "
        "warmups custom-weight-loader io-processor-plugin"
    ),
    (
        "tokens would be drafted by other weights that no sync updates; remove it, or draft with "
        "the model's own head (rollout.speculative.method=mtp)"
    ): (
        "speculative-* spec-* decoupled-spec-* enable-multi-layer-eagle "
        "enable-draft-weights-cpu-backup decrypted-draft-config-file num-lookahead-slots dllm-* "
        "no-dllm-*"
    ),
    (
        "tokens would be sampled differently from rollout.sampling and the trainer's log-probs; "
        "remove it"
    ): (
        "preferred-sampling-params sampling-defaults enable-custom-logit-processor "
        "logits-processors logits-processor-pattern override-generation-config generation-config "
        "logprobs-mode enable-watermark watermark-config enable-strict-thinking "
        "structured-outputs-config mlx-enable-sampling"
    ),
    (
        "engines use the weights that the trainer sends, in rollout.quantization or model.dtype; "
        "remove it"
    ): (
        "quantization quantization-param-path quantize-and-serve quantization-config "
        "rl-quant-profile torchao-config modelopt-* modelexpress-config load-format "
        "model-loader-extra-config startup-weight-load-mode weight-version weight-cache-* "
        "weight-transfer-config remote-instance-weight-loader-* checkpoint-engine-* "
        "delete-ckpt-after-loading decrypted-config-file model-checksum enable-w4a4-mxfp4-megamoe"
    ),
    "engines receive weights with the adapters merged (docs/lora.md); remove it": (
        "enable-lora* lora-* no-lora-* max-lora* max-loras* max-loaded-loras max-cpu-loras "
        "fully-sharded-loras specialize-active-lora default-mm-loras uno-lora-path "
        "experts-shared-outer-loras no-experts-shared-outer-loras enable-prompt-adapter "
        "max-prompt-adapter*"
    ),
    "weights would move away from the addresses that a sync writes to; remove it": (
        "enable-eplb eplb-* ep-num-redundant-experts ep-dispatch-algorithm init-expert-location "
        "elastic-ep-* enable-elastic-expert-backup max-ep-size cpu-offload-* offload-* kt-* "
        "ple-offload-* enable-paged-experts paged-experts-num-resident "
        "enable-tp-lm-head-all-to-all dwdp-size"
    ),
    "it would keep results of older weights after a sync; remove it": (
        "hicache-storage-* enable-lmcache lmcache-* enable-flexkv flexkv-* "
        "enable-unified-cache-external-linker unified-cache-external-linker-* radix-cache-backend "
        "kv-offloading-*"
    ),
    "the engine's model is the trainer's (model.path, model.hf_config); remove it": (
        "model model-path revision code-revision hf-config-path hf-overrides "
        "json-model-override-args config-format model-impl model-config-parser rope-scaling "
        "rope-theta is-embedding runner convert task encoder-only language-only "
        "language-model-only override-attention-dtype disable-sliding-window served-model-name"
    ),
    "prompts and answers are token ids of model.tokenizer; remove it": (
        "tokenizer tokenizer-path tokenizer-mode tokenizer-backend tokenizer-revision "
        "skip-tokenizer-init enable-prompt-embeds allow-auto-truncate enable-multimodal"
    ),
    "the job sets the format of the engine's answers; remove it": (
        "incremental-streaming-output stream-interval stream-output enable-return-hidden-states "
        "return-* enable-return-indexer-topk enable-return-aux-hidden-states max-logprobs "
        "enable-response-store enable-streaming-session strip-thinking-cache disaggregation-* "
        "enable-pd-role-switch enable-scale-out prefill-only-disable-kv-cache tokens-only use-ray "
        "distributed-executor-backend"
    ),
}
# {our key: the server's names of the equivalent arguments}
_OUR_KEYS = {
    "rollout.tensor": "tp-size tensor-parallel-size",
    "rollout.pipeline": "pp-size pipeline-parallel-size",
    "rollout.expert": "ep ep-size expert-parallel-size enable-expert-parallel",
    "rollout.data_parallel_attention": (
        "dp-size enable-dp-attention data-parallel-* attn-dp-size attention-data-parallel-size "
        "attn-cp-size attention-context-parallel-size dcp-size decode-context-parallel-size "
        "prefill-context-parallel-size moe-dp-size moe-data-parallel-size moe-dense-tp-size "
        "shared-experts-tp-size"
    ),
    "rollout.nodes_per_engine": "nnodes node-rank",
    "rollout.max_running_requests": "max-running-requests max-num-seqs",
    "rollout.max_total_tokens": "max-total-tokens num-gpu-blocks-override",
    "rollout.mem_fraction_static": "mem-fraction-static gpu-memory-utilization",
    "rollout.sleep_while_training": "enable-memory-saver enable-sleep-mode",
    "model.dtype": "dtype",
    "seed": "random-seed seed",
    "cluster.devices_per_node": "device base-gpu-id gpu-id-step",
}
_SHORTEST = 4
_WHY: dict[str, list[str]] = {
    **{why: names.split() for why, names in _REFUSED.items()},
    **{f"set {key} instead": names.split() for key, names in _OUR_KEYS.items()},
}


def refusals(arguments: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name as given, reason) for each rejected SGLang or vLLM server argument."""
    for given in arguments:
        if why := _why(given):
            yield given, why


def _why(given: str) -> str:
    """Explain why this argument is rejected. Empty if it is allowed."""
    name = given.lstrip("-").replace("_", "-").partition(".")[0]  # vLLM accepts --group.key
    for why, patterns in _WHY.items():
        if any(fnmatchcase(name, pattern) or _is_short_for(name, pattern) for pattern in patterns):
            return why
    return ""


def _is_short_for(name: str, pattern: str) -> bool:
    """Return True if a command line accepts `name` as an abbreviation of the argument."""
    whole = pattern.rstrip("*")
    return len(name) >= _SHORTEST and whole.startswith(name)
