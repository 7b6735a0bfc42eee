"""Profiling of a rank with torch's profiler, or with Nsight Systems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridflow.config.schema import ProfileConfig


class RankProfiler:
    """Profiles one step at a time on this rank, from `start` to `stop`."""

    def __init__(self, config: ProfileConfig) -> None:
        self.config = config
        self._profile: Any = None
        self._is_on = False

    def start(self) -> None:
        """Start profiling. With nsys, the capture range of `nsys profile` begins."""
        import torch

        self._is_on = True
        if self.config.tool == "nsys":
            torch.cuda.profiler.start()
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(
            activities=activities,
            with_stack=self.config.stacks,
            profile_memory=self.config.memory,
        )
        self._profile.start()

    def stop(self, file: Path) -> str:
        """Stop profiling, and write torch's trace to `file` (.json.gz). If that fails, returns an
        error message instead of raising, because a failed profile must not end the run.
        """
        if not self._is_on:
            return ""
        self._is_on = False
        if self.config.tool == "nsys":
            import torch

            torch.cuda.profiler.stop()
            return ""
        profile = self._profile
        self._profile = None
        profile.stop()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            return f"{file} could not be written: {error}"
        return ""
