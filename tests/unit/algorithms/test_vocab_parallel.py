"""Chunked log-probs, entropy and top-k against plain torch over the whole logits, and what they
allocate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.algorithms import vocab_parallel
from hybridflow.algorithms.vocab_parallel import (
    Scoring,
    log_probs_and_entropy,
    log_probs_of_tokens,
    top_log_probs,
)
from tests.unit.algorithms.tensor_ranks import HIDDEN, PADDED, VOCAB, Ranks

ROWS = 37


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """A tensor-parallel group of one; several are tested in tests/dist."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCAB, (ROWS,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 5, 37, 1000])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_values_and_gradients_equal_log_softmax(group: Any, chunk: int, temperature: float) -> None:
    hidden, weight, targets = inputs()
    upstream = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1))

    whole = ((hidden @ weight.t())[:, :VOCAB] / temperature).log_softmax(-1)
    expected = whole.gather(-1, targets[:, None])[:, 0], -(whole.exp() * whole).sum(-1)
    expected_grads = torch.autograd.grad((torch.stack(expected) * upstream).sum(), (hidden, weight))

    found = log_probs_and_entropy(
        hidden, weight, targets, Scoring(VOCAB, temperature, True, chunk), group
    )
    grads = torch.autograd.grad((torch.stack(found) * upstream).sum(), (hidden, weight))  # type: ignore[arg-type]
    for ours, theirs in zip((*found, *grads), (*expected, *expected_grads), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not grads[1][VOCAB:].any()  # padding rows take no gradient

    alone, none = log_probs_and_entropy(
        hidden, weight, targets, Scoring(VOCAB, temperature, False, chunk), group
    )
    torch.testing.assert_close(alone, expected[0], rtol=1e-5, atol=1e-5)
    grads = torch.autograd.grad((alone * upstream[0]).sum(), (hidden, weight))
    again = torch.autograd.grad(
        (log_softmax(hidden, weight, temperature, targets) * upstream[0]).sum(), (hidden, weight)
    )
    for ours, theirs in zip(grads, again, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert none is None


def log_softmax(
    hidden: torch.Tensor, weight: torch.Tensor, temperature: float, targets: torch.Tensor
) -> torch.Tensor:
    return (
        ((hidden @ weight.t())[:, :VOCAB] / temperature)
        .log_softmax(-1)
        .gather(-1, targets[:, None])[:, 0]
    )


@pytest.mark.parametrize("chunk", [4, 1000])
def test_the_most_likely_tokens_equal_topk_over_the_vocabulary(group: Any, chunk: int) -> None:
    hidden, weight, _ = inputs()
    expected = ((hidden @ weight.t())[:, :VOCAB] / 0.7).log_softmax(-1).topk(6, dim=-1)
    values, tokens = top_log_probs(
        hidden.detach(), weight.detach(), 6, Scoring(VOCAB, 0.7, False, chunk), group
    )
    torch.testing.assert_close(values, expected.values, rtol=1e-5, atol=1e-5)
    assert torch.equal(tokens, expected.indices)
    with pytest.raises(ValueError, match="k=52 exceeds the vocabulary size of 51"):
        top_log_probs(hidden, weight, 52, Scoring(VOCAB, 1.0, False), group)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@pytest.mark.slow
def test_logits_never_exist_for_more_than_a_chunk(group: Any) -> None:
    rows = 512
    hidden_size = 4
    vocab = 1000
    chunk = 4
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, hidden_size, generator=generator).requires_grad_()
    weight = torch.randn(vocab, hidden_size, generator=generator).requires_grad_()
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    for entropy in (True, False):
        with Largest() as largest:
            log_probs, found = log_probs_and_entropy(
                hidden, weight, targets, Scoring(vocab, 0.9, entropy, chunk), group
            )
            (log_probs.sum() + (found.sum() if found is not None else 0.0)).backward()
            top_log_probs(
                hidden.detach(), weight.detach(), 3, Scoring(vocab, 0.9, False, chunk), group
            )
        assert largest.numel == chunk * vocab == weight.numel()
    with Largest() as largest:  # the measure sees whole logits where there are some
        (hidden @ weight.t()).log_softmax(-1)
    assert largest.numel == rows * vocab


@pytest.mark.parametrize("world", [1, 2, 4, 7])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_any_number_of_tensor_ranks_gives_the_same(
    monkeypatch: pytest.MonkeyPatch, world: int, with_entropy: bool
) -> None:
    """51 tokens in 56 rows: with seven ranks the last has padding alone."""
    ranks = Ranks(world)
    monkeypatch.setattr(vocab_parallel, "dist", ranks)
    hidden, weight, targets = inputs()
    upstream = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1))
    rows = -(-PADDED // world)

    def score(rank: int) -> list[torch.Tensor]:
        mine = (
            hidden.detach().clone().requires_grad_(),
            weight.detach()[rank * rows : (rank + 1) * rows].clone(),
        )
        mine[1].requires_grad_()
        log_probs, entropy = log_probs_and_entropy(
            *mine, targets, Scoring(VOCAB, 0.7, with_entropy, 5), ranks
        )
        loss = (log_probs * upstream[0]).sum()
        if entropy is not None:
            loss = loss + (entropy * upstream[1]).sum()
        grads = torch.autograd.grad(loss, mine)
        return [log_probs.detach(), *([] if entropy is None else [entropy.detach()]), *grads]

    found = ranks.run(score)
    exact = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    whole = ((exact[0] @ exact[1].t())[:, :VOCAB] / 0.7).log_softmax(-1)
    expected = [whole.gather(-1, targets[:, None])[:, 0], -(whole.exp() * whole).sum(-1)][
        : 1 + with_entropy
    ]
    loss = sum((value * up).sum() for value, up in zip(expected, upstream, strict=False))
    expected_grads = torch.autograd.grad(loss, exact)  # type: ignore[arg-type]
    for one in found:
        for ours, theirs in zip(one[:-2], expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        sum(one[-2] for one in found).double(), expected_grads[0], rtol=1e-6, atol=2e-6
    )
    torch.testing.assert_close(
        torch.cat([one[-1] for one in found]).double(), expected_grads[1], rtol=1e-6, atol=2e-6
    )


@pytest.mark.parametrize("world", [1, 2, 7])
@pytest.mark.parametrize("chunk", [5, 1000])
def test_tokens_of_a_teacher_are_scored_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, world: int, chunk: int
) -> None:
    """In float64, where the log-probs of the targets, which have kernels of float32, are given;
    tokens occur several times, and among them is the target."""
    ranks = Ranks(world)
    monkeypatch.setattr(vocab_parallel, "dist", ranks)
    given = inputs()
    hidden = given[0].detach().double()
    weight = given[1].detach().double()
    targets = given[2]
    tokens = torch.randint(0, VOCAB, (ROWS, 6), generator=torch.Generator().manual_seed(2))
    tokens[:, 3] = targets
    upstream = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    exact = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    whole = ((exact[0] @ exact[1].t())[:, :VOCAB] / 0.7).log_softmax(-1)
    of_targets = whole.gather(-1, targets[:, None])[:, 0]
    expected = whole.gather(-1, tokens)
    rows = -(-PADDED // world)

    def score(rank: int) -> list[torch.Tensor]:
        mine = weight[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        leaves = hidden.clone().requires_grad_(), mine, of_targets.detach().requires_grad_()
        scoring = Scoring(VOCAB, 0.7, False, chunk)
        found = log_probs_of_tokens(leaves[0], mine, tokens, targets, leaves[2], scoring, ranks)
        return [found.detach(), *torch.autograd.grad((found * upstream).sum(), leaves)]

    found = ranks.run(score)
    through_targets = torch.autograd.grad(of_targets, exact, found[0][3], retain_graph=True)
    wanted = torch.autograd.grad((expected * upstream).sum(), exact)
    for one in found:
        torch.testing.assert_close(one[0], expected.detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(one[3], found[0][3])
    ours = sum(one[1] for one in found), torch.cat([one[2] for one in found])
    for share, rest, theirs in zip(ours, through_targets, wanted, strict=True):
        torch.testing.assert_close(share + rest, theirs, rtol=1e-11, atol=1e-11)


def test_a_shard_of_another_group_is_refused(group: Any) -> None:
    hidden, weight, targets = inputs()
    for call in (
        lambda: log_probs_and_entropy(
            hidden, weight[:28], targets, Scoring(VOCAB, 1.0, False), group
        ),
        lambda: top_log_probs(hidden, weight[:28], 3, Scoring(VOCAB, 1.0, False), group),
    ):
        with pytest.raises(
            ValueError,
            match=r"28 rows across the 1 ranks of the group \(28 each\), but the vocabulary has 51",
        ):
            call()


@pytest.mark.parametrize("target", [-1, VOCAB, PADDED])
def test_a_target_that_is_no_token_is_refused(group: Any, target: int) -> None:
    """Also one of a padding row, which has a weight and no probability."""
    hidden, weight, targets = inputs()
    targets[3] = target
    with pytest.raises(
        ValueError,
        match=f"target 3 is {target}; with a vocabulary of {VOCAB} tokens, ids are 0 to 50",
    ):
        log_probs_and_entropy(hidden, weight, targets, Scoring(VOCAB, 1.0, False), group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weights_gradient_is_added_to_megatrons_main_gradient(
    monkeypatch: pytest.MonkeyPatch, group: Any, dtype: torch.dtype
) -> None:
    """Over two micro-batches: what was there is kept, and nothing is rounded to the weight's dtype.
    The torch form of the kernel stands for it."""
    monkeypatch.setattr(vocab_parallel, "uses_triton", lambda tensor: True)
    hidden, weight, targets = (tensor.detach() for tensor in inputs())
    hidden, scoring = hidden.to(dtype), Scoring(VOCAB, 0.9, True, 5)
    plain, megatrons = (torch.nn.Parameter(weight.to(dtype)) for _ in range(2))
    before = torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    megatrons.main_grad, megatrons.grad_added_to_main_grad = before.clone(), False  # type: ignore[attr-defined]

    def backward(parameter: torch.nn.Parameter) -> None:
        for rows in (slice(0, 20), slice(20, ROWS)):
            log_probs, entropy = log_probs_and_entropy(
                hidden[rows], parameter, targets[rows], scoring, group
            )
            assert entropy is not None
            tokens = targets[rows, None] + torch.tensor([-1, 0])
            of_tokens = log_probs_of_tokens(
                hidden[rows], parameter, tokens % VOCAB, targets[rows], log_probs, scoring, group
            )
            (log_probs.sum() + entropy.sum() + 0.3 * of_tokens.sum()).backward()

    for parameter in (plain, megatrons):
        backward(parameter)
    assert megatrons.grad_added_to_main_grad and megatrons.grad is not None  # type: ignore[attr-defined]
    added = megatrons.main_grad - before  # type: ignore[attr-defined]
    assert plain.grad is not None and added.abs().max() > 0.5
    # the plain gradient's own: it has the weight's dtype
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(added, plain.grad.float(), rtol=rounding, atol=4 * rounding)

    # tied to the embedding
    megatrons.zero_out_wgrad, megatrons.grad = True, None  # type: ignore[attr-defined]
    megatrons.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    kept = megatrons.main_grad.clone()  # type: ignore[attr-defined]
    backward(megatrons)
    assert torch.equal(megatrons.main_grad, kept)  # type: ignore[attr-defined]
    assert not megatrons.grad_added_to_main_grad  # type: ignore[attr-defined]
    assert megatrons.grad is not None and torch.equal(megatrons.grad, plain.grad)
