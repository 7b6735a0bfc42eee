"""An update at the shape of Qwen3 0.6B beside the bare product, and what torch's profiler sees in
one."""

from __future__ import annotations

from typing import Any

from torch.profiler import ProfilerActivity, profile

from hybridflow.models.published import published
from tests import models
from tests.gpu.measure import REHEARSAL, result
from tests.gpu.train_step import alone, measure, update_of

# what makes the host wait for the device
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::_local_scalar_dense",
)
KERNELS = 25


def profiled(update: Any) -> dict[str, Any]:
    """Milliseconds of the longest kernels of one update, and how often the host waited."""
    activities = (
        [ProfilerActivity.CPU] if REHEARSAL else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    )
    with profile(activities=activities) as seen:
        update()
    events = seen.key_averages()
    longest = sorted(events, key=lambda event: -event.self_device_time_total)[:KERNELS]
    return {
        "kernels_ms": {
            event.key[:80]: round(event.self_device_time_total / 1e3, 3) for event in longest
        },
        "waits": {event.key: event.count for event in events if event.key in WAITS},
    }


def main() -> None:
    """Measure, then profile: a profiler that fails leaves the measurement."""
    alone()
    hf, tokens, side = (
        (models.DENSE, 128, 64) if REHEARSAL else (published("qwen3-0.6b"), 16384, 8192)
    )
    from hybridflow.mcore.bootstrap import backend_name

    found: dict[str, Any] = {"layers": backend_name()}
    found |= measure(hf, "bfloat16", tokens, side, rounds=1 if REHEARSAL else 3)
    result(found)
    update = update_of(hf, "bfloat16", tokens)
    update()
    result(found | profiled(update))


if __name__ == "__main__":
    main()
