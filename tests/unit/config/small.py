"""A configuration that passes every check, small enough to be changed key by key."""

from __future__ import annotations

from hybridflow.config.check import problems
from hybridflow.config.load import load_config
from hybridflow.config.schema import RunConfig

# The e2e recipe cut down to one process and one engine without a warm start: what the cases below
# build upon.
ONE_PROCESS = (
    *(
        "actor=tiny",
        "cluster=one-process",
        "rollout=tiny",
        "sft=none",
        "data.prepare.options.num_sft=0",
    ),
    *(
        "data.max_prompt_length=32",
        "data.max_response_length=16",
        "actor.optim.lr_decay_style=constant",
        "actor.optim.lr_decay_steps=null",
    ),
)


def small(*overrides: str) -> RunConfig:
    given = {override.split("=")[0] for override in overrides}
    return load_config(
        "e2e", [*(word for word in ONE_PROCESS if word.split("=")[0] not in given), *overrides]
    )


def found(*overrides: str, name: str | None = None, job: str = "train") -> list[str]:
    return problems(load_config(name, overrides) if name else small(*overrides), job)
