"""Checks of the sampling settings against the engines and the trainer's log-probs. No torch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from hybridflow.config import derived
from hybridflow.config.keys import ENGINE, differing
from hybridflow.config.schema import AgentConfig, RunConfig, SamplingConfig
from hybridflow.config.val_sets import val_sets

_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def problems(config: RunConfig) -> Iterator[str]:
    """Yield every problem as one line."""
    yield from _training(config)
    for key, one in sampled(config).items():
        yield from _values(config, key, one)


def sampled(config: RunConfig) -> dict[str, SamplingConfig]:
    """Return {key: its sampling settings}, for training and every validation set."""
    named = {}
    for name, one in val_sets(config).items():
        if name:
            named[f"data.val_sets.{name}.sampling"] = one.sampling
    return {
        "rollout.sampling": config.rollout.sampling,
        "rollout.val_sampling": config.rollout.val_sampling,
        **named,
    }


def _values(config: RunConfig, key: str, one: SamplingConfig) -> Iterator[str]:
    if one.top_k == 0:
        yield f"{key}.top_k=0 would sample from no token; -1 switches it off"
    if one.stop and config.rollout.agent.loop != AgentConfig().loop:
        yield (
            f"{key}.stop={list(one.stop)} with rollout.agent.loop={config.rollout.agent.loop}: an "
            "answer that ends with a text lacks the token that ends a turn before the next "
            "message; remove it"
        )
    most = getattr(one, "max_new_tokens", None) or 0
    prompt = config.data.max_prompt_length
    if prompt + most > config.rollout.max_total_tokens:
        yield (
            f"{key}.max_new_tokens={most} after data.max_prompt_length={prompt} does not fit the "
            "KV cache of an engine; lower it, or raise "
            f"rollout.max_total_tokens={config.rollout.max_total_tokens}"
        )
    if any(not text for text in one.stop):
        yield (
            f"{key}.stop has an empty text, behind which every answer would end at once; remove it"
        )


def _training(config: RunConfig) -> Iterator[str]:
    """Yield settings for which the trainer could not compute the log-probs."""
    sampling = config.rollout.sampling
    key = "rollout.sampling"
    for name, value, off in differing(sampling, _PENALTIES):
        yield (
            f"{key}.{name}={value} changes the logits by the tokens before, which the trainer's "
            f"log-probs do not follow; set it to {off} (rollout.val_sampling may have it)"
        )
    if sampling.top_k == 1 and config.rollout.logprob_diff_bound is not None:
        yield (
            f"{key}.top_k=1 takes the most likely token alone, which no gradient follows from; "
            "raise it, set it to -1, or, to debug with the log-probs of the whole vocabulary, set "
            "rollout.logprob_diff_bound=null"
        )
    if not derived.needs_support(config):
        return
    cuts = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    named = " ".join(f"{key}.{name}={value}" for name, value, _ in differing(sampling, cuts))
    if sampling.top_k == -1:
        yield (
            f"{named}: engines tell the trainer what each token was sampled among, at most so many "
            f"tokens as top_k; set {key}.top_k too, for example to 256, or switch the others off"
        )
    engine = config.rollout.engine
    if engine in ENGINE.names() and not _tells_support(engine):
        others = ", ".join(filter(_tells_support, ENGINE.names()))
        yield (
            f"{named} with rollout.engine={engine}, which does not tell what a token was sampled "
            "among, so that the trainer has no log-probs of it; switch them off, or choose one of "
            f"{others}"
        )
    if config.actor.distillation.coef:
        yield (
            f"{named} with actor.distillation.coef={config.actor.distillation.coef}: a teacher "
            "scores the whole vocabulary, and the policy what it was sampled among; switch one off"
        )


def _tells_support(engine: str) -> bool:
    """Return the declaration of a built-in kind's package. Importing it imports no library."""
    return bool(
        getattr(importlib.import_module(f"{ENGINE.package}.{engine}"), "TELLS_SUPPORT", True)
    )
