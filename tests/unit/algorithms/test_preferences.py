"""Online DPO, IPO and KTO: the update's gradient is that of the published loss, by autograd in
float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from hybridflow.algorithms.estimators.base import Samples
from hybridflow.algorithms.losses import aggregate
from hybridflow.config.entries import ESTIMATORS, estimator_options
from hybridflow.config.schema import AlgorithmConfig

BETA = 0.3
# groups: 7 has a best and a worst answer, 3 too, 9 has equal scores; an observation in an answer,
# and length 1
GROUPS = torch.tensor([7, 3, 7, 9, 3, 7, 9, 3])
SCORES = torch.tensor([0.0, 1.0, 1.0, 0.5, 0.0, 0.5, 0.5, 0.25], dtype=torch.float64)
LENGTHS = torch.tensor([3, 1, 4, 2, 5, 2, 3, 2])
PAIRS = ((2, 0), (1, 4))  # chosen, rejected


def samples_of(policy: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> Samples:
    columns = {"old_log_probs": policy.detach(), "ref_log_probs": reference}
    return Samples(SCORES, torch.zeros(len(mask)), GROUPS, LENGTHS, mask, columns)


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    total = int(LENGTHS.sum())
    policy, reference = (
        -3 * torch.rand(total, generator=random, dtype=torch.float64) for _ in range(2)
    )
    mask = torch.ones(total, dtype=torch.bool)
    mask[5] = False  # the second token of the third answer
    return policy.requires_grad_(), reference, mask


def row_sums(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([row.sum() for row in values.split(LENGTHS.tolist())])


def dpo(ratios: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return (
        sum((-F.logsigmoid(BETA * (ratios[c] - ratios[r])) for c, r in PAIRS), torch.zeros(())) / 3
    )


def ipo(ratios: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    means = ratios / sizes
    return sum(((means[c] - means[r] - 1 / (2 * BETA)) ** 2 for c, r in PAIRS), torch.zeros(())) / 3


def kto(ratios: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    z = ratios.mean().clamp(min=0).detach()
    good = SCORES >= 0.5
    gain = torch.where(good, torch.sigmoid(BETA * (ratios - z)), torch.sigmoid(BETA * (z - ratios)))
    return (torch.where(good, 1.5, 0.5) * (1 - gain)).mean()


@pytest.mark.parametrize("loss", [dpo, ipo, kto])
def test_the_gradient_is_that_of_the_published_loss(
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    name = loss.__name__
    policy, reference, mask = tokens()
    ratios = row_sums((policy - reference).where(mask, 0.0))
    (wanted,) = torch.autograd.grad(loss(ratios, row_sums(mask.double())), policy)
    options = {"beta": BETA} | (
        {"desirable_weight": 1.5, "undesirable_weight": 0.5} if name == "kto" else {}
    )
    algorithm = AlgorithmConfig(adv_estimator=name, adv_estimator_options=options)
    advantages, returns = ESTIMATORS.get(name).function(
        samples_of(policy, reference, mask), estimator_options(algorithm)
    )
    assert returns is None and not advantages[~mask].any()
    total, count = aggregate(-advantages * policy.where(mask, 0.0), LENGTHS, "seq-mean-token-sum")
    (found,) = torch.autograd.grad(total / count, policy)
    if name != "kto":
        # a mean over samples counts a prompt of three answers as 3 / 8, a mean over prompts 1 / 3
        found = found * 8 / 9
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


def test_equal_scores_prefer_nothing() -> None:
    policy, reference, mask = tokens()
    whole = samples_of(policy, reference, mask)
    same = Samples(torch.ones_like(SCORES), whole.rewards, GROUPS, LENGTHS, mask, whole.columns)
    for name in ("dpo", "ipo"):
        options = estimator_options(AlgorithmConfig(adv_estimator=name))
        assert not ESTIMATORS.get(name).function(same, options)[0].any()
