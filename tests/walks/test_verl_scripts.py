"""Launch scripts in verl's form become recipes that train here, with nothing but `+scale=laptop`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.observe.jsonl import read_jsonl
from tests.e2e.runs import Run
from tests.unit.observe.tracker_folders import with_libraries
from tests.walks.published_cache import MAIN, laid

pytestmark = [pytest.mark.slow, pytest.mark.full]
HEAD = """\
#!/usr/bin/env bash
set -xeuo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1
NNODES=${NNODES:-1}
MODEL=%s
max_prompt_length=$((1024 * 1))
max_response_length=$((1024 * 2))
offload=True
python3 -m verl.trainer.main_ppo --config-path=config --config-name='ppo_megatron_trainer.yaml' \\
    data.train_files=BytedTsinghua-SIA/DAPO-Math-17k data.val_files=BytedTsinghua-SIA/DAPO-Math-17k \\
    data.prompt_key=prompt data.truncation='left' data.filter_overlong_prompts=True \\
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \\
    data.train_batch_size=256 actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.model.path="${MODEL}" actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.rollout.n=8 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 trainer.logger='["console","wandb"]' \\
    trainer.project_name=p trainer.nnodes="${NNODES}" trainer.n_gpus_per_node=8 \\
    trainer.save_freq=-1 trainer.test_freq=10 trainer.total_epochs=10 trainer.experiment_name=moved \\
"""
MEGATRON = "actor_rollout_ref.actor.megatron"
# {case: (a recipe of the same model, settings)}
SCRIPTS = {
    "GRPO, dense": (
        "grpo-qwen3-8b-1x8",
        f"algorithm.adv_estimator=grpo {MEGATRON}.tensor_model_parallel_size=2 "
        f"{MEGATRON}.pipeline_model_parallel_size=2 actor_rollout_ref.actor.use_kl_loss=True "
        f"{MEGATRON}.param_offload=${{offload}} actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    ),
    "DAPO, mixture": (
        "ppo-qwen3-30b-a3b-4x8",
        f"algorithm.adv_estimator=grpo {MEGATRON}.expert_model_parallel_size=8 "
        f"+{MEGATRON}.override_transformer_config.recompute_granularity=full "
        "actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 "
        "actor_rollout_ref.actor.clip_ratio_c=10.0 reward_model.reward_manager=dapo "
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=$((512)) "
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True "
        "actor_rollout_ref.rollout.val_kwargs.top_p=0.7",
    ),
    "PPO": (
        "grpo-llama-3.1-405b-28x8",
        f"algorithm.adv_estimator=gae critic.model.path=$MODEL critic.optim.lr=1e-5 "
        f"critic.ppo_micro_batch_size_per_gpu=4 {MEGATRON}.tensor_model_parallel_size=4 "
        "critic.megatron.tensor_model_parallel_size=4 algorithm.use_kl_in_reward=True "
        "algorithm.kl_ctrl.kl_coef=0.001",
    ),
    "GSPO": (
        "grpo-qwen2.5-0.5b-1x8",
        "algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo "
        "actor_rollout_ref.actor.use_dynamic_bsz=True "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length * 8))",
    ),
    "RLOO, FSDP": (
        "grpo-qwen2.5-0.5b-1x8",
        "algorithm.adv_estimator=rloo actor_rollout_ref.actor.strategy=fsdp2 "
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_verl_starts_here(name: str, tmp_path: Path) -> None:
    from hybridflow.config.load import load_config

    like, words = SCRIPTS[name]
    cache = laid(tmp_path, like)
    work = tmp_path / "work"
    work.mkdir()
    (work / "run.sh").write_text(HEAD % load_config(like).model.path + f"    {words} $@\n")
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "migrate", "verl", "run.sh"],
        cwd=work,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert "no equivalent" not in done.stderr, done.stderr
    (work / "moved.yaml").write_text(done.stdout)
    command = (sys.executable, "-c", MAIN, "train")
    given = ("--config-dir", ".", "--config-name", "moved", "+scale=laptop")
    site = {**with_libraries(), "HF_HOME": str(cache)}  # the scripts log to wandb
    with Run(tmp_path / "output", *given, command=command, site=site, cwd=work) as run:
        assert run.end(500) == 0, run.out + run.err
    steps = read_jsonl(work / "runs" / "moved" / "metrics.jsonl")
    assert [one["step"] for one in steps if one["phase"] == "train"] == [1, 2]
