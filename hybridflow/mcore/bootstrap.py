"""Makes Megatron importable on the available device. Must be imported before any `megatron` module.

It changes nothing on CUDA. Without CUDA, `cpu_compat` replaces the CUDA state functions that
Megatron-Core calls unconditionally.
"""

from __future__ import annotations

import os
import sys
import warnings

from hybridflow.device.platform import Platform
from hybridflow.process.importing import without_compiler

if Platform.detect().kind == "cpu":
    os.environ.update(without_compiler())  # megatron/core/jit.py:24: jit_fuser is torch.compile
    if "torch._dynamo" in sys.modules:  # the variable was read on import
        sys.modules["torch._dynamo"].config.disable = True
    from hybridflow.mcore import cpu_compat

    cpu_compat.install()

# package_info.py:20 (0.19) runs git and adds the commit of the surrounding repository, which is not
# Megatron's
os.environ.setdefault("NO_VCS_VERSION", "1")
# Megatron's own warnings about itself, which a user can do nothing about
for _message in (
    # five modules warn that these are missing; `backend_name` reports the substitute once
    ".*(Apex|Transformer Engine).*not installed.*",
    "full scope is deprecated",  # the default of its cuda_graph_scope
    r"The \.grad attribute of a Tensor that is not a leaf",  # optimizer.py:66 looks for main_grad
    r"`torch\.distributed\.\w+` is deprecated",
):
    warnings.filterwarnings("ignore", message=_message)
import megatron.core  # noqa: E402
from megatron.core.extensions import transformer_engine  # noqa: E402
from megatron.core.tensor_parallel import layers  # noqa: E402
from megatron.core.transformer.moe import fused_a2a  # noqa: E402

MEGATRON_VERSION: str = megatron.core.__version__
# Megatron's own flag: true only if the import succeeded, not merely if the package exists
HAVE_TRANSFORMER_ENGINE: bool = transformer_engine.HAVE_TE and Platform.detect().kind == "cuda"
# Apex's kernel for accumulating weight gradients in float32; without it the output layer rejects
# the setting
HAVE_GRADIENT_KERNEL: bool = (
    layers._grad_accum_fusion_available and Platform.detect().kind == "cuda"
)
HAVE_DEEP_EP: bool = fused_a2a.HAVE_DEEP_EP


def backend_name() -> str:
    """Return the name of the layer implementation, for the run's environment record."""
    if HAVE_TRANSFORMER_ENGINE:
        return "transformer-engine"
    return f"torch ({Platform.detect().kind})"
