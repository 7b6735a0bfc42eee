"""Combinations that cannot run are refused before anything starts, each with its keys and what to
do."""

from __future__ import annotations

import copy
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config import derived
from hybridflow.config.build import build, to_plain
from hybridflow.config.check import check, problems
from hybridflow.config.keys import Above, AtLeast, Bound, all_keys
from hybridflow.config.load import load_config
from hybridflow.config.locate import shipped_config_dir
from hybridflow.config.schema import RunConfig
from hybridflow.data.prepare import prepare
from hybridflow.errors import ConfigError
from hybridflow.models.published import published
from tests.unit.config.small import found, small

pytestmark = pytest.mark.usefixtures("elsewhere")
STALE = ("trainer.max_staleness=1", "actor.rollout_correction.weight=token")
TP2 = ("cluster.procs_per_node=2", "actor.parallel.tensor=2", "actor.parallel.sequence=true")


DRAFTS = ("actor.mtp.train=true", "rollout.speculative.method=mtp")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["e2e", "tiny-moe-grpo"])
def test_the_recipes_pass(name: str) -> None:
    assert found(name=name) == []


@pytest.mark.slow
def test_the_gsm8k_recipe_passes_once_prepared() -> None:
    [line] = found(name="gsm8k-smoke")
    assert "`hybridflow prepare gsm8k --out data/gsm8k`" in line
    Path("raw").mkdir()
    for split in ("train", "test"):
        Path(f"raw/{split}.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\n')
    prepare("gsm8k", Path("data/gsm8k"), Path("raw"))
    assert found(name="gsm8k-smoke") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        TP2,
        ("model=tiny-dense", "cluster.procs_per_node=2", "actor.parallel.tensor=2"),
        ("cluster.nodes=2", "actor.parallel.pipeline=2"),
        ("cluster.procs_per_node=2",),
        ("cluster.procs_per_node=4", "actor.parallel.expert=4", "rollout.n=8"),
        (
            "cluster.procs_per_node=4",
            "actor.parallel.tensor=4",
            "actor.parallel.sequence=true",
            "actor.parallel.expert=2",
        ),
        ("cluster.procs_per_node=2", "actor.parallel.context=2"),
        (
            "cluster.procs_per_node=2",
            "actor.parallel.pipeline=2",
            "actor.parallel.virtual_pipeline=2",
            "model.hf_config.num_hidden_layers=4",
        ),
        ("actor.parallel.virtual_pipeline=1",),
        ("cluster.procs_per_node=2", "actor.parallel.expert_tensor=2"),
        (*TP2, "actor.parallel.expert_tensor=1"),
        (
            "cluster.procs_per_node=2",
            "actor.parallel.overlap_grad_reduce=true",
            "actor.parallel.overlap_param_gather=true",
        ),
        (
            "cluster.procs_per_node=2",
            "actor.parallel.expert=2",
            "actor.parallel.moe_dispatcher=allgather",
        ),
        ("actor.recompute=full", "actor.on_nonfinite=skip", "actor.logits_chunk_tokens=1"),
        ("rollout.sampling.top_k=20", "rollout.sampling.top_p=0.8", "rollout.sampling.min_p=0.01"),
        (
            "rollout.val_sampling.repetition_penalty=1.1",
            "rollout.val_sampling.top_p=0.9",
            "rollout.sampling.stop=[x]",
        ),
        *((f"algorithm={name}",) for name in ("dpo", "ipo", "kto")),
        ("trainer.max_staleness=4", "actor.old_log_probs=engine"),
        ("trainer.max_staleness=4", "algorithm=grpo-async"),
        STALE,
        ("actor.optim.lr_decay_style=cosine", "actor.optim.lr_decay_steps=10"),
        ("actor.clip_ratio_c=null",),
        ("rollout.tensor=2", "rollout.expert=2"),
        ("rollout.pipeline=2", "rollout.sync.pause=abort"),
        ("rollout.quantization=fp8", "model.dtype=bfloat16"),
        (
            (
                "rollout.extra_args={chunked_prefill_size: 64, attention_backend: triton, "
                "disable_radix_cache: true, kv_cache_dtype: fp8_e5m2, "
                "enable_return_routed_experts: true}"
            ),
        ),
        ("rollout.tensor=2", "rollout.nodes_per_engine=2", "rollout.sync.transport=shared_memory"),
        ("rollout.tensor=8", "rollout.data_parallel_attention=2", "rollout.expert=4"),
        ("actor.max_tokens_per_micro_batch=48",),
        ("actor.lora.rank=8", "actor.lora.targets=[linear_qkv]"),
        ("actor.lora.rank=8", "actor.lora.targets=[linear_proj, experts.linear_fc1]"),
        ("actor.lora.rank=8", "actor.lora.sync=adapter"),
        (
            "model=tiny-dense",
            "actor.lora.rank=8",
            "actor.lora.alpha=16",
            "actor.lora.targets=[linear_fc1, linear_proj]",
        ),
        ("sft=warm-start", "data.prepare.options.num_sft=64"),
    ],
)
def test_what_can_run_passes(overrides: tuple[str, ...]) -> None:
    assert found(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ("actor.parallel.tensor=2", "actor.parallel.sequence=true"),
            ("tensor=2", "1 processes", "multiple of 2"),
        ),
        (
            ("cluster.procs_per_node=2", "actor.parallel.expert=4"),
            ("expert=4", "expert_tensor=1 (the default)", "2 processes"),
        ),
        (
            (
                "cluster.procs_per_node=2",
                "actor.parallel.expert=2",
                "actor.parallel.expert_tensor=2",
            ),
            ("expert_tensor=2", "= 4 does not"),
        ),
        (
            ("algorithm=remax", "rollout.val_sampling.temperature=1"),
            ("temperature=1.0", "remax", "greedy answer"),
        ),
        *(
            (
                (f"algorithm={name}", *given),
                (said, f"adv_estimator={name}", f"set {said.partition('=')[0]}={wanted}"),
            )
            for name in ("dpo", "ipo", "kto")
            for given, said, wanted in (
                (("actor.ppo_mini_batch_size=2",), "actor.ppo_mini_batch_size=2", 4),
                (("actor.ppo_epochs=2",), "actor.ppo_epochs=2", 1),
                (("actor.kl_loss_coef=0.1",), "actor.kl_loss_coef=0.1", 0.0),
                (("algorithm.kl_coef=0.1",), "algorithm.kl_coef=0.1", 0.0),
            )
        ),
        (
            ("algorithm.adv_estimator=dpo",),
            ("loss_agg_mode=token-mean", "dpo", "seq-mean-token-sum"),
        ),
        (
            ("rollout.val_samples=4",),
            ("rollout.val_samples=4", "temperature=0", "would be identical"),
        ),
        (("algorithm.dynamic_sampling=1",), ("algorithm.dynamic_sampling=1", "2 or more")),
        (
            ("algorithm=reinforce-plus-plus", "algorithm.dynamic_sampling=3"),
            ("dynamic_sampling=3", "equal scores"),
        ),
        (("reward.overlong_tokens=9999",), ("overlong_tokens=9999", "max_response_length")),
        (
            ("model=tiny-dense", "actor.parallel.sequence=true"),
            ("actor.parallel.sequence=true", "tensor > 1"),
        ),
        (
            (*TP2, "actor.parallel.sequence=false"),
            ("actor.parallel.sequence=true", "num_experts=4", "mixture of experts"),
        ),
        (
            ("model=tiny-dense", "actor.parallel.expert=2", "cluster.procs_per_node=2"),
            ("expert=2", "num_experts"),
        ),
        (
            ("actor.parallel.moe_dispatcher=deepep",),
            ("moe_dispatcher=deepep", "actor.parallel.expert above 1"),
        ),
        (("actor.parallel.virtual_pipeline=2",), ("virtual_pipeline=2", "pipeline > 1")),
        (
            ("actor.parallel.context=2", "cluster.procs_per_node=3"),
            ("context=2", "3 processes", "multiple of 2"),
        ),
        (
            (
                "actor.parallel.context=2",
                "cluster.procs_per_node=2",
                "actor.max_tokens_per_micro_batch=49",
                "data.max_response_length=17",
            ),
            (
                "max_tokens_per_micro_batch=49",
                "52 tokens",
                "2 x actor.parallel.context=2",
                "at least 52",
            ),
        ),
        (
            (
                "actor.parallel.overlap_param_gather=true",
                "actor.parallel.distributed_optimizer=false",
            ),
            ("overlap_param_gather=true", "distributed_optimizer=true"),
        ),
        (
            ("actor.parallel.overlap_param_gather=true",),
            ("overlap_param_gather=true", "overlap_grad_reduce to true"),
        ),
        (
            ("model=tiny-dense", "actor.parallel.expert_tensor=2", "cluster.procs_per_node=2"),
            ("expert_tensor=2", "mixture of experts", "null"),
        ),
        (
            ("cluster.procs_per_node=2", "actor.parallel.expert_tensor=3"),
            ("expert_tensor=3", "multiple of 3"),
        ),
        (("rollout.tensor=3",), ("num_attention_heads=4", "rollout.tensor=3")),
        (("rollout.sync.timeout_s=0",), ("rollout.sync.timeout_s=0.0 must be more than 0",)),
        (("rollout.sync.max_retries=-1",), ("rollout.sync.max_retries=-1 must be at least 0",)),
        (
            ("rollout.tensor=4", "model.hf_config.num_key_value_heads=3"),
            ("num_key_value_heads=3", "rollout.tensor=4"),
        ),
        (
            ("rollout.tensor=2", "rollout.expert=3"),
            ("rollout.expert=3", "rollout.tensor=2", "divisor of 2"),
        ),
        (
            ("rollout.data_parallel_attention=2",),
            ("rollout.data_parallel_attention=2", "rollout.tensor=1"),
        ),
        (
            ("rollout.pipeline=2",),
            ("rollout.pipeline=2", "rollout.sync.pause=abort", "got retract"),
        ),
        (
            ("rollout.pipeline=3", "rollout.sync.pause=abort"),
            ("num_hidden_layers=2", "rollout.pipeline=3"),
        ),
        (
            ("rollout.quantization=fp8",),
            ("rollout.quantization=fp8", "model.dtype=bfloat16", "got float32"),
        ),
        (
            ("+rollout.extra_args.host=0.0.0.0",),
            ("rollout.extra_args.host='0.0.0.0'", "only on loopback", "remove it"),
        ),
        (
            ("+rollout.extra_args.admin_api_key=x",),
            ("rollout.extra_args.admin_api_key", "keys that the job chooses"),
        ),
        (
            ("rollout.engine=vllm", "+rollout.extra_args.hf_overrides={a:1}"),
            ("extra_args.hf_overrides", "model.hf_config"),
        ),
        (
            ("cluster=in-process", "+rollout.extra_args.chunked_prefill_size=64"),
            ('rollout.extra_args={"chunked_prefill_size": 64}', "set it to {}"),
        ),
        (
            ("rollout.tensor=2", "rollout.nodes_per_engine=2", "cluster.address=10.0.0.1:6379"),
            ("rollout.nodes_per_engine=2", "10.0.0.1:6379", "cluster.trusted_network=true"),
        ),
        (
            ("rollout.nodes_per_engine=2",),
            (
                "rollout.nodes_per_engine=2",
                "an engine's rollout.tensor=1 x rollout.pipeline=1 = 1 ranks",
                "divisor of 1",
            ),
        ),
        (
            ("rollout.pipeline=2", "rollout.tensor=3", "rollout.nodes_per_engine=3"),
            ("nodes_per_engine=3", "rollout.pipeline=2", "occupy whole nodes"),
        ),
        (
            ("model=tiny-dense", "rollout.tensor=2", "rollout.expert=2"),
            ("rollout.expert=2", "mixture of experts"),
        ),
        (
            (
                "rollout.tensor=4",
                "rollout.data_parallel_attention=4",
                "model.hf_config.num_experts=6",
                "rollout.expert=4",
            ),
            ("6 experts",),
        ),
        (
            ("rollout.tensor=2", "model.hf_config.moe_intermediate_size=33"),
            ("moe_intermediate_size=33", "rollout.tensor=2"),
        ),
        (
            (
                "rollout.tensor=2",
                "+model.hf_config.n_shared_experts=1",
                "model.hf_config.moe_intermediate_size=33",
            ),
            ("shared", "33"),
        ),
        (
            ("rollout.tensor=8", "rollout.data_parallel_attention=1"),
            ("num_attention_heads=4", "rollout.tensor=8"),
        ),
        (
            ("data.train_batch_size=6", "actor.ppo_mini_batch_size=4"),
            ("train_batch_size=6", "ppo_mini_batch_size=4", "divides 6"),
        ),
        (
            ("cluster.procs_per_node=3", "rollout.n=1"),
            ("ppo_mini_batch_size=4", "rollout.n=1", "3 data-parallel ranks"),
        ),
        (
            ("sft=warm-start", "sft.batch_size=3", "cluster.procs_per_node=2"),
            ("sft.batch_size=3", "2 data-parallel ranks"),
        ),
        (
            ("actor.max_tokens_per_micro_batch=47",),
            ("max_tokens_per_micro_batch=47", "max_prompt_length=32", "at least 48"),
        ),
        (("rollout.max_total_tokens=47",), ("rollout.max_total_tokens=47", "KV cache")),
        (("data.max_response_length=2000",), ("max_position_embeddings=1024", "2032")),
        (
            ("rollout.sampling.top_p=0.9",),
            ("rollout.sampling.top_p=0.9", "also set rollout.sampling.top_k"),
        ),
        (
            ("rollout.sampling.min_p=0.1",),
            ("rollout.sampling.min_p=0.1", "also set rollout.sampling.top_k"),
        ),
        (("rollout.sampling.top_k=1",), ("rollout.sampling.top_k=1", "logprob_diff_bound=null")),
        (
            ("actor.kl_loss_unbiased=true", "actor.kl_loss_type=k3+"),
            ("actor.kl_loss_unbiased=true", "kl_loss_type=k3+"),
        ),
        (("rollout.sampling.top_k=0",), ("rollout.sampling.top_k=0", "no token")),
        (
            ("rollout.sampling.temperature=9e-7",),
            ("rollout.sampling.temperature=9e-07", "at least 1e-06"),
        ),
        (
            ("rollout.sampling.repetition_penalty=1.1",),
            ("rollout.sampling.repetition_penalty=1.1", "do not model"),
        ),
        (("rollout.sampling.stop=['']",), ("rollout.sampling.stop", "empty string")),
        (
            ("rollout.val_sampling.max_new_tokens=999999",),
            ("max_new_tokens=999999", "rollout.max_total_tokens"),
        ),
        (
            ("rollout.sampling.top_k=20", "actor.distillation.coef=1", "teacher.path=x"),
            ("rollout.sampling.top_k=20", "actor.distillation.coef=1"),
        ),
        (
            ("rollout.sampling.top_k=20", "rollout.engine=vllm"),
            ("rollout.sampling.top_k=20", "rollout.engine=vllm", "hf, sglang"),
        ),
        (
            ("trainer.max_staleness=1",),
            ("trainer.max_staleness=1", "actor.rollout_correction.weight=token"),
        ),
        (
            (*STALE, "trainer.tail_batching=0.25"),
            ("trainer.tail_batching=0.25", "set one of the two to 0"),
        ),
        ((*STALE, "trainer.steps_ahead=2"), ("trainer.steps_ahead=2", "trainer.max_staleness=1")),
        (("trainer.tail_batching=-1",), ("trainer.tail_batching=-1", "at least 0")),
        ((*STALE, "rollout.sync.pause=abort"), ("rollout.sync.pause=abort", "retract or in_place")),
        (
            (*STALE, "rollout.sync.pause=in_place"),
            ("rollout.sync.pause=in_place", "logprob_diff_bound=null"),
        ),
        (
            (*STALE, "rollout.sleep_while_training=true"),
            ("rollout.sleep_while_training=true", "max_staleness to 0"),
        ),
        (
            ("actor.optim.lr_decay_style=cosine",),
            ("actor.optim.lr_decay_style=cosine", "lr_decay_steps"),
        ),
        (
            ("actor.optim.lr_decay_steps=5", "actor.optim.lr_warmup_steps=5"),
            ("lr_decay_steps=5", "lr_warmup_steps=5"),
        ),
        (("actor.optim.min_lr=1",), ("actor.optim.min_lr=1", "actor.optim.lr=")),
        (("reward_model.optim.min_lr=1",), ("reward_model.optim.min_lr=1", "must be at most")),
        (("sft.optim.adam_beta2=1.0",), ("sft.optim.adam_beta2=1.0",)),
        (
            ("rollout.val_sampling.temperature=-1",),
            ("rollout.val_sampling.temperature=-1", "at least 0"),
        ),
        (("rollout.sampling.temperature=0",), ("rollout.sampling.temperature=0", "at least 1e-06")),
        (
            ("rollout.sampling.temperature=1e-7",),
            ("rollout.sampling.temperature=1e-07", "at least 1e-06"),
        ),
        (
            ("rollout.val_sampling.temperature=1e-7",),
            ("rollout.val_sampling.temperature=1e-07", "must be 0"),
        ),
        (
            ("+data.val_sets.aime={files: [x], sampling: {temperature: 1e-9}}",),
            ("data.val_sets.aime.sampling.temperature=1e-09", "must be 0"),
        ),
        (
            (
                "data.max_response_length=992",
                "rollout.agent.loop=tools",
                "rollout.agent.tools=[calculator]",
            ),
            ("max_position_embeddings=1024", "= 1024 + 6", "an engine rejects a prompt"),
        ),
        (
            ("+rollout.extra_args.context_length=9",),
            ("rollout.extra_args.context_length=9", "the engine's context", "at least "),
        ),
        (("rollout.sampling.top_k=0",), ("rollout.sampling.top_k=0", "-1")),
        (("actor.clip_ratio_c=0.9",), ("actor.clip_ratio_c=0.9", "null")),
        (("rollout.mem_fraction_static=1.5",), ("mem_fraction_static=1.5", "less than 1")),
        (("name=a/b",), ("name='a/b'", "output_dir")),
        (("~model.hf_config",), ("model.path", "model.hf_config", "both empty")),
        (("model.path=nowhere", "~model.hf_config"), ("model.path=nowhere", "folder not found")),
        (("model.path=nowhere",), ("model.path=nowhere", "folder not found")),
        (("model.tokenizer=null",), ("model.tokenizer", "FOLDER")),
        (("model.tokenizer=nowhere",), ("model.tokenizer=nowhere", "folder not found")),
        (("data.train_files=[]",), ("data.train_files is empty",)),
        (
            ("data.train_files=[nowhere.parquet]",),
            ("data.train_files: nowhere.parquet", "hybridflow prepare"),
        ),
        (("data.val_files=[nowhere.parquet]",), ("data.val_files: nowhere.parquet",)),
        (("sft.steps=3",), ("sft.steps=3", "sft.train_files")),
        (("actor.lora.rank=-8",), ("actor.lora.rank=-8 must be at least 0",)),
        (
            ("actor.lora.rank=8", "actor.lora.alpha=0"),
            ("actor.lora.alpha=0.0 must be more than 0",),
        ),
        (("actor.lora.rank=8", "actor.lora.dropout=0.1"), ("actor.lora.dropout=0.1 must be 0",)),
        (
            ("actor.lora.targets=[linear_qkv]",),
            ("actor.lora.targets=['linear_qkv']", "set actor.lora.rank"),
        ),
        (
            ("actor.lora.rank=8", "actor.lora.targets=[linear_qkv,linear_qkv]"),
            ("contains linear_qkv twice",),
        ),
        (
            ("actor.lora.rank=8", "actor.lora.targets=[linear_fc1]"),
            ("has no linear_fc1, because its MLPs are routed experts", "experts.linear_fc1"),
        ),
        (
            ("model=tiny-dense", "actor.lora.rank=8", "actor.lora.targets=[experts.linear_fc2]"),
            ("model_type=qwen3 has no experts.linear_fc2; choose from linear_qkv",),
        ),
        (
            ("model=tiny-dense", "actor.lora.rank=8", "actor.lora.targets=[linear_kv_up_proj]"),
            (
                "model_type=qwen3 has no linear_kv_up_proj",
                "choose from linear_qkv, linear_proj, linear_fc1, linear_fc2",
            ),
        ),
        (
            ("actor=tiny", "actor.lora.rank=8", "actor.lora.sync=adapter", "actor.backend=fsdp"),
            ("actor.lora.sync=adapter is not supported with actor.backend=fsdp",),
        ),
        (("actor.lora.sync=adapter",), ("actor.lora.sync=adapter has no effect with rank 0",)),
        (
            (
                "actor.lora.rank=8",
                "actor.lora.sync=adapter",
                "actor.lora.targets=[linear_qkv, experts.linear_fc2]",
            ),
            ("engines cannot keep adapters for experts.linear_fc2; remove these targets",),
        ),
        (
            ("actor.lora.rank=8", "actor.lora.sync=adapter", "rollout.sleep_while_training=true"),
            ("sleeping engines drop their weights",),
        ),
        (
            ("actor.lora.rank=8", "actor.lora.sync=adapter", "rollout.engine=vllm"),
            ("actor.lora.sync=adapter requires rollout.engine=sglang",),
        ),
        (("actor.mtp.coef=0",), ("actor.mtp.coef=0.0 must be more than 0",)),
        (
            ("actor.lora.rank=8", "actor.mtp.train=true"),
            ("actor.mtp.train=true trains its multi-token-prediction heads",),
        ),
        (
            ("model=tiny-dense", "actor.backend=fsdp", "actor.mtp.train=true"),
            ("actor.mtp.train=true is not supported with actor.backend=fsdp",),
        ),
        (
            ("rollout.speculative.method=mtp",),
            ("rollout.speculative.method=mtp requires actor.mtp.train=true",),
        ),
        (
            (*DRAFTS, "rollout.pipeline=2", "rollout.sync.pause=abort"),
            ("rollout.speculative.method=mtp requires rollout.pipeline=1, got 2",),
        ),
        (
            (*DRAFTS, "actor.router_replay=r3"),
            ("rollout.speculative.method=mtp does not record the experts",),
        ),
        (
            (*DRAFTS, "rollout.val_sampling.presence_penalty=0.5"),
            ("does not support rollout.val_sampling.presence_penalty=0.5",),
        ),
        (
            (*DRAFTS, "rollout.sampling.top_k=20"),
            ("does not support rollout.sampling.top_k=20", "set it to -1"),
        ),
        (
            ("actor.lora.rank=8", "actor.expert_bias_update_rate=0.001"),
            ("actor.lora.rank=8", "expert_bias_update_rate=0.001"),
        ),
        (
            ("actor.optim.exp_avg_dtype=bfloat16",),
            ("actor.optim.exp_avg_dtype=bfloat16 requires actor.optim.precision_aware=true",),
        ),
        (
            ("actor.optim.precision_aware=true",),
            ("precision_aware=true requires model.dtype=bfloat16",),
        ),
        (
            ("model=tiny-dense", "actor.backend=fsdp", "actor.optim.precision_aware=true"),
            ("actor.optim.precision_aware=true is not supported with actor.backend=fsdp",),
        ),
        (("sft=warm-start",), ("sft.parquet", "data.prepare.options.num_sft=2000")),
        (("reward.path=nowhere.py",), ("reward.path=nowhere.py", "file not found")),
        (("data.prepare.task=gsm8k",), ("unknown key data.prepare.options.reverse_answer",)),
        (("data.prepare.task=null",), ("data.train_files", "does not exist")),
        (
            ("trainer.keep_rollouts_every_steps=10",),
            ("keep_rollouts_every_steps=10 has no effect", "keep_rollout_steps=null"),
        ),
        (
            ("trainer.keep_rollout_steps=2", "trainer.dump_rollouts_every_steps=0"),
            ("keep_rollout_steps=2 has no effect", "dump_rollouts_every_steps=0"),
        ),
        (
            ("trainer.keep_rollout_steps=2", "trainer.rollout_only=true"),
            ("keep_rollout_steps=2 would delete", "rollout_only=true"),
        ),
    ],
)
def test_what_cannot_run_is_refused_with_keys_and_values(
    overrides: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    lines = found(*overrides)
    assert any(all(part in line for part in parts) for line in lines), lines


@pytest.mark.parametrize("recipe", ["tiny-moe-ppo", "tiny-remax", "tiny-moe-grpo"])
def test_a_run_that_only_generates_needs_no_critic_and_no_reference(recipe: str) -> None:
    config = load_config(recipe, ["trainer.rollout_only=true", "actor.kl_loss_coef=0.001"])
    assert [line for line in problems(config) if "reward_model.path" not in line] == []
    assert {"critic", "reference"} & set(derived.models_in_use(config)) == set()


def test_a_temperature_below_zero_gets_one_answer() -> None:
    [line] = found("rollout.sampling.temperature=-1")
    assert line.startswith("rollout.sampling.temperature=-1.0 must be at least 1e-06 (")


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """A configuration that passes every check, as nested mappings."""
    return to_plain(small())


@pytest.mark.slow
@pytest.mark.parametrize(
    "key", [key for key, kind in all_keys(RunConfig) if kind.type in (int, float)]
)
def test_numbers_out_of_range_name_their_key(key: str, plain: dict[str, Any]) -> None:
    kind = dict(all_keys(RunConfig))[key]
    outside: dict[type[Bound], float] = {Above: 0.0, AtLeast: -1.0}
    bad = [kind.type(bound.limit + outside.get(type(bound), 1)) for bound in kind.bounds]
    for value in (*bad, *((math.nan, math.inf) if kind.type is float else ())):
        values = copy.deepcopy(plain)
        *groups, name = key.split(".")
        functools.reduce(dict.__getitem__, groups, values)[name] = (
            [value] if kind.is_list else value
        )
        assert any(line.startswith(f"{key}=") for line in problems(build(values))), value


def test_the_keys_that_have_a_range() -> None:
    """As many as have one; a key that loses its range fails here."""
    ranged = [key for key, kind in all_keys(RunConfig) if kind.bounds]
    assert {
        "seed",
        "rollout.n",
        "actor.parallel.tensor",
        "actor.clip_ratio_c",
        "rollout.val_sampling.top_p",
    } < set(ranged)
    assert len(ranged) >= 110


@pytest.mark.parametrize(
    ("key", "value"), [("rollout.sampling", "-1"), ("rollout.val_sampling", "-1")]
)
def test_a_temperature_below_zero_gets_one_message(key: str, value: str) -> None:
    assert len([line for line in found(f"{key}.temperature={value}") if "temperature" in line]) == 1


def test_all_checkpoints_can_be_kept() -> None:
    """The key's description says `0: all`."""
    assert found("trainer.max_checkpoints_to_keep=0") == []


def test_an_unknown_linear_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match=r"actor\.lora\.targets\[0\]: got 'q_proj', choose one of: linear_qkv"
    ):
        small("actor.lora.rank=8", "actor.lora.targets=[q_proj]")


@pytest.mark.slow
def test_sizes_of_a_model_folder_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    overrides = ("model.path=model", "~model.hf_config", "rollout.tensor=2")
    assert any("config.json could not be read" in line for line in found(*overrides))
    (tmp_path / "model" / "config.json").write_text("{")
    assert any("is not JSON" in line for line in found(*overrides))
    (tmp_path / "model" / "config.json").write_text(
        json.dumps({"num_attention_heads": 3, "num_hidden_layers": 2})
    )
    assert any(
        "num_attention_heads=3" in line and "rollout.tensor=2" in line for line in found(*overrides)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value", "is_refused"),
    [
        *(
            ("model_type", "qwen3", True),
            ("num_hidden_layers", 3, True),
            ("hidden_size", 128, True),
        ),
        *(
            ("max_position_embeddings", 7, False),
            ("rms_norm_eps", 0.5, False),
            ("num_hidden_layers", None, False),
        ),
    ],
)
def test_a_folder_of_another_model_than_the_recipe_is_refused(
    tmp_path: Path, field: str, value: object, is_refused: bool
) -> None:
    sizes = dict(small().model.hf_config) | {field: value}  # None: the folder does not say
    (tmp_path / "model").mkdir()
    kept = {name: given for name, given in sizes.items() if given is not None}
    (tmp_path / "model" / "config.json").write_text(json.dumps(kept))
    said = [line for line in found("model.path=model") if "is not the recipe's model" in line]
    assert len(said) == is_refused
    if is_refused:
        assert f"its config.json has {field}={value}" in said[0] and "~model.hf_config" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "size"), [(True, "llama-3.1-70b"), (False, "qwen2.5-7b"), (False, "")]
)
def test_a_folder_of_another_family_names_the_recipes_for_it(
    tmp_path: Path, files: bool, size: str
) -> None:
    """Also where a plan is made, for which no other file need be there."""
    (tmp_path / "model").mkdir()
    values = published(size) if size else {"model_type": "llama", "hidden_size": 7}
    (tmp_path / "model/config.json").write_text(json.dumps(values))
    said = problems(
        load_config("grpo-qwen3-8b-1x8", [f"model.path={tmp_path / 'model'}"]), files=files
    )
    (line,) = [line for line in said if "is not the recipe's model" in line]
    wanted = f"--config-name grpo-{size}-" if size else "set the recipe's model folder"
    assert wanted in line and ("--config-name" in line) == bool(size)
    for name in re.findall(r"(?:--config-name|or) ([\w.-]+x8)", line):
        assert problems(load_config(name, [f"model.path={tmp_path / 'model'}"]), files=False) == []


def test_sft_needs_steps_and_its_own_files_only() -> None:
    assert any("sft.steps=0" in line for line in found(job="sft"))
    assert (
        found(
            "sft=warm-start",
            "data.prepare.options.num_sft=64",
            "data.train_files=[nowhere.parquet]",
            job="sft",
        )
        == []
    )


@pytest.mark.parametrize(("job", "section"), [("sft", "sft"), ("train-reward", "reward_training")])
def test_a_job_with_files_of_its_own_needs_no_prompts(
    tmp_path: Path, job: str, section: str
) -> None:
    """`data=files` names none; training on prompts asks for them."""
    (tmp_path / "rows.parquet").touch()
    words: tuple[str, ...] = ("data=files", f"model.tokenizer={tmp_path}", f"{section}.steps=2")
    words = (*words, f"{section}.train_files=[{tmp_path}/rows.parquet]")
    words = (*words, "reward_model.path=model") if job == "train-reward" else words
    assert found(*words, job=job) == []
    assert any("data.train_files is empty" in line for line in found(*words))


def test_all_problems_come_at_once() -> None:
    config = small(
        "data.train_batch_size=6", "actor.ppo_mini_batch_size=4", "reward.path=nowhere.py"
    )
    with pytest.raises(ConfigError) as caught:
        check(config)
    text = str(caught.value)
    assert "2 problems" in text
    assert "ppo_mini_batch_size" in text
    assert "nowhere.py" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("cluster=in-process",), None),
        (
            ("rollout.engine=hf",),
            "rollout.engine=hf runs only in the trainer's process; choose cluster=in-process",
        ),
        (("cluster.in_process=true",), "rollout.engine=sglang runs a server"),
        (
            ("cluster=in-process", "rollout.num_engines=2"),
            "rollout.num_engines=2 must be 1 with cluster.in_process=true",
        ),
        (
            ("cluster=in-process", "cluster.procs_per_node=2"),
            "cluster.procs_per_node=2 must be 1 with cluster.in_process=true",
        ),
        (
            ("cluster=in-process", "actor.router_replay=r3"),
            "actor.router_replay=r3 requires the experts",
        ),
        (("cluster=in-process", "cluster.address=auto"), "cluster.address=auto is not supported"),
        (
            ("cluster=in-process", "reference.placement=own", "actor.kl_loss_coef=0.001"),
            "reference.placement=own requires more processes",
        ),
    ],
)
def test_a_job_in_one_process_has_one_of_everything(
    words: tuple[str, ...], expected: str | None
) -> None:
    lines = found(*words, name="tiny-moe-grpo")
    assert lines == [] if expected is None else any(expected in line for line in lines), lines


@pytest.mark.slow
@pytest.mark.parametrize("key", ["router_aux_loss_coef", "router_z_loss_coef"])
@pytest.mark.parametrize(
    ("others", "said"),
    [
        (("model=tiny-dense",), "the model is dense"),
        (("actor.lora.rank=4",), "adapters do not train routers"),
        (
            ("actor.rollout_correction.reject={token_k1: [0.5, 2.0]}",),
            "unknown until tokens have been rejected",
        ),
    ],
)
def test_losses_of_routers_are_refused_where_they_cannot_be_trained(
    key: str, others: tuple[str, ...], said: str
) -> None:
    (line,) = [
        line for line in found(f"actor.{key}=0.01", *others, name="tiny-moe-grpo") if key in line
    ]
    assert said in line
    assert not [line for line in found(*others, name="tiny-moe-grpo") if key in line]


CLUSTERS = sorted(path.stem for path in shipped_config_dir().glob("*x8.yaml"))
# roles of their own, replay, engines over nodes
COVERING = ("grpo-llama-3.1-405b-28x8", "ppo-qwen3-30b-a3b-4x8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in COVERING else [pytest.mark.full]) for n in CLUSTERS]
)
def test_every_recipe_of_a_cluster_has_a_form_for_one_process(name: str) -> None:
    config = load_config(name, ["+scale=laptop", "~model.hf_config"])
    assert [
        line for line in problems(config, files=False) if not line.startswith("model.path=")
    ] == []
