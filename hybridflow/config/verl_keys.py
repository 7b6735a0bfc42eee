"""Mapping of verl's keys to HybridFlow's. The prefix `actor_rollout_ref.` is omitted, and ROLE
stands for each of the sections actor, ref, critic and reward_model. A name that ends with `.*`
stands for all keys below it.
"""

from __future__ import annotations

_PREFIX = "actor_rollout_ref."
NO_EFFECT = "it has no effect here; remove it"  # of a key that neither table contains
_SECTIONS = {
    "actor": "actor",
    "ref": "reference",
    "critic": "critic",
    "reward_model": "reward_model",
}

# {verl's key: our key, then a space and how its values differ}
RENAMED = {
    "ROLE.model.path": "ROLE.path",
    "ROLE.megatron.tensor_model_parallel_size": "ROLE.parallel.tensor",
    "ROLE.megatron.pipeline_model_parallel_size": "ROLE.parallel.pipeline",
    "ROLE.megatron.virtual_pipeline_model_parallel_size": "ROLE.parallel.virtual_pipeline",
    "ROLE.megatron.context_parallel_size": "ROLE.parallel.context",
    "ROLE.megatron.expert_model_parallel_size": "ROLE.parallel.expert",
    "ROLE.megatron.expert_tensor_parallel_size": "ROLE.parallel.expert_tensor",
    "ROLE.megatron.sequence_parallel": "ROLE.parallel.sequence",
    "ROLE.megatron.use_distributed_optimizer": "ROLE.parallel.distributed_optimizer",
    "ROLE.ulysses_sequence_parallel_size": "ROLE.parallel.context",
    "ROLE.megatron.param_offload": "ROLE.offload.weights",
    "ROLE.megatron.grad_offload": "ROLE.offload.gradients",
    "ROLE.megatron.optimizer_offload": "ROLE.offload.optimizer",
    "ROLE.fsdp_config.param_offload": "ROLE.offload.weights",
    "ROLE.fsdp_config.optimizer_offload": "ROLE.offload.optimizer",
    "ROLE.model.fsdp_config.param_offload": "ROLE.offload.weights",
    "ROLE.model.fsdp_config.optimizer_offload": "ROLE.offload.optimizer",
    "ROLE.megatron.override_transformer_config.recompute_granularity": "actor.recompute",
    "ROLE.megatron.override_transformer_config.recompute_modules": "actor.recompute_modules",
    (
        "ROLE.megatron.override_transformer_config.moe_token_dispatcher_type"
    ): "ROLE.parallel.moe_dispatcher",
    (
        "ROLE.megatron.override_transformer_config.moe_enable_deepep"
    ): "ROLE.parallel.moe_dispatcher (deepep)",
    (
        "ROLE.megatron.override_transformer_config.num_layers_in_first_pipeline_stage"
    ): "ROLE.parallel.first_stage_layers",
    (
        "ROLE.megatron.override_transformer_config.num_layers_in_last_pipeline_stage"
    ): "ROLE.parallel.last_stage_layers",
    (
        "ROLE.megatron.override_transformer_config.pipeline_model_parallel_layout"
    ): "ROLE.parallel.layers_per_stage",
    "ROLE.megatron.override_transformer_config.moe_aux_loss_coeff": "actor.router_aux_loss_coef",
    "ROLE.megatron.override_transformer_config.moe_z_loss_coeff": "actor.router_z_loss_coef",
    "ROLE.megatron.override_transformer_config.*": (
        "actor.megatron (fields of Megatron's TransformerConfig)"
    ),
    "ROLE.megatron.override_ddp_config.overlap_grad_reduce": "ROLE.parallel.overlap_grad_reduce",
    "ROLE.megatron.override_ddp_config.overlap_param_gather": "ROLE.parallel.overlap_param_gather",
    "ROLE.megatron.dtype": "model.dtype",
    "ROLE.strategy": "actor.backend (of all roles that train)",
    "ROLE.grad_clip": "ROLE.optim.clip_grad",
    "ROLE.optim.betas": "ROLE.optim.adam_beta1 (and adam_beta2)",
    "ROLE.optim.lr_warmup_steps_ratio": (
        "ROLE.optim.lr_warmup_steps (optimizer updates, not a share of them)"
    ),
    "ROLE.optim.total_training_steps": "ROLE.optim.lr_decay_steps (optimizer updates)",
    "ROLE.optim.warmup_style": "ROLE.optim.lr_decay_style",
    "ROLE.optim.lr_scheduler_type": "ROLE.optim.lr_decay_style",
    "ROLE.optim.min_lr_ratio": "ROLE.optim.min_lr (a rate, not a share of lr)",
    (
        "ROLE.optim.override_optimizer_config.use_precision_aware_optimizer"
    ): "ROLE.optim.precision_aware",
    "ROLE.optim.override_optimizer_config.optimizer_cpu_offload": "ROLE.offload.optimizer",
    "ROLE.ppo_micro_batch_size": "ROLE.max_tokens_per_micro_batch (tokens, not rows)",
    "ROLE.ppo_micro_batch_size_per_gpu": "ROLE.max_tokens_per_micro_batch (tokens, not rows)",
    "ROLE.micro_batch_size": "ROLE.max_tokens_per_micro_batch (tokens, not rows)",
    "ROLE.micro_batch_size_per_gpu": "ROLE.max_tokens_per_micro_batch (tokens, not rows)",
    "ROLE.log_prob_micro_batch_size": "ROLE.max_tokens_per_micro_batch (tokens, not rows)",
    "ROLE.log_prob_micro_batch_size_per_gpu": "ROLE.max_tokens_per_micro_batch (tokens, not rows)",
    "ROLE.ppo_max_token_len_per_gpu": "ROLE.max_tokens_per_micro_batch",
    "ROLE.forward_max_token_len_per_gpu": "ROLE.max_tokens_per_micro_batch",
    "ROLE.log_prob_max_token_len_per_gpu": "ROLE.max_tokens_per_micro_batch",
    "actor.entropy_coeff": "actor.entropy_coef",
    "actor.clip_ratio": "actor.clip_ratio_low (and clip_ratio_high)",
    "actor.use_kl_loss": "actor.kl_loss_coef (above 0 enables it)",
    "actor.policy_loss.loss_mode": "actor.policy_loss",
    "actor.policy_loss.*": "actor.policy_loss_options",
    "actor.loss_scale_factor": "actor.loss_norm_tokens",
    "actor.entropy_from_logits_with_chunking": "actor.logits_chunk_tokens",
    "actor.router_replay.mode": "actor.router_replay",
    "actor.checkpoint.async_save": "trainer.async_checkpoints",
    "actor.tis_imp_ratio_cap": (
        "actor.rollout_correction.upper (with actor.rollout_correction.weight=token)"
    ),
    "rollout.name": "rollout.engine",
    "rollout.tensor_model_parallel_size": "rollout.tensor",
    "rollout.pipeline_model_parallel_size": "rollout.pipeline",
    "rollout.expert_parallel_size": "rollout.expert",
    "rollout.data_parallel_size": "rollout.num_engines (or rollout.data_parallel_attention)",
    "rollout.gpu_memory_utilization": "rollout.mem_fraction_static",
    "rollout.free_cache_engine": "rollout.sleep_while_training",
    "rollout.max_num_seqs": "rollout.max_running_requests",
    "rollout.max_num_batched_tokens": "rollout.extra_args (chunked_prefill_size)",
    "rollout.enable_chunked_prefill": "rollout.extra_args (chunked_prefill_size)",
    "rollout.temperature": "rollout.sampling.temperature",
    "rollout.top_p": "rollout.sampling.top_p",
    "rollout.top_k": "rollout.sampling.top_k",
    "rollout.do_sample": "rollout.sampling.temperature",
    "rollout.val_kwargs.n": "rollout.val_samples",
    "rollout.val_kwargs.do_sample": (
        "rollout.val_sampling.temperature (0 takes the most likely token)"
    ),
    "rollout.val_kwargs.temperature": "rollout.val_sampling.temperature",
    "rollout.val_kwargs.top_p": "rollout.val_sampling.top_p",
    "rollout.val_kwargs.top_k": "rollout.val_sampling.top_k",
    "rollout.dtype": "model.dtype",
    "rollout.seed": "seed",
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.response_length": "data.max_response_length",
    "rollout.max_model_len": (
        "data.max_response_length (with data.max_prompt_length it limits the length of a row)"
    ),
    "rollout.log_prob_micro_batch_size": "actor.max_tokens_per_micro_batch (tokens, not rows)",
    "rollout.log_prob_micro_batch_size_per_gpu": (
        "actor.max_tokens_per_micro_batch (tokens, not rows)"
    ),
    "rollout.log_prob_max_token_len_per_gpu": "actor.max_tokens_per_micro_batch",
    "rollout.multi_turn.enable": "rollout.agent.loop (tools)",
    "rollout.multi_turn.max_assistant_turns": "rollout.agent.max_answers",
    "rollout.multi_turn.max_user_turns": "rollout.agent.max_answers",
    "rollout.multi_turn.max_tool_response_length": "rollout.agent.max_observation_tokens",
    "rollout.multi_turn.max_parallel_calls": (
        "rollout.agent.max_parallel_calls (further calls wait; verl drops them)"
    ),
    "rollout.multi_turn.tool_config_path": "rollout.agent.tools (names, or path/to/file.py:name)",
    "rollout.multi_turn.interaction_config_path": "rollout.agent.environment",
    "rollout.multi_turn.format": "rollout.agent.call_format",
    "rollout.agent.default_agent_loop": "rollout.agent.loop",
    "rollout.agent.agent_loop_config_path": "rollout.agent.loop (path/to/file.py:name)",
    "rollout.agent.num_workers": "rollout.agent.environment_processes",
    "rollout.engine_kwargs.*": "rollout.extra_args",
    "rollout.checkpoint_engine.backend": "rollout.sync.transport",
    (
        "rollout.checkpoint_engine.update_weights_bucket_megabytes"
    ): "rollout.sync.staging_bytes (bytes)",
    "rollout.update_weights_bucket_megabytes": "rollout.sync.staging_bytes (bytes)",
    "rollout.enable_rollout_routing_replay": "actor.router_replay (r3)",
    "rollout.skip_rollout": "trainer.rollouts_from",
    "model.tokenizer_path": "model.tokenizer",
    "model.enable_gradient_checkpointing": "actor.recompute (full)",
    "model.lora_rank": "actor.lora.rank",
    "model.lora_alpha": "actor.lora.alpha",
    "model.target_modules": "actor.lora.targets (Megatron's names)",
    "model.lora.target_modules": "actor.lora.targets",
    "model.lora.rank": "actor.lora.rank",
    "model.lora.alpha": "actor.lora.alpha",
    "model.lora.dropout": "actor.lora.dropout",
    "model.external_lib": "model.family (path/to/file.py:MODEL_TYPE)",
    "nccl_timeout": "cluster.call_timeout_s",
    "hybrid_engine": "rollout.pool (actor: engines and trainer take turns)",
    "ROLE.nccl_timeout": "cluster.call_timeout_s",
    "data.tokenizer": "model.tokenizer",
    "data.seed": "seed",
    "data.val_max_samples": "data.val_max_prompts",
    "data.custom_cls.path": "data.dataset_class.path",
    "data.custom_cls.name": "data.dataset_class.name",
    "data.sampler.*": "data.difficulty_key (or data.weight_key)",
    "data.response_key": "sft.response_key",
    "data.messages_key": "sft.messages_key",
    "data.tools_key": "sft.tools_key",
    "data.multiturn.messages_key": "sft.messages_key",
    "data.multiturn.tools_key": "sft.tools_key",
    "data.multiturn.enable": "sft.messages_key (setting a column enables it)",
    "data.gen_batch_size": "algorithm.dynamic_sampling (maximum batches of data.train_batch_size)",
    "data.tool_config_path": "rollout.agent.tools (names, or path/to/file.py:name)",
    "algorithm.norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std",
    "algorithm.use_kl_in_reward": "algorithm.kl_coef (above 0 enables it)",
    "algorithm.kl_ctrl.kl_coef": "algorithm.kl_coef",
    "algorithm.kl_ctrl.type": "algorithm.kl_target (setting it makes the coefficient adaptive)",
    "algorithm.kl_ctrl.target_kl": "algorithm.kl_target",
    "algorithm.kl_ctrl.horizon": "algorithm.kl_horizon",
    "algorithm.filter_groups.*": (
        "algorithm.dynamic_sampling (maximum batches of data.train_batch_size)"
    ),
    "algorithm.rollout_correction.rollout_is": "actor.rollout_correction.weight",
    "algorithm.rollout_correction.rollout_is_threshold": "actor.rollout_correction.upper",
    "algorithm.rollout_correction.rollout_rs": "actor.rollout_correction.reject",
    "algorithm.rollout_correction.rollout_rs_threshold": "actor.rollout_correction.reject",
    "algorithm.rollout_correction.bypass_mode": "actor.old_log_probs (engine)",
    "algorithm.rollout_correction.*": "actor.rollout_correction (docs/rollout-correction.md)",
    "custom_reward_function.path": "reward.path",
    "custom_reward_function.name": "reward.name",
    "custom_reward_function.reward_kwargs.*": "reward.kwargs",
    "reward.custom_reward_function.path": "reward.path",
    "reward.custom_reward_function.name": "reward.name",
    "reward.custom_reward_function.reward_kwargs.*": "reward.kwargs",
    "reward.num_workers": "reward.processes",
    "reward_model.num_workers": "reward.processes",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len": "reward.overlong_tokens",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable": (
        "reward.overlong_tokens (above 0 enables it)"
    ),
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor": "reward.overlong_penalty",
    "reward_model.reward_kwargs.max_resp_len": "data.max_response_length",
    "reward_model.enable": "reward_model.path (setting a folder enables it)",
    "reward_model.enable_resource_pool": "reward_model.placement (own)",
    "reward_model.n_gpus_per_node": "reward_model.procs (in total)",
    "reward_model.nnodes": "reward_model.procs (in total)",
    "trainer.experiment_name": "name",
    "trainer.total_training_steps": "trainer.total_steps",
    "trainer.project_name": "trainer.project",
    "trainer.logger": "trainer.loggers",
    "trainer.log_val_generations": "trainer.tracked_samples (of training steps too)",
    "trainer.test_freq": "trainer.test_every_steps (0 instead of verl's -1)",
    "trainer.save_freq": "trainer.save_every_steps (0 instead of verl's -1)",
    "trainer.resume_mode": "trainer.resume",
    "trainer.resume_from_path": "trainer.resume (auto: the last checkpoint of output_dir/name)",
    "trainer.max_actor_ckpt_to_keep": "trainer.max_checkpoints_to_keep",
    "trainer.max_critic_ckpt_to_keep": "trainer.max_checkpoints_to_keep",
    "trainer.default_local_dir": "output_dir (the run folder is output_dir/name)",
    "trainer.rollout_data_dir": (
        "trainer.dump_rollouts_every_steps (files are written to the run folder)"
    ),
    "trainer.validation_data_dir": (
        "trainer.dump_rollouts_every_steps (files are written to the run folder)"
    ),
    "trainer.nnodes": "cluster.nodes",
    "trainer.n_gpus_per_node": "cluster.procs_per_node",
    "trainer.device": "cluster.devices_per_node (GPUs required per node)",
    "trainer.ray_wait_register_center_timeout": "cluster.start_timeout_s",
    "trainer.val_only": "trainer.rollout_only",
    # keys of other trainers
    "trainer.max_steps": "trainer.total_steps",
    "trainer.epochs": "trainer.total_epochs",
    "ROLE.learning_rate": "ROLE.optim.lr",
    "ray_kwargs.ray_init.address": "cluster.address",
}
_ALWAYS_PACKED = (
    "rows are always packed without padding, up to actor.max_tokens_per_micro_batch tokens per "
    "pass; remove the key"
)
_ONE_MAP = (
    "weights are always read and written as Hugging Face folders, with one map for all layouts; "
    "remove the key"
)
_NO_CODE = "code shipped with a model is never run (docs/security.md); remove the key"
_KERNELS = "kernels are chosen based on the device; remove the key"
_ENGINE_OWN = (
    "set the engine's own options in rollout.extra_args, under the names of its server's "
    "arguments; defaults need no key"
)
_PROFILES = "the run folder always contains a timeline, which the report shows; remove the key"

# {verl's key without an equivalent: the reason and the remedy}
ABSENT = {
    "actor_rollout_ref": (
        "its sections are at top level here: actor, rollout, model, and reference for verl's ref"
    ),
    "ROLE.use_dynamic_bsz": _ALWAYS_PACKED,
    "ROLE.log_prob_use_dynamic_bsz": _ALWAYS_PACKED,
    "rollout.log_prob_use_dynamic_bsz": _ALWAYS_PACKED,
    "model.use_remove_padding": _ALWAYS_PACKED,
    "ROLE.model.use_remove_padding": _ALWAYS_PACKED,
    "ROLE.megatron.use_remove_padding": _ALWAYS_PACKED,
    "reward_model.reward_kwargs.overlong_buffer_cfg.log": (
        "the share of penalized responses is always logged (reward/overlong); remove the key"
    ),
    "trainer.balance_batch": (
        "rows are always balanced over the ranks by token count; remove the key"
    ),
    "ROLE.megatron.use_mbridge": _ONE_MAP,
    "ROLE.megatron.vanilla_mbridge": _ONE_MAP,
    "ROLE.megatron.use_dist_checkpointing": _ONE_MAP,
    "ROLE.megatron.dist_checkpointing_path": _ONE_MAP,
    "ROLE.checkpoint.*": (
        "a checkpoint always contains everything needed to resume, and the export contains the "
        "model; remove the key"
    ),
    "ROLE.model.enable_gradient_checkpointing": (
        "all trained roles use actor.recompute; remove the key"
    ),
    "ROLE.megatron.override_transformer_config.recompute_method": (
        "actor.recompute=full applies to every layer; remove the key"
    ),
    "ROLE.megatron.override_transformer_config.recompute_num_layers": (
        "actor.recompute=full applies to every layer; remove the key"
    ),
    "ROLE.megatron.*": "Megatron's fields are derived from config.json and actor.parallel; remove "
    "the key",
    "ROLE.optim.override_optimizer_config.*": (
        "use the optimizer keys of actor.optim and actor.offload"
    ),
    "ROLE.model.*": "these settings are read from the model folder; remove the key",
    "ROLE.fsdp_config.*": (
        "with actor.backend=fsdp every process is an FSDP2 rank; remove the key"
    ),
    "ROLE.model.fsdp_config.*": (
        "with actor.backend=fsdp every process is an FSDP2 rank; remove the key"
    ),
    "ROLE.use_torch_compile": _KERNELS,
    "ROLE.use_fused_kernels": _KERNELS,
    "model.use_fused_kernels": _KERNELS,
    "model.fused_kernel_options.*": _KERNELS,
    "model.use_liger": _KERNELS,
    "ROLE.profiler.*": _PROFILES,
    "rollout.profiler.*": _PROFILES,
    "global_profiler.*": _PROFILES,
    "ROLE.shuffle": "mini-batches keep the order of the step's rows; remove the key",
    "rollout.mode": "engines always generate asynchronously; remove the key",
    "rollout.load_format": (
        "weights are always sent to the engines as slices from the trainer; remove the key"
    ),
    "rollout.layered_summon": (
        "weights are always sent to the engines as slices from the trainer; remove the key"
    ),
    "rollout.calculate_log_probs": "the engine's log-probs are always recorded; remove the key",
    "rollout.multi_stage_wake_up": (
        "weights and KV cache are always restored separately; remove the key"
    ),
    "rollout.enforce_eager": _ENGINE_OWN,
    "rollout.cudagraph_capture_sizes": _ENGINE_OWN,
    "rollout.enable_prefix_caching": _ENGINE_OWN,
    "rollout.ignore_eos": "an answer always ends at a stop token; remove the key",
    "rollout.multi_turn.*": "conversations are configured with the keys of rollout.agent "
    "(docs/agents.md)",
    "model.trust_remote_code": _NO_CODE,
    "ROLE.model.trust_remote_code": _NO_CODE,
    "data.trust_remote_code": _NO_CODE,
    "model.use_shm": "a model folder is read in place; remove the key",
    "model.custom_chat_template": (
        "the template is read from the tokenizer folder (chat_template.jinja); write it there"
    ),
    "model.override_config.*": "the model folder's config.json is used; set the field there",
    "model.enable_activation_offload": (
        "activations stay on the device; use actor.recompute to reduce them"
    ),
    "data.val_batch_size": (
        "all held-out prompts are submitted to the engines together; remove the key"
    ),
    "data.return_raw_chat": "prompts are always stored as messages; remove the key",
    "data.return_raw_input_ids": "prompts are always stored as messages; remove the key",
    "data.return_full_prompt": "rollouts are always dumped with their prompts; remove the key",
    "data.reward_fn_key": "the column data_source selects a row's verifier; rename the column",
    "data.train_max_samples": "all rows of data.train_files are used; write a smaller file",
    "data.video_key": "videos are not supported",
    "data.dataloader_num_workers": "prompts are read into memory once; remove the key",
    "data.filter_overlong_prompts_workers": (
        "prompt lengths are measured once at the start; remove the key"
    ),
    "data.apply_chat_template_kwargs.*": (
        "the tokenizer folder's template is applied unchanged; set the default in "
        "chat_template.jinja"
    ),
    "algorithm.pf_ppo.*": "PF-PPO is not supported",
    "algorithm.use_pf_ppo": "PF-PPO is not supported",
    "trainer.default_hdfs_dir": (
        "checkpoints are written to output_dir; mount the file system there"
    ),
    "trainer.del_local_ckpt_after_load": (
        "trainer.max_checkpoints_to_keep limits the checkpoints kept; remove the key"
    ),
    "trainer.esi_redundant_time": (
        "a Slurm job stops --grace seconds before its time limit; remove the key"
    ),
    "trainer.use_legacy_worker_impl": "there is only one kind of worker; remove the key",
    "reward_model.use_reward_loop": (
        "rewards are always computed in a process pool; remove the key"
    ),
    "reward_model.launch_reward_fn_async": (
        "rewards are always computed in a process pool; remove the key"
    ),
    "reward_model.sandbox_fusion.*": (
        "programs run in a sandbox on this machine (the verifier code, docs/security.md)"
    ),
    "reward_model.rollout.*": (
        "a reward model is a Megatron role with one score per answer, not an engine; see "
        "reward_model.path, or the judges of docs/algorithms.md"
    ),
    "ray_kwargs.*": "set Ray's options in the section cluster",
    "transfer_queue.*": "rows are always passed by reference until a rank reads them; remove the "
    "key",
}
_MANAGERS = (
    "verl's reward managers are keys of reward here: naive, prime and remote match the default, a "
    "process pool (reward.processes); dapo is reward.overlong_tokens; batch is a function of lists "
    "and rate_limited an async one (reward.path); gdpo is algorithm.adv_estimator=gdpo"
)
ABSENT |= dict.fromkeys(
    (
        "reward_model.reward_manager",
        "reward_manager.*",
        "reward.reward_manager.*",
        "reward.reward_manager",
    ),
    _MANAGERS,
)


def counterpart(name: str) -> tuple[str, str]:
    """Look up a name that may be a verl key. Returns (HybridFlow's key, how its values differ),
    ("", reason) if there is no equivalent, or ("", "") if the name is not in the tables. If only
    the section has a different name here (`actor_rollout_ref.actor.ppo_epochs`), the key is
    returned under HybridFlow's section name.
    """
    own = name.removeprefix(_PREFIX)
    section, _, rest = own.partition(".")
    section = _SECTIONS.get(section, "")
    for known in (*_patterns(own), *(_patterns(f"ROLE.{rest}") if section else ())):
        if known in RENAMED:
            key, _, note = RENAMED[known].replace("ROLE.", f"{section}.").partition(" ")
            return key, note
        if known in ABSENT:
            return "", ABSENT[known]
    moved = f"{section}.{rest}" if section else own
    if moved == name:
        return "", ""
    return moved, NO_EFFECT


def _patterns(name: str) -> list[str]:
    """Return the table keys that match the name, starting with the most specific."""
    parts = name.split(".")
    return [name, *(".".join((*parts[:end], "*")) for end in range(len(parts), 0, -1))]
