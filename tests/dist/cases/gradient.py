"""The gradient of every loss under different cuts of the same batch, on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.algorithms import vocab_parallel
from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import ActorConfig
from tests.dist.harness.policies import batch_of, policy_of, share_of
from tests.models import DENSE_UNTIED

ROWS = 12
_POLICY = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=1.5)
LOSSES: dict[str, ActorConfig | None] = {
    "sft": None,
    **{
        mode: replace(_POLICY, loss_agg_mode=mode)
        for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
    },
    "entropy": replace(_POLICY, entropy_coef=0.1, loss_agg_mode="seq-mean-token-mean"),
    **{
        f"kl {kind}": replace(_POLICY, kl_loss_coef=0.5, kl_loss_type=kind)
        for kind in ("k1", "abs", "k2", "k3")
    },
}


@dataclass(frozen=True)
class Cut:
    """A way to cut the batch: ranks, budget of a micro-batch, order of the rows."""

    name: str
    parallel: dict[str, Any] = field(default_factory=dict)
    data: int = 1
    max_tokens: int = 4096
    is_reversed: bool = False

    @property
    def world(self) -> int:
        return self.data * self.parallel.get("context", 1) * self.parallel.get("pipeline", 1)


CUTS = [
    Cut("one micro-batch"),
    Cut("many micro-batches", max_tokens=20),
    Cut("other order, other packing", max_tokens=33, is_reversed=True),
    Cut("DP2", {}, 2, 40),
    Cut("CP2", {"context": 2}, 1, 40),
    Cut("DP4", {}, 4, 24, is_reversed=True),
    Cut("CP2 DP2", {"context": 2}, 2, 24),
    Cut("CP4", {"context": 4}, 1, 48, is_reversed=True),
    Cut("PP2 VPP2 DP2", {"pipeline": 2, "virtual_pipeline": 2}, 2, 24),
]


# one process, and everything else at once in different pairs
IN_MAKE_TEST = ("one micro-batch", "other order, other packing", "CP2 DP2", "PP2 VPP2 DP2")
MASKED = {f"{name}, masked": config for name, config in LOSSES.items() if config}
MASKED_CUTS = ("one micro-batch", "CP2 DP2", "PP2 VPP2 DP2")
INTO_MAIN_GRAD = "token-mean, into main_grad"


def gradients(worlds: Any, folder: Path, cuts: Sequence[Cut]) -> dict[str, dict[str, float]]:
    """{cut: {loss: largest difference of any gradient from one micro-batch on one process, in units
    of the largest gradient}}."""
    from tests.dist.harness.worlds import measured

    file = folder / "gradients.pt"
    return dict(measured(cuts, lambda cut: (cut.name, _measure(cut, file)), within=worlds))


def _measure(cut: Cut, path: Path) -> dict[str, float]:
    from tests.dist.cases.parity import wait_for

    # a dense model: what a mixture of experts chooses may flip with the last bit, and then no bound
    # holds; and small weights, since large ones amplify the rounding of activations (1.4e-6 at
    # 0.2), which is not what this is about
    policy = policy_of({**cut.parallel, "distributed_optimizer": False}, DENSE_UNTIED, std=0.05)
    batch = batch_with_columns(policy)
    batch = batch.reorder(np.arange(ROWS)[::-1]) if cut.is_reversed else batch
    found = {
        name: reduced_gradient(policy, share_of(batch), config, cut.max_tokens)
        for name, config in LOSSES.items()
    }
    if cut.name in MASKED_CUTS:
        masked = share_of(with_mask(batch))
        plain = share_of(with_mask(batch, share=0.0))
        found |= {
            name: reduced_gradient(policy, masked, config, cut.max_tokens)
            for name, config in MASKED.items()
        }
        again = reduced_gradient(policy, plain, LOSSES["token-mean"], cut.max_tokens)
        assert all(torch.equal(found["token-mean"][name], tensor) for name, tensor in again.items())
    found[INTO_MAIN_GRAD] = _gradient_into_main_grad(policy, share_of(batch), cut.max_tokens)
    if cut is CUTS[0]:
        _check_by_hand(policy, batch, found)
        torch.save(found, path.with_suffix(".partial"))
        path.with_suffix(".partial").rename(path)
    wait_for(path)
    one = torch.load(path, weights_only=True)
    differences = {}
    for name, tensors in found.items():
        expected = one["token-mean" if name == INTO_MAIN_GRAD else name]
        scale = max(float(tensor.abs().max()) for tensor in expected.values())
        worst = torch.tensor(
            max((float((tensors[key] - expected[key]).abs().max()) for key in tensors), default=0.0)
        )
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        differences[name] = float(worst) / scale
    return differences


def _gradient_into_main_grad(
    policy: Any, batch: DataProto, max_tokens: int
) -> dict[str, torch.Tensor]:
    """The reduced gradient where the output layer's is added to the buffer of Megatron's DDP by the
    backward of the log-probs, as on a GPU, and not by DDP's hook."""
    kept = vocab_parallel.uses_triton
    vocab_parallel.uses_triton = lambda tensor: True
    try:
        found = reduced_gradient(policy, batch, LOSSES["token-mean"], max_tokens)
    finally:
        vocab_parallel.uses_triton = kept
    weights = policy.weights()
    added = {
        name
        for name, parameter in weights.items()
        if getattr(parameter, "grad_added_to_main_grad", False)
    }
    assert added == {name for name in weights if name.endswith("output_layer.weight")}, added
    return found


def batch_with_columns(policy: Any, rows: int = ROWS) -> DataProto:
    """Rows with old log-probs, reference log-probs and advantages, so that every branch of the
    losses is taken."""
    batch = batch_of(rows, 5)
    rng = np.random.default_rng(0)
    lengths = batch["response_ids"].lengths

    def column(spread: float, middle: float) -> Jagged:
        return Jagged.from_rows(
            [rng.normal(middle, spread, n).astype(np.float32) for n in lengths], np.float32
        )

    return batch.with_columns(
        old_log_probs=column(0.5, -3.9),
        ref_log_probs=column(0.5, -3.9),
        advantages=column(1.0, 0.0),
    )


def with_mask(batch: DataProto, share: float = 0.4) -> DataProto:
    """Some response tokens are observations, at which every column of a loss is NaN: one that is
    read would show."""
    responses = batch.jagged("response_ids")
    # the same tokens are observations in whatever order the rows come
    mask = np.array([(token * 7919) % 100 >= 100 * share for token in responses.values], np.bool_)
    columns = {
        name: Jagged(
            np.where(mask, batch.jagged(name).values.T, np.float32(np.nan)).T, responses.offsets
        )
        for name in (
            "old_log_probs",
            "ref_log_probs",
            "advantages",
            "values",
            "returns",
            "teacher_top_log_probs",
        )
        if name in batch
    }
    return batch.with_columns(response_mask=Jagged(mask, responses.offsets), **columns)


def _check_by_hand(
    policy: Any, batch: DataProto, found: dict[str, dict[str, torch.Tensor]]
) -> None:
    """The masked loss is the loss of all tokens with the observations picked out of its inputs
    afterwards."""
    from hybridflow.workers.losses import PolicyLoss

    masked = with_mask(batch)
    config = LOSSES["entropy"]
    assert config is not None
    loss = PolicyLoss(config)
    mask = torch.tensor(masked.jagged("response_mask").values)
    assert 0 < int(mask.sum()) < len(mask)

    def picked(log_probs: torch.Tensor, entropy: torch.Tensor, micro: Any) -> Any:
        row = torch.repeat_interleave(torch.arange(len(micro.lengths)), micro.lengths)
        chosen = mask  # one micro-batch holds the whole batch in its order
        micro = SimpleNamespace(
            lengths=row[chosen].bincount(minlength=len(micro.lengths)),
            columns={name: values[chosen] for name, values in micro.columns.items()},
        )
        return loss(log_probs[chosen], entropy[chosen], micro)

    picked.columns, picked.with_entropy = loss.columns[1:], True  # type: ignore[attr-defined]
    expected = reduced_gradient(policy, masked.drop(["response_mask"]), picked, 4096)
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    assert (
        max(
            float((found["entropy, masked"][name] - expected[name]).abs().max())
            for name in expected
        )
        <= 1e-6 * scale
    )


def reduced_gradient(
    policy: Any, batch: DataProto, config: Any, max_tokens: int, temperature: float = 0.8
) -> dict[str, torch.Tensor]:
    """The reduced gradient of one mini-batch as HF tensors, on each stage's leader. `config` makes
    a policy loss, is a loss with its columns, or None: the supervised one."""
    from hybridflow.mcore.parallel import all_coordinates
    from hybridflow.mcore.step import Watch, backward
    from hybridflow.workers.losses import PolicyLoss, sft_loss
    from tests.dist.cases.gather import gather_stage, plan_stages

    loss = PolicyLoss(config) if isinstance(config, ActorConfig) else config or sft_loss
    columns, with_entropy = (loss.columns, loss.with_entropy) if config else ((), False)
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    micro_batches = policy._micro_batches(batch, max_tokens, columns)
    backward(
        policy.chunks,
        micro_batches,
        loss,
        policy._scoring(temperature, with_entropy),
        Watch(len(micro_batches)),
    )
    ranks = all_coordinates()
    found = {}
    local = {
        # expert biases are buffers
        name: getattr(parameter, "main_grad", torch.zeros_like(parameter))
        for name, parameter in policy.weights().items()
    }
    for plan in plan_stages(policy.family, ranks, 1 << 20, 4):
        if plan.stage == ranks[dist.get_rank()].pp_rank:
            for tensors in gather_stage(plan, local, torch.float32):
                found |= tensors
    return found
