"""The efficiencies of the time and memory model: one set for all models, devices and layouts.

They are fitted to the published points of `hybridflow.planning.published_points` all together;
docs/planning.md prints what they predict for each point, good and bad. Nothing else in the planner
is a fitted number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """Shares of a data sheet's figure, unless the unit is said."""

    gemm: float = 0.77  # of the matrix peak, for large matrices
    gemm_fp8: float = 0.60
    gemm_half: float = 192.0  # a matrix side at which a product reaches half of its share
    attention: float = 0.55  # of the bfloat16 peak, forward
    attention_backward: float = 0.42
    memory: float = 0.80  # of the memory's bandwidth
    # bytes moved by what is no matrix product, for each byte of activation
    traffic_forward: float = 3.4
    traffic_backward: float = 4.7
    domain: float = 0.72  # of the fast link's bandwidth
    network: float = 0.88
    exposed_data_parallel: float = 0.3  # of data-parallel communication, where it is overlapped
    exposed_tensor_overlap: float = 0.43  # of tensor-parallel communication, where it is overlapped
    exposed_expert_overlap: float = 0.6  # of expert-parallel communication, where it is overlapped
    # of a layer with experts, forward and backward: routing, waits for counts
    expert_layer_s: float = 7.5e-4
    imbalance: float = 1.10  # natural routing: the busiest expert rank beside the mean
    # of a layer in a decoding step: launches, and all-reduces within a fast domain
    decode_layer_s: float = 6.0e-5
    # of a decoding step: scheduling, sampling with log-probabilities, answers
    decode_step_s: float = 0.02
    # of a layer more, where an engine's ranks are over several fast domains
    decode_hop_s: float = 6.0e-5
    decode_memory: float = 0.65  # of the memory's bandwidth in decoding
    prefill: float = 0.5  # of the matrix share, in the engines' prefill
    sync_s: float = 1.8  # of a weight sync: pause, sessions, commit, resume
    sync_gbs: float = 85.0  # of model bytes, what published broadcasts reach beyond it
    # the same, where each rank sends what the other lacks straight into its memory
    sync_p2p_gbs: float = 250.0
    save_gbs: float = 1.0  # of a node's checkpoint bytes to disk
    # of a device: context, communication libraries, workspaces; not in torch's figures
    process_gb: float = 2.5
    group_gb: float = 0.4  # of communication buffers, for each kind of parallelism in use
    fragmentation: float = 1.04  # reserved beside allocated


FITTED = Constants()
