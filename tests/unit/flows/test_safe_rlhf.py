"""Safe RLHF: the multiplier against the paper's formula, the advantages of costs against a loop in
numpy, what its critics are given, and what the checks before the start say."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.batch import DataProto, Jagged, objects
from hybridflow.config import derived
from hybridflow.config.check import problems
from hybridflow.config.check_entries import flow_problems, loss_problems
from hybridflow.config.explain import Origins, explain
from hybridflow.config.load import load_config
from hybridflow.config.role_table import CRITICS
from hybridflow.config.schema import AlgorithmConfig, CriticConfig, RewardConfig, RunConfig
from hybridflow.errors import ConfigError, DataError
from hybridflow.flows.safe_rlhf import Options, constrained, costs_of, next_multiplier
from hybridflow.placement.pools import pools_of
from hybridflow.planning.devices import read_cluster
from hybridflow.planning.job import job_of
from hybridflow.planning.plan import make_plan
from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.verifiers.exact import exact
from hybridflow.rollout.evaluation import check_numbers
from hybridflow.single_controller import block_on
from hybridflow.trainer.advantages import Advantages, RequiredParts
from hybridflow.trainer.flow_check import check_flow
from hybridflow.trainer.protocols import Update
from tests.unit.flows.bodies import fitted, own
from tests.unit.trainer.critics import Critic, PpoWorld
from tests.unit.trainer.worlds import Rows, Scores, config_of, records, trainer_of

FLOW = "safe_rlhf"
ROLES = ("policy", "critic", "cost_critic", "reference")
BODY = """
async for step in run.steps():
    batch = await run.samples()
    batch = batch.with_columns(costs=batch["scores"])
    batch = await run.all(
        run.policy.log_probs(batch), run.critic.values(batch), run.cost_critic.values(batch)
    )
    batch = run.advantages(batch)
    batch = run.advantages(batch, of="costs")
    await run.critic.update(batch)
    await run.cost_critic.update(batch)
    await run.policy.update(batch)
    await run.sync()
"""


def constrained_run(folder: Path, flow: str = FLOW, **algorithm: Any) -> RunConfig:
    given = {"adv_estimator": "gae", **algorithm}
    return replace(config_of(folder), algorithm=AlgorithmConfig(flow=flow, **given))


# ---- the formulas


@given(st.floats(0.01, 4), st.floats(-2, 2), st.floats(-1, 1), st.floats(0, 1), st.floats(4.5, 9))
def test_the_multiplier_is_that_of_equation_31(
    multiplier: float, cost: float, limit: float, lr: float, largest: float
) -> None:
    options = Options(limit=limit, multiplier=1.0, lr=lr, largest=largest)
    found = next_multiplier(multiplier, cost, options)
    # ln lambda_{k+1} = ln lambda_k + alpha lambda_k J_C, with J_C = E[C] + d and d = -limit
    exact = multiplier * math.exp(lr * multiplier * (cost - limit))
    assert found == pytest.approx(min(max(exact, 1e-8), largest), rel=1e-9)
    assert (found >= multiplier) == (cost >= limit or lr == 0) or found == pytest.approx(multiplier)


@pytest.mark.parametrize("cost", [-1e30, 1e30])
def test_a_multiplier_stays_finite_and_above_zero(cost: float) -> None:
    options = Options()
    found = next_multiplier(1.0, cost, options)
    assert 0 < found <= options.largest and next_multiplier(found, 1e30, options) > found / 2


def test_a_multiplier_above_its_bound_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"flow_options.multiplier=9 is more than largest=5"):
        Options(multiplier=9.0)


def batch_of(lengths: Sequence[int], seed: int) -> DataProto:
    """Rows with random values, costs and log-probs; the second token of a row is not sampled."""
    rng = np.random.default_rng(seed)
    total = sum(lengths)
    mask = np.concatenate([np.arange(length) != 1 for length in lengths])
    columns: dict[str, Any] = {
        name: Jagged.from_lengths(rng.normal(size=total).astype(np.float32), np.array(lengths))
        for name in ("values", "cost_values", "old_log_probs", "ref_log_probs")
    }
    return DataProto.from_columns(
        {
            **columns,
            "uid": np.arange(len(lengths)),
            "response_ids": Jagged.from_lengths(np.zeros(total, np.int64), np.array(lengths)),
            "response_mask": Jagged.from_lengths(mask, np.array(lengths)),
            "scores": rng.normal(size=len(lengths)).astype(np.float32),
            "costs": rng.normal(size=len(lengths)).astype(np.float32),
        }
    )


def by_hand(
    batch: DataProto, numbers: str, values: str, kl: float, gamma: float, lam: float
) -> tuple[np.ndarray, np.ndarray]:
    """Whitened advantages and returns at the sampled tokens, in float64. `kl` is added to each
    token's number, times its log-ratio."""
    found = []
    returns = []
    for row in range(len(batch)):
        mask = batch.jagged("response_mask").row(row)
        ratio = batch.jagged("old_log_probs").row(row) - batch.jagged("ref_log_probs").row(row)
        given = kl * ratio.astype(np.float64)[mask]
        given[-1] += batch[numbers][row]
        value = batch.jagged(values).row(row).astype(np.float64)[mask]
        after = np.append(value[1:], 0.0)
        delta = given + gamma * after - value
        advantage = np.zeros_like(delta)
        carried = 0.0
        for token in reversed(range(len(delta))):
            carried = delta[token] + gamma * lam * carried
            advantage[token] = carried
        found.append(advantage)
        returns.append(advantage + value)
    flat = np.concatenate(found)
    return (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8), np.concatenate(returns)


@settings(max_examples=25)
@given(st.lists(st.integers(2, 6), min_size=2, max_size=6), st.integers(0, 99))
def test_advantages_of_costs_are_those_of_a_loop_in_float64(lengths: list[int], seed: int) -> None:
    config = constrained_run(Path("x"), gamma=0.9, lam=0.8, kl_coef=0.05, kl_target=0.1)
    batch = batch_of(lengths, seed)
    part = Advantages(replace(config, reward=replace(config.reward, weight=1.0)))
    done = part.add(part.add(batch), of="costs")
    mask = batch.jagged("response_mask").values
    # the penalty lowers rewards and raises costs, by one coefficient that changes afterwards
    assert part.control.value != 0.05
    for prefix, numbers, kl in (("", "scores", -0.05), ("cost_", "costs", 0.05)):
        advantages, returns = by_hand(batch, numbers, f"{prefix}values", kl, 0.9, 0.8)
        for name, wanted in (("advantages", advantages), ("returns", returns)):
            values = done.jagged(f"{prefix}{name}").values
            np.testing.assert_allclose(values[mask], wanted, rtol=2e-4, atol=2e-5)
            assert not values[~mask].any()
    whole = constrained(done, 1.5).values
    rewards, costs = (done.jagged(name).values for name in ("advantages", "cost_advantages"))
    np.testing.assert_allclose(whole, (rewards - 1.5 * costs) / 2.5, rtol=1e-6, atol=1e-7)


def test_costs_are_the_numbers_that_the_reward_returned() -> None:
    extras = [{"cost": 1}, {"cost": True}, {}, {"cost": np.float32(0.5)}, {"cost": "7"}]
    batch = DataProto.from_columns({"uid": np.arange(5), "reward_extra": objects(extras)})
    np.testing.assert_array_equal(costs_of(batch), np.array([1, 1, np.nan, 0.5, np.nan]))
    texts = RequiredParts(constrained_run(Path("x"))).lost(with_mask(batch))
    assert [text is not None for text in texts] == [False, False, True, False, True]
    assert "returned cost='7', but algorithm.flow=safe_rlhf requires a finite number" in str(
        texts[4]
    )
    assert RequiredParts(constrained_run(Path("x"), "ppo")).lost(with_mask(batch)) == [None] * 5


def with_mask(batch: DataProto) -> DataProto:
    return batch.with_columns(response_mask=Jagged.from_rows([[True]] * len(batch), np.bool_))


# ---- the loop


class Costs(Scores):
    """A row's number is its cost; a row of `lost` has none."""

    lost: tuple[int, ...] = ()

    async def score(self, batch: DataProto) -> DataProto:
        found = await super().score(batch)
        extras = [{} if row in self.lost else {"cost": row} for row in range(len(batch))]
        return found.with_columns(reward_extra=objects(extras))

    def check_failures(self, batch: DataProto) -> None:
        if all(text is not None for text in batch["reward_failure"]):
            raise DataError(str(batch["reward_failure"][0]))


class CostCritic(Critic):
    """Its value of a token is one."""

    def load(self, folder: Path, optim: Any) -> None:
        assert folder.name == "cost_critic"
        self.world.calls.append("load cost critic")

    def compute_values(self, batch: DataProto) -> DataProto:
        self.world.calls.append("cost values")
        offsets = batch.jagged("response_ids").offsets
        return DataProto.from_columns({"values": Jagged(np.ones(offsets[-1], np.float32), offsets)})

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        await super().update(method, batch, seed)
        means = {"loss": 0.75, "critic/vf_clipfrac": 0.5, "critic/vpred_mean": 0.2}
        return [Update(means, 3.0, 1e-3, True)]


def trainer_over(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...] = ()
) -> tuple[Any, PpoWorld, Critic, CostCritic]:
    monkeypatch.setattr(Costs, "lost", lost)
    monkeypatch.setattr("tests.unit.trainer.worlds.Scores", Costs)
    world = PpoWorld()
    critic = Critic(world)
    cost_critic = CostCritic(world)
    trainer = trainer_of(config, world, critic=critic, cost_critic=cost_critic)
    return trainer, world, critic, cost_critic


def test_both_critics_learn_from_returns_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = constrained_run(tmp_path, flow_options={"limit": 3.0, "multiplier": 0.5, "lr": 0.1})
    trainer, world, critic, cost_critic = trainer_over(config, monkeypatch)
    fitted(trainer)
    assert world.calls.count("values") == world.calls.count("cost values") == 3
    assert world.calls.count("update_critic") == 6
    rewards = critic.seen[0]
    costs = cost_critic.seen[0]
    np.testing.assert_allclose(rewards.jagged("values").values[:3], [0, 0.1, 0])
    assert (costs.jagged("values").values == 1).all()
    # undiscounted, a token's return is the number of its row
    lengths = costs.lengths("response_ids")
    np.testing.assert_allclose(costs.jagged("returns").values, np.repeat(np.arange(8), lengths))
    np.testing.assert_allclose(
        rewards.jagged("returns").values, np.repeat(np.arange(8) % 2 == 0, lengths)
    )
    found = records(trainer, "train")
    assert [one["critic/vf_loss"] for one in found] == [0.25] * 3
    assert [one["cost_critic/vf_loss"] for one in found] == [0.75] * 3
    first = found[0]
    assert first["cost_critic/values/mean"] == 1 and first["cost_critic/vf_clipfrac"] == 0.5
    assert first["cost_critic/returns/max"] == 7 and first["critic/returns/max"] == 1
    assert first["cost_critic/grad_norm"] == 3 and first["critic/grad_norm"] == 2
    assert "cost_critic/vf_explained_var" in first and first["timing_s/update_cost_critic"] >= 0
    multiplier = 0.5
    for one in found:  # mean cost 3.5, limit 3
        assert one["flow/cost"] == 3.5 and one["flow/multiplier"] == pytest.approx(multiplier)
        multiplier *= math.exp(0.1 * multiplier * 0.5)
    assert trainer.state["multiplier"] == pytest.approx(multiplier)


def test_an_answer_without_a_cost_counts_in_no_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(constrained_run(tmp_path), reward=replace(RunConfig().reward, timeout_s=1.0))
    trainer, _, _, cost_critic = trainer_over(config, monkeypatch, lost=(7,))
    fitted(trainer)
    assert [one["flow/cost"] for one in records(trainer, "train")] == [3.0] * 3
    assert cost_critic.seen[0]["costs"][7] == 0


def test_a_reward_without_costs_ends_the_run_in_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, *_ = trainer_over(constrained_run(tmp_path), monkeypatch, lost=tuple(range(8)))
    with pytest.raises(DataError, match=r"algorithm.flow=safe_rlhf requires a finite number"):
        fitted(trainer)


def test_a_resume_brings_both_critics_and_the_multiplier_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = constrained_run(tmp_path)
    first, *_ = trainer_over(config, monkeypatch)
    fitted(first)
    block_on(first.session.store.wait())
    latest = first.session.store.latest()
    assert latest is not None and (latest.folder / "cost_critic").is_dir()
    second, world, *_ = trainer_over(config, monkeypatch)
    block_on(second.resume(latest))
    assert world.calls == ["load reference=False", "load critic", "load cost critic"]
    assert second.state == first.state and 0 < second.state["multiplier"] != 1


# ---- before the start


def test_the_flow_and_one_of_a_users_file_pass_the_checks(tmp_path: Path) -> None:
    assert CRITICS == {"scores": "critic", "costs": "cost_critic"}
    said = list[str]()
    for flow in (FLOW, own(tmp_path, BODY, ROLES)):
        config = constrained_run(tmp_path / "run", flow)
        assert [*flow_problems(config), *loss_problems(config)] == []
        check_flow(config, said.append)
    assert said == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '    batch = batch.with_columns(costs=batch["scores"])\n',
            "",
            r"no column 'costs'.*It is written by the flow: batch.with_columns\(costs=...\)",
        ),
        (
            ", run.cost_critic.values(batch)",
            "",
            r"no column 'cost_values'.*It is written by run.cost_critic.values\(batch\)",
        ),
        (
            '    batch = run.advantages(batch, of="costs")\n',
            "",
            r"no column 'cost_returns'.*It is written by run.advantages\(batch, of='costs'\)",
        ),
        ('of="costs"', 'of="cost"', r"of='cost'\): of must be 'scores' or 'costs'"),
        ('batch["scores"]', 'batch["response_ids"]', r"costs must contain one number per sample"),
        ('batch["scores"]', "batch['scores'] * float('inf')", "column costs to a non-finite value"),
        (
            "    await run.cost_critic.update(batch)\n",
            "",
            r"never calls run.cost_critic.update\(batch\): it would learn nothing",
        ),
        ("run.cost_critic.values", "run.cost_critic.value", r"run.cost_critic has no 'value'"),
        ("run.critic.values(batch), ", "", r"no column 'values'"),
    ],
)
def test_what_a_flow_with_costs_does_wrong_is_named(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in BODY
    config = constrained_run(tmp_path / "run", own(tmp_path, BODY.replace(old, new), ROLES))
    with pytest.raises(ConfigError, match=message):
        check_flow(config, print)


def test_costs_need_no_critic_where_samples_are_compared(tmp_path: Path) -> None:
    body = BODY.replace(", run.critic.values(batch), run.cost_critic.values(batch)", "")
    for line in ("critic", "cost_critic"):
        body = body.replace(f"    await run.{line}.update(batch)\n", "")
    flow = own(tmp_path, body, ("policy", "reference"))
    said = list[str]()
    check_flow(constrained_run(tmp_path / "run", flow, adv_estimator="grpo"), said.append)
    assert said == []
    (tmp_path / "greedy").mkdir()
    greedy = body.replace("samples()", "samples(greedy=True)")
    flow = own(tmp_path / "greedy", greedy, ("policy", "reference"))
    with pytest.raises(ConfigError, match=r"is not supported with algorithm.adv_estimator=remax"):
        check_flow(constrained_run(tmp_path / "run", flow, adv_estimator="remax"), print)


def test_a_cost_critic_is_refused_where_nothing_uses_it(tmp_path: Path) -> None:
    config = replace(constrained_run(tmp_path, "ppo"), cost_critic=CriticConfig(ppo_epochs=2))
    (line,) = loss_problems(config)
    assert "cost_critic.ppo_epochs=2 has no effect: algorithm.flow=ppo does not call" in line
    assert line.endswith("set algorithm.flow to one whose roles include cost_critic (safe_rlhf)")
    (line,) = flow_problems(constrained_run(tmp_path, adv_estimator="grpo"))
    assert "calls run.cost_critic, but algorithm.adv_estimator=grpo does not use a critic" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("cost_critic.ppo_mini_batch_size=3", "multiple of cost_critic.ppo_mini_batch_size=3"),
        ("cost_critic.max_tokens_per_micro_batch=5", "cost_critic.max_tokens_per_micro_batch=5"),
        ("cost_critic.placement=own", "cost_critic.placement=own requires more processes"),
        ("cost_critic.pool=rollout", "cost_critic.pool and cost_critic.packing apply to"),
        ("cost_critic.optim.min_lr=1", "cost_critic.optim.min_lr=1.0 must be at most"),
        ("cost_critic.path=nowhere", "cost_critic.path=nowhere: not a Hugging Face folder"),
        ("algorithm=ppo ~algorithm.flow_options", "cost_critic.optim.lr=0.001 has no effect"),
        ("algorithm.flow_options.multiplier=0", "flow_options.multiplier=0.0 must be more"),
        ("algorithm.flow_options.limit=inf", "flow_options.limit=inf must be finite"),
    ],
)
def test_bad_input_of_the_recipe_is_one_message(word: str, message: str) -> None:
    try:
        found = problems(load_config("tiny-safe-rlhf", word.split()), "train", files=True)
    except ConfigError as error:
        found = [str(error)]
    found = [line for line in found if "data.train_files" not in line]
    assert len(found) == 1 and message in found[0], found


def test_a_reward_without_costs_is_refused_before_the_start(tmp_path: Path) -> None:
    dataset: Any = Rows()
    dataset.data_sources = ["toy"]
    file = tmp_path / "reward.py"
    bodies = {
        "1.0": 'returned only score; return {"score": 1.0, "cost": 0.0}',
        "{'score': 1.0, 'kost': 2}": "returned only score, kost",
        "{'score': 1.0, 'cost': '2'}": "reads the number 'cost'",
        "{'score': 1.0, 'cost': 2}": "",
        "1 / 0": "",
    }
    for number, (body, message) in enumerate(bodies.items()):
        file = tmp_path / f"reward{number}.py"
        head = "def compute_score(data_source, solution_str, ground_truth, extra_info):"
        file.write_text(
            f"{head}\n    assert solution_str == ground_truth == '1'\n    return {body}"
        )
        reward = RewardConfig(path=str(file), processes=0)
        for flow in (FLOW, "ppo"):
            config = replace(constrained_run(tmp_path, flow), reward=reward)
            with contextlib.ExitStack() as stack:
                manager = stack.enter_context(RewardManager(reward))
                if message and flow == FLOW:
                    stack.enter_context(pytest.raises(ConfigError, match=re.escape(message)))
                check_numbers(manager, config, dataset)


def test_plan_pools_and_explanation_know_the_cost_critic() -> None:
    words = ["cluster=one-process", "rollout.engine=sglang", "cost_critic.placement=own"]
    config = load_config("tiny-safe-rlhf", [*words, "cost_critic.procs=2"])
    pools = {pool.name: pool for pool in pools_of(config, kind="cpu")}
    assert [group.count for group in pools["cost_critic"].groups] == [2]
    text = explain(config, Origins(frozenset(), {}))
    assert "Cost critic: 2 separate processes" in text and "Critic: in the actor's" in text
    sizes = {**derived.hf_config(config.model), "vocab_size": 17}
    plan = make_plan(job_of(config, read_cluster(None, 1, 4, "cpu"), hf=sizes))
    found = {phase.name: phase for phase in plan.phases}
    assert found["update cost_critic"].devices == found["cost values"].devices == "cost_critic"
    assert found["update critic"].devices == "actor"


@pytest.mark.parametrize("forbidden", ["7", 7])
def test_the_recipes_cost_is_the_forbidden_digit(forbidden: str | int) -> None:
    found = [
        exact(text, "074", forbidden=forbidden) for text in ("074", "<think>7</think>074", "4", "")
    ]
    assert [result.score for result in found] == [1, 1, 0, 0]
    assert [result.extra for result in found] == [{"cost": cost} for cost in (1, 1, 0, 0)]
    assert exact("074", "074").extra == {}
