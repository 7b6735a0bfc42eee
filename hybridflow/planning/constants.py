"""The efficiency constants of the time and memory model. A single set, used for all models, devices
and layouts, is fitted jointly to the published runs in `hybridflow.planning.published_points`.
docs/planning.md lists the prediction for every run, accurate or not. The planner has no other
fitted numbers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Fractions of a data-sheet figure unless another unit is given."""

    gemm: float = 0.77  # fraction of peak reached by large matrix products
    gemm_fp8: float = 0.60
    gemm_half: float = 192.0  # matrix dimension at which a product reaches half of that fraction
    attention: float = 0.55  # fraction of the bfloat16 peak, forward
    attention_backward: float = 0.42
    memory: float = 0.80  # fraction of memory bandwidth
    # bytes moved by operations other than matrix products, per byte of activations
    traffic_forward: float = 3.4
    traffic_backward: float = 4.7
    domain: float = 0.72  # fraction of the fast link's bandwidth
    network: float = 0.88
    exposed_data_parallel: float = 0.3  # exposed fraction of overlapped data-parallel communication
    exposed_tensor_overlap: float = 0.43  # the same for tensor-parallel communication
    exposed_expert_overlap: float = 0.6  # the same for expert-parallel communication
    # seconds per MoE layer, forward and backward: routing and waiting for token counts
    expert_layer_s: float = 7.5e-4
    imbalance: float = 1.10  # load of the busiest expert rank relative to the mean, natural routing
    # seconds per layer and decoding step: launches, and all-reduces within a fast domain
    decode_layer_s: float = 6.0e-5
    # seconds per decoding step: scheduling, sampling with log-probabilities, responses
    decode_step_s: float = 0.02
    # additional seconds per layer if an engine's ranks span several fast domains
    decode_hop_s: float = 6.0e-5
    decode_memory: float = 0.65  # fraction of memory bandwidth in decoding
    prefill: float = 0.5  # fraction of `gemm` reached by the engines' prefill
    sync_s: float = 1.8  # fixed seconds of a weight sync: pause, sessions, commit, resume
    sync_gbs: float = 85.0  # GB/s of model bytes in published broadcasts, after the fixed time
    # the same if each rank sends exactly the needed slices directly into the receiver's memory
    sync_p2p_gbs: float = 250.0
    save_gbs: float = 1.0  # GB/s per node for writing checkpoints to disk
    # GB per device for context, communication libraries and workspaces; not in torch's figures
    process_gb: float = 2.5
    group_gb: float = 0.4  # GB of communication buffers per kind of parallelism in use
    fragmentation: float = 1.04  # reserved relative to allocated memory


FITTED = Constants()
