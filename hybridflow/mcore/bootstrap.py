"""To be imported before any `megatron` module: makes Megatron importable on the device at hand.

On CUDA nothing is changed. Without CUDA, `cpu_compat` replaces the CUDA state functions that Megatron-Core calls
unconditionally.
"""

from __future__ import annotations

import os
import sys
import warnings

from hybridflow.device.platform import Platform

if Platform.detect().kind == "cpu":
    # megatron/core/jit.py:24: jit_fuser is torch.compile, which needs a C++ tool chain and minutes of warm-up on a CPU
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    if "torch._dynamo" in sys.modules:  # it read the variable when it was imported
        sys.modules["torch._dynamo"].config.disable = True
    from hybridflow.mcore import cpu_compat

    cpu_compat.install()

# package_info.py:20 (0.19) starts git and adds the commit of the repository around it, which is not Megatron's
os.environ.setdefault("NO_VCS_VERSION", "1")
# five modules of megatron warn that these are absent; `backend_name` says once what is used instead
warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine).*not installed.*")
import megatron.core  # noqa: E402
from megatron.core.extensions import transformer_engine  # noqa: E402
from megatron.core.tensor_parallel import layers  # noqa: E402
from megatron.core.transformer.moe import fused_a2a  # noqa: E402

MEGATRON_VERSION: str = megatron.core.__version__
# Megatron's own flag, which says whether its import went well, not only whether there is such a package
HAVE_TRANSFORMER_ENGINE: bool = transformer_engine.HAVE_TE and Platform.detect().kind == "cuda"
# Apex's kernel, which adds a gradient of weights to its float32 sum; the output layer refuses the setting without it
HAVE_GRADIENT_KERNEL: bool = layers._grad_accum_fusion_available and Platform.detect().kind == "cuda"
HAVE_DEEP_EP: bool = fused_a2a.HAVE_DEEP_EP


def backend_name() -> str:
    """What computes the layers, for the run's record."""
    if HAVE_TRANSFORMER_ENGINE:
        return "transformer-engine"
    return f"torch ({Platform.detect().kind})"
