"""SGLang platform plugin for machines without CUDA. It uses SGLang's own torch-native code paths,
without sgl_kernel.

SGLang finds `activate` through the entry point group `sglang.srt.platforms`
(sglang/srt/platforms/__init__.py, `_resolve_platform`). Its in-tree CPU platform is enabled by
SGLANG_USE_CPU_ENGINE=1 and imports compiled sgl_kernel operators, which the package index does not
provide for plain CPU machines. If that variable is set, the operators are assumed to be installed,
and this plugin is inactive.
"""

from __future__ import annotations

import os

from hybridflow.device.platform import Platform

PLATFORM_CLASS = "hybridflow.engines.sglang.cpu_plugin.platform.CpuNativePlatform"


def wanted() -> bool:
    """Return True if this process has no accelerator and the user did not request SGLang's own CPU
    engine."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        return False
    return Platform.detect().kind == "cpu"


def activate() -> str | None:
    """Entry point. Return the platform class to use, or None to leave the choice to SGLang."""
    if not wanted():
        return None
    from hybridflow.engines.sglang.cpu_plugin import torchvision_stand_in

    torchvision_stand_in.install()
    return PLATFORM_CLASS
