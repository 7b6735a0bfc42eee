"""Critic and reward model: what cannot run is refused before anything starts, and `--explain` says
where they live."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.config.check import problems
from hybridflow.config.explain import Origins, explain
from hybridflow.config.load import load_config
from hybridflow.errors import SchemaError
from hybridflow.trainer.groups import check_steps, update_step
from hybridflow.workers.model_role import teacher_method

PPO = ("algorithm=ppo", "+critic=tiny")
OWN = ("algorithm=ppo", "+critic=tiny-own")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def model_folder(path: str) -> str:
    Path(path).mkdir(parents=True)
    (Path(path) / "config.json").write_text("{}")
    return path


def found(*overrides: str, job: str = "train", name: str = "e2e") -> list[str]:
    return problems(load_config(name, overrides), job)


@pytest.mark.slow
def test_the_recipes_pass() -> None:
    assert found(name="tiny-moe-reward", job="train-reward") == []
    [missing] = found(name="tiny-moe-ppo")
    assert "reward_model.path=runs/tiny-moe-reward/export" in missing and "train-reward" in missing
    model_folder("runs/tiny-moe-reward/export")
    assert found(name="tiny-moe-ppo") == []
    assert found(*PPO) == found(*OWN) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((*PPO, "critic.parallel.tensor=2"), (
            r"critic.parallel has no effect with critic.placement=colocated"
        )),
        ((*OWN, "critic.procs=3"), (
            r"tensor x pipeline x context = 2 does not divide critic.procs=3"
        )),
        ((*OWN, "critic.parallel.sequence=true"), (
            r"critic.parallel.sequence=true requires critic.parallel.tensor > 1"
        )),
        ((*PPO, "critic.ppo_mini_batch_size=3"), r"data.train_batch_size=4 is not a multiple of "
                                                 r"critic.ppo_mini_batch_size=3"),
        ((*PPO, "critic.max_tokens_per_micro_batch=5"), (
            r"critic.max_tokens_per_micro_batch=5 is less than the "
            r"longest sample, 24"
        )),
        ((*PPO, "trainer.critic_warmup=2"), (
            r"trainer.critic_warmup=2 leaves no step of trainer.total_steps=2"
        )),
        (("trainer.critic_warmup=1",), (
            r"trainer.critic_warmup=1 requires a critic; set algorithm.adv_estimator=gae"
        )),
        ((*PPO, "algorithm.lam=1.5"), r"algorithm.lam=1.5 must be at least 0 and at most 1"),
        ((*PPO, "critic.cliprange_value=0"), r"critic.cliprange_value=0.0 must be more than 0"),
        (("algorithm.kl_target=0.1",), (
            r"algorithm.kl_target=0.1 adapts algorithm.kl_coef, which is 0"
        )),
        (("reward_model.path=nowhere",), r"reward_model.path=nowhere: not a Hugging Face folder"),
        (("reference.path=nowhere", "reference.placement=own"), (
            r"reference.path=nowhere: not a Hugging Face folder"
        )),
        (("reference.placement=own", "reference.parallel.tensor=2"), (
            r"tensor x pipeline x context = 2 does not "
            r"divide reference.procs=1"
        )),
        ((*PPO, "critic.optim.lr=0"), r"critic.optim.lr=0.0 must be more than 0"),
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused(overrides: tuple[str, ...], expected: str) -> None:
    [line] = found(*overrides)
    assert expected in line, line


def test_a_teacher_needs_processes_of_its_own() -> None:
    [line] = found(f"reference.path={model_folder('teacher')}")
    assert "another model requires separate processes; set reference.placement=own" in line
    assert (
        found("reference.path=teacher", "reference.placement=own", "reference.offload.weights=true")
        == []
    )
    [line] = found("reference.offload.weights=true")
    assert (
        "with reference.placement=colocated, because a colocated reference uses actor.offload.weights"
        in line
    )
    text = explain(
        load_config("e2e", ["reference.path=teacher", "reference.placement=own"]),
        Origins(frozenset(), {}),
    )
    assert (
        "Reference: teacher; one forward pass over a step's samples, in 1 separate processes"
        in text
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "settings"),
    [
        ("critic", PPO),
        ("reference", ("reference.placement=own",)),
        ("reward_model", ()),
        ("teacher", ("teacher.top_k=4",)),
    ],
)
def test_every_role_must_understand_the_policys_tokens(
    role: str, settings: tuple[str, ...]
) -> None:
    policy = Path(model_folder("policy"))
    other = Path(model_folder("other"))
    for folder, size in ((policy, 17), (other, 16)):
        (folder / "config.json").write_text(json.dumps({"vocab_size": size}))
    overrides = (
        *settings,
        f"{role}.path=other",
        "~model.hf_config",
        "model.path=policy",
        "model.tokenizer=null",
    )

    def of_role() -> list[str]:
        return [line for line in found(*overrides) if line.startswith(role)]

    [line] = of_role()
    assert f"{role}.path=other has vocab_size=16, but the policy has 17" in line
    (other / "config.json").write_text(json.dumps({"vocab_size": 18}))
    assert len(of_role()) == (role == "teacher")  # the others may have more rows than tokens
    (other / "config.json").write_text(json.dumps({"vocab_size": 17}))
    assert of_role() == []
    words = {"a": 0, "b": 1}
    tokenizer = {"model": {"vocab": words}, "added_tokens": [{"content": "<eos>", "id": 2}]}
    (policy / "tokenizer.json").write_text(json.dumps(tokenizer))
    (other / "tokenizer.json").write_text(
        json.dumps({**tokenizer, "model": {"vocab": {"a": 1, "b": 0}}})
    )
    [line] = of_role()
    assert f"{role}.path=other has a different tokenizer (2 of its 3 tokens" in line


@pytest.mark.slow
def test_a_teacher_speaks_the_language_of_the_policy() -> None:
    folder = Path(model_folder("teacher"))
    (folder / "config.json").write_text('{"vocab_size": 16}')
    assert found("teacher.path=teacher", "teacher.top_k=4", "model.hf_config.vocab_size=16") == []
    settings = ("teacher.path=teacher", "teacher.top_k=4")
    [line] = found(*settings, "model.hf_config.vocab_size=17")
    assert "teacher.path=teacher has vocab_size=16, but the policy has 17" in line
    [line] = found("teacher.path=teacher")
    assert "teacher.top_k=32 is more than the 16 tokens in the vocabulary" in line
    [line] = found("teacher.path=nowhere")
    assert (
        "teacher.path=nowhere: not a Hugging Face folder" in line
        and "`hybridflow sft --help`" in line
    )
    [line] = found(*settings, "teacher.parallel.tensor=2")
    assert "tensor x pipeline x context = 2 does not divide teacher.procs=1" in line
    [line] = found(*settings, "teacher.placement=colocated", "teacher.parallel.tensor=2")
    assert (
        "teacher.parallel has no effect with teacher.placement=colocated, because colocated roles "
        "use the layout actor.parallel"
    ) in line
    text = explain(load_config("e2e", settings), Origins(frozenset(), {}))
    assert (
        "Teacher: teacher; its 4 most likely tokens at every response token, 1 separate processes"
        in text
    )
    check_steps(load_config("e2e", settings))


@pytest.mark.slow
def test_distillation_needs_a_teacher_and_reads_what_it_writes() -> None:
    (Path(model_folder("teacher")) / "config.json").write_text('{"vocab_size": 16}')
    one = "actor.distillation.coef=0.5"
    alone = "actor.distillation.task_rewards=false"
    [line] = found(one)
    assert "actor.distillation.coef=0.5 requires a teacher; set teacher.path" in line
    [line] = found(alone)
    assert (
        "actor.distillation.task_rewards=false with actor.distillation.coef=0: nothing would "
        "be trained"
    ) in line
    given = ("teacher.path=teacher", "teacher.top_k=4")
    sampled = (*given, one, alone, "actor.distillation.loss=low_var_kl+")
    for settings, said, reads, writer in (
        (given, "not used for training (actor.distillation.coef is 0)", (), "compute_teacher_top"),
        (
            (*given, one),
            "distilled with forward_kl_topk, actor.distillation.coef 0.5, in addition to the rewards",
            ("teacher_top_log_probs", "teacher_top_ids"),
            "compute_teacher_top",
        ),
        (
            sampled,
            "distilled with k3+, actor.distillation.coef 0.5, without rewards",
            ("teacher_log_probs",),
            "compute_teacher_log_probs",
        ),
    ):
        assert found(*settings, "model.hf_config.vocab_size=16") == []
        config = load_config("e2e", settings)
        assert said in explain(config, Origins(frozenset(), {}))
        assert (
            tuple(name for name in update_step(config).reads if name.startswith("teacher")) == reads
        )
        assert teacher_method(config.actor.distillation).__name__ == writer
        check_steps(config)


def test_reward_training_needs_pairs_that_fit() -> None:
    settings = {"job": "train-reward", "name": "tiny-moe-reward"}
    [line] = found("data.prepare.options.num_pairs=0", **settings)
    assert "pairs.parquet will not be written, because data.prepare.options.num_pairs is 0" in line
    [line] = found("reward_model.max_tokens_per_micro_batch=47", **settings)
    assert "less than two samples of 24" in line
    assert any(
        "reward_training.steps=0" in line for line in found("reward_training.steps=0", **settings)
    )
    assert any(
        "nowhere.parquet does not exist" in line
        for line in found("reward_training.train_files=[nowhere.parquet]", **settings)
    )


@pytest.mark.slow
def test_explain_says_where_they_live_and_how_the_reward_is_made() -> None:
    def text(*overrides: str) -> str:
        return explain(load_config("e2e", overrides), Origins(frozenset(), {}))

    assert "Critic: none" in text() and "Reward model: none" in text()
    colocated = text(*PPO, f"reward_model.path={model_folder('rm')}", "reward_model.weight=0.5")
    assert (
        "Critic: in the actor's processes" in colocated
        and "reward.weight 1 x score + reward_model.weight 0.5 x its score" in colocated
    )
    own = text(*OWN, "critic.ppo_mini_batch_size=2")
    assert (
        "Critic: 2 separate processes (tensor 1 x pipeline 2 x expert 1)" in own
        and "4 / 2 x 1 = 2 per step" in own
    )


def test_the_columns_of_every_step_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridflow.trainer import groups

    config = load_config("e2e", [*PPO, "reward_model.path=rm"])
    check_steps(config)
    monkeypatch.setitem(groups.PASSES, "value", groups.ModelWorker.compute_scores)
    with pytest.raises(SchemaError, match="advantages reads column 'values'"):
        check_steps(config)


@pytest.mark.slow
def test_recorded_pairs_are_for_estimators_of_preferences() -> None:
    def of_pairs(*overrides: str) -> list[str]:
        return found(*overrides, name="tiny-dpo")

    assert of_pairs() == [] and of_pairs("algorithm=ipo") == [] and of_pairs("algorithm=kto") == []
    config = load_config("tiny-dpo")
    check_steps(config)
    assert "Rollout: none during steps" in explain(config, Origins(frozenset(), {}))
    [line] = of_pairs("algorithm.adv_estimator=grpo")
    assert ("learns from answers sampled by the policy; set adv_estimator to dpo, ipo, kto") in line
    [line] = of_pairs("rollout.n=8")
    assert (
        "rollout.n=8 must be 2 with data.answers=pairs: a prompt has two answers, chosen and rejected"
    ) in line
    [line] = of_pairs("data.prepare.options.num_pairs=0")
    assert "pairs.parquet will not be written, because data.prepare.options.num_pairs is 0" in line
    for override, default in (
        ("actor.old_log_probs=engine", "trainer"),
        ("algorithm.dynamic_sampling=2", "0"),
        ("algorithm.overlong_filter=true", "false"),
        ("data.weight_key=weight", "null"),
    ):
        [line] = of_pairs(override)
        assert "applies to sampled answers" in line and line.endswith(f"set it to {default}"), line
    [line] = of_pairs("actor.rollout_correction.weight=token")
    assert (
        "actor.rollout_correction is not supported with data.answers=pairs, because no engine "
        "sampled those answers" in line
    )
