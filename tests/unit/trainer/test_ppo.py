"""The loop with a critic and a reward model, with small stand-ins: order of calls, what each is
given, what a checkpoint keeps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.algorithms.whitening import whiten
from hybridflow.batch import DataProto, Jagged
from hybridflow.config.schema import (
    AlgorithmConfig,
    ReferenceConfig,
    RewardConfig,
    RewardModelConfig,
    RunConfig,
)
from hybridflow.errors import HybridFlowError, WorkerError
from hybridflow.observe.progress import Progress
from hybridflow.observe.rollouts import read_rollouts
from hybridflow.observe.timeline import read_timeline
from hybridflow.saving.manifest import say_saved
from hybridflow.single_controller import block_on
from hybridflow.trainer.advantages import Advantages
from hybridflow.trainer.loop import RLTrainer
from hybridflow.trainer.model_scores import agreement
from hybridflow.trainer.protocols import Update
from hybridflow.trainer.recovery import fit_with_restarts
from hybridflow_kernels.scans import gae
from tests.unit.trainer.critics import Critic, FakeRole, PpoWorld
from tests.unit.trainer.worlds import World, config_of, records, trainer_of

NAMES = (
    "vf_loss",
    "vf_clipfrac",
    "vpred_mean",
    "grad_norm",
    "lr",
    "vf_explained_var",
    "values/mean",
    "returns/mean",
    "rewards/mean",
)


class Model(FakeRole):
    """Scores by row number."""

    async def compute_scores(self, batch: DataProto) -> DataProto:
        await asyncio.sleep(0)  # a round in which others go on
        return DataProto.from_columns({"rm_scores": np.arange(len(batch), dtype=np.float32)})


class Teacher(FakeRole):
    """Two tokens with a quarter of the probability each."""

    def compute_teacher_top(self, batch: DataProto) -> DataProto:
        responses = batch.jagged("response_ids")
        log_probs = np.full((len(responses.values), 2), np.log(0.25), np.float32)
        ids = np.zeros_like(log_probs, np.int64)
        return DataProto.from_columns(
            {
                "teacher_top_log_probs": Jagged(log_probs, responses.offsets),
                "teacher_top_ids": Jagged(ids, responses.offsets),
            }
        )


def ppo_of(folder: Path, world: World, critic: Critic, **settings: int) -> RLTrainer:
    config = config_of(folder, **settings)
    config = replace(
        config,
        algorithm=AlgorithmConfig(adv_estimator="gae", gamma=0.9, lam=0.8),
        reward_model=RewardModelConfig(weight=0.5),
    )
    return trainer_of(config, world, critic=critic, reward_model=Model())


def test_the_critic_values_before_advantages_and_learns_before_the_policy(tmp_path: Path) -> None:
    world = PpoWorld()
    critic = Critic(world)
    trainer = ppo_of(tmp_path, world, critic, total_steps=2)
    block_on(trainer.start_from_present_weights())
    block_on(trainer.fit())
    step = ["generate", "log_probs", "values", "update_critic", "update"]
    start = ["set_optimizer", "export", "start critic from start"]
    assert world.calls == [
        *start,
        "sync 0",
        "answer",
        *step,
        "sync 1",
        *step,
        "sync 2",
        "answer",
        "save",
        "save critic",
    ]
    [record, _] = records(trainer, "train")
    assert {f"critic/{name}" for name in NAMES} <= record.keys()
    assert (
        record["critic/vf_loss"] == 0.25
        and record["reward_model/score/max"] == record["reward_model/counted/max"] == 7
    )
    assert (
        record["perf/offloaded_gb/Critic"] == record["perf/offloaded_gb/Model"] == 0.5
        and record["perf/max_memory_allocated_gb"] == 3
    )


class SlowCritic(Critic):
    """A critic whose update ends when the loop has come to a place where it waits for it."""

    async def update(
        self, method: Callable[..., Any], batch: DataProto, seed: int | None = None
    ) -> Sequence[Update]:
        updates = await super().update(method, batch, seed)
        for _ in range(1000):  # far more rounds of the event loop than a step over stand-ins takes
            await asyncio.sleep(0)
        self.end()
        return updates

    def end(self) -> None:
        self.world.calls.append("critic ends")


def with_critic_at(trainer: RLTrainer, placement: Any, pool: str | None = None) -> RLTrainer:
    critic = replace(trainer.config.critic, placement=placement, pool=pool)
    roles = {"actor": trainer.policy, **trainer.others}
    parts = (trainer.engines, trainer.samples, trainer.records.validator)
    return RLTrainer(replace(trainer.config, critic=critic), trainer.session, roles, *parts)


@pytest.mark.parametrize(
    ("placement", "pool"), [("own", None), ("own", "rollout"), ("colocated", None)]
)
def test_the_update_of_a_critic_with_devices_of_its_own_lasts_into_the_next_generation(
    tmp_path: Path, placement: Any, pool: str | None
) -> None:
    """The update ends before the critic computes again, and before a checkpoint. Where the critic
    shares devices with policy or engines, it ends before these go on."""
    world = PpoWorld()
    critic = SlowCritic(world)
    trainer = ppo_of(tmp_path, world, critic, total_steps=4, save_every_steps=3)
    trainer = with_critic_at(trainer, placement, pool)
    block_on(trainer.start_from_present_weights())
    block_on(trainer.fit())
    calls = world.calls[world.calls.index("sync 0") :]
    # the reward model's pass comes first on the policy's devices
    passes = ["values", "log_probs"] if placement == "own" else ["log_probs", "values"]
    begun = ["generate", *passes, "update_critic"]
    if placement == "own" and pool is None:
        ahead = ["generate", "log_probs", "critic ends", "values", "update_critic", "update"]
        steps = [
            *begun,
            "update",
            "sync 1",
            *ahead,
            "sync 2",
            *ahead,
            "sync 3",
            "critic ends",
            "save",
            "save critic",
        ]
        steps += [*begun, "update", "sync 4", "answer", "critic ends", "save", "save critic"]
    else:
        one = [*begun, *(("update", "critic ends") if pool else ("critic ends", "update"))]
        steps = [*one, "sync 1", *one, "sync 2", *one, "sync 3", "save", "save critic"]
        steps += [*one, "sync 4", "answer", "save", "save critic"]
    assert calls == ["sync 0", "answer", *steps]
    found = records(trainer, "train")
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    assert all(
        record["critic/vf_loss"] == 0.25 and record["timing_s/update_critic"] >= 0
        for record in found
    )
    timeline = read_timeline(trainer.session.folder / "timeline.jsonl")
    assert [one["step"] for one in timeline if one["name"] == "update_critic"] == [1, 2, 3, 4]


def test_a_critic_lost_beside_a_generation_takes_its_own_step_back(tmp_path: Path) -> None:
    world = PpoWorld()
    alive = [True]

    class Lost(SlowCritic):
        def end(self) -> None:
            if self.world.calls.count("update_critic") == 2:
                alive[0] = False
                raise WorkerError(
                    "the worker process died", role="critic", rank=0, node="here", method="update"
                )

        def is_alive(self) -> bool:
            return alive[0]

        async def restart(self) -> None:
            alive[0] = True
            self.world.calls.append("restart")

    critic = Lost(world)
    trainer = with_critic_at(ppo_of(tmp_path, world, critic, total_steps=3), "own")
    block_on(trainer.start_from_present_weights())
    groups: Any = {"critic": critic}
    block_on(fit_with_restarts(trainer, groups, 1, Progress(0, "", enabled=False)))
    at = world.calls.index("restart")
    assert world.calls[:at].count("generate") == 3  # the third step's answers were there already
    assert [record["step"] for record in records(trainer, "train")] == [1, 2, 3]


def test_what_the_critic_learns_from_is_gae_of_score_and_model_score(tmp_path: Path) -> None:
    world = PpoWorld()
    critic = Critic(world)
    block_on(ppo_of(tmp_path, world, critic, total_steps=1).fit())
    [batch] = critic.seen
    scores = np.arange(8) % 2 == 0
    rewards = scores + 0.5 * np.arange(8)
    np.testing.assert_allclose(batch["rewards"], rewards, rtol=1e-6)
    lengths = torch.from_numpy(np.asarray(batch.lengths("response_ids")))
    token = torch.zeros(int(lengths.sum()))
    token[lengths.cumsum(0) - 1] = torch.tensor(rewards, dtype=torch.float32)
    advantages, returns = gae(
        token,
        torch.from_numpy(np.array(batch.jagged("values").values)),
        lengths,
        gamma=0.9,
        lam=0.8,
    )
    np.testing.assert_allclose(batch.jagged("returns").values, returns.numpy(), rtol=1e-6)
    np.testing.assert_allclose(
        batch.jagged("advantages").values, whiten(advantages).numpy(), rtol=1e-6
    )


def test_rollouts_alone_are_scored_by_the_reward_model(tmp_path: Path) -> None:
    world = PpoWorld()
    trainer = ppo_of(tmp_path, world, Critic(world), total_steps=2, rollout_only=True)
    block_on(trainer.fit())
    assert world.calls == ["sync 0", "answer", "generate", "generate"]
    found = records(trainer, "train")
    assert [record["reward_model/score/max"] for record in found] == [7, 7]
    rows = read_rollouts(trainer.session.folder / "rollouts" / "step_000002.parquet")
    assert [row["rm_score"] for row in rows] == list(range(8))


def test_a_teacher_adds_its_columns_before_updates(tmp_path: Path) -> None:
    world = PpoWorld()
    critic = Critic(world)
    trainer = ppo_of(tmp_path, world, critic, total_steps=1)
    roles = {"actor": trainer.policy, **trainer.others, "teacher": Teacher()}
    parts = (trainer.engines, trainer.samples, trainer.records.validator)
    block_on(RLTrainer(trainer.config, trainer.session, roles, *parts).fit())
    [batch] = critic.seen
    assert batch.jagged("teacher_top_log_probs").values.shape == (
        batch.lengths("response_ids").sum(),
        2,
    )
    [record] = records(trainer, "train")
    assert (
        record["teacher/top_mass"] == pytest.approx(0.5)
        and record["perf/offloaded_gb/Teacher"] == 0.5
    )


def test_the_critic_warms_up_alone(tmp_path: Path) -> None:
    world = PpoWorld()
    trainer = ppo_of(tmp_path, world, Critic(world), total_steps=3, critic_warmup=2)
    block_on(trainer.fit())
    assert [call for call in world.calls if call.startswith("update")] == ["update_critic"] * 3 + [
        "update"
    ]
    assert [call for call in world.calls if call.startswith("sync")] == [
        "sync 0",
        "sync 1",
        "sync 2",
        "sync 3",
    ]
    warm_up, _, last = records(trainer, "train")
    assert "actor/loss" not in warm_up and "critic/vf_loss" in warm_up and "actor/loss" in last


def test_a_resume_brings_the_critic_and_the_kl_coefficient_back(tmp_path: Path) -> None:
    world = PpoWorld()
    first = ppo_of(tmp_path, world, Critic(world), total_steps=2)
    first.advantages.control.value = 0.125
    block_on(first.fit())
    block_on(first.session.store.wait())
    latest = first.session.store.latest()
    assert latest is not None and latest.critic.is_dir()
    again = PpoWorld()
    second = ppo_of(tmp_path, again, Critic(again), total_steps=3)
    block_on(second.resume(latest))
    assert again.calls == ["load reference=False", "load critic"]
    assert second.advantages.control.value == 0.125 and second.step == 2


class Frozen(FakeRole):
    """A reference in processes of its own."""

    def __init__(self, world: World) -> None:
        self.world = world

    def fill(self, folder: Path) -> None:
        self.world.calls.append(f"start reference from {folder.name}")

    def compute_ref_log_probs(self, batch: DataProto) -> DataProto:
        self.world.calls.append("own reference")
        return batch.select(["rollout_log_probs"]).rename({"rollout_log_probs": "ref_log_probs"})


@pytest.mark.parametrize("path", [None, "teacher"])
def test_a_reference_of_its_own_takes_the_policy_as_it_begins_or_stays_a_teacher(
    tmp_path: Path, path: str | None
) -> None:
    world = PpoWorld()
    config = replace(
        config_of(tmp_path, kl=0.1, total_steps=1),
        reference=ReferenceConfig(placement="own", path=path),
    )
    trainer = trainer_of(config, world, reference=Frozen(world))
    block_on(trainer.start_from_present_weights())
    # a teacher has its weights already
    filled = ["export", "start reference from start"] if path is None else []
    assert world.calls == ["set_optimizer", *filled]  # no weights are swapped, none are kept twice
    block_on(trainer.fit())
    block_on(trainer.session.store.wait())
    assert "own reference" in world.calls and "compute_ref_log_probs" not in world.calls
    latest = trainer.session.store.latest()
    assert latest is not None
    world.calls.clear()
    block_on(trainer.resume(latest))
    assert world.calls == ["load reference=False", *filled[-1:]]


def test_a_checkpoint_counts_when_the_critic_too_is_on_the_disk(tmp_path: Path) -> None:
    world = PpoWorld()
    critic = Critic(world)
    trainer = ppo_of(tmp_path, world, critic, total_steps=1)
    critic.writes = False
    block_on(trainer.fit())
    time.sleep(0.3)
    assert trainer.session.store.latest() is None
    folder = trainer.session.folder / "checkpoints" / "global_step_1.partial" / "critic"
    (folder / "manifest.json").write_text("{}")
    say_saved(folder)
    block_on(trainer.session.store.wait())
    latest = trainer.session.store.latest()
    assert latest is not None and latest.step == 1


def test_a_critic_gradient_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    world = PpoWorld()
    with pytest.raises(
        HybridFlowError,
        match=r"step 1: a gradient of the critic is not finite .*Reduce critic\.optim\.lr",
    ):
        block_on(ppo_of(tmp_path, world, Critic(world, applied=False)).fit())
    assert "save" not in world.calls


# ---- advantages without a loop
# --------------------------------------------------------------------------------------------------


def batch_of(**columns: object) -> DataProto:
    rows = [np.arange(n) for n in (3, 1, 0, 2)]
    responses = Jagged.from_rows(rows, np.int64)
    old = Jagged(np.linspace(-1, 0, 6, dtype=np.float32), responses.offsets)
    reference = Jagged(np.linspace(-2, 0, 6, dtype=np.float32), responses.offsets)
    mask = Jagged(np.ones(6, np.bool_), responses.offsets)
    given = {
        "response_ids": responses,
        "response_mask": mask,
        "old_log_probs": old,
        "ref_log_probs": reference,
        "uid": np.array([0, 0, 1, 1]),
        "scores": np.array([1, 0, 1, 0], np.float32),
    }
    return DataProto.from_columns({**given, **columns})


def test_the_kl_penalty_follows_the_divergence_and_lowers_rewards() -> None:
    algorithm = AlgorithmConfig(kl_coef=0.5, kl_penalty="k1", kl_target=0.1, kl_horizon=8)
    advantages = Advantages(RunConfig(algorithm=algorithm))
    batch = batch_of()
    rewards = advantages.add(batch)["rewards"]
    difference = batch.jagged("old_log_probs").values - batch.jagged("ref_log_probs").values
    expected = [
        1 - 0.5 * difference[:3].sum(),
        -0.5 * difference[3],
        1.0,
        -0.5 * difference[4:].sum(),
    ]
    np.testing.assert_allclose(rewards, expected, rtol=1e-6)
    kl = (difference[:3].mean() + difference[3] + 0 + difference[4:].mean()) / 4
    assert advantages.metrics == pytest.approx(
        {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": 0.5}, rel=1e-6
    )
    # far above the target: the largest step
    assert advantages.control.value == pytest.approx(0.5 * (1 + 0.2 * 4 / 8))


def test_scores_are_weighted_and_squashed() -> None:
    batch = batch_of(rm_scores=np.array([0.0, 100.0, -100.0, 2.0], np.float32))
    config = RunConfig(
        reward=RewardConfig(weight=2.0),
        reward_model=RewardModelConfig(weight=0.5, squash="sigmoid"),
    )
    np.testing.assert_allclose(
        Advantages(config).add(batch)["rewards"],
        [2.25, 0.5, 2.0, 0.5 / (1 + np.exp(-2.0))],
        rtol=1e-5,
    )
    plain = Advantages(replace(config, reward_model=RewardModelConfig(weight=0.5)))
    np.testing.assert_allclose(plain.add(batch)["rewards"], [2.0, 50.0, -48.0, 1.0], rtol=1e-6)
    assert (
        plain.metrics["reward_model/counted/max"] == 100
        and plain.metrics["reward_model/share"] > 0.99
    )


def test_standard_scores_are_over_the_spread_of_the_whole_run_and_survive_a_resume() -> None:
    rng = np.random.default_rng(0)
    seen = [rng.normal(7, 3, 4).astype(np.float32) for _ in range(5)]
    config = RunConfig(
        reward=RewardConfig(weight=0.0),
        reward_model=RewardModelConfig(weight=2.0, squash="standard", clip=1.0),
    )
    advantages = Advantages(config)
    for number, scores in enumerate(seen):
        found = advantages.add(batch_of(rm_scores=scores))["rewards"] / 2.0
        so_far = np.concatenate(seen[: number + 1]).astype(np.float64)
        np.testing.assert_allclose(
            found, np.clip((scores - so_far.mean()) / so_far.std(), -1, 1), rtol=1e-5, atol=1e-6
        )
        resumed = Advantages(config)
        resumed.restore(advantages.state())
        advantages = resumed
    assert np.abs(found).max() <= 1 and advantages.model_scores.count == 20
    alike = Advantages(config).add(batch_of(rm_scores=np.full(4, 3.0, np.float32)))["rewards"]
    assert (alike == 0).all()  # and not NaN


def test_agreement_counts_pairs_of_one_prompt_that_the_verifier_tells_apart() -> None:
    prompt = np.array([0, 0, 0, 1, 1, 2, 2])
    verifier = np.array([1, 0, 0, 1, 1, 0, 1], np.float32)
    # of the first prompt one pair in order and one not, of the last a tie; the second has no pair,
    # and nothing crosses prompts
    assert agreement(np.array([2.0, 1, 3, 0, 9, 5, 5]), verifier, prompt) == pytest.approx(1.5 / 3)
    assert (
        agreement(verifier, verifier, prompt) == 1 and agreement(-verifier, verifier, prompt) == 0
    )
    assert agreement(verifier, np.ones(7), prompt) is None


def test_the_shares_of_the_two_scores_add_up() -> None:
    model = np.array([1.0, -2.0, 3.0, 0.5], np.float32)
    advantages = Advantages(RunConfig(reward_model=RewardModelConfig(weight=0.5)))
    batch = batch_of(rm_scores=model)
    advantages.add(batch)
    whole = np.asarray(batch["scores"]) + 0.5 * model
    assert advantages.metrics["reward_model/share"] == pytest.approx(
        1 - np.cov(batch["scores"], whole)[0, 1] / whole.var(ddof=1), rel=1e-5
    )
