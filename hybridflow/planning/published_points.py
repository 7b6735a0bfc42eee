"""The published runs to which the planner's constants were fitted.

All figures are third-party; `source` cites their origin. The planner computes weights and optimizer
state exactly, and estimates everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hybridflow.models.published import published
from hybridflow.planning.devices import DEVICES
from hybridflow.planning.sizes import decoder_of
from hybridflow.planning.training import Cut, Practice, Precision, Training

# layer widths of GPT-3; its MLP of two matrices of 49,152 has as many parameters as a gated MLP of
# 32,768
_GPT3: Mapping[str, Any] = {
    "model_type": "llama",
    **{
        "vocab_size": 51200,
        "hidden_size": 12288,
        "intermediate_size": 32768,
        "num_hidden_layers": 96,
    },
    "num_attention_heads": 96,
}
_BF16_GRADIENTS = Precision(gradient=2)
_FP8 = Precision(gradient=2, linear_input=1, fp8=True)


@dataclass(frozen=True)
class Point:
    """A published run.

    Attributes:
        step_s: seconds per optimizer update.
        static_gb, total_gb: 10^9 bytes allocated on pipeline stage `stage` (None: the fullest
            stage).
        weights_gradients_gb, optimizer_gb, activations_gb: 10^9 bytes per part, if the source
            breaks memory down.
    """

    name: str
    model: str
    device: str
    cut: Cut
    sequence: int
    sequences: int
    source: str
    precision: Precision = field(default_factory=Precision)
    practice: Practice = field(default_factory=Practice)
    step_s: float | None = None
    static_gb: float | None = None
    weights_gradients_gb: float | None = None
    optimizer_gb: float | None = None
    total_gb: float | None = None
    activations_gb: float | None = None
    stage: int | None = None
    mtp: bool = False
    micro: int = 1

    def training(self) -> Training:
        """Return the run as a `Training`."""
        hf = _GPT3 if self.model == "gpt3-175b" else published(self.model)
        if self.mtp:
            hf = {**hf, "num_nextn_predict_layers": 1}
        # all of these runs overlap them if there are data-parallel ranks
        practice = replace(self.practice, overlaps_gradients=True, overlaps_weights=True)
        return Training(
            decoder_of(hf, mtp=self.mtp), self.cut, DEVICES[self.device], self.precision, practice
        )


_BRIDGE = "NVIDIA Megatron-Bridge"
_ZOO = "Megatron-MoE-ModelZoo"
_MOE = "arXiv 2603.07685"
POINTS: tuple[Point, ...] = (
    Point(
        "Llama 3 70B, 32 H100, fp8",
        "llama-3.1-70b",
        "H100",
        Cut(32, 4, 4, 5, sequence=True),
        4096,
        32,
        f"{_BRIDGE}, memory tuning",
        _FP8,
        Practice(frozenset({"core_attn"}), overlaps_tensor=True),
        step_s=2.52,
        total_gb=58.8,
    ),
    Point(
        "Llama 3 70B, 32 H100, fp8, MLP recomputed",
        "llama-3.1-70b",
        "H100",
        Cut(32, 4, 4, 5, sequence=True),
        4096,
        32,
        f"{_BRIDGE}, memory tuning",
        _FP8,
        Practice(frozenset({"mlp"}), overlaps_tensor=True),
        step_s=2.99,
        total_gb=55.6,
    ),
    Point(
        "Qwen3-30B-A3B, 16 H100",
        "qwen3-30b-a3b",
        "H100",
        Cut(16, expert=16),
        4096,
        1024,
        f"{_BRIDGE}, MoE hardware configs",
        _BF16_GRADIENTS,
        Practice(dispatch="deepep", overlaps_expert=True, even_routing=True),
        step_s=20.147,
        total_gb=66.75,
    ),
    Point(
        "Qwen3-235B-A22B, 256 H100",
        "qwen3-235b-a22b",
        "H100",
        Cut(256, 2, 8, 4, expert=32, sequence=True),
        4096,
        2048,
        _ZOO,
        _BF16_GRADIENTS,
        Practice(frozenset({"layernorm", "moe_act"}), dispatch="deepep", even_routing=True),
        step_s=19.7,
    ),
    Point(
        "Qwen3-235B-A22B, 256 H100, overlap",
        "qwen3-235b-a22b",
        "H100",
        Cut(256, 2, 8, 4, expert=32, sequence=True),
        4096,
        2048,
        _ZOO,
        _BF16_GRADIENTS,
        Practice(
            frozenset({"layernorm", "moe_act"}),
            dispatch="deepep",
            overlaps_expert=True,
            even_routing=True,
        ),
        step_s=17.6,
    ),
    Point(
        "DeepSeek-V3, 1,024 H100, fp8",
        "deepseek-v3",
        "H100",
        Cut(1024, 2, 8, 4, expert=64, sequence=True),
        4096,
        8192,
        _MOE,
        _FP8,
        Practice(
            frozenset({"mlp", "mla_up_proj", "moe_act", "layernorm"}),
            dispatch="deepep",
            overlaps_expert=True,
            even_routing=True,
        ),
        step_s=23.2,
        mtp=True,
    ),
    Point(
        "DeepSeek-V3, 256 GB200, mxfp8",
        "deepseek-v3",
        "GB200",
        Cut(256, 1, 4, 4, expert=64),
        4096,
        4096,
        f"{_BRIDGE}, 26.06",
        _FP8,
        Practice(frozenset({"mla_up_proj"}), dispatch="deepep", even_routing=True),
        step_s=13.19,
        mtp=True,
    ),
    Point(
        "Llama 3.1 405B, 1,024 H100, fp8",
        "llama-3.1-405b",
        "H100",
        Cut(1024, 8, 8, 8, 2, sequence=True),
        8192,
        1536,
        f"{_BRIDGE}, 26.06",
        _FP8,
        Practice(overlaps_tensor=True),
        step_s=37.7,
    ),
    Point(
        "Mixtral 8x7B, 64 H100",
        "mixtral-8x7b",
        "H100",
        Cut(64, 2, 4, 8, expert=8, sequence=True),
        4096,
        256,
        "Megatron-LM, golden values",
        step_s=3.306,
        static_gb=19.743,
        total_gb=35.506,
        stage=-1,
    ),
    Point(
        "GPT-3 175B, 64 A100",
        "gpt3-175b",
        "A100",
        Cut(64, 8, 8, 3, sequence=True),
        2048,
        64,
        "arXiv 2205.05198",
        practice=Practice(frozenset({"core_attn"})),
        step_s=13.75,
    ),
    Point(
        "GPT-3 175B, 64 A100, full recompute",
        "gpt3-175b",
        "A100",
        Cut(64, 8, 8, 3),
        2048,
        64,
        "arXiv 2205.05198",
        practice=Practice(frozenset({"full"})),
        step_s=18.13,
    ),
    Point(
        "DeepSeek-V3, memory anatomy, 256 ranks",
        "deepseek-v3",
        "GB200",
        Cut(256, 1, 4, 4, expert=64),
        4096,
        4096,
        _MOE,
        practice=Practice(keeps_expert_outputs=True, even_routing=True),
        weights_gradients_gb=36.4,
        optimizer_gb=32.1,
        activations_gb=131.0,
        stage=1,
    ),
)


@dataclass(frozen=True)
class RlPoint:
    """Published timings of a reinforcement-learning step in which engines and trainer take turns on
    the same devices.

    Attributes:
        prompt, response: mean tokens. If the source reports only their sum, the prompt length is
            assumed.
        seconds: durations of the step and its phases, keyed by the planner's names.
    """

    name: str
    model: str
    device: str
    cut: Cut
    prompts: int
    n: int
    updates: int
    prompt: float
    response: float
    longest: int
    micro_tokens: int
    engine_tensor: int
    memory_fraction: float
    seconds: Mapping[str, float]
    source: str
    practice: Practice = field(default_factory=Practice)
    with_reference: bool = False


RL_POINTS: tuple[RlPoint, ...] = (
    RlPoint(
        "Qwen3-235B-A22B GRPO, 128 H100",
        "qwen3-235b-a22b",
        "H100",
        Cut(128, 2, 8, context=2, expert=16, sequence=True),
        prompts=16,
        n=32,
        updates=1,
        prompt=500,
        response=5198,
        longest=7700,
        micro_tokens=8192,
        engine_tensor=16,
        memory_fraction=0.7,
        seconds={"step": 395},
        source="NeMo RL 0.6",
        practice=Practice(frozenset({"full"}), overlaps_gradients=True, overlaps_weights=True),
    ),
    RlPoint(
        "Qwen3-30B-A3B GRPO, 32 H100",
        "qwen3-30b-a3b",
        "H100",
        Cut(32, expert=8),
        prompts=64,
        n=32,
        updates=4,
        prompt=300,
        response=2903,
        longest=3800,
        micro_tokens=4096,
        engine_tensor=2,
        memory_fraction=0.6,
        seconds={"step": 192},
        source="NeMo RL 0.6",
        practice=Practice(overlaps_gradients=True, overlaps_weights=True),
    ),
    RlPoint(
        "Qwen3-30B-A3B GRPO, 128 H20 (response length assumed)",
        "qwen3-30b-a3b",
        "H20",
        Cut(128, 2, 1, context=2, expert=8, sequence=True),
        prompts=512,
        n=16,
        updates=4,
        prompt=300,
        response=2800,
        longest=8192,
        micro_tokens=20480,  # 10,240 per rank, which verl multiplies by the context ranks
        engine_tensor=4,
        memory_fraction=0.7,
        seconds={
            "step": 497.9,
            "generation": 348.1,
            "log-probs": 28.7,
            "reference": 20.9,
            "update actor": 86.3,
        },
        source="verl, fully_async.md",
        with_reference=True,
    ),
)

# complete weight syncs of other systems: name, device, bytes of the engine's model, True if ranks
# send only the needed slices, seconds, source
SYNC_POINTS: tuple[tuple[str, str, float, bool, float, str], ...] = (
    ("Qwen3-235B-A22B to 8 H800, broadcast", "H800", 470e9, False, 6.22, "checkpoint-engine"),
    ("GLM-4.5-Air to 8 H800, broadcast", "H800", 214e9, False, 3.47, "checkpoint-engine"),
    ("Kimi-K2 fp8 to 256 H20, broadcast", "H20", 1026e9, False, 16.04, "checkpoint-engine"),
    ("Qwen3-30B-A3B to 16 H100, NCCL", "H100", 61e9, False, 2.67, "miles"),
    ("Qwen3-30B-A3B to 16 H100, RDMA", "H100", 61e9, True, 2.16, "miles"),
    ("GLM-4.5-Air to 32 H100, NCCL", "H100", 214e9, False, 5.00, "miles"),
    ("GLM-4.5-Air to 32 H100, RDMA", "H100", 214e9, True, 2.64, "miles"),
)
