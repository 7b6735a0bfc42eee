"""Every name that verl 0.9.1 gives to an estimator, a loss, a KL estimate, an aggregation or a
reward manager, and its main branch to an aggregation, is read as ours, or refused with what to set
instead."""

from __future__ import annotations

import pytest

from hybridflow.config.check_entries import problems
from hybridflow.config.keys import value_at
from hybridflow.config.load import load_config
from hybridflow.errors import ConfigError

SAME = {
    "algorithm.adv_estimator": (
        *(
            "gae",
            "grpo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "remax",
            "rloo",
            "opo",
            "grpo_passk",
        ),
        *("gpg", "optimal_token_baseline", "gdpo"),
    ),
    "actor.policy_loss": (
        "dppo_tv",
        "dppo_kl",
        "gspo",
        "sapo",
        "gpg",
        "clip_cov",
        "kl_cov",
        "dro",
        "cispo",
    ),
    "actor.loss_agg_mode": (
        *(
            "token-mean",
            "token-sum",
            "seq-mean-token-sum",
            "seq-mean-token-mean",
            "seq-mean-token-sum-norm",
        ),
    ),
    "actor.kl_loss_type": ("k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"),
    "algorithm.kl_penalty": ("k1", "abs", "k2", "k3"),
}
OTHER = {
    "algorithm.adv_estimator": {
        "grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
        "tir_optimal_token_baseline": "optimal_token_baseline",
    },
    "actor.policy_loss": {"vanilla": "ppo", "geo_mean": "gmpo"},
    "actor.kl_loss_type": {
        "kl": "k1",
        "mse": "k2",
        "low_var_kl": "k3",
        "kl+": "k1+",
        "mse+": "k2",
        "k2+": "k2",
        "low_var_kl+": "k3+",
    },
    "algorithm.kl_penalty": {"kl": "k1", "mse": "k2", "low_var_kl": "k3"},
}
REFUSED = {
    "actor.policy_loss=bypass_mode": r"verl's bypass_mode is actor\.old_log_probs=engine",
    "actor.loss_agg_mode=batch-mean": "choose one of: token-mean",
    "actor.kl_loss_type=full": "choose one of: k1",
    # its reward managers: naive, prime, dapo, batch, remote, rate_limited, gdpo
    "reward_model.reward_manager=dapo": r"dapo is reward\.overlong_tokens",
    "reward.reward_manager.name=prime": "a process pool",
}
NAMES = {
    key: {**dict(zip(names, names, strict=True)), **OTHER.get(key, {})}
    for key, names in SAME.items()
}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(max(map(len, NAMES.values()))))
def test_names_of_verl_are_read_as_ours(number: int) -> None:
    """One name of each key at a time."""
    names = {key: list(ours)[number % len(ours)] for key, ours in NAMES.items()}
    config = load_config("e2e", [f"{key}={name}" for key, name in names.items()])
    assert {key: value_at(config, key) for key in names} == {
        key: NAMES[key][name] for key, name in names.items()
    }
    assert not list(problems(config))


@pytest.mark.parametrize(("word", "said"), REFUSED.items())
def test_a_name_without_a_counterpart_is_refused_with_what_to_set(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config("e2e", [word])
