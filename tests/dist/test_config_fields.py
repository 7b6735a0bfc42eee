"""Every field of each family's config class: followed as transformers follows it, or refused by
name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridflow.models.family import FAMILIES
from tests.dist.cases.config_fields import OTHER, WITHOUT_INFLUENCE, batch, changes_of, fields_of
from tests.dist.harness.ranks import FSDP, run_ranks
from tests.models import FIELD_MODELS, LONG_TESTS_FULL

pytestmark = pytest.mark.slow
# rope_parameters has cases of its own; return_dict is a question of python, and transformers itself
# fails without
ELSEWHERE = {"rope_parameters", "return_dict"}


def oracle(folder: Path) -> np.ndarray:
    """Log-probs of the responses by transformers, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rows = batch()
    found = []
    for i in range(len(rows)):
        prompt = rows["prompt_ids"].row(i)
        response = rows["response_ids"].row(i)
        ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        found.append(
            logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0].numpy()
        )
    return np.concatenate(found)


@pytest.mark.parametrize("family", FIELD_MODELS)
def test_every_field_is_declared_and_has_a_case(family: str) -> None:
    fields = fields_of(family)
    assert fields - FAMILIES.get(family).fields.declared() == set()
    assert fields - OTHER.keys() - WITHOUT_INFLUENCE.keys() - ELSEWHERE == set()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[pytest.mark.full] if name in LONG_TESTS_FULL else [])
        for name in FIELD_MODELS
    ],
)
def test_every_field_is_followed_or_refused(family: str, tmp_path: Path) -> None:
    cases = dict(changes_of(family, fields_of(family)))
    [found] = run_ranks(
        1,
        "tests.dist.cases.config_fields:log_probs",
        cases=cases,
        folder=str(tmp_path),
        timeout_s=230,
    )
    wrong = {}
    unanswered = {}
    refused = set()
    distinct = set()
    for name, result in found.items():
        if isinstance(result, str):
            refused.add(name)
            field = name.removeprefix("no ").split("=")[0]
            if field in cases["as it is"] | OTHER and field not in result:
                wrong[name] = result  # the message must name the field
            continue
        try:
            expected = oracle(tmp_path / name)
        except (RuntimeError, ValueError, ZeroDivisionError) as error:
            unanswered[name] = repr(error)[:200]
            continue
        distinct.add(tuple(result))
        if not np.abs(np.array(result) - expected).max() < 2e-5:
            wrong[name] = str(np.abs(np.array(result) - expected).max())
    assert wrong == {}, refused
    assert not refused & {
        "as it is",
        "without influence",
        "linear",
        "yarn",
        "yarn with mscale",
        "llama3",
    }
    unsupported = {"hidden_act=gelu", "hidden_activation=gelu", "attention_dropout=0.5"}
    assert refused >= {"dynamic", "longrope"} | unsupported & cases.keys()
    # transformers cannot run its own default of 128 key heads with another number of heads, nor a
    # head_dim here
    assert unanswered.keys() <= (
        {"no num_key_value_heads", "head_dim=16"}
        if family in ("deepseek_v3", "glm4_moe_lite")
        else set()
    ), unanswered
    assert len(distinct) > 18  # most changes do change the result


@pytest.mark.parametrize(
    "name", ["linear", "yarn with a factor of attention", "dynamic", "use_sliding_window=True"]
)
def test_fsdp_scales_rotary_embeddings_and_refuses_the_same_configs(
    name: str, tmp_path: Path
) -> None:
    # the backend takes the deviation of its random weights from the config, Megatron's cases have
    # 0.2
    cases = {
        name: {**dict(changes_of("qwen3", fields_of("qwen3")))[name], "initializer_range": 0.2}
    }
    arguments = {"cases": cases, "folder": str(tmp_path), "backend": "fsdp"}
    [found] = run_ranks(
        1, "tests.dist.cases.config_fields:log_probs", loaded=FSDP, timeout_s=100, **arguments
    )
    if name == "dynamic":
        assert "not supported" in found[name]
    else:
        assert np.abs(np.array(found[name]) - oracle(tmp_path / name)).max() < 2e-5
