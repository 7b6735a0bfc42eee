"""A loader that a test gives to an engine (`--custom-weight-loader`)."""

from __future__ import annotations

import os
from typing import Any

import torch
from safetensors.torch import load_file

from hybridflow.engines.sglang.weight_receiver import recompute_derived_weights


@torch.no_grad()
def load_in_place(model: Any, _: Any) -> None:
    """Everything from TEST_WEIGHTS by the model's loader but `kv_b_proj`, which is written in place
    as slices are."""
    tensors = load_file(os.environ["TEST_WEIGHTS"])
    model.load_weights(
        iter((name, tensor) for name, tensor in tensors.items() if "kv_b_proj" not in name)
    )
    for name, parameter in model.named_parameters():
        if "kv_b_proj" in name:
            parameter.copy_(tensors[name])
    recompute_derived_weights(model)
