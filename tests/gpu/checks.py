"""The checks of `make gpu`: what each runs, how long it may take, and what was predicted before any
GPU had run it.

Imports the standard library alone: it is read on machines that still lack everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Bounds = tuple[float, float]  # least and most; of a prediction, or of what passes
INFINITY = float("inf")
TRAIN = ("-m", "hybridflow.cli.main", "train", "--config-name", "tiny-moe-grpo")
IN_PROCESS = (
    *(
        "cluster=in-process",
        "model.dtype=bfloat16",
        "rollout.logprob_diff_bound=null",
        "trainer.save_every_steps=0",
    ),
)
# the layers of Qwen3 0.6B at random, and answers of 128 tokens
SHAPE = (
    *(
        "model=qwen3-0.6b",
        "model.path=null",
        "model.tokenizer=${data.prepare.out}/tokenizer",
        "sft.steps=0",
        "trainer.export=false",
    ),
    *(
        "data.train_batch_size=8",
        "actor.ppo_mini_batch_size=8",
        "rollout.n=8",
        "data.max_response_length=128",
    ),
    *("data.val_max_prompts=64", "actor.max_tokens_per_micro_batch=16384", "actor.recompute=full"),
)
# of the same model what a CPU has time for
SMALL_SHAPE = (
    *SHAPE,
    *("model.hf_config.num_hidden_layers=2", "data.max_response_length=8", "rollout.n=2"),
    *("data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "data.val_max_prompts=2"),
)
# Of SGLang's kernels, wheels of a machine without an index have neither flashinfer's nor FlashAttention
# 3's, and its prefix cache in Rust reads the tensors of a newer torch.
COLOCATED = (
    *(
        "cluster.procs_per_node=1",
        "cluster.devices_per_node=1",
        "actor.parallel.tensor=1",
        "actor.parallel.pipeline=1",
    ),
    *(
        "actor.parallel.expert=1",
        "actor.parallel.sequence=false",
        "rollout.num_engines=1",
        "rollout.pool=actor",
    ),
    *(
        "rollout.sleep_while_training=true",
        "actor.offload={weights: true, gradients: true, optimizer: true}",
    ),
    *("model.dtype=bfloat16", "rollout.logprob_diff_bound=null", "sft.steps=0"),
    "rollout.extra_args={attention_backend: triton, sampling_backend: pytorch, "
    "disable_radix_cache: true}",
)
# SGLang's rotary kernel for a mixture in bfloat16 takes heads of 64, 128, 256 or 512
TINY_COLOCATED = (*TRAIN, *COLOCATED, "model.hf_config.head_dim=64", "name=gpu-colocated")
SGLANG = ("torch", "megatron", "hydra", "ray", "sglang", "sgl_kernel")
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Check:
    """One process with a limit.

    Attributes:
        command: arguments of Python.
        rehearsal: the same for a CPU; None where only a GPU has what is checked.
        interpreted: the rehearsal runs kernels in Triton's interpreter.
        needs: packages without which it is not run.
        limit_s: after so many seconds it is ended.
        predicted_s: the seconds that were expected of it.
        passes: bounds of its figures, on a GPU alone.
        predicted: what was predicted of its figures.
        run: the run folder whose summary and timings are its figures.
    """

    name: str
    part: int
    shows: str
    command: tuple[str, ...]
    limit_s: float
    predicted_s: float
    rehearsal: tuple[str, ...] | None = None
    interpreted: bool = False
    needs: tuple[str, ...] = ()
    passes: dict[str, Bounds] = field(default_factory=dict)
    predicted: dict[str, Bounds] = field(default_factory=dict)
    run: str = ""


def _module(name: str, *words: str) -> tuple[str, ...]:
    return "-m", f"tests.gpu.{name}", *words


CHECKS = (
    Check(
        "environment",
        1,
        "what the machine is: versions, driver, memory that may be locked, speed of a copy and of "
        "a matrix product",
        _module("environment"),
        rehearsal=_module("environment", "--rehearse"),
        limit_s=25,
        predicted_s=12,
        needs=("torch",),
        passes={"copy_TB_s": (2.0, INFINITY), "product_TFLOP_s": (500, INFINITY)},
        predicted={"copy_TB_s": (2.8, 4.4), "product_TFLOP_s": (700, 800)},
    ),
    Check(
        "kernels",
        1,
        "each kernel against float64, or byte for byte",
        _module("kernel_truth"),
        rehearsal=_module("kernel_truth", "--rehearse"),
        interpreted=True,
        limit_s=110,
        predicted_s=60,
        needs=("torch", "triton"),
        passes={"wrong": (0, 0)},
        predicted={"wrong": (0, 0), "log_z": (0, 1e-4), "gradient": (0, 6e-3)},
    ),
    Check(
        "trainer",
        1,
        "log-probabilities are a CPU's; a resumed run goes on as one that was not; all that leaves "
        "the GPU comes back",
        (
            *PYTEST,
            "-n",
            "8",
            "--durations=0",
            "tests/gpu/test_trainer.py",
            "tests/gpu/test_resume.py",
            "tests/gpu/test_sleep.py",
        ),
        rehearsal=(
            *PYTEST,
            "tests/gpu/test_trainer.py",
            "tests/gpu/test_resume.py",
            "-k",
            "TINY or offloaded",
        ),
        limit_s=200,
        predicted_s=70,
        needs=("torch", "megatron"),
    ),
    Check(
        "cuda-ipc",
        1,
        "weights between processes over memory of one GPU: exact bytes, kills, stalls, deadlines",
        (*PYTEST, "tests/gpu/test_cuda_ipc.py"),
        limit_s=130,
        predicted_s=40,
        needs=("torch", "megatron"),
    ),
    Check(
        "ipc-speed",
        1,
        "a second process copies this one's memory",
        _module("ipc_speed"),
        limit_s=40,
        predicted_s=10,
        needs=("torch",),
        passes={"equal": (1, 1), "TB_s": (0.5, INFINITY)},
        predicted={"TB_s": (1.0, 4.4)},
    ),
    Check(
        "tiny-grpo",
        1,
        "GRPO in one process: trainer and engine agree about log-probabilities in bfloat16",
        (*TRAIN, *IN_PROCESS, "name=gpu-tiny", "trainer.total_steps=3", "sft.steps=20"),
        rehearsal=(
            *TRAIN,
            *IN_PROCESS,
            "name=gpu-tiny",
            "trainer.total_steps=1",
            "sft.steps=2",
            "data.val_max_prompts=8",
        ),
        limit_s=60,
        predicted_s=35,
        needs=("torch", "megatron", "hydra", "transformers"),
        passes={"logprob_diff_mean": (0, 0.03)},
        predicted={"logprob_diff_mean": (0, 0.03)},
        run="gpu-tiny",
    ),
    Check(
        "speed",
        1,
        "kernels beside the bare product and beside a copy",
        _module("kernel_speed"),
        rehearsal=_module("kernel_speed", "--rehearse"),
        interpreted=True,
        limit_s=60,
        predicted_s=25,
        needs=("torch", "triton"),
        predicted={
            "forward_share_4096": (0.65, 0.8),
            "all_over_three_products_4096": (1.2, 1.6),
            "checksum_share": (0.3, 1.0),
            "pack_share": (0.4, 1.0),
        },
    ),
    Check(
        "update",
        1,
        "an update at the shape of Qwen3 0.6B: its share of the bare product, its kernels, and "
        "where the host waits",
        _module("update_profile"),
        rehearsal=_module("update_profile", "--rehearse"),
        limit_s=70,
        predicted_s=40,
        needs=("torch", "megatron"),
        passes={"share": (0.15, INFINITY)},
        predicted={"share": (0.3, 0.45), "seconds": (0.25, 0.35)},
    ),
    Check(
        "update-transformers",
        1,
        "the same update by transformers: bfloat16, its own attention, checkpointing, fused AdamW",
        _module("update_transformers"),
        rehearsal=_module("update_transformers", "--rehearse"),
        limit_s=50,
        predicted_s=25,
        needs=("torch", "transformers"),
        predicted={"seconds": (0.3, 0.7)},
    ),
    Check(
        "0.6b-grpo",
        1,
        "two steps of GRPO in one process at the shape of Qwen3 0.6B",
        (*TRAIN, *IN_PROCESS, *SHAPE, "name=gpu-0.6b", "trainer.total_steps=2"),
        rehearsal=(*TRAIN, *IN_PROCESS, *SMALL_SHAPE, "name=gpu-0.6b", "trainer.total_steps=1"),
        limit_s=150,
        predicted_s=50,
        needs=("torch", "megatron", "hydra", "transformers"),
        run="gpu-0.6b",
    ),
    Check(
        "weights",
        2,
        "an engine's checksum through empty updates and through twenty colocated syncs is that of "
        "a cold start",
        (*PYTEST, "-s", "tests/gpu/test_weights.py"),
        limit_s=170,
        predicted_s=110,
        needs=("torch", "megatron", "ray", "sglang", "sgl_kernel"),
    ),
    Check(
        "colocated",
        2,
        "three steps of GRPO with the engine on the trainer's GPU, in turns, weights over cuda_ipc",
        (*TINY_COLOCATED, "trainer.total_steps=3"),
        limit_s=240,  # SGLang compiles kernels at its first start
        predicted_s=90,
        needs=SGLANG,
        passes={"logprob_diff_mean": (0, 0.02)},
        run="gpu-colocated",
    ),
    Check(
        "resumed",
        2,
        "the same run goes on from its checkpoint",
        (*TINY_COLOCATED, "trainer.total_steps=5"),
        limit_s=120,
        predicted_s=70,
        needs=SGLANG,
        passes={"logprob_diff_mean": (0, 0.02)},
        run="gpu-colocated",
    ),
    Check(
        "0.6b-colocated",
        2,
        "three colocated steps of GRPO at the shape of Qwen3 0.6B, the engine with graphs",
        (
            *(*TRAIN, "rollout=gpu", *COLOCATED, *SHAPE, "rollout.mem_fraction_static=0.5"),
            *("name=gpu-0.6b-colocated", "trainer.total_steps=3"),
        ),
        limit_s=170,
        predicted_s=110,
        needs=SGLANG,
        passes={"logprob_diff_mean": (0, 0.02)},
        run="gpu-0.6b-colocated",
    ),
    Check(
        "te-trainer",
        3,
        "Transformer Engine's layers compute what torch's do, and a resumed run goes on",
        (
            *PYTEST,
            "-n",
            "4",
            "tests/gpu/test_trainer.py",
            "tests/gpu/test_resume.py",
            "-k",
            "engine or resuming",
        ),
        limit_s=120,
        predicted_s=80,
        needs=("torch", "megatron", "transformer_engine"),
    ),
    Check(
        "te-update",
        3,
        "an update at the shape of Qwen3 0.6B with Transformer Engine's layers",
        _module("update_profile"),
        limit_s=80,
        predicted_s=50,
        needs=("torch", "megatron", "transformer_engine"),
        predicted={"share": (0.4, 0.55)},
    ),
)
