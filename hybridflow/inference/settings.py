"""The settings of an evaluation or a server. They come from the run that wrote the weights, or from
the defaults, and include only the settings that engines, data and rewards need.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridflow.config import derived
from hybridflow.config.check import check
from hybridflow.config.hub import is_hub_id, located
from hybridflow.config.keys import ENGINE
from hybridflow.config.recorded import (
    RECORDED,
    load_values,
    located_from_elsewhere,
    read_recorded,
    refuse_code,
)
from hybridflow.config.schema import (
    AgentConfig,
    ClusterConfig,
    DataConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from hybridflow.config.schema_data import PrepareConfig
from hybridflow.config.schema_rewards import RewardConfig
from hybridflow.config.val_sets import val_sets
from hybridflow.errors import ConfigError
from hybridflow.inference.source import Source

_SECTIONS = ("data", "model", "rollout", "reward", "seed", "cluster")
_IN_PROCESS = "hf"  # the kind of engine that computes in this process
# an engine that does not share its device with a trainer
_MEM_FRACTION = 0.85
_DTYPES = ("float32", "bfloat16")
# a server answers with the model alone
_UNUSED_TO_SERVE = (
    "data.dataset_class.path",
    "reward.path",
    "reward.verifiers",
    "reward.combine",
    "rollout.agent.",
)


@dataclass(frozen=True)
class Job:
    """The current command: its name (`eval` or `serve`), and the option that allows it to execute a
    run's code.
    """

    name: str
    run_code: bool = False


def expected_engines(source: Source, words: Sequence[str]) -> RunConfig:
    """Return the kind of engine that `settings` will most likely select, so that its library can be
    imported in the background.
    """
    known = _nested(_recorded(source), "rollout", "engine")
    engine = known if isinstance(known, str) else RolloutConfig().engine
    in_process = engine == _IN_PROCESS
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        if key == "rollout.engine":
            engine = value
            in_process = engine == _IN_PROCESS
        elif key == "cluster":
            in_process = True
    return RunConfig(
        rollout=RolloutConfig(engine=engine), cluster=ClusterConfig(in_process=in_process)
    )


def settings(
    source: Source,
    words: Sequence[str],
    job: Job,
    data: Sequence[str] = (),
    out: Path | None = None,
) -> RunConfig:
    """Return the validated configuration. Its `model.path` is the given folder or None.

    Args:
        words: `key=value` settings on the command line.
        data: evaluation sets that replace the run's, as `FILE` or `NAME=FILE`.
        out: the folder for results and logs.

    Raises:
        ConfigError: a setting is invalid or has no effect, there is no evaluation set, or the run's
            configuration refers to code that was not allowed.
    """
    config = load_values(_recorded(source), words)
    _refuse_without_effect(words, job)
    if source.run is not None and not job.run_code:
        unused = _UNUSED_TO_SERVE if job.name == "serve" else ()
        refuse_code(config, source.run / RECORDED, words, f"hybridflow {job.name}", unused)
    config = _of_role(config, source)
    if data:
        config = replace(config, data=_with_sets(config.data, data, words))
    model = replace(config.model, tokenizer=_tokenizer(config, source, words))
    config = _reduced(replace(config, model=model), source, job, out)
    config = _without_preparation(located(config))
    if job.name == "eval" and not any(one.files for one in val_sets(config).values()):
        raise ConfigError(
            "no evaluation set was given: add --data FILE or --data NAME=FILE (parquet, jsonl or "
            "csv files, or a data set's hub id)"
        )
    check(config, job.name)
    return config


def _recorded(source: Source) -> dict[str, Any]:
    """Return the run's configuration values, or default values for a model without a run."""
    if source.run is not None:
        values = located_from_elsewhere(read_recorded(source.run / RECORDED), source.run)
        values["cluster"] = {
            "in_process": _nested(values, "cluster", "in_process") is True,
            "start_timeout_s": _nested(values, "cluster", "start_timeout_s") or 120.0,
        }
        return values
    dtype = source.dtype if source.dtype in _DTYPES else "bfloat16"
    return {"model": {"dtype": dtype}, "rollout": {"mem_fraction_static": _MEM_FRACTION}}


def _nested(values: Mapping[str, Any], section: str, key: str) -> Any:
    found = values.get(section)
    return found.get(key) if isinstance(found, Mapping) else None


def _refuse_without_effect(words: Sequence[str], job: Job) -> None:
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if key == "model.path":
            raise ConfigError(
                f"{word}: pass the folder as an argument instead: hybridflow {job.name} FOLDER"
            )
        if key.partition(".")[0].partition("/")[0] not in _SECTIONS:
            raise ConfigError(
                f"{key} has no effect on hybridflow {job.name}, which does not train; its settings "
                f"are in {', '.join(_SECTIONS[:-2])} and {_SECTIONS[-2]}"
            )


def _of_role(config: RunConfig, source: Source) -> RunConfig:
    """Return the settings of the selected policy."""
    is_export = source.manifest is None
    if not source.role or (is_export and source.role not in config.roles):
        return config
    if source.role not in config.roles:
        known = ", ".join(("policy", *config.roles))
        raise ConfigError(
            f"{source.folder} does not belong to a policy of its run; pass the folder of one of "
            f"its policies: {known}"
        )
    return derived.policy_view(config, source.role)


def _with_sets(data: DataConfig, given: Sequence[str], words: Sequence[str]) -> DataConfig:
    """Return the data section with these evaluation sets in place of the run's."""
    unnamed: list[str] = []
    named: dict[str, list[str]] = {}
    for one in given:
        name, found, file = one.partition("=")
        if found and not Path(one).exists():
            named.setdefault(name, []).append(file)
        else:
            unnamed.append(one)
    keys = [word.lstrip("+").partition("=")[0] for word in words]
    for key in keys:
        name = key.removeprefix("data.val_sets.").partition(".")[0]
        if key.startswith("data.val_sets.") and name not in named:
            raise ConfigError(
                f"{key}: --data has no set named {name} (named sets: "
                f"{', '.join(named) or 'none'}); write --data {name}=FILE"
            )
    sets = {}
    for name, files in named.items():
        sets[name] = {**data.val_sets.get(name, {}), "files": files}
    # a limit for validation during training is not one for other data
    most = data.val_max_prompts if "data.val_max_prompts" in keys else None
    return replace(data, val_files=tuple(unnamed), val_sets=sets, val_max_prompts=most)


def _reduced(config: RunConfig, source: Source, job: Job, out: Path | None) -> RunConfig:
    """Return the configuration without settings that only training uses."""
    folder = None if source.manifest is not None else str(source.folder)
    known = {} if folder is not None else dict(source.hf_config)
    model = replace(config.model, path=folder, hf_config=known)
    data = replace(config.data, train_files=(), train_batch_size=DataConfig().train_batch_size)
    data = replace(data, answers="sampled", weight_key=None, difficulty_key=None)
    rollout = _engines(config)
    reward = config.reward
    if job.name == "serve":
        data = replace(data, val_files=(), val_sets={}, dataset_class=DataConfig().dataset_class)
        agent = AgentConfig(call_format=rollout.agent.call_format)
        rollout = replace(rollout, agent=agent, val_samples=1)
        reward = RewardConfig()
    # a server writes nothing but logs, which are temporary
    out = Path(tempfile.gettempdir()) / "run" if out is None else out
    in_process = _is_in_process(config)
    cluster = ClusterConfig(in_process=in_process, start_timeout_s=config.cluster.start_timeout_s)
    longest = data.max_prompt_length + data.max_response_length
    actor = RunConfig().actor
    actor = replace(
        actor, max_tokens_per_micro_batch=max(actor.max_tokens_per_micro_batch, longest)
    )
    return RunConfig(
        name=out.name,
        output_dir=str(out.parent),
        seed=config.seed,
        data=data,
        model=model,
        actor=actor,
        rollout=rollout,
        reward=reward,
        cluster=cluster,
    )


def _without_preparation(config: RunConfig) -> RunConfig:
    """Return the configuration without `data.prepare` if all files exist."""
    wanted: list[str] = []
    for one in val_sets(config).values():
        wanted += one.files
    if config.model.tokenizer is not None:
        wanted.append(config.model.tokenizer)
    if all(Path(one).exists() for one in wanted):
        return replace(config, data=replace(config.data, prepare=PrepareConfig()))
    return config


def _tokenizer(config: RunConfig, source: Source, words: Sequence[str]) -> str | None:
    """Return the tokenizer's folder. The first of these that exists is used: the given folder, the
    folder in the run's settings, the run's copy of it, the model's folder.
    """
    named = config.model.tokenizer
    if any(word.lstrip("+").startswith("model.tokenizer=") for word in words):
        return named
    if source.manifest is None and named is None:
        return None  # that of the folder
    found = named or config.model.path
    if found is not None and (Path(found).is_dir() or is_hub_id(found)):
        return found
    if source.run is not None:
        copy = source.run / "model" / source.role
        if (copy / "config.json").is_file():
            return str(copy)
    return None if source.manifest is None else found


def _is_in_process(config: RunConfig) -> bool:
    engine = config.rollout.engine
    return engine == _IN_PROCESS if engine in ENGINE.names() else config.cluster.in_process


def _engines(config: RunConfig) -> RolloutConfig:
    """Return the engines' settings, omitting those that are used only in training. If the engine
    runs in this process, the number of engines is 1.
    """
    rollout = config.rollout
    if rollout.quantization is not None:
        raise ConfigError(
            f"rollout.quantization={rollout.quantization}: the trainer quantized the run's weights "
            "for its engines, but this command has no trainer; set "
            "rollout.quantization=null to use them in "
            f"{config.model.dtype}"
        )
    if rollout.nodes_per_engine > 1:
        raise ConfigError(
            f"rollout.nodes_per_engine={rollout.nodes_per_engine}: engines are started on this "
            "machine only; set rollout.nodes_per_engine=1, and rollout.tensor to at most its "
            "number of GPUs"
        )
    rollout = replace(
        rollout, sampling=SamplingConfig(), pool=None, sleep_while_training=False, n=1
    )
    if not _is_in_process(config):
        return rollout
    return replace(
        rollout,
        num_engines=1,
        tensor=1,
        pipeline=1,
        expert=1,
        data_parallel_attention=1,
        extra_args={},
        python=None,
    )
