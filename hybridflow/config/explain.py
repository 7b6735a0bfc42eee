"""`--explain`: shows how prompts, samples, mini-batches, micro-batches, ranks and accumulation
steps multiply, and the origin of each number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config import derived
from hybridflow.config.build import to_plain
from hybridflow.config.entries import (
    ESTIMATORS,
    FLOWS,
    POLICY_LOSSES,
    estimator_options,
    flow_options,
    policy_loss_options,
)
from hybridflow.config.keys import hints_of, value_at
from hybridflow.config.load import files_of
from hybridflow.config.schema import RunConfig

_DEFAULT = "schema default"
_KEYS = (  # shown to the user, in this order
    "data.train_batch_size",
    "rollout.n",
    "rollout.num_engines",
    "rollout.sync.staging_bytes",
    "actor.ppo_mini_batch_size",
    "actor.ppo_epochs",
    "actor.max_tokens_per_micro_batch",
    "data.max_prompt_length",
    "data.max_response_length",
    "cluster.nodes",
    "cluster.procs_per_node",
    "actor.parallel.tensor",
    "actor.parallel.pipeline",
    "actor.parallel.context",
    "trainer.total_steps",
    "trainer.total_epochs",
    "trainer.max_staleness",
    "sft.steps",
    "sft.batch_size",
)


@dataclass(frozen=True)
class Origins:
    """The origin of each key's value: an override, the last YAML file that sets it, or the
    schema."""

    overrides: frozenset[str]
    files: dict[str, str]

    @classmethod
    def find(cls, recipe: str, overrides: Sequence[str], dirs: Sequence[Path]) -> Origins:
        """Read the recipe and its group files, in order of increasing precedence."""
        files: dict[str, str] = {}
        for file, package in files_of(recipe, overrides, dirs):
            files |= dict.fromkeys(_leaves(_read(file), package), _shown(file, dirs))
        return cls(frozenset(word.lstrip("+~").partition("=")[0] for word in overrides), files)

    def of(self, key: str) -> str:
        """Return the origin of a key's value: `command line`, a file, or `schema default`."""
        # an override of a section may be a group choice (`algorithm=grpo`), which sets no key
        for prefix in _prefixes(key):
            if prefix in self.overrides and (prefix == key or prefix not in hints_of(RunConfig)):
                return "command line"
        return next(
            (self.files[prefix] for prefix in _prefixes(key) if prefix in self.files), _DEFAULT
        )


def explain(config: RunConfig, origins: Origins) -> str:
    """Return the text that `--explain` prints."""
    given = _given(config, origins)
    parts = (_rollout, _algorithm, _actor, _reference, _teacher, _critics, _sync, _sft)
    lines = list(given)
    for section in parts:
        lines += ["", *section(config)]
    for name in config.roles:
        view = derived.policy_view(config, name)
        own = config.roles[name]
        kind = "a frozen policy" if own.frozen else "an additional policy"
        processes = f"{derived.world_size(view)} processes"
        if own.base is not None:
            processes = f"adapters in the policy's {processes}, on its weights"
        lines += ["", f"roles.{name}: {kind}, {processes}"]
        for part in (_rollout,) if own.frozen else (_rollout, _actor, _reference):
            lines += [f"  {line}" for line in part(view)]
    return "\n".join(lines)


def _given(config: RunConfig, origins: Origins) -> list[str]:
    rows = []
    for key in _KEYS:
        rows.append((key, str(value_at(config, key)), origins.of(key)))
    wide = max(map(len, _KEYS))
    return ["Given", *(f"  {key:<{wide}}  {value:>8}  {origin}" for key, value, origin in rows)]


def _rollout(config: RunConfig) -> list[str]:
    prompts = config.data.train_batch_size
    n = config.rollout.n
    engines = config.rollout.num_engines
    samples = derived.samples_per_step(config)
    if config.data.answers == "pairs":
        return [
            "Rollout: none during steps; engines answer only held-out prompts",
            f"  samples   = data.train_batch_size recorded pairs = {prompts} x 2 = {samples}",
        ]
    return [
        "Rollout (one step)",
        f"  ranks     = {_engine_shape(config)}",
        f"  samples   = data.train_batch_size x rollout.n = {prompts} x {n} = {samples}",
        (
            f"  an engine = {samples} samples / rollout.num_engines {engines} = "
            f"{_up(samples, engines)}, at most rollout.max_running_requests "
            f"{config.rollout.max_running_requests} at a time"
        ),
        f"  sampling  = {_sampling(config)}",
        *_images(config),
        f"  staleness = trainer.max_staleness {config.trainer.max_staleness}: {_staleness(config)}",
    ]


def _sampling(config: RunConfig) -> str:
    if not derived.needs_support(config):
        return "from the whole vocabulary; log-probs are over the whole vocabulary"
    return (
        f"from at most rollout.sampling.top_k {config.rollout.sampling.top_k} tokens; log-probs "
        "and entropies, also the reference's, are over each token's candidates, without the "
        "log-prob kernel"
    )


def _images(config: RunConfig) -> list[str]:
    key = config.data.image_key
    if key is None:
        return []
    how = (
        "read by the engine in this process"
        if config.cluster.in_process
        else "sent to an engine as patches, once for all samples of a prompt"
    )
    return [f"  images    = column data.image_key {key}: {how}"]


def _staleness(config: RunConfig) -> str:
    steps = config.trainer.max_staleness
    samples = derived.samples_per_step(config)
    if config.trainer.tail_batching:
        size = config.data.train_batch_size
        short = derived.short_round_prompts(config)
        return (
            f"tail batching: a step submits {short} prompts and trains on the {size} that finish "
            f"first; once {size} prompts have been cut off, a separate step regenerates them"
        )
    if not steps:
        return "a step waits for all of its samples, generated with the current weights"
    ahead = config.trainer.steps_ahead
    have = (
        f"up to 1 + {steps} steps, {(1 + steps) * samples}, limited to what keeps the trainer busy,"
    )
    if ahead is not None:
        have = f"1 + trainer.steps_ahead {ahead} steps, {(1 + ahead) * samples},"
    return (
        f"engines work on the samples of {have} and continue while the policy trains; a token is "
        f"at most {steps} weight versions old"
    )


def _engine_shape(config: RunConfig) -> str:
    """Describe an engine's ranks, how experts and attention are distributed across them, and their
    nodes."""
    rollout = config.rollout
    ranks = derived.engine_ranks(config)
    nodes = config.rollout.nodes_per_engine
    sizes = {"expert": rollout.expert, "data_parallel_attention": rollout.data_parallel_attention}
    groups = [f"{key} {size}" for key, size in sizes.items() if size > 1]
    grouped = f" ({', '.join(groups)})" if groups else ""
    place = (
        f", {ranks // nodes} on each of rollout.nodes_per_engine = {nodes} nodes"
        if nodes > 1
        else ", on one node"
    )
    if nodes > 1 and config.cluster.address is None:
        place += " (all on this machine: cluster.address is null)"
    product = f"rollout.tensor x rollout.pipeline = {rollout.tensor} x {rollout.pipeline} = {ranks}"
    weights = f"; weights in {rollout.quantization}" if rollout.quantization else ""
    return f"{product} per engine{grouped}{place}{weights}"


def _algorithm(config: RunConfig) -> list[str]:
    estimator = ESTIMATORS.get(config.algorithm.adv_estimator)
    loss = POLICY_LOSSES.get(config.actor.policy_loss)
    flow = derived.flow_name(config)
    given = to_plain(flow_options(config.algorithm))
    options = f"; {_options(given)}" if given else ""
    return [
        "Algorithm",
        f"  flow        = {flow}, which calls {', '.join(FLOWS.get(flow).roles)}{options}",
        (
            f"  advantages  = algorithm.adv_estimator {config.algorithm.adv_estimator} of "
            f"scores{''.join(f', {name}' for name in estimator.reads)}; "
            f"{_options(estimator_options(config.algorithm))}"
        ),
        f"  policy loss = actor.policy_loss {config.actor.policy_loss} of {', '.join(loss.reads)}; "
        f"{_options(policy_loss_options(config.actor))}",
        f"  correction  = actor.rollout_correction: {_correction(config)}",
    ]


def _correction(config: RunConfig) -> str:
    correction = config.actor.rollout_correction
    below = (
        f"0 outside {correction.lower}..{correction.upper}"
        if correction.lower
        else f"at most {correction.upper}"
    )
    parts = []
    if correction.weight != "none":
        parts.append(f"{correction.weight} weights trainer / engine, {below}")
    if correction.reject:
        bounds = [f"{name}={value}" for name, value in correction.reject.items()]
        parts.append(f"rejection by {', '.join(bounds)}")
    return "; ".join(parts) or "none (the engine's log-probs are not used as weights)"


def _options(options: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in to_plain(options).items()) or "no options"


def _old_log_probs(config: RunConfig) -> str:
    column = derived.old_log_probs_column(config)
    if column is None:
        return "computed by the step's only update; no separate pass"
    kind = f"actor.old_log_probs {config.actor.old_log_probs}"
    if column == "old_log_probs" and not derived.scores_before_update(config):
        later = derived.share_scored_before_update(config)
        rest = (
            f"a separate pass over the other {later:.0%} of the rows"
            if later
            else "no separate pass"
        )
        return f"computed by the first update for its own rows; {rest} ({kind})"
    where = (
        "from a pass before the updates"
        if column == "old_log_probs"
        else "from the engine that sampled"
    )
    needed = "; a separate pass computes the policy's for reward, advantages or replay"
    return f"{where} ({kind})" + (
        needed if column != "old_log_probs" and derived.scores_before_update(config) else ""
    )


def _actor(config: RunConfig) -> list[str]:
    actor = config.actor
    parallel = config.actor.parallel
    samples = derived.samples_per_step(config)
    mini = derived.samples_per_mini_batch(config)
    dp = derived.data_parallel_size(config)
    model = derived.model_parallel_size(parallel)
    world = derived.world_size(config)
    longest = derived.max_sequence_length(config)
    share = _up(mini, dp)
    most = _up(share * longest, actor.max_tokens_per_micro_batch)
    return [
        "Actor (one step)",
        f"  processes          = cluster.nodes x cluster.procs_per_node = {config.cluster.nodes} x "
        f"{config.cluster.procs_per_node} = {world}",
        (
            f"  one model          = tensor x pipeline x context = {parallel.tensor} x "
            f"{parallel.pipeline} x {parallel.context} = {model} processes"
        ),
        (
            f"  data-parallel      = {world} / {model} = {dp} copies; each gets {_up(samples, dp)} "
            f"of the {samples} samples, balanced by cost"
        ),
        (
            "  mini-batch         = actor.ppo_mini_batch_size x rollout.n = "
            f"{actor.ppo_mini_batch_size} x {config.rollout.n} = {mini} samples per optimizer "
            "update"
        ),
        (
            "  updates            = data.train_batch_size / actor.ppo_mini_batch_size x "
            f"actor.ppo_epochs = {config.data.train_batch_size} / {actor.ppo_mini_batch_size} x "
            f"{actor.ppo_epochs} = {derived.updates_per_step(config)} per step{_in_all(config)}"
        ),
        f"  old log-probs      = {_old_log_probs(config)}",
        f"  a rank's share     = {mini} samples / {dp} copies = {share} samples per update",
        (
            "  micro-batches      = packed up to actor.max_tokens_per_micro_batch "
            f"{actor.max_tokens_per_micro_batch} tokens; the longest sample has {longest}, so "
            f"between 1 and about {min(share, most)} per update, the same number on every rank"
        ),
        (
            "  accumulation       = gradients of all micro-batches of an update are summed before "
            "its optimizer step"
        ),
    ]


def _in_all(config: RunConfig) -> str:
    steps = derived.total_steps(config, None)
    if steps is None:
        return f", for trainer.total_epochs {config.trainer.total_epochs} (steps: see Epoch)"
    return f", {derived.updates_per_step(config) * steps} in total ({steps} steps)"


def _reference(config: RunConfig) -> list[str]:
    if not derived.needs_reference(config):
        return ["Reference: none (actor.kl_loss_coef and algorithm.kl_coef are 0)"]
    if derived.has_own_reference(config):
        model = config.reference.path or "the policy at the start of RL"
        return [
            (
                f"Reference: {model}; one forward pass over a step's samples, in "
                f"{_place(config, 'reference')}"
            )
        ]
    return [
        (
            "Reference: one forward pass over a step's samples, on the actor's ranks, in "
            "micro-batches of the same size"
        )
    ]


def _teacher(config: RunConfig) -> list[str]:
    if not derived.has_teacher(config):
        return ["Teacher: none (teacher.path is null)"]
    teacher = config.teacher
    distillation = config.actor.distillation
    what = f"its {teacher.top_k} most likely tokens at every response token"
    if distillation.coef and distillation.loss != "forward_kl_topk":
        what = "its log-probability of every response token"
    learned = "not used for training (actor.distillation.coef is 0)"
    if distillation.coef:
        rewards = "in addition to the rewards" if distillation.task_rewards else "without rewards"
        learned = (
            f"distilled with {distillation.loss}, actor.distillation.coef {distillation.coef:g}, "
            f"{rewards}"
        )
    return [f"Teacher: {teacher.path}; {what}, {_place(config, 'teacher')}", f"  {learned}"]


def _sync(config: RunConfig) -> list[str]:
    sync = config.rollout.sync
    engines = config.rollout.num_engines
    return [
        "Weight sync (one step)",
        (
            "  bucket    = rollout.sync.staging_bytes / (2 x rollout.num_engines) = "
            f"{sync.staging_bytes} / (2 x {engines}) = {sync.staging_bytes // engines // 2} bytes; "
            "a rank has two of them, or up to eight parts, in flight to each engine"
        ),
        (
            f"  a failure = after rollout.sync.timeout_s {sync.timeout_s:g} s without progress; "
            f"{sync.max_retries} retries in the same sync, then the engine is excluded until the "
            "next sync"
        ),
    ]


def _critics(config: RunConfig) -> list[str]:
    model = "Reward model: none (reward_model.path is null)"
    if derived.has_reward_model(config):
        model = (
            f"Reward model: {config.reward_model.path}, {_place(config, 'reward_model')}; reward = "
            f"reward.weight {config.reward.weight:g} x score + reward_model.weight "
            f"{config.reward_model.weight:g} x its score"
        )
    critics = derived.critics(config)
    if not critics:
        estimator = config.algorithm.adv_estimator
        return [f"Critic: none (algorithm.adv_estimator={estimator} uses none)", model]
    lines: list[str] = []
    for name in critics:
        lines += _critic(config, name)
    return [*lines, model]


def _critic(config: RunConfig, role: str) -> list[str]:
    mini = derived.role_mini_batch_size(config, role)
    updates = derived.role_updates_per_step(config, role)
    epochs = getattr(config, role).ppo_epochs
    n = config.rollout.n
    dp = derived.role_data_parallel_size(config, role)
    return [
        f"{role.replace('_', ' ').capitalize()}: {_place(config, role)}",
        (
            f"  mini-batch         = {role}.ppo_mini_batch_size x rollout.n = {mini} x {n} = "
            f"{mini * n} samples per optimizer update"
        ),
        (
            f"  updates            = data.train_batch_size / {role}.ppo_mini_batch_size x "
            f"{role}.ppo_epochs = {config.data.train_batch_size} / {mini} x {epochs} = {updates} "
            f"per step; the first trainer.critic_warmup = {config.trainer.critic_warmup} steps "
            "do not train the policy"
        ),
        (
            f"  a rank's share     = {mini * n} samples / {dp} copies = {_up(mini * n, dp)} "
            "samples per update"
        ),
    ]


def _place(config: RunConfig, role: str) -> str:
    if derived.is_colocated(config, role):
        return "in the actor's processes, in its layout"
    layout = derived.role_layout(config, role)
    sizes = f"tensor {layout.tensor} x pipeline {layout.pipeline} x expert {layout.expert}"
    return f"{derived.role_world_size(config, role)} separate processes ({sizes})"


def _sft(config: RunConfig) -> list[str]:
    if config.sft.steps < 1:
        return ["Warm start: none (sft.steps is 0)"]
    size = config.sft.batch_size
    dp = derived.data_parallel_size(config)
    return [
        "Warm start",
        (
            f"  sequences seen = sft.steps x sft.batch_size = {config.sft.steps} x {size} = "
            f"{config.sft.steps * size}"
        ),
        (
            f"  a rank's share = {size} / {dp} = {_up(size, dp)} sequences per update, in "
            "micro-batches as above"
        ),
    ]


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _prefixes(key: str) -> Iterator[str]:
    """Yield a dotted key and its prefixes, longest first: `a.b.c`, `a.b`, `a`."""
    parts = key.split(".")
    return (".".join(parts[:end]) for end in range(len(parts), 0, -1))


def _read(file: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(file.read_text(encoding="utf-8")) or {}


def _leaves(values: Any, prefix: str) -> Iterator[str]:
    if not isinstance(values, dict):
        yield prefix
        return
    for key, value in values.items():
        if key != "defaults":
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))


def _shown(file: Path, dirs: Sequence[Path]) -> str:
    folder = next(filter(file.is_relative_to, dirs))
    return f"{folder.name}/{file.relative_to(folder)}"
