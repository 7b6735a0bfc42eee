"""A key that is refused comes with the one that was meant: verl's names, names of another section,
options with dashes."""

from __future__ import annotations

import re

import pytest

from hybridflow.cli.main import parse
from hybridflow.config.keys import exists
from hybridflow.config.load import load_config
from hybridflow.config.schema import RunConfig
from hybridflow.config.verl_keys import ABSENT, RENAMED, counterpart
from hybridflow.errors import ConfigError

# The keys of verl's example scripts (0.7, most used first) that are refused here, as these write
# them.
OF_SCRIPTS = {
    "trainer.logger": "trainer.loggers",
    "trainer.project_name": "trainer.project",
    "trainer.log_val_generations": "trainer.tracked_samples",
    "trainer.experiment_name": "name",
    "trainer.nnodes": "cluster.nodes",
    "trainer.n_gpus_per_node": "cluster.procs_per_node",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.optim.lr": "actor.optim.lr",
    "trainer.save_freq": "trainer.save_every_steps",
    "trainer.test_freq": "trainer.test_every_steps",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "rollout.tensor",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout.mem_fraction_static",
    "actor_rollout_ref.actor.use_kl_loss": "actor.kl_loss_coef",
    "algorithm.use_kl_in_reward": "algorithm.kl_coef",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "actor.max_tokens_per_micro_batch",
    "actor_rollout_ref.rollout.n": "rollout.n",
    (
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    ): "actor.max_tokens_per_micro_batch",
    "actor_rollout_ref.actor.kl_loss_coef": "actor.kl_loss_coef",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "actor.offload.weights",
    "actor_rollout_ref.actor.entropy_coeff": "actor.entropy_coef",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "actor.recompute",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "actor.offload.optimizer",
    "actor_rollout_ref.actor.kl_loss_type": "actor.kl_loss_type",
    (
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    ): "reference.max_tokens_per_micro_batch",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "reference.offload.weights",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "rollout.extra_args",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "actor.max_tokens_per_micro_batch",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": "actor.parallel.tensor",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": "actor.parallel.pipeline",
    "critic.model.path": "critic.path",
    "trainer.default_local_dir": "output_dir",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "actor_rollout_ref.ref.megatron.tensor_model_parallel_size": "reference.parallel.tensor",
    "critic.ppo_micro_batch_size_per_gpu": "critic.max_tokens_per_micro_batch",
    "actor_rollout_ref.rollout.free_cache_engine": "rollout.sleep_while_training",
    "actor_rollout_ref.actor.megatron.grad_offload": "actor.offload.gradients",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path": "rollout.agent.tools",
    "trainer.resume_mode": "trainer.resume",
    "actor_rollout_ref.rollout.val_kwargs.n": "rollout.val_samples",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "rollout.val_sampling.temperature",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": "actor.parallel.expert",
    "actor_rollout_ref.rollout.temperature": "rollout.sampling.temperature",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "actor.policy_loss",
    "trainer.total_training_steps": "trainer.total_steps",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_checkpoints_to_keep",
    "reward_model.model.path": "reward_model.path",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": "reward.overlong_tokens",
    "custom_reward_function.path": "reward.path",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "actor.parallel.context",
    "actor_rollout_ref.rollout.max_num_seqs": "rollout.max_running_requests",
    "actor_rollout_ref.model.lora_rank": "actor.lora.rank",
    "actor_rollout_ref.actor.grad_clip": "actor.optim.clip_grad",
    (
        "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity"
    ): "actor.recompute",
    # with verl's outer section left out already
    "actor.entropy_coeff": "actor.entropy_coef",
    "rollout.tensor_model_parallel_size": "rollout.tensor",
    "rollout.temperature": "rollout.sampling.temperature",
    "ref.log_prob_micro_batch_size_per_gpu": "reference.max_tokens_per_micro_batch",
}
WITHOUT = (
    *(
        "actor_rollout_ref.model.use_remove_padding",
        "actor_rollout_ref.actor.use_dynamic_bsz",
    ),
    *(
        "data.return_raw_chat",
        "trainer.balance_batch",
        "actor_rollout_ref.actor.megatron.use_mbridge",
    ),
    *(
        "actor_rollout_ref.rollout.enforce_eager",
        "actor_rollout_ref.rollout.mode",
        "data.trust_remote_code",
    ),
    *(
        "trainer.del_local_ckpt_after_load",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.log",
        "actor_rollout_ref.actor.tau_pos",
        "actor_rollout_ref.actor.use_torch_compile",
    ),
)
OF_ANOTHER_SECTION = {
    "actor.lr": "actor.optim.lr",
    "critic.lr": "critic.optim.lr",
    "data.batch_size": "data.train_batch_size",
    "trainer.nodes": "cluster.nodes",
    "trainer.steps": "trainer.total_steps",
    "actor.tensor": "actor.parallel.tensor",
    "trainer.seed": "seed",
    "kl_coef": "algorithm.kl_coef",
}


def refusal(*words: str) -> str:
    """What is said of a recipe with these settings."""
    with pytest.raises(ConfigError) as caught:
        load_config("e2e", words)
    return str(caught.value)


@pytest.mark.parametrize(("theirs", "ours"), [*OF_SCRIPTS.items(), *OF_ANOTHER_SECTION.items()])
def test_a_key_of_another_place_is_refused_with_the_one_that_was_meant(
    theirs: str, ours: str
) -> None:
    assert refusal(f"{theirs}=1").startswith(
        f"unknown key {theirs.lstrip('+')}; did you mean {ours}?"
    )
    assert exists(RunConfig, ours)


@pytest.mark.parametrize("theirs", WITHOUT)
def test_a_key_without_a_counterpart_says_what_to_do(theirs: str) -> None:
    assert re.search(
        f"^unknown key {theirs.lstrip('+')}: .*(remove it|remove the key|extra_args|include it in)",
        refusal(theirs + "=1"),
    )


def test_every_name_in_verls_table_is_a_key() -> None:
    sections = ("actor", "reference", "critic", "reward_model")
    for theirs, ours in RENAMED.items():
        key = ours.partition(" ")[0]
        assert any(
            exists(RunConfig, key.replace("ROLE.", f"{section}.")) for section in sections
        ), theirs
        section = key.replace("ROLE.", "actor.").partition(".")[0]
        assert counterpart(theirs.replace("ROLE.", "actor.").removesuffix(".*"))[0].startswith(
            section
        )
    groups = "|".join(RunConfig.__dataclass_fields__)
    for text in ABSENT.values():
        for key in re.findall(rf"\b((?:{groups})\.[a-z_.]*[a-z])(?:=\w+)?", text):
            assert exists(RunConfig, key) or key.endswith((".json", ".jinja", ".md")), key
    # a name of ours needs no entry
    assert not [
        name
        for name in (*RENAMED, *ABSENT)
        if "ROLE" not in name and exists(RunConfig, name) and name != "seed"
    ]


def test_all_wrong_settings_are_named_at_once() -> None:
    text = refusal("trainer.nnodes=1", "trainer.total_steps=3", "actor.lr=1", "a b")
    assert text.startswith(
        "3 invalid settings:\n  unknown key trainer.nnodes; did you mean cluster.nodes?\n"
    )
    assert "did you mean actor.optim.lr?" in text and "override 'a b'" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--trainer.total_steps", "3"],
            "settings are words without dashes: trainer.total_steps=3",
        ),
        (["--actor.optim.lr=1e-6"], "settings are words without dashes: actor.optim.lr=1e-6"),
        (["--seed", "3"], "settings are words without dashes: seed=3"),
        (["--trainer.resume"], "settings are words without dashes: trainer.resume=VALUE"),
        (["--explian"], "did you mean --explain?"),
    ],
)
def test_a_setting_with_dashes_is_written_without(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["train", "--config-name", "e2e", *words])
    assert said in capsys.readouterr().err
