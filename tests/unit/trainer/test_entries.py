"""An estimator and a policy loss in a file outside of the package run through checks, dataflow,
advantages and the worker's loss, with nothing else changed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridflow.config import derived
from hybridflow.config.check import check, problems
from hybridflow.config.entries import ESTIMATORS, POLICY_LOSSES
from hybridflow.config.explain import Origins, explain
from hybridflow.config.load import load_config
from hybridflow.errors import ConfigError, SchemaError
from hybridflow.single_controller import block_on
from hybridflow.trainer.groups import check_steps, update_step
from hybridflow.workers.losses import PolicyLoss
from tests.unit.trainer.worlds import World, config_of, trainer_of

ENTRIES = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from hybridflow.algorithms.estimators.base import estimator
from hybridflow.algorithms.policy_losses.base import policy_loss

@dataclass(frozen=True)
class Scale:
    by: float = 1.0
    gamma: float = 0.5  # a key of the section too: its value comes from there

@estimator("scaled", reads=("old_log_probs",), options=Scale)
def scaled(samples, options):
    assert samples.columns["old_log_probs"].shape == samples.mask.shape
    return samples.over_tokens(samples.scores * options.by * options.gamma), None

@estimator("with_critic", reads=("values",), needs_critic=True)
def with_critic(samples, options):
    return samples.rewards - samples.columns["values"], samples.rewards

@estimator("foresight", reads=("future_scores",))
def foresight(samples, options):
    return samples.rewards, None

@dataclass(frozen=True)
class Clip:
    clip_ratio_low: float = 9.0
    bound: float = 2.0

@policy_loss("plain", reads=("advantages", "rollout_log_probs"), options=Clip)
def plain(tokens, options):
    assert options.clip_ratio_low == 0.25
    weight = (tokens.log_probs - tokens.columns["rollout_log_probs"]).exp().clamp(max=options.bound).detach()
    return -tokens.columns["advantages"] * weight * tokens.log_probs, {"actor/weight": weight}
"""


@pytest.fixture
def entries(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(ENTRIES)
    return path


class Micro:
    """Three tokens of two sequences."""

    def __init__(self) -> None:
        self.lengths = torch.tensor([2, 1])
        advantages = torch.tensor([1.0, -1.0, 2.0])
        rollout = torch.tensor([0.0, -1.0, -5.0])
        self.columns = {"advantages": advantages, "rollout_log_probs": rollout}


def test_an_estimator_of_a_file_gives_the_advantages_of_a_run(
    tmp_path: Path, entries: Path
) -> None:
    config = config_of(tmp_path, total_steps=1)
    name = f"{entries}:scaled"
    options = {"by": 3.0}
    algorithm = replace(
        config.algorithm, adv_estimator=name, adv_estimator_options=options, gamma=0.25
    )
    config = replace(config, algorithm=algorithm)
    seen = []

    class Noting(World):
        async def update(self, method, batch, seed=None):  # type: ignore[no-untyped-def]
            seen.append(batch)
            return await super().update(method, batch, seed)

    block_on(trainer_of(config, Noting()).fit())
    [batch] = seen
    expected = np.repeat(batch["scores"] * 0.75, batch.lengths("response_ids"))
    np.testing.assert_array_equal(batch.jagged("advantages").values, expected)
    assert not derived.critics(config)


def test_what_an_estimator_needs_follows_from_its_declaration(entries: Path) -> None:
    config = load_config("e2e", [f"algorithm.adv_estimator={entries}:with_critic"])
    check(config)
    check_steps(config)
    assert derived.critics(config) == ("critic",) and "Critic: in the actor's processes" in explain(
        config, _NOWHERE
    )
    without = load_config("e2e", [f"algorithm.adv_estimator={entries}:foresight"])
    assert not derived.critics(without)
    with pytest.raises(
        SchemaError, match=r"advantages reads column 'future_scores', .* no step writes it"
    ):
        check_steps(without)


def test_a_policy_loss_of_a_file_trains_and_its_columns_reach_it(entries: Path) -> None:
    words = [
        f"actor.policy_loss={entries}:plain",
        "actor.policy_loss_options={bound: 1.5}",
        "actor.clip_ratio_low=0.25",
        "actor.kl_loss_coef=0",
    ]
    config = load_config("e2e", words)
    check(config)
    check_steps(config)
    loss = PolicyLoss(config.actor)
    assert (
        {"advantages", "rollout_log_probs"} <= set(loss.columns) <= set(update_step(config).reads)
    )
    assert "old_log_probs" not in loss.columns
    assert (
        f"{entries}:plain of advantages, rollout_log_probs; clip_ratio_low=0.25, bound=1.5"
        in explain(config, _NOWHERE)
    )
    log_probs = torch.tensor([0.0, -1.0, -1.0], requires_grad=True)
    total, count, metrics = loss(log_probs, None, Micro())  # type: ignore[arg-type]
    total.backward()
    assert (
        log_probs.grad is not None and log_probs.grad.tolist() == [-1.0, 1.0, -3.0] and count == 3
    )
    assert [float(part) for part in metrics["actor/weight"]] == [3.5, 3.0]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "algorithm.adv_estimator_options={lamb: 1}",
            "unknown key algorithm.adv_estimator_options.lamb",
        ),
        (
            "algorithm.adv_estimator_options={norm_adv_by_std: 1}",
            "set this option with the key algorithm.norm_adv_by_std",
        ),
        ("algorithm.adv_estimator=missing.py:mine", "'missing.py' not found"),
        (
            "rollout.n=1",
            "rollout.n=1 is not supported with algorithm.adv_estimator=grpo, because it compares the samples of a prompt",
        ),
    ],
)
def test_a_wrong_name_or_option_is_said_before_anything_starts(word: str, said: str) -> None:
    [line] = problems(load_config("e2e", [word]))
    assert said in line


@pytest.mark.parametrize(
    ("word", "near"), [("algorithm.adv_estimator=grop", "grpo"), ("actor.policy_loss=pop", "ppo")]
)
def test_a_wrong_name_is_refused_as_the_configuration_is_read(word: str, near: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"choose one of: .*, or path/to/file\.py:name; did you mean {near}\?"
    ):
        load_config("e2e", [word])


def test_an_option_of_a_file_is_checked(entries: Path) -> None:
    words = [f"actor.policy_loss={entries}:plain", "actor.policy_loss_options={bound: wide}"]
    with pytest.raises(
        ConfigError, match=r"actor\.policy_loss_options\.bound: got 'wide', expected number"
    ):
        check(load_config("e2e", words))


@pytest.mark.slow
def test_declarations_of_the_package_need_no_torch() -> None:
    code = (
        "import sys; from hybridflow.config.check import check; from hybridflow.config.load import "
        "load_config; from hybridflow.config.entries import ESTIMATORS, POLICY_LOSSES; "
        "check(load_config('e2e', [])); [r.get(n) for r in (ESTIMATORS, POLICY_LOSSES) for n in "
        "r.names()]; print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
    assert {"grpo", "gae"} <= set(ESTIMATORS.names()) and "ppo" in POLICY_LOSSES.names()


_NOWHERE = Origins(frozenset(), {})


def test_a_file_that_imports_a_built_in_entry_leaves_it_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from hybridflow.algorithms.policy_losses.ppo import ppo\n"
        "from hybridflow.algorithms.policy_losses.base import policy_loss\n"
        "policy_loss('ppo')(ppo)\n"
    )
    program = (
        "from hybridflow.config.entries import POLICY_LOSSES as found\n"
        f"own = found.get({str(tmp_path / 'mine.py')!r} + ':ppo')\n"
        "print(own is not found.get('ppo'), found.get('ppo').options.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "True PpoOptions\n", done.stderr
