"""Packing with a response mask: tokens that the policy did not sample are context and nothing
else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import ActorConfig, CriticConfig
from hybridflow.data.packing import check_token_ids, lengths_read
from hybridflow.workers.losses import Noted, PolicyLoss, ValueLoss, policy_loss_columns

LENGTHS = (5, 3, 0, 4)
# observations in the middle, at the end, and everywhere
MASK = [True, True, False, False, True, True, True, False, False, False, False, False]
KL = ActorConfig(kl_loss_coef=0.5, entropy_coef=0.1)
NAMES = ("old_log_probs", "ref_log_probs", "advantages", "values", "returns")


def batch_of(mask: list[bool] | None, outside: float = 0.0) -> DataProto:
    """Rows with every column that a loss reads; at tokens outside of the mask, `outside`."""
    rng = np.random.default_rng(0)
    prompts = (2, 1, 3, 2)
    columns = {name: rng.normal(-1, 0.5, sum(LENGTHS)).astype(np.float32) for name in NAMES}
    if mask is not None:
        columns = {
            name: np.where(mask, values, np.float32(outside)) for name, values in columns.items()
        }
        columns["response_mask"] = np.array(mask)
    columns["response_ids"] = np.arange(10, 10 + sum(LENGTHS))
    return DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_lengths(np.arange(sum(prompts)), prompts),
            **{name: Jagged.from_lengths(values, LENGTHS) for name, values in columns.items()},
        }
    )


def megatron(batch: DataProto, columns: tuple[str, ...], rank: int = 0, size: int = 1) -> Any:
    from hybridflow.mcore.packed import Cut, build_micro_batches

    cut = Cut(2 * size if size > 1 else 1, 1, rank, size)
    return build_micro_batches(batch, [np.arange(4)], columns, cut)[0]


def fsdp(batch: DataProto, columns: tuple[str, ...]) -> Any:
    from hybridflow.fsdp.packed import build_micro_batches

    return build_micro_batches(batch, [np.arange(4)], columns, torch.device("cpu"))[0]


BACKENDS = pytest.mark.parametrize("pack", [megatron, fsdp])


@BACKENDS
def test_only_sampled_tokens_are_predicted(pack: Callable[..., Any]) -> None:
    whole, kept = (pack(batch_of(mask), policy_loss_columns(KL)) for mask in (None, MASK))
    assert torch.equal(whole.tokens, kept.tokens)  # observations are still attended to
    for name in ("predict_rows", "targets"):
        assert torch.equal(getattr(kept, name), getattr(whole, name)[MASK])
    assert kept.lengths.tolist() == [3, 2, 0, 0] and whole.lengths.tolist() == list(LENGTHS)
    assert set(kept.columns) == {"old_log_probs", "ref_log_probs", "advantages"}


# prompts 0 1 | 2 | 3 4 5 | 6 7, responses 10 11 12 13 14 | 15 16 17 | nothing | 18 19 20 21
WITHOUT_LAST = [0, 1, 10, 11, 12, 13, 2, 15, 16, 3, 4, 6, 7, 18, 19, 20]


@BACKENDS
def test_the_last_token_of_a_row_is_predicted_and_not_read(pack: Callable[..., Any]) -> None:
    micro = pack(batch_of(None), ())
    assert micro.tokens[0].tolist() == WITHOUT_LAST
    assert micro.positions[0].tolist() == [*range(6), *range(3), *range(2), *range(5)]
    assert micro.targets.tolist() == list(range(10, 22))
    assert micro.tokens[0, micro.predict_rows].tolist() == [
        1,
        10,
        11,
        12,
        13,
        2,
        15,
        16,
        7,
        18,
        19,
        20,
    ]


def test_the_last_token_is_read_where_its_output_is_asked_for() -> None:
    from hybridflow.mcore.packed import Cut, build_micro_batches

    [micro] = build_micro_batches(batch_of(None), [np.arange(4)], (), Cut(), last_token=True)
    ends = micro.packed.cu_seqlens_q[1:].long() - 1
    assert micro.length == 8 + 12 and micro.tokens[0, ends].tolist() == [14, 17, 5, 21]


@pytest.mark.parametrize("response", [0, 1])
def test_a_row_keeps_one_token_at_least(response: int) -> None:
    lengths = np.array([1 + response])
    assert lengths_read(lengths).tolist() == [1] and lengths_read(
        lengths, last_token=True
    ).tolist() == [1 + response]


@BACKENDS
def test_a_mask_that_is_all_true_changes_nothing(pack: Callable[..., Any]) -> None:
    without, with_mask = (
        pack(batch_of(mask), policy_loss_columns(KL)) for mask in (None, [True] * sum(LENGTHS))
    )
    for name in ("tokens", "positions", "predict_rows", "targets", "lengths"):
        assert torch.equal(getattr(without, name), getattr(with_mask, name))
    assert all(
        torch.equal(without.columns[name], with_mask.columns[name]) for name in without.columns
    )


def test_context_parallel_ranks_divide_the_sampled_tokens() -> None:
    whole = megatron(batch_of(MASK), policy_loss_columns(KL))
    ranks = [megatron(batch_of(MASK), policy_loss_columns(KL), rank, 2) for rank in range(2)]
    places = torch.cat([rank.places for rank in ranks])
    assert sorted(places.tolist()) == list(range(sum(MASK)))
    assert torch.equal(torch.cat([rank.targets for rank in ranks])[places.argsort()], whole.targets)
    assert all(
        torch.equal(rank.columns["advantages"], whole.columns["advantages"]) for rank in ranks
    )


LOSSES = {
    mode: ActorConfig(loss_agg_mode=mode, kl_loss_coef=0.5, kl_loss_type=kind, entropy_coef=0.1)
    for mode, kind in (
        ("token-mean", "k1"),
        ("seq-mean-token-sum", "abs"),
        ("seq-mean-token-mean", "k3"),
    )
} | {"k2": ActorConfig(kl_loss_coef=0.5, kl_loss_type="k2"), "plain": ActorConfig()}


@BACKENDS
@pytest.mark.parametrize("name", [*LOSSES, "value"])
def test_a_masked_token_gives_no_gradient_loss_or_count(
    pack: Callable[..., Any], name: str
) -> None:
    """Whatever stands at masked tokens (NaN here), every loss is that of the rows without them."""
    loss: Any = ValueLoss(CriticConfig()) if name == "value" else PolicyLoss(LOSSES[name])
    inside = torch.tensor(MASK)
    found = []
    logits = torch.linspace(-2, -0.1, sum(LENGTHS))
    for outside, mask in ((np.nan, MASK), (7.0, MASK)):
        micro = pack(batch_of(mask, outside), loss.columns)
        values = logits.clone().requires_grad_()
        chosen = values[inside]  # what the model's output at `predict_rows` is
        arguments = (chosen, micro) if name == "value" else (chosen, chosen.exp(), micro)
        total, count, metrics = loss(*arguments)
        (total / count).backward()
        assert (
            values.grad is not None and not values.grad[~inside].any() and values.grad[inside].any()
        )
        found.append(
            [total, count, values.grad, *(part for pair in metrics.values() for part in pair)]
        )
        assert int(count) == (2 if name.startswith("seq") else 5)
    assert all(
        torch.equal(torch.as_tensor(one), torch.as_tensor(other))
        for one, other in zip(*found, strict=True)
    )


@BACKENDS
@pytest.mark.parametrize("mask", [None, MASK])
def test_an_update_without_a_pass_is_that_with_its_own_values_as_old_log_probs(
    pack: Callable[..., Any], mask: list[bool] | None
) -> None:
    """The same loss, gradient and metrics, bit for bit; and the values that it notes are those that
    it was given."""
    scores = torch.linspace(-2, -0.1, sum(LENGTHS))
    inside = torch.ones(len(scores), dtype=torch.bool) if mask is None else torch.tensor(mask)
    own = np.where(inside, scores, np.float32(0.0))
    batch = batch_of(mask)
    found = []
    with_own = batch.with_columns(old_log_probs=Jagged(own, batch.jagged("response_ids").offsets))
    for rows, loss in (
        (batch.drop(["old_log_probs"]), PolicyLoss(KL, None)),
        (with_own, PolicyLoss(KL)),
    ):
        values = scores.clone().requires_grad_()
        noted = Noted(loss)
        total, _, metrics = noted(values[inside], values[inside].exp(), pack(rows, loss.columns))
        total.backward()
        found.append([total, values.grad, *(part for pair in metrics.values() for part in pair)])
        taken = noted.take(rows)
        assert taken is not None and taken.jagged("old_log_probs").values.tolist() == own.tolist()
        np.testing.assert_allclose(
            taken.jagged("entropys").values[inside], np.exp(own[inside]), rtol=1e-6
        )
        assert noted.take(rows) is None
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_in_place_of_the_old_log_probs_the_loss_reads_those_of_the_engine() -> None:
    engine = PolicyLoss(ActorConfig(), "rollout_log_probs")
    assert set(engine.columns) == {"response_mask", "rollout_log_probs", "advantages"}
    batch = batch_of(None)
    renamed = batch.rename({"old_log_probs": "rollout_log_probs"})
    values = torch.linspace(-2, -0.1, sum(LENGTHS))
    losses = [
        loss(values, None, megatron(rows, loss.columns))[0]
        for loss, rows in ((engine, renamed), (PolicyLoss(ActorConfig()), batch))
    ]
    assert torch.equal(*losses)


def test_token_ids_that_the_model_lacks_are_refused_on_the_host() -> None:
    batch = batch_of(None)  # tokens 0 to 7 and 10 to 21
    check_token_ids(batch, 22)
    with pytest.raises(
        ValueError, match="response_ids contains token 21, but the model's token ids are 0 to 20"
    ):
        check_token_ids(batch, 21)
    negative = DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_lengths(np.array([3, -1]), (1, 1)),
            "response_ids": Jagged.from_lengths(np.array([], dtype=np.int64), (0, 0)),
        }
    )
    with pytest.raises(ValueError, match="prompt_ids contains token -1"):
        check_token_ids(negative, 21)
