"""The platform object that SGLang queries about devices, backends and capabilities. Imported only
inside SGLang processes."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform


class CpuNativePlatform(CpuDeviceMixin, SRTPlatform):
    """CPU as an out-of-tree (OOT) device. If `is_cpu()` were true, SGLang would use its sgl_kernel
    paths; for an OOT device it uses its native code paths."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    # no triton, no graphs: every field keeps its conservative default
    capabilities = PlatformCapabilities()

    def get_default_attention_backend(self) -> str:
        """Return the name of the attention backend implemented with plain torch operators."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Return the key with which custom operators dispatch to `forward_native`."""
        return "native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Return True for EAGLE, i.e. drafting with the model's own head (`speculation`)."""
        return algorithm == "EAGLE"
