"""Write the policy as a Hugging Face folder: each pipeline stage's leader writes its own shards, no rank ever holds the whole model."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridflow.mcore.parallel import all_coordinates, coordinates
from hybridflow.mcore.policy import Policy
from hybridflow.models.weights import TOKENIZER_FILES, copy_files
from hybridflow.reshard.gather import gather_stage
from hybridflow.reshard.plan import StagePlan, plan_stages

_SHARD_BYTES = 4 << 30


def export(policy: Policy, folder: Path, hf_config: Mapping[str, Any], tokenizer: Path | None) -> None:
    """Write `folder` (safetensors shards, index, config.json, tokenizer files); it appears whole or not at all. Collective.

    Raises:
        OSError: the disk is full or the folder cannot be written; `folder` is then as it was before.
    """
    plans = plan_stages(policy.family, all_coordinates(), _SHARD_BYTES, policy.dtype.itemsize)
    partial = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    _write_shards(policy, partial, plans)
    dist.barrier()
    if dist.get_rank() == 0:
        _write_index(policy, partial, plans)
        dtype = str(policy.dtype).removeprefix("torch.")
        (partial / "config.json").write_text(json.dumps({**hf_config, "torch_dtype": dtype}, indent=2))
        if tokenizer is not None:
            copy_files(tokenizer, partial, TOKENIZER_FILES)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(partial, folder)
    dist.barrier()


def _shard_names(plans: list[StagePlan]) -> list[list[str]]:
    total, names, number = sum(len(plan.buckets) for plan in plans), [], 0
    for plan in plans:
        names.append([f"model-{number + i + 1:05d}-of-{total:05d}.safetensors" for i in range(len(plan.buckets))])
        number += len(plan.buckets)
    return names


def _write_shards(policy: Policy, folder: Path, plans: list[StagePlan]) -> None:
    from safetensors.torch import save_file

    stage = coordinates().pp_rank
    parameters = policy.parameters()
    for plan, names in zip(plans, _shard_names(plans), strict=True):
        if plan.stage != stage:
            continue
        for name, tensors in zip(names, gather_stage(plan, parameters, policy.dtype), strict=True):
            if tensors:
                save_file({key: value.cpu() for key, value in tensors.items()}, folder / name, metadata={"format": "pt"})


def _write_index(policy: Policy, folder: Path, plans: list[StagePlan]) -> None:
    weight_map = {
        tensor: name
        for plan, names in zip(plans, _shard_names(plans), strict=True)
        for bucket, name in zip(plan.buckets, names, strict=True)
        for tensor, _ in bucket.tensors
    }
    total = sum(bucket.numel for plan in plans for bucket in plan.buckets) * policy.dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
