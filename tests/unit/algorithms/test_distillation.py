"""The losses of distillation against whole distributions written out by hand, in float64: values,
gradients, masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.algorithms.losses import OF_TEACHER, forward_kl_topk
from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import ActorConfig, DistillationConfig
from hybridflow.workers.losses import PolicyLoss

VOCAB = 23
K = 5
LENGTHS = (5, 3, 0, 1)
TOTAL = sum(LENGTHS)
# an observation in the middle
MASK = np.array([True, True, False, False, True, True, True, True, True])


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """[T, V] logits of the policy, a leaf, and log-probs of the teacher."""
    random = torch.Generator().manual_seed(0)
    policy, teacher = (
        2 * torch.randn(TOTAL, VOCAB, generator=random, dtype=torch.float64) for _ in range(2)
    )
    return policy.requires_grad_(), teacher.log_softmax(-1)


def batch_of(teacher: torch.Tensor, k: int = K, outside: float = np.nan) -> DataProto:
    """Rows with the columns of the loss; at observations, `outside`."""
    rng = np.random.default_rng(0)
    best = teacher.topk(k, dim=-1)
    floats = {
        name: rng.normal(-1, 0.5, TOTAL)
        for name in ("old_log_probs", "advantages", "teacher_log_probs")
    }
    floats["teacher_top_log_probs"] = best.values.numpy()
    columns: dict[str, np.ndarray] = {}
    for name, values in floats.items():
        inside = MASK if values.ndim == 1 else MASK[:, None]
        columns[name] = np.where(inside, values, outside).astype(np.float32)
    columns |= {
        "teacher_top_ids": best.indices.numpy(),
        "response_ids": np.arange(TOTAL),
        "response_mask": MASK,
    }
    return DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_lengths(np.arange(len(LENGTHS)), (1,) * len(LENGTHS)),
            **{name: Jagged.from_lengths(values, LENGTHS) for name, values in columns.items()},
        }
    )


def megatron(batch: DataProto, columns: tuple[str, ...]) -> Any:
    from hybridflow.mcore.packed import Cut, build_micro_batches

    return build_micro_batches(batch, [np.arange(4)], columns, Cut())[0]


def fsdp(batch: DataProto, columns: tuple[str, ...]) -> Any:
    from hybridflow.fsdp.packed import build_micro_batches

    return build_micro_batches(batch, [np.arange(4)], columns, torch.device("cpu"))[0]


BACKENDS = pytest.mark.parametrize("pack", [megatron, fsdp])


def scored(logits: torch.Tensor, micro: Any) -> tuple[torch.Tensor, Any]:
    """What a backend makes of the policy's logits: log-probs of the sampled tokens, and those of
    the teacher's."""
    whole = logits[torch.from_numpy(MASK)].log_softmax(-1)
    columns = {
        name: values if name.endswith("ids") else values.double()
        for name, values in micro.columns.items()
    }
    if "teacher_top_ids" in columns:
        columns[OF_TEACHER] = whole.gather(-1, columns["teacher_top_ids"])
    return whole.gather(-1, micro.targets[:, None])[:, 0], replace(micro, columns=columns)


def by_hand(logits: torch.Tensor, teacher: torch.Tensor, mode: str, k: int) -> torch.Tensor:
    """The divergence over the k most likely tokens, a token at a time, and the mean that `mode`
    says."""
    sums = []
    row = 0
    for length in LENGTHS:
        tokens = []
        for place in range(row, row + length):
            if not MASK[place]:
                continue
            normaliser = logits[place].exp().sum().log()
            best = sorted(range(VOCAB), key=lambda token: -float(teacher[place, token]))[:k]
            tokens.append(
                sum(
                    teacher[place, v].exp() * (teacher[place, v] - logits[place, v] + normaliser)
                    for v in best
                )
            )
        row += length
        sums.append(torch.stack(tokens) if tokens else torch.zeros(0, dtype=torch.float64))
    if mode.startswith("token"):
        return torch.cat(sums).mean() if mode == "token-mean" else torch.cat(sums).sum()
    each = [one.sum() if mode == "seq-mean-token-sum" else one.mean() for one in sums if len(one)]
    return torch.stack(each).mean()


@BACKENDS
@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"]
)
@pytest.mark.parametrize("k", [K, VOCAB])
def test_values_and_gradients_are_those_of_whole_distributions(
    pack: Callable[..., Any], mode: str, k: int
) -> None:
    logits, teacher = distributions()
    teacher = teacher.float().double()  # as the column has it
    config = ActorConfig(
        loss_agg_mode=mode,  # type: ignore[arg-type]
        distillation=DistillationConfig(coef=0.7, task_rewards=False),
    )
    loss = PolicyLoss(config)
    log_probs, micro = scored(logits, pack(batch_of(teacher, k), loss.columns))
    total, count, metrics = loss(log_probs, None, micro)
    (found,) = torch.autograd.grad(total / count.clamp(min=1), logits)
    expected = by_hand(logits, teacher, mode, k)
    (wanted,) = torch.autograd.grad(0.7 * expected, logits)
    torch.testing.assert_close(
        (total / count.clamp(min=1)).detach(), 0.7 * expected.detach(), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert not found[~torch.from_numpy(MASK)].any() and found[torch.from_numpy(MASK)].all()
    value, of = metrics["actor/distillation_loss"]
    torch.testing.assert_close(value / of.clamp(min=1), expected.detach(), rtol=1e-12, atol=1e-12)
    assert not metrics["actor/pg_loss"][0]


def test_the_divergence_of_the_whole_vocabulary_is_least_at_the_teacher_and_that_of_k_tokens_without_a_tail() -> (
    None
):
    logits, teacher = distributions()
    best = teacher.topk(K, dim=-1)
    mass = best.values.exp().sum(-1)
    assert not forward_kl_topk(teacher, teacher).any()
    assert (forward_kl_topk(teacher, logits.detach().log_softmax(-1)) > 0).all()
    # nothing is left for other tokens
    least = forward_kl_topk(best.values, best.values - mass.log()[:, None])
    torch.testing.assert_close(least, mass * mass.log(), rtol=1e-12, atol=1e-12)
    assert (forward_kl_topk(best.values, best.values) > least).all()
    # there its gradient is zero: nothing beyond the normalised k tokens is learned
    ideal = torch.full_like(teacher, -60.0).scatter(-1, best.indices, best.values).requires_grad_()
    forward_kl_topk(best.values, ideal.log_softmax(-1).gather(-1, best.indices)).sum().backward()
    assert ideal.grad is not None and ideal.grad.abs().max() < 1e-12


@BACKENDS
def test_the_teacher_is_added_to_the_policy_loss_and_sampled_tokens_suffice_for_the_reverse_divergence(
    pack: Callable[..., Any],
) -> None:
    logits, teacher = distributions()
    plain = PolicyLoss(ActorConfig())
    batch = batch_of(teacher)
    alone = plain(*_arguments(logits, pack(batch, plain.columns)))[0]
    for kind in ("forward_kl_topk", "k2"):
        both, only = (
            PolicyLoss(
                ActorConfig(
                    distillation=DistillationConfig(coef=0.7, loss=kind, task_rewards=rewards)
                )
            )
            for rewards in (True, False)
        )
        sums = [loss(*_arguments(logits, pack(batch, loss.columns)))[0] for loss in (both, only)]
        torch.testing.assert_close(sums[0], alone + sums[1], rtol=1e-12, atol=1e-12)
    # the mean gradient of k2 is that of KL(policy, teacher): its value is half the squared
    # log-ratio
    log_probs, micro = scored(logits, pack(batch, only.columns))
    ratio = log_probs - micro.columns["teacher_log_probs"]
    torch.testing.assert_close(sums[1], 0.7 * (0.5 * ratio**2).sum(), rtol=1e-12, atol=1e-12)


def _arguments(logits: torch.Tensor, micro: Any) -> tuple[Any, ...]:
    log_probs, micro = scored(logits, micro)
    return log_probs, None, micro


@BACKENDS
def test_tokens_that_the_correction_rejects_teach_nothing(pack: Callable[..., Any]) -> None:
    logits, teacher = distributions()
    config = ActorConfig(distillation=DistillationConfig(coef=1.0, task_rewards=False))
    config = replace(
        config, rollout_correction=replace(config.rollout_correction, reject={"token_k3": 1e-3})
    )
    loss = PolicyLoss(config)
    batch = batch_of(teacher, outside=0.0)
    old = batch.jagged("old_log_probs")
    engine = old.values.copy()
    engine[[0, 5]] -= 2.0  # the engine gave these two tokens another probability
    batch = batch.with_columns(rollout_log_probs=Jagged(engine, old.offsets))
    total, count, metrics = loss(*_arguments(logits, pack(batch, loss.columns)))
    (found,) = torch.autograd.grad(total, logits)
    assert int(count) == MASK.sum() - 2 and int(metrics["rollout_correction/rejected"][0]) == 2
    assert not found[[0, 2, 3, 5]].any() and found[[1, 4, 6, 7, 8]].all()


@BACKENDS
def test_token_ids_reach_the_loss_as_whole_numbers(pack: Callable[..., Any]) -> None:
    _, teacher = distributions()
    batch = batch_of(teacher)
    large = batch.jagged("teacher_top_ids").values + 2**24  # beyond it not every id is a float32
    batch = batch.with_columns(
        teacher_top_ids=Jagged(large, batch.jagged("teacher_top_ids").offsets)
    )
    micro = pack(batch, ("response_mask", "teacher_top_ids", "advantages"))
    assert torch.equal(micro.columns["teacher_top_ids"], torch.from_numpy(large[MASK]))
    assert micro.columns["advantages"].dtype == torch.float32
