"""Translation of verl's settings to HybridFlow's: the same run, expressed in HybridFlow's keys,
with verl's defaults. `config/verl_keys.py` maps names. This module contains rules for cases in
which several verl keys map to one key, or a value has a different form. Each rule removes the keys
that it translates from `Settings`; the remaining keys are looked up by name.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from hybridflow.config.keys import Kind, all_keys
from hybridflow.config.megatron_settings import field_types, refusal
from hybridflow.config.schema import RunConfig
from hybridflow.config.verl_keys import NO_EFFECT, RENAMED, counterpart

# verl's defaults that a run of ours would not have (verl/trainer/config, January 2026)
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor.optim.lr": 1e-6,
    "actor.optim.weight_decay": 0.01,
    "actor.ppo_mini_batch_size": 256,
    "actor.use_kl_loss": False,
    "actor.megatron.sequence_parallel": True,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "algorithm.use_kl_in_reward": False,
    "rollout.n": 1,
    "rollout.name": "vllm",
    "rollout.tensor_model_parallel_size": 2,
    "rollout.gpu_memory_utilization": 0.5,
    "rollout.max_num_seqs": 256,
    "rollout.free_cache_engine": True,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.logger": ["console", "wandb"],
}
_PREFIX = "actor_rollout_ref."
_ROWS = (
    "ppo_micro_batch_size_per_gpu",
    "ppo_micro_batch_size",
    "micro_batch_size_per_gpu",
    "log_prob_micro_batch_size_per_gpu",
    "log_prob_micro_batch_size",
    "forward_micro_batch_size_per_gpu",
)
_TOKENS = (
    "ppo_max_token_len_per_gpu",
    "log_prob_max_token_len_per_gpu",
    "forward_max_token_len_per_gpu",
)
_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
# fields of Megatron that are chosen by device and by what is installed (mcore/model.py)
_DEVICE_FIELDS = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "deallocate_pipeline_outputs",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "moe_permute_fusion",
    "persist_layer_norm",
)
_BY_DEVICE = "Megatron's kernels are chosen based on the device"
# losses that verl averages over sequences, whatever loss_agg_mode is
_OVER_SEQUENCES = ("gspo", "sapo")
_LIBRARIES = ("wandb", "mlflow", "trackio")
_TRACKERS = ("console", "tensorboard", *_LIBRARIES)


@dataclass
class Migration:
    """A translated run.

    Attributes:
        settings: translated settings, keyed by HybridFlow's names.
        renamed: verl keys that have been translated to `settings`.
        needless: verl keys whose setting always applies in HybridFlow or has no effect, with the
            reason.
        missing: verl keys without an equivalent, with the reason.
        remarks: differences that the user should know about.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    renamed: list[str] = field(default_factory=list)
    needless: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def has_reference(self) -> bool:
        """True if the run has a KL term."""
        coefficients = ("actor.kl_loss_coef", "algorithm.kl_coef")
        return any(map(self.settings.get, coefficients))

    @property
    def has_critic(self) -> bool:
        """True if the run's estimator needs a critic."""
        return self.settings.get("algorithm.adv_estimator") == "gae"


class Settings:
    """verl's settings, keyed by name without `actor_rollout_ref.`. Rules remove the keys that they
    translate."""

    def __init__(self, given: Mapping[str, Any], out: Migration) -> None:
        self._given = {name.removeprefix(_PREFIX): value for name, value in given.items()}
        self._names = {name.removeprefix(_PREFIX): name for name in given}
        self.out = out

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def left(self) -> list[str]:
        """Return the keys that no rule has translated, in script order."""
        return [name for name in self._given if self._names.get(name) is not None]

    def whole(self, name: str) -> str:
        """Return a key as spelled in the script."""
        return self._names[name]

    def get(self, name: str) -> Any:
        """Return the value of a key, or verl's default, without marking the key as translated."""
        return self._given.get(name, DEFAULTS.get(name))

    def take(self, *names: str) -> Any:
        """Mark keys as translated (`*` is a wildcard). Returns the value of the first one, or
        verl's default."""
        value = self.get(names[0])
        for name in names:
            for known in fnmatch.filter(list(self._names), name) if "*" in name else [name]:
                whole = self._names.pop(known, None)
                if whole:
                    self.out.renamed.append(whole)
        return value

    def drop(self, reason: str, *names: str, needless: bool = True) -> None:
        """Mark keys as translated although they do not map to a setting."""
        dropped = self.out.needless if needless else self.out.missing
        for name in names:
            whole = self._names.pop(name, None)
            if whole:
                dropped[whole] = reason


def migrate(given: Mapping[str, Any]) -> Migration:
    """Translate verl's settings, {key: value}, into HybridFlow's."""
    out = Migration()
    settings = Settings(given, out)
    for rule in _RULES:
        out.settings |= rule(settings)
    for name in settings.left():
        _by_name(name, settings, out)
    if not out.has_critic:
        unused = [key for key in out.settings if key.startswith("critic.")]
        for key in unused:
            del out.settings[key]
        if any(name.startswith("critic.") for name in given):
            estimator = out.settings["algorithm.adv_estimator"]
            out.remarks.append(
                f"adv_estimator={estimator} does not use a critic, so the critic's settings are "
                "omitted"
            )
    return out


def _by_name(name: str, settings: Settings, out: Migration) -> None:
    """Translate a setting whose value keeps its meaning, using the table of names."""
    value = settings.get(name)
    key, note = counterpart(settings.whole(name))
    key = key or ("" if note else name)
    kind = _kinds().get(key)
    if kind is not None:
        settings.take(name)
        if kind.is_mapping and not isinstance(value, dict):
            out.settings.setdefault(key, {})[name.rpartition(".")[2]] = value
        else:
            out.settings[key] = _converted(key, value)
        return
    is_known = note not in ("", NO_EFFECT)
    reason = note if is_known else "no equivalent setting here"
    is_needless = is_known and any(words in note for words in ("remove", "need no key"))
    settings.drop(reason, name, needless=is_needless or value in (None, False, "null", [], {}))


@functools.cache
def _kinds() -> Mapping[str, Kind]:
    return dict(all_keys(RunConfig))


def _converted(key: str, value: Any) -> Any:
    """Convert a value to the type of HybridFlow's key, and translate verl's names for values."""
    kind = _kinds()[key]
    if isinstance(value, str):
        value = dict(kind.aliases).get(value, value)
    if value is None or isinstance(value, bool):
        return value
    if kind.is_list and not isinstance(value, list):
        return [value]
    return float(value) if kind.plain is float else value


# ---- rules: what several keys make, or a value of another form


def _model(given: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {"model.path": given.take("model.path")}
    given.take("critic.model.path")
    critic = given.get("critic.model.path")
    if critic not in (None, found["model.path"]):
        found["critic.path"] = critic
    return found


def _data(given: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("train_files", "val_files"):
        value = given.take(f"data.{name}")
        if value is not None:
            found[f"data.{name}"] = value if isinstance(value, list) else [value]
    for name in ("train_batch_size", "max_prompt_length", "max_response_length"):
        found[f"data.{name}"] = given.take(f"data.{name}")
    given.take(
        "rollout.prompt_length",
        "rollout.response_length",
        "reward_model.reward_kwargs.max_resp_len",
    )
    return found


def _algorithm(given: Settings) -> dict[str, Any]:
    key = "algorithm.adv_estimator"
    return {key: _converted(key, given.take(key))}


def _kl(given: Settings) -> dict[str, Any]:
    in_loss = given.take("actor.use_kl_loss", "actor.kl_loss_coef")
    in_reward = given.take("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")
    loss = given.get("actor.kl_loss_coef")
    reward = given.get("algorithm.kl_ctrl.kl_coef")
    found: dict[str, Any] = {"actor.kl_loss_coef": 0.0, "algorithm.kl_coef": 0.0}
    if in_loss:
        found["actor.kl_loss_coef"] = float(0.001 if loss is None else loss)
    if in_reward:
        found["algorithm.kl_coef"] = float(0.001 if reward is None else reward)
    if given.take("algorithm.kl_ctrl.type") != "adaptive":
        given.take("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon")
    if not in_reward:
        given.take("algorithm.kl_penalty")
    return found


def _clip(given: Settings) -> dict[str, Any]:
    both = given.take("actor.clip_ratio")
    if both is None or "actor.clip_ratio_low" in given:
        return {}
    return {"actor.clip_ratio_low": float(both), "actor.clip_ratio_high": float(both)}


def _policy_loss(given: Settings) -> dict[str, Any]:
    loss = given.take("actor.policy_loss.loss_mode")
    found: dict[str, Any] = {}
    if loss is not None:
        found["actor.policy_loss"] = _converted("actor.policy_loss", loss)
    if loss == "sapo":
        options = {}
        for name in ("tau_pos", "tau_neg"):
            if f"actor.{name}" in given:
                options[name] = given.take(f"actor.{name}")
        if options:
            found["actor.policy_loss_options"] = options
    if loss in _OVER_SEQUENCES:
        given.take("actor.loss_agg_mode")
        found["actor.loss_agg_mode"] = "seq-mean-token-mean"
    return found


def _optimizer(given: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix in ("actor.optim", "critic.optim"):
        for name in ("lr", "weight_decay"):
            found[f"{prefix}.{name}"] = float(given.take(f"{prefix}.{name}"))
        betas = given.take(f"{prefix}.betas")
        if isinstance(betas, list) and len(betas) == 2:
            found[f"{prefix}.adam_beta1"] = float(betas[0])
            found[f"{prefix}.adam_beta2"] = float(betas[1])
        warmup = f"{prefix}.lr_warmup_steps"
        steps = given.take(warmup)
        if steps is not None and int(steps) >= 0:
            found[warmup] = int(steps)
        of_ratio = f"{prefix}.lr_warmup_steps_ratio"
        ratio = given.get(of_ratio)
        if not ratio:
            given.take(of_ratio)
            continue
        total = given.get("trainer.total_training_steps")
        updates = given.get("data.train_batch_size") // given.get("actor.ppo_mini_batch_size")
        updates = max(updates, 1)
        if total:
            given.take(of_ratio)
            found[warmup] = round(float(ratio) * int(total) * updates)
        else:
            reason = (
                f"a share of the run's updates: set {warmup} to {ratio} x total steps x {updates} "
                "updates per step; `--explain` shows the steps per epoch"
            )
            given.drop(reason, of_ratio, needless=False)
    return found


def _layout(given: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for role in ("actor", "critic"):
        tensor = given.get(f"{role}.megatron.tensor_model_parallel_size")
        sequence = given.take(f"{role}.megatron.sequence_parallel")
        if role == "actor" and int(tensor or 1) > 1 and sequence is not False:
            found[f"{role}.parallel.sequence"] = True
    _same_layout(given, "ref", "reference")
    _same_layout(given, "critic", "critic")
    given.take("ref.megatron.*_offload", "ref.fsdp_config.*_offload", "ref.strategy")
    given.take("ref.ulysses_sequence_parallel_size")
    given.drop(
        "actor.offload.optimizer offloads the whole optimizer",
        *_starting(given, "actor.optim.override_optimizer_config.optimizer_offload_fraction"),
        *_starting(given, "actor.optim.override_optimizer_config.overlap_cpu_optimizer_d2h_h2d"),
    )
    return found


def _same_layout(given: Settings, role: str, section: str) -> None:
    """Mark a colocated role's layout settings as translated. In HybridFlow, a role in the actor's
    processes uses the actor's layout.
    """
    differs: list[str] = []
    for name in _SIZES:
        own = given.take(f"{role}.megatron.{name}")
        if own is not None and own != given.get(f"actor.megatron.{name}"):
            differs.append(f"{name}={own}")
    if differs:
        listed = ", ".join(differs)
        given.out.remarks.append(
            f"{role}.megatron has a different layout from the actor ({listed}), but a colocated "
            f"role uses the actor's layout. Set {section}.placement=own to use a separate layout"
        )


def _experts(given: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for role in ("actor", "ref", "critic"):
        prefix = f"{role}.megatron.override_transformer_config"
        deepep = given.take(f"{prefix}.moe_enable_deepep")
        kind = given.take(f"{prefix}.moe_token_dispatcher_type")
        if role == "ref" or (kind is None and not deepep):
            continue
        wanted = "deepep" if deepep else {"flex": "alltoall"}.get(str(kind), kind)
        found[f"{role}.parallel.moe_dispatcher"] = wanted
    return found


def _recompute(given: Settings) -> dict[str, Any]:
    prefix = "actor.megatron.override_transformer_config"
    granularity = given.take(f"{prefix}.recompute_granularity")
    given.take(f"{prefix}.recompute_method", f"{prefix}.recompute_num_layers")
    is_fsdp = given.get("actor.strategy") not in (None, "megatron")
    for role in ("ref", "critic"):
        given.take(f"{role}.megatron.override_transformer_config.recompute_*")
    given.drop(
        "logits are always computed in chunks (actor.logits_chunk_tokens)",
        "actor.entropy_from_logits_with_chunking",
        "ref.entropy_from_logits_with_chunking",
    )
    checkpointing = given.take("model.enable_gradient_checkpointing")
    given.take("critic.model.enable_gradient_checkpointing")
    if granularity is not None:
        return {"actor.recompute": granularity}
    if checkpointing is None:
        checkpointing = is_fsdp  # on by default in verl's FSDP backend
    return {"actor.recompute": "full"} if checkpointing else {}


def _megatron_fields(given: Settings) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for role in ("actor", "ref", "critic"):
        prefix = f"{role}.megatron.override_transformer_config."
        for name in _starting(given, prefix):
            field = name.removeprefix(prefix)
            why = _BY_DEVICE if field in _DEVICE_FIELDS else refusal(field)
            if f"ROLE.megatron.override_transformer_config.{field}" in RENAMED:
                continue
            if not why and field_types() and field not in field_types():
                why = "Megatron's TransformerConfig has no such field"
            if not why and role != "actor":
                why = "only the policy's fields can be set (actor.megatron)"
            if why:
                given.drop(why, name, needless=why == _BY_DEVICE or "config.json" in why)
            else:
                fields[field] = given.take(name)
    return {"actor.megatron": fields} if fields else {}


def _micro_batches(given: Settings) -> dict[str, Any]:
    row = int(given.get("data.max_prompt_length")) + int(given.get("data.max_response_length"))
    found: dict[str, Any] = {}
    for role in ("actor", "critic", "ref", "rollout"):
        tokens = _first_of(given, role, _TOKENS)
        rows = _first_of(given, role, _ROWS)
        context = (
            given.get(f"{role}.megatron.context_parallel_size")
            or given.get(f"{role}.ulysses_sequence_parallel_size")
            or 1
        )
        context = int(context)
        if role == "rollout" or (role == "ref" and not given.out.has_reference):
            continue  # the actor computes the old log-probabilities
        is_dynamic = given.get(f"{role}.use_dynamic_bsz") or given.get("actor.use_dynamic_bsz")
        if tokens and (is_dynamic or not rows):
            # verl's bound is of a GPU, ours of all context ranks together
            bound = max(int(tokens) * context, row)
        else:
            bound = int(rows or 1) * row
        section = "reference" if role == "ref" else role
        found[f"{section}.max_tokens_per_micro_batch"] = bound
    return found


def _first_of(given: Settings, role: str, names: Sequence[str]) -> Any:
    """Mark a role's keys as translated. Returns the first value that is set, or None."""
    keys = [f"{role}.{name}" for name in names]
    given.take(*keys)
    return next(filter(None, map(given.get, keys)), None)


def _cluster(given: Settings) -> dict[str, Any]:
    nodes = int(given.take("trainer.nnodes") or 1)
    gpus = int(given.take("trainer.n_gpus_per_node") or 8)
    ranks = int(given.take("rollout.tensor_model_parallel_size"))
    pipeline = int(given.take("rollout.pipeline_model_parallel_size") or 1)
    attention = int(given.take("rollout.data_parallel_size") or 1)
    size = ranks * attention * pipeline
    found: dict[str, Any] = {
        "cluster.nodes": nodes,
        "cluster.procs_per_node": gpus,
        "cluster.devices_per_node": gpus,
        "rollout.tensor": ranks * attention,
        "rollout.num_engines": max(1, nodes * gpus // size),
        "rollout.pool": "actor",
        "rollout.sleep_while_training": bool(given.take("rollout.free_cache_engine")),
        "rollout.mem_fraction_static": float(given.take("rollout.gpu_memory_utilization")),
        "rollout.max_running_requests": int(given.take("rollout.max_num_seqs")),
    }
    given.take("hybrid_engine")
    if pipeline > 1:
        found["rollout.pipeline"] = pipeline
    if attention > 1:
        found["rollout.data_parallel_attention"] = attention
    if size > gpus:
        found["rollout.nodes_per_engine"] = -(-size // gpus)
    return found


def _engine(given: Settings) -> dict[str, Any]:
    kind = str(given.take("rollout.name"))
    found: dict[str, Any] = {"rollout.engine": "sglang", "rollout.n": given.take("rollout.n")}
    if kind == "vllm":
        given.out.remarks.append(
            "rollout.name=vllm is translated to SGLang, this project's main engine; "
            "rollout.engine=vllm requires rollout.python, the interpreter of an environment with "
            "vLLM"
        )
    elif kind != "sglang":
        given.out.remarks.append(f"rollout.name={kind} is translated to SGLang")
    chunked = given.take("rollout.enable_chunked_prefill")
    tokens = given.take("rollout.max_num_batched_tokens")
    if tokens and chunked is not False:
        found["rollout.extra_args"] = {"chunked_prefill_size": int(tokens)}
    given.drop(
        f"these are {kind} arguments; set the SGLang equivalents in rollout.extra_args",
        *_starting(given, "rollout.engine_kwargs."),
    )
    return found


def _conversations(given: Settings) -> dict[str, Any]:
    for name in ("rollout.multi_turn.tool_config_path", "data.tool_config_path"):
        given.drop(
            "tools are Python functions here: list them in rollout.agent.tools with "
            "rollout.agent.loop=tools (docs/agents.md)",
            name,
            needless=given.get(name) in (None, ""),
        )
    return {}


def _backend(given: Settings) -> dict[str, Any]:
    kinds = {"fsdp2": "fsdp"}
    strategy = given.take("actor.strategy", "critic.strategy")
    return {"actor.backend": kinds.get(str(strategy), strategy)} if strategy else {}


def _sampling(given: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    sampled = given.take("rollout.val_kwargs.do_sample")
    temperature = given.take("rollout.val_kwargs.temperature")
    if sampled:
        found["rollout.val_sampling.temperature"] = float(temperature or 1.0)
    else:
        # without do_sample verl takes the most likely token, whatever the other keys are
        given.take("rollout.val_kwargs.top_p", "rollout.val_kwargs.top_k")
    given.take("rollout.do_sample")
    for name, off in (("top_p", 1.0), ("top_k", -1)):
        for part in ("rollout", "rollout.val_kwargs"):
            value = given.get(f"{part}.{name}")
            if value == off or (name == "top_k" and value == 0):
                given.take(f"{part}.{name}")
    return found


def _schedule(given: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    epochs = given.take("trainer.total_epochs")
    steps = given.take("trainer.total_training_steps")
    if steps:
        found["trainer.total_steps"] = int(steps)
    else:
        found["trainer.total_epochs"] = int(epochs)
    for name, key in (("save_freq", "save_every_steps"), ("test_freq", "test_every_steps")):
        found[f"trainer.{key}"] = max(0, int(given.take(f"trainer.{name}")))
    if given.take("trainer.resume_mode") == "disable":
        found["trainer.resume"] = "disable"
    for name in ("max_ckpt_to_keep", "max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"):
        kept = given.take(f"trainer.{name}")
        if kept:
            found["trainer.max_checkpoints_to_keep"] = int(kept)
    for name in ("rollout_data_dir", "validation_data_dir"):
        given.drop("rollouts are always written to the run folder", f"trainer.{name}")
    return found


def _names(given: Settings) -> dict[str, Any]:
    project = given.take("trainer.project_name")
    name = str(given.take("trainer.experiment_name") or project or "migrated")
    found: dict[str, Any] = {"name": name.replace("/", "-") or "migrated"}
    if project:
        found["trainer.project"] = str(project)
    folder = given.take("trainer.default_local_dir")
    if folder:
        path = PurePath(str(folder))
        found["output_dir"] = str(path.parent if path.name == name else path)
    wanted = given.take("trainer.logger")
    if not isinstance(wanted, list):
        wanted = [wanted]
    known = [one for one in wanted if one in _TRACKERS]
    found["trainer.loggers"] = [*dict.fromkeys(["console", "jsonl", *known])]
    libraries = [one for one in known if one in _LIBRARIES]
    if libraries:
        listed = ", ".join(libraries)
        extras = ",".join(libraries)
        given.out.remarks.append(
            f"trainer.loggers: {listed} must be installed: pip install 'hybridflow[{extras}]'"
        )
    others = [str(one) for one in wanted if one not in _TRACKERS]
    if others:
        listed = ", ".join(others)
        given.out.remarks.append(
            f"trainer.logger: there is no tracker {listed}; metrics are written to metrics.jsonl "
            "and the report. Add your own tracker with trainer.loggers=[path/to/file.py:name]"
        )
    return found


def _reward(given: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for prefix in ("", "reward."):
        path = given.take(f"{prefix}custom_reward_function.path")
        name = given.take(f"{prefix}custom_reward_function.name")
        if path:
            found |= {"reward.path": path, "reward.name": name or "compute_score"}
    prefix = "reward_model.reward_kwargs.overlong_buffer_cfg"
    given.drop("the report always shows the penalty", f"{prefix}.log")
    tokens = given.take(f"{prefix}.len")
    penalty = given.take(f"{prefix}.penalty_factor")
    if given.take(f"{prefix}.enable") and tokens:
        found["reward.overlong_tokens"] = int(tokens)
        found["reward.overlong_penalty"] = float(1.0 if penalty is None else penalty)
    for name in ("reward_model.reward_manager", "reward_manager.name"):
        if given.get(name) in ("naive", "dapo", "prime", "batch"):
            given.take(name)
    if not given.get("reward_model.enable"):
        given.drop("reward_model.enable is not set", *_starting(given, "reward_model.model."))
        given.drop("reward_model.enable is not set", *_starting(given, "reward_model.rollout."))
    return found


def _filter_groups(given: Settings) -> dict[str, Any]:
    enabled = given.take("algorithm.filter_groups.enable", "data.gen_batch_size")
    batches = given.take("algorithm.filter_groups.max_num_gen_batches")
    given.take("algorithm.filter_groups.metric")
    # verl: 0 is no limit
    return {"algorithm.dynamic_sampling": int(batches or 10)} if enabled else {}


def _router_replay(given: Settings) -> dict[str, Any]:
    mode = given.take("actor.router_replay.mode")
    engines = given.take("rollout.enable_rollout_routing_replay")
    wanted = str(mode or "disabled").lower()
    if wanted in ("r2", "r3") or engines:
        return {"actor.router_replay": wanted if wanted in ("r2", "r3") else "r3"}
    return {}


def _mtp(given: Settings) -> dict[str, Any]:
    prefix = "model.mtp."
    is_on = bool(given.get(f"{prefix}enable"))
    trains = is_on and bool(given.get(f"{prefix}enable_train"))
    found: dict[str, Any] = {}
    if trains:
        given.take(f"{prefix}enable_train", f"{prefix}enable")
        found["actor.mtp.train"] = True
        coef = given.take(f"{prefix}mtp_loss_scaling_factor")
        if coef:
            found["actor.mtp.coef"] = float(coef)
        detached = bool(given.get(f"{prefix}detach_encoder"))
        given.drop(
            "heads never change the policy (docs/prediction-heads.md)",
            f"{prefix}detach_encoder",
            needless=detached,
        )
    drafts = is_on and bool(given.get(f"{prefix}enable_rollout"))
    if drafts and trains:
        given.take(f"{prefix}enable_rollout")
        found["rollout.speculative.method"] = "mtp"
        steps = given.take(f"{prefix}speculative_num_steps")
        if steps:
            found["rollout.speculative.num_steps"] = int(steps)
    given.drop(
        "drafts are chains of the trained head (docs/prediction-heads.md)",
        *_starting(given, prefix),
        needless=not drafts,
    )
    return found


def _starting(given: Settings, prefix: str) -> list[str]:
    return [name for name in given.left() if name.startswith(prefix)]


Rule = Callable[[Settings], Mapping[str, Any]]
_RULES: Sequence[Rule] = (
    _names,
    _model,
    _data,
    _algorithm,
    _kl,
    _layout,
    _experts,
    _recompute,
    _megatron_fields,
    _optimizer,
    _micro_batches,
    _clip,
    _policy_loss,
    _router_replay,
    _mtp,
    _cluster,
    _engine,
    _backend,
    _conversations,
    _sampling,
    _reward,
    _filter_groups,
    _schedule,
)
