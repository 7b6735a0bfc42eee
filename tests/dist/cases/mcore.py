"""What each rank does in the tests of the Megatron backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import LoraConfig, OptimConfig, ParallelConfig

TINY = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "intermediate_size": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "vocab_size": 51,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
}


TOP = 5


def batch_of(num: int, seed: int, vocab: int = 51) -> DataProto:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, vocab, rng.integers(1, 9)) for _ in range(num)]
    responses = [rng.integers(2, vocab, rng.integers(1, 7)) for _ in range(num)]
    return DataProto.from_columns(
        {"prompt_ids": Jagged.from_rows(prompts, np.int64), "response_ids": Jagged.from_rows(responses, np.int64)}
    )


def weights_of(family: Any, std: float = 0.2) -> Any:
    """Random weights that do not depend on the layout."""
    from hybridflow.models.weights import RandomWeights

    class Shaken(RandomWeights):
        """Norms and biases differ from one and zero, so that a dropped or swapped one shows."""

        def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
            values = super().read(name, start, shape)
            if len(shape) > 1:
                return values
            digest = sum(map(ord, name))
            full = torch.randn(self.tensors[name], generator=torch.Generator().manual_seed(digest))
            return values + 0.1 * full[start[0] : start[0] + shape[0]]

    return Shaken(family.tensors(), seed=5, std=std)


def _policy(
    parallel: dict[str, Any],
    hf: dict[str, Any],
    std: float = 0.2,
    dtype: str = "float32",
    lora: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    from megatron.core import parallel_state

    from hybridflow.mcore import parallel as groups
    from hybridflow.mcore.policy import Policy
    from hybridflow.models import family_of
    from hybridflow.models.lora import AdapterMap

    config = ParallelConfig(**parallel)
    if not parallel_state.model_parallel_is_initialized():
        groups.initialize(config, seed=1, backend="gloo", timeout_s=180)
    family = family_of(hf)
    if lora is not None:
        options["lora"] = AdapterMap(family, LoraConfig(**lora), seed=3)
    return Policy(family, config, dtype, weights_of(family, std), **options)


def _share(batch: DataProto) -> DataProto:
    from hybridflow.mcore.parallel import data_parallel_position

    rank, size, _ = data_parallel_position()
    return batch.chunk(size)[rank]


def log_probs_and_export(parallel: dict[str, Any], hf: dict[str, Any], folder: str, max_tokens: int) -> Any:
    from hybridflow.mcore.hf_export import export
    from hybridflow.mcore.parallel import data_parallel_position

    policy = _policy(parallel, hf)
    found = policy.log_probs(_share(batch_of(12, 3)), max_tokens=max_tokens, temperature=0.7, with_entropy=True)
    top = policy.top_log_probs(_share(batch_of(12, 3)), k=TOP, max_tokens=max_tokens, temperature=0.7)
    export(policy, Path(folder), hf, None)
    if not data_parallel_position()[2]:
        return None
    result = {"log_probs": found[0], "entropy": found[1], "top_values": top[0], "top_tokens": top[1]}
    assert all((column.lengths == batch_of(12, 3)["response_ids"].lengths).all() for column in result.values())
    return {name: column.values.tolist() for name, column in result.items()}


def move_expert_biases(parallel: dict[str, Any], hf: dict[str, Any], before: str, after: str, rate: float) -> Any:
    """Export, one update with moving expert biases, export; then the frozen reference's log-probs before and after."""
    from hybridflow.mcore.hf_export import export
    from hybridflow.workers.losses import sft_loss

    policy = _policy(parallel, hf, expert_bias_update_rate=rate)
    policy.set_optimizer(OptimConfig(lr=1e-3))
    policy.freeze_reference()
    export(policy, Path(before), hf, None)
    batch, log_probs = batch_of(8, 0), []
    for _ in range(2):
        with policy.as_reference():
            found = policy.log_probs(batch, max_tokens=4096, temperature=1.0, with_entropy=False)
        log_probs.append(found[0].values.tolist())
        policy.train_mini_batch(batch, sft_loss, columns=(), max_tokens=4096, temperature=1.0, with_entropy=False)
        if not Path(after).exists():
            export(policy, Path(after), hf, None)
    return log_probs


def digest(policy: Any) -> dict[str, list[float]]:
    """Every HF tensor reduced to (sum, sum of squares), each element counted once; the same on all ranks."""
    from hybridflow.mcore.parallel import all_coordinates
    from hybridflow.reshard.plan import plan_stages

    shares: dict[str, Any] = {}
    parameters = policy.parameters()
    for plan in plan_stages(policy.family, all_coordinates(), 1 << 16, 4):
        for owned in (piece for bucket in plan.buckets for piece in bucket.pieces):
            share = shares.setdefault(owned.piece.source, torch.zeros(2, dtype=torch.float64))
            if owned.rank == dist.get_rank():
                values = parameters[owned.parameter][owned.piece.slices()].double()
                share += torch.stack([values.sum(), (values**2).sum()])
    stacked = torch.stack([shares[name] for name in sorted(shares)])
    dist.all_reduce(stacked)
    return dict(zip(sorted(shares), stacked.tolist(), strict=True))


def log_probs_of_checkpoint(
    parallel: dict[str, Any], hf: dict[str, Any], checkpoint: str, prompts: list[list[int]], responses: list[list[int]]
) -> Any:
    """Load a checkpoint's weights into these ranks and score the responses; a list a response, on the rank that
    collects."""
    from hybridflow.mcore import checkpoint as checkpoints
    from hybridflow.mcore.parallel import data_parallel_position

    policy = _policy(parallel, hf)
    checkpoints.load(policy, Path(checkpoint))
    batch = DataProto.from_columns(
        {"prompt_ids": Jagged.from_rows(prompts, np.int64), "response_ids": Jagged.from_rows(responses, np.int64)}
    )
    found = policy.log_probs(batch, max_tokens=256, temperature=1.0, with_entropy=False)
    return [found[0].row(i).tolist() for i in range(len(batch))] if data_parallel_position()[2] else None


def unequal_loads(parallel: dict[str, Any], hf: dict[str, Any], rows: list[int], max_tokens: int) -> dict[str, Any]:
    """Each data-parallel rank gets another number of rows: how many micro-batches it runs, and whether the pass goes
    through."""
    from hybridflow.mcore.parallel import data_parallel_position

    policy = _policy(parallel, hf)
    batch = batch_of(rows[data_parallel_position()[0]], 3)
    count = len(policy._micro_batches(batch, max_tokens, ()))
    found = policy.log_probs(batch, max_tokens=max_tokens, temperature=1.0, with_entropy=False)
    return {"micro_batches": count, "rows": len(found[0]) if found else None}
