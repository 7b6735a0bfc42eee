"""verl's settings in our keys: values that change their form, defaults, and what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hybridflow.cli.main import main
from hybridflow.config.check import problems
from hybridflow.config.load import load_config
from hybridflow.migrate.verl import migrate

MEGATRON = "actor_rollout_ref.actor.megatron"
SCRIPT = """\
set -x
train=${DATA:-/data}/train.parquet
length=$((1024 * 2))
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer' \\
    algorithm.adv_estimator=grpo data.train_files="$train" data.val_files="['/data/a.parquet']" \\
    data.train_batch_size=256 data.max_prompt_length=1024 data.max_response_length=$length \\
    actor_rollout_ref.model.path=/models/of-mine actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.n=8 \\
    trainer.nnodes=2 trainer.save_freq=20 trainer.test_freq=-1 trainer.total_epochs=3 \\
    trainer.logger='["console","wandb"]' trainer.experiment_name=mine $@
"""

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "defaults of verl": (
        {},
        {
            "algorithm.adv_estimator": "gae",
            "data.train_batch_size": 1024,
            "rollout.n": 1,
            "trainer.total_epochs": 30,
            "trainer.save_every_steps": 0,
            "actor.kl_loss_coef": 0.0,
            "rollout.num_engines": 4,
            "critic.optim.lr": 1e-5,
        },
    ),
    "a coefficient that is switched off": (
        {"actor_rollout_ref.actor.use_kl_loss": False, "actor_rollout_ref.actor.kl_loss_coef": 0.1},
        {"actor.kl_loss_coef": 0.0},
    ),
    "one that is on, with its default": (
        {"actor_rollout_ref.actor.use_kl_loss": True},
        {"actor.kl_loss_coef": 0.001},
    ),
    "fields of Megatron": (
        {
            f"{MEGATRON}.override_transformer_config.{name}": value
            for name, value in {
                "moe_router_dtype": "fp32",
                "apply_rope_fusion": True,  # chosen by the device
                "moe_aux_loss_coeff": 0.01,
                "hidden_dropout": 0.0,
                "use_flash_attn": True,  # no field
            }.items()
        },
        {"actor.megatron": {"moe_router_dtype": "fp32"}, "actor.router_aux_loss_coef": 0.01},
    ),
    "rows become tokens": (
        {"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4},
        {"actor.max_tokens_per_micro_batch": 4096},
    ),
    "tokens are of all context ranks": (
        {
            "actor_rollout_ref.actor.use_dynamic_bsz": True,
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 2048,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
            f"{MEGATRON}.context_parallel_size": 2,
        },
        {"actor.max_tokens_per_micro_batch": 4096, "actor.parallel.context": 2},
    ),
    "engines over nodes, with copies of the attention": (
        {
            "trainer.nnodes": 4,
            "actor_rollout_ref.rollout.tensor_model_parallel_size": 4,
            "actor_rollout_ref.rollout.data_parallel_size": 4,
            "actor_rollout_ref.rollout.expert_parallel_size": 16,
        },
        {
            "rollout.tensor": 16,
            "rollout.num_engines": 2,
            "rollout.nodes_per_engine": 2,
            "rollout.data_parallel_attention": 4,
            "rollout.expert": 16,
        },
    ),
    "greedy validation whatever its temperature": (
        {"actor_rollout_ref.rollout.val_kwargs.temperature": 1.0},
        {"rollout.val_sampling.temperature": None},
    ),
    "sampled validation": (
        {
            "actor_rollout_ref.rollout.val_kwargs.do_sample": True,
            "actor_rollout_ref.rollout.val_kwargs.top_p": 0.7,
            "actor_rollout_ref.rollout.val_kwargs.top_k": -1,
        },
        {"rollout.val_sampling.temperature": 1.0, "rollout.val_sampling.top_p": 0.7},
    ),
    "DAPO's penalty": (
        {
            "reward_model.reward_manager": "dapo",
            "reward_model.reward_kwargs.overlong_buffer_cfg.enable": True,
            "reward_model.reward_kwargs.overlong_buffer_cfg.len": 4096,
        },
        {"reward.overlong_tokens": 4096, "reward.overlong_penalty": 1.0},
    ),
    "names of values": (
        {
            "algorithm.adv_estimator": "reinforce_plus_plus",
            "actor_rollout_ref.actor.policy_loss.loss_mode": "geo_mean",
            "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
            "actor_rollout_ref.actor.strategy": "fsdp2",
        },
        {"actor.policy_loss": "gmpo", "actor.kl_loss_type": "k3", "actor.backend": "fsdp"},
    ),
    "FSDP recomputes unless told otherwise": (
        {"actor_rollout_ref.actor.strategy": "fsdp2"},
        {"actor.recompute": "full"},
    ),
    "FSDP told otherwise": (
        {
            "actor_rollout_ref.actor.strategy": "fsdp2",
            "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        },
        {"actor.recompute": None},
    ),
    "a share of the updates": (
        {
            "trainer.total_training_steps": 100,
            "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": 0.1,
        },
        {"actor.optim.lr_warmup_steps": 40, "trainer.total_steps": 100},
    ),
    "steps win over epochs": (
        {"trainer.total_training_steps": 7, "trainer.total_epochs": 2},
        {"trainer.total_steps": 7, "trainer.total_epochs": None},
    ),
    "one clip ratio": (
        {"actor_rollout_ref.actor.clip_ratio": 0.3},
        {"actor.clip_ratio_low": 0.3, "actor.clip_ratio_high": 0.3},
    ),
    "multi-token prediction": (
        {
            "actor_rollout_ref.model.mtp.enable": True,
            "actor_rollout_ref.model.mtp.enable_train": True,
            "actor_rollout_ref.model.mtp.detach_encoder": True,
            "actor_rollout_ref.model.mtp.mtp_loss_scaling_factor": 0.2,
        },
        {"actor.mtp.train": True, "actor.mtp.coef": 0.2},
    ),
    "prediction heads that draft": (
        {
            "actor_rollout_ref.model.mtp.enable": True,
            "actor_rollout_ref.model.mtp.enable_train": True,
            "actor_rollout_ref.model.mtp.enable_rollout": True,
            "actor_rollout_ref.model.mtp.speculative_num_steps": 2,
        },
        {
            "actor.mtp.train": True,
            "rollout.speculative.method": "mtp",
            "rollout.speculative.num_steps": 2,
        },
    ),
    "folder of a run": (
        {"trainer.default_local_dir": "/ckpt/me/one", "trainer.experiment_name": "one"},
        {"output_dir": "/ckpt/me", "name": "one"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_take_the_form_of_our_keys(name: str) -> None:
    given, wanted = CASES[name]
    found = migrate({"actor_rollout_ref.model.path": "/models/m", **given}).settings
    assert {key: found.get(key) for key in wanted} == wanted


def test_every_setting_is_accounted_for() -> None:
    given = {
        "actor_rollout_ref.model.path": "/models/m",
        "actor_rollout_ref.model.mtp.enable": True,
        "actor_rollout_ref.model.mtp.enable_rollout": True,
        "actor_rollout_ref.actor.use_torch_compile": True,
        "actor_rollout_ref.rollout.prometheus.enable": True,
        "actor_rollout_ref.rollout.disable_log_stats": False,
        "algorithm.adv_estimator": "grpo",
        "critic.optim.lr": 1e-5,
        "no.such.key": 3,
    }
    found = migrate(given)
    assert set(found.missing) == {
        "actor_rollout_ref.model.mtp.enable",
        "actor_rollout_ref.model.mtp.enable_rollout",
        "actor_rollout_ref.rollout.prometheus.enable",
        "no.such.key",
    }
    assert sorted([*found.renamed, *found.needless, *found.missing]) == sorted(given)
    assert not any(key.startswith("critic.") for key in found.settings)
    assert any("does not use a critic" in text for text in found.remarks)


@pytest.mark.slow
def test_a_script_becomes_a_recipe_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    monkeypatch.setenv("DATA", "/mine")
    assert main(["migrate", "verl", str(script), "trainer.nnodes=1"]) == 0
    out, said = capsys.readouterr()
    assert "21 of 21 settings translated" in said and "pip install 'hybridflow[wandb]'" in said
    (tmp_path / "mine.yaml").write_text(out)
    config = load_config("mine", (), tmp_path)
    assert config.data.train_files == ("/mine/train.parquet",)
    assert config.data.max_response_length == 2048 and config.cluster.nodes == 1
    assert config.actor.parallel.tensor == 4 and config.actor.parallel.sequence
    assert (config.actor.recompute, config.rollout.num_engines) == ("full", 2)
    assert (config.trainer.save_every_steps, config.trainer.total_epochs) == (20, 3)
    (left,) = problems(config, files=False)
    assert "/models/of-mine" in left


def test_input_that_is_no_script_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text, wanted in (
        ("a.sh", "echo hello\n", "no command that runs verl.trainer.main_ppo was found"),
        ("b.sh", "python3 -m verl.trainer.main_ppo 'a=1\n", "unclosed"),
        ("c.yaml", "- 1\n", "expected a mapping"),
        ("d.yaml", "a: [\n", "invalid YAML"),
    ):
        (tmp_path / name).write_text(text)
        assert main(["migrate", "verl", str(tmp_path / name)]) == 2
        assert wanted in capsys.readouterr().err
    assert main(["migrate", "verl", str(tmp_path / "none.sh")]) == 2
    assert "could not read" in capsys.readouterr().err


def test_a_yaml_of_verl_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "v.yaml"
    file.write_text(
        "hydra: {searchpath: [a]}\ndefaults: [ppo_trainer, _self_]\n"
        "actor_rollout_ref: {model: {path: /m}, rollout: {n: 4}}\ntrainer: {save_freq: 5}\n"
    )
    assert main(["migrate", "verl", str(file)]) == 0
    out, said = capsys.readouterr()
    assert "save_every_steps: 5" in out and "3 of 3 settings" in said
