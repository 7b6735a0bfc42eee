"""The values a choice field may take. Data only, so that the loader, the command line and the tests read the same
list."""

from __future__ import annotations

PREPARE_TASKS: dict[str, str] = {
    "arithmetic": "generated sums and products with a small tokenizer; needs no download",
    "gsm8k": "grade-school maths; needs --source, a folder with the raw GSM8K files",
}

ROUTER_REPLAY: dict[str, str] = {
    "none": "the live router chooses",
    "compare": "the live router chooses; how often the engine chose otherwise is measured",
    "r2": "updates use the experts of the old-log-prob pass",
    "r3": "the old-log-prob pass and updates use the experts that the engine used",
}

BACKENDS: dict[str, str] = {
    "megatron": "Megatron-Core: every parallelism, dense and mixture of experts",
    "fsdp": "FSDP2 over transformers' models: dense families, weights sharded over all processes",
}

LORA_TARGETS: dict[str, str] = {
    "linear_qkv": "query, key and value",
    "linear_q_proj": "query of latent attention without a query latent",
    "linear_q_down_proj": "query latent",
    "linear_q_up_proj": "query out of its latent",
    "linear_kv_down_proj": "key and value latent",
    "linear_kv_up_proj": "key and value out of their latent",
    "linear_proj": "output of attention",
    "linear_fc1": "gate and up of dense MLPs and shared experts",
    "linear_fc2": "down of dense MLPs and shared experts",
}

_DECAY = ("constant", "linear", "cosine")
_AGGREGATION = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
_PLACEMENT = ("colocated", "own")
_KL = ("k1", "abs", "k2", "k3")

CHOICES: dict[str, tuple[str, ...]] = {
    "actor.backend": tuple(BACKENDS),
    "actor.lora.targets": tuple(LORA_TARGETS),
    "data.prepare.task": tuple(PREPARE_TASKS),
    "data.truncation": ("error", "left", "right", "middle"),
    "model.dtype": ("float32", "bfloat16"),
    "actor.optim.lr_decay_style": _DECAY,
    "sft.optim.lr_decay_style": _DECAY,
    "actor.parallel.moe_dispatcher": ("alltoall", "allgather"),
    "actor.recompute": ("none", "selective", "full"),
    "actor.on_nonfinite": ("stop", "skip"),
    "critic.optim.lr_decay_style": _DECAY,
    "reward_training.optim.lr_decay_style": _DECAY,
    "actor.loss_agg_mode": _AGGREGATION,
    "actor.kl_loss_type": _KL,
    "actor.router_replay": tuple(ROUTER_REPLAY),
    "rollout.quantization": ("fp8",),
    "rollout.sync.transport": ("auto", "p2p", "tcp", "shared_memory", "disk"),
    "rollout.sync.commit": ("staged", "in_place"),
    "rollout.sync.pause": ("retract", "abort", "in_place"),
    "critic.loss_agg_mode": _AGGREGATION,
    "critic.placement": _PLACEMENT,
    "reference.placement": _PLACEMENT,
    "reward_model.placement": _PLACEMENT,
    "teacher.placement": _PLACEMENT,
    "reward_model.squash": ("none", "sigmoid", "standard"),
    "algorithm.kl_penalty": _KL,
    "trainer.resume": ("auto", "disable"),
}
