"""Writes `trl_algorithms.json`: what TRL 1.16.0's GRPO trainer makes of the batches of `drawn`, in
float64: losses with their gradients in the new log-probs, and advantages under its three ways to
scale rewards.

Needs the peer beside torch and transformers: `pip install --no-deps --target PEER trl==1.16.0
accelerate datasets pandas python-dateutil pytz tzdata six multiprocess dill xxhash`, then
`PYTHONPATH=.:PEER python tests/golden/make_trl_algorithms.py`.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from tests.golden.algorithm_inputs import PEER_CASES, Case, drawn, projected, scores_of_groups

OUT = Path(__file__).with_name("trl_algorithms.json")
PPO = {"loss_type": "bnpo", "epsilon": 0.2, "epsilon_high": 0.28}
# form of a loss: options of GRPOConfig; beta is set behind it, since TRL would load a reference
FORMS: dict[str, dict[str, Any]] = {
    "ppo": PPO,
    "gspo": {
        "loss_type": "bnpo",
        "epsilon": 0.1,
        "epsilon_high": 0.2,
        "importance_sampling_level": "sequence",
    },
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.28},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "vespo, k_neg 1": {"loss_type": "vespo", "vespo_k_neg": 1.0},
    "kl": {**PPO, "beta": 0.3, "use_bias_correction_kl": False},
    "unbiased kl": {**PPO, "beta": 0.3, "use_bias_correction_kl": True},
    "off-policy masks": {**PPO, "off_policy_mask_threshold": 0.02},
    "top entropy": {**PPO, "top_entropy_quantile": 0.2},
}


def trainer_of(options: dict[str, Any], folder: str) -> GRPOTrainer:
    """A trainer of a model of two words, whose own answers are not asked for."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    sizes = {
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=2, num_key_value_heads=1, eos_token_id=1, bos_token_id=0, **sizes)
    )
    options, beta = {**options}, options.get("beta", 0.0)
    options["beta"] = 0.0
    args = GRPOConfig(
        folder,
        use_cpu=True,
        bf16=False,
        report_to=[],
        num_generations=4,
        per_device_train_batch_size=12,
        **options,
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="b", pad_token="b"
        ),
    )
    trainer.beta = beta
    return trainer


def loss_of(trainer: GRPOTrainer, case: Case, seed: int) -> tuple[float, float]:
    """The loss and its projected gradient; the entropy of a token is minus its new log-prob."""
    new = case.new.clone().requires_grad_()
    mask = case.padded(case.mask.long())
    padded = case.padded(new)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (padded, -padded.detach(), None)
    trainer.current_gradient_accumulation_steps = 1
    inputs = {
        "prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "advantages": case.by_row(),
        "old_per_token_logps": case.padded(case.old),
        "sampling_per_token_logps": case.padded(case.rollout),
        "ref_per_token_logps": case.padded(case.reference),
        "num_items_in_batch": mask.sum(),
    }
    loss = trainer._compute_loss(None, inputs)
    (gradient,) = torch.autograd.grad(loss, new)
    return projected(loss, seed), projected(gradient, seed)


def advantages_of(trainer: GRPOTrainer, seed: int) -> float:
    """The projected advantages of three groups of four."""
    scores = scores_of_groups(seed)
    answers = [[0]] * len(scores)
    trainer._generate = lambda prompts: (
        answers,
        answers,
        None,
        ["a"] * len(scores),
        None,
        {},
        None,
        None,
    )
    trainer._calculate_rewards = lambda *_: scores[:, None]
    return projected(
        trainer._generate_and_score_completions([{"prompt": "a"}] * len(scores))["advantages"], seed
    )


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    # the quantile of entropies is in float32
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    seeds = range(PEER_CASES)
    with tempfile.TemporaryDirectory() as folder:
        trainers = {name: trainer_of(options, folder) for name, options in FORMS.items()}
        losses = {
            name: [loss_of(one, drawn(seed), seed) for seed in seeds]
            for name, one in trainers.items()
        }
        scaled = {
            name: trainer_of({"scale_rewards": name}, folder) for name in ("group", "batch", "none")
        }
        advantages = {
            name: [advantages_of(one, seed) for seed in seeds] for name, one in scaled.items()
        }
    found = {"peer": "TRL 1.16.0", "losses": losses, "advantages": advantages}
    OUT.write_text(json.dumps(found, separators=(",", ":")) + "\n")
