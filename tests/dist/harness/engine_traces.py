"""Run alone, not by pytest: trace what each rank of SGLang engines of several shapes holds, for
tiny models of all families.

`python -m tests.dist.harness.engine_traces FOLDER` reads FOLDER/cases.json (list of {name, model,
tensor, expert, pipeline, data_attention}) and writes FOLDER/{name}-{rank}.json. SGLang is imported
once; each rank is a fork that joins its engine's process groups over gloo, builds the model as an
engine does (dummy weights, SGLang's own post-processing included) and runs its `load_weights` on
meta tensors.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hybridflow.engines.layout_tracer import trace_layout
from hybridflow.engines.server import command_line
from hybridflow.engines.sglang.server import environment, server_arguments
from hybridflow.engines.sglang.weight_receiver import WithDraft
from hybridflow.engines.spec import EngineSpec
from hybridflow.models import family_of
from hybridflow.models.fp8 import BlockQuantisation


def trace_rank(case: dict[str, Any], rank: int, folder: Path) -> None:
    """Write what the rank's loader does."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.model_loader import get_model, loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import prepare_server_args

    shape = {key: case[key] for key in ("tensor", "expert", "pipeline", "data_attention")}
    config = json.loads((Path(case["model"]) / "config.json").read_text())
    in_fp8 = "quantization_config" in config
    dtype = "bfloat16" if in_fp8 else "float32"
    spec = EngineSpec(
        name=case["name"],
        model_path=case["model"],
        dtype=dtype,
        extra_args={"load-format": "dummy"},
        draft_tokens=int(case.get("draft", False)),
        **shape,
    )
    (folder / case["name"]).mkdir(exist_ok=True)
    os.environ |= environment(spec, str(folder / case["name"]))
    arguments = prepare_server_args(
        command_line(server_arguments(spec, 20000 + os.getpid() % 10000))
    )
    publish(
        arguments, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=rank)
    )
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=0)
    model_config = ModelConfig.from_server_args(arguments)
    bootstrap.init_layer_runtime(model_config=model_config)
    initialize_moe_config()
    tensors = family_of(config, mtp=case.get("draft", False)).tensors()
    load = LoadConfig(load_format="dummy")
    if in_fp8:
        tensors, kinds = BlockQuantisation.of(config).checkpoint(tensors)
        dtypes = {name: getattr(torch, kind) for name, kind in kinds.items()}
        # SGLang makes fp8 buffers on any CPU but refuses to prepare them for use on one without AMX
        # (sglang/srt/layers/quantization/fp8.py:827), so the model is taken as its loader fills it
        with set_default_torch_dtype(model_config.dtype):
            model = loader._initialize_model(
                model_config, load, loader._get_quantization_config(model_config, load)
            )
    else:
        dtypes = {}
        model = get_model(
            model_config=model_config, load_config=load, device_config=DeviceConfig("cpu")
        )
    if case.get("draft"):
        drafting = ModelConfig.from_server_args(arguments, is_draft_model=True)
        draft = get_model(
            model_config=drafting, load_config=load, device_config=DeviceConfig("cpu")
        )
        draft.set_embed_and_head(*model.get_embed_and_head())
        model = WithDraft(model, draft)
    traced = trace_layout(model, model.load_weights, tensors, getattr(torch, dtype), dtypes)
    (folder / f"{case['name']}-{rank}.json").write_text(json.dumps(asdict(traced)))


def fork_rank(case: dict[str, Any], rank: int, folder: Path) -> int:
    """Pid of a child that does it."""
    pid = os.fork()
    if pid:
        return pid
    try:
        trace_rank(case, rank, folder)
        code = 0
    except BaseException:
        (folder / f"{case['name']}-{rank}.error").write_text(traceback.format_exc())
        code = 1
    os._exit(code)


def main() -> None:
    """All cases, one after another."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    folder = Path(sys.argv[1])
    failed = False
    for case in json.loads((folder / "cases.json").read_text()):
        pids = [fork_rank(case, rank, folder) for rank in range(case["tensor"] * case["pipeline"])]
        failed |= sum(os.waitpid(pid, 0)[1] != 0 for pid in pids) > 0  # waits for each
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
