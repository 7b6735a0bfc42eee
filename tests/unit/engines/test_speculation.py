"""Verification of drafted chains in torch: greedy by hand, sampled by frequencies."""

from __future__ import annotations

import torch

from hybridflow.engines.sglang.cpu_plugin import speculation


def outputs(requests: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.zeros(requests * width, dtype=torch.int32),
        torch.full((requests, width), -1, dtype=torch.int32),
        torch.empty(requests, dtype=torch.int32),
    )


def test_greedy_verification_accepts_up_to_the_first_other_token() -> None:
    candidates = torch.tensor([[5, 1, 2, 3], [5, 1, 9, 3], [5, 9, 2, 3]])
    most_likely = torch.tensor([[1, 2, 3, 4]] * 3)
    predicts, index, count = outputs(3, 4)
    speculation.verify_greedy(
        predicts, index, count, candidates, *(torch.empty(0),) * 3, most_likely, 1
    )
    assert count.tolist() == [3, 1, 0]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1]]
    assert predicts.view(3, 4).tolist() == [[1, 2, 3, 4], [1, 2, 0, 0], [1, 0, 0, 0]]


def test_sampled_verification_draws_from_the_model_whatever_was_drafted() -> None:
    torch.manual_seed(0)
    many = 200_000
    first = torch.tensor([0.5, 0.3, 0.15, 0.05])
    second = torch.tensor([0.1, 0.2, 0.3, 0.4])
    third = torch.tensor([0.7, 0.1, 0.1, 0.1])
    probs = torch.stack([first, second, third]).expand(many, 3, 4)
    drafts = torch.randint(0, 4, (many, 2))
    candidates = torch.cat([torch.zeros(many, 1, dtype=torch.long), drafts], 1)
    predicts, index, count = outputs(many, 3)
    speculation.verify_sampled(
        predicts=predicts,
        accept_index=index,
        accept_token_num=count,
        candidates=candidates,
        uniform_samples=torch.rand(many, 3),
        uniform_samples_for_final_sampling=torch.rand(many),
        target_probs=probs,
    )
    tokens = predicts.view(many, 3).long()
    for place, expected in enumerate((first, second, third)):
        there = tokens[count >= place, place]
        found = torch.bincount(there, minlength=4) / len(there)
        assert (found - expected).abs().max() < 6 * (0.25 / len(there)) ** 0.5
    # accepted tokens are the drafted ones
    accepted = count >= 1
    assert torch.equal(tokens[accepted, 0], drafts[accepted, 0])


def test_locations_and_slots_are_those_of_each_request() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    requests, lengths = torch.tensor([2, 0]), torch.tensor([3, 5])
    out = torch.empty(4, dtype=torch.int64)
    speculation.draft_locations(requests, table, lengths, out, 1, 2)
    assert out.tolist() == [23, 24, 5, 6]
    found = speculation.extend_locations(requests, table, lengths, lengths + 3, 2, 3, "cpu")
    assert found.tolist() == [23, 24, 25, 5, 6, 7]
    speculation.assign_slots(
        requests, table, lengths, torch.tensor([5, 6]), torch.tensor([70, 71, 72]), 2
    )
    assert table[2, 3:5].tolist() == [70, 71] and int(table[0, 5]) == 72
    bonus = torch.empty(2, dtype=torch.int32)
    accepted = torch.tensor([[4, 5, 6], [7, 8, 9]], dtype=torch.int32)
    speculation.fill_bonus_tokens(accepted, torch.tensor([1, 3]), bonus, 3, 2)
    assert bonus.tolist() == [4, 9]
