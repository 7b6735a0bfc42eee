"""Checks that engines support the sampling settings, and that the trainer can compute log-probs of
the sampled tokens. Does not import torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from hybridflow.config import derived
from hybridflow.config.keys import ENGINE, differing
from hybridflow.config.schema import AgentConfig, RunConfig, SamplingConfig
from hybridflow.config.val_sets import val_sets

_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}


def problems(config: RunConfig) -> Iterator[str]:
    """Yield one line for each problem with the sampling settings."""
    yield from _training(config)
    for key, one in sampled(config).items():
        yield from _values(config, key, one)


def sampled(config: RunConfig) -> dict[str, SamplingConfig]:
    """Return the sampling settings for training and for every validation set, keyed by
    configuration key."""
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
        yield f"{key}.top_k=0 would leave no token to sample; set -1 to disable it"
    if one.stop and config.rollout.agent.loop != AgentConfig().loop:
        yield (
            f"{key}.stop={list(one.stop)} with rollout.agent.loop={config.rollout.agent.loop}: an "
            "answer that ends with a stop string lacks the end-of-turn token that must precede the "
            "next message; remove it"
        )
    most = getattr(one, "max_new_tokens", None) or 0
    prompt = config.data.max_prompt_length
    if prompt + most > config.rollout.max_total_tokens:
        yield (
            f"{key}.max_new_tokens={most} after data.max_prompt_length={prompt} does not fit in an "
            "engine's KV cache; reduce it, or raise "
            f"rollout.max_total_tokens={config.rollout.max_total_tokens}"
        )
    if any(not text for text in one.stop):
        yield (
            f"{key}.stop contains an empty string, which would end every answer immediately; "
            "remove it"
        )


def _training(config: RunConfig) -> Iterator[str]:
    """Yield one line for each training sampling setting for which the trainer cannot compute
    log-probs.
    """
    sampling = config.rollout.sampling
    key = "rollout.sampling"
    for name, value, off in differing(sampling, _PENALTIES):
        yield (
            f"{key}.{name}={value} changes logits based on earlier tokens, but the trainer's "
            f"log-probs do not model this; set it to {off} (only rollout.val_sampling supports it)"
        )
    if sampling.top_k == 1 and config.rollout.logprob_diff_bound is not None:
        yield (
            f"{key}.top_k=1 always selects the most likely token, which yields no gradient; raise "
            "it, set it to -1, or, to debug with log-probs over the whole vocabulary, set "
            "rollout.logprob_diff_bound=null"
        )
    if not derived.needs_support(config):
        return
    cuts = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
    named = " ".join(f"{key}.{name}={value}" for name, value, _ in differing(sampling, cuts))
    if sampling.top_k == -1:
        yield (
            f"{named}: engines report the candidates that each token was sampled from, at most "
            f"top_k of them; also set {key}.top_k, for example to 256, or disable these settings"
        )
    engine = config.rollout.engine
    if engine in ENGINE.names() and not _tells_support(engine):
        others = ", ".join(filter(_tells_support, ENGINE.names()))
        yield (
            f"{named} is not supported with rollout.engine={engine}, because it does not report "
            "the candidates that a token was sampled from, so the trainer cannot compute the "
            f"token's log-prob; disable these settings, or choose one of {others}"
        )
    if config.actor.distillation.coef:
        yield (
            f"{named} is not supported with "
            f"actor.distillation.coef={config.actor.distillation.coef}: the teacher scores the "
            "whole vocabulary, but the policy scores only the sampled candidates; disable one of "
            "them"
        )


def _tells_support(engine: str) -> bool:
    """Return True if a built-in engine reports the candidates that each token was sampled from. Its
    package states this as `TELLS_SUPPORT` (default: True), and importing the package does not
    import the engine's library.
    """
    return bool(
        getattr(importlib.import_module(f"{ENGINE.package}.{engine}"), "TELLS_SUPPORT", True)
    )
