"""The kernels of `hybridflow_kernels` on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hybridflow.bench.measurements.base import Place, interleaved, measurement
from hybridflow.bench.result import Metric, Reference

BYTES = 1 << 28  # of a message
TOKENS, VOCAB, HIDDEN = 8192, 151936, 4096


@measurement("gpu_kernels", "micro", needs_gpu=True, timeout_s=180.0)
def gpu_kernels(place: Place) -> Iterator[Metric]:
    """packing, checksum and fp8 of a weight message, GAE and log-probabilities beside the least that they must move"""
    from hybridflow.device.platform import Platform

    platform = Platform.detect()
    copy, moved = _moved(platform.device())
    product, log_probs = _log_probs(platform.device())

    def waited(form: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            form()
            platform.synchronize()

        return run

    sides = {"copy": copy, "product": product, "log_probs": log_probs} | {
        name: form for name, (form, _) in moved.items()
    }
    found = interleaved({name: waited(form) for name, form in sides.items()}, rounds=7, warm_up=2)
    for name, (_, nbytes) in moved.items():
        least = tuple(one * nbytes / (2 * BYTES) for one in found["copy"])
        limit = Reference("a copy of the least bytes", least)
        yield Metric("gpu_kernels", f"gpu_kernels/{name}", "s", "lower", tuple(found[name]), limit)
    limit = Reference("the matrix product alone", tuple(found["product"]))
    yield Metric("gpu_kernels", "gpu_kernels/log_probs", "s", "lower", tuple(found["log_probs"]), limit)


def _moved(device: Any) -> tuple[Callable[[], Any], dict[str, tuple[Callable[[], Any], int]]]:
    """A copy of BYTES, and by name the operations that memory bounds, each with the least bytes read and written."""
    import torch

    from hybridflow_kernels.digest import digest
    from hybridflow_kernels.scans import gae
    from hybridflow_kernels.slices import Slice, Slices

    body, target = (torch.zeros(BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    rows = BYTES // 8192
    weights = torch.randn(1, rows, 8192, device=device)[
        :, :, 2048:6144
    ]  # half of each row of 4,096 bf16 in the message
    size, blocks = (1, rows, 4096), (1, -(-rows // 128), 32)
    cast = Slices([Slice(weights, 0, size, torch.bfloat16)], BYTES)
    half = weights.bfloat16()
    scales = Slice(half, 0, blocks, torch.float32, (128, 128))
    values = Slice(half, scales.end, size, torch.float8_e4m3fn, (128, 128))
    made = Slices([scales, values], values.end)
    buffer = torch.empty(1, rows, 8192, dtype=torch.bfloat16, device=device)[:, :, :4096]
    back = Slices([Slice(buffer, 0, size, torch.bfloat16)], BYTES)
    lengths = torch.randint(1, 4097, (BYTES // 65536,), generator=torch.Generator().manual_seed(1))
    tokens = int(lengths.sum())
    rewards, state_values = (torch.randn(tokens, device=device) for _ in range(2))
    sizes = lengths.to(device)
    return lambda: target.copy_(body), {
        "checksum": (lambda: digest(body, 7), BYTES),
        "pack fp32 as bf16": (lambda: cast.pack(target, 7), 3 * BYTES),
        "pack bf16 as fp8": (lambda: made.pack(target[: values.end], 7), BYTES + values.end),
        "scatter bf16": (lambda: back.scatter(body, 7), 2 * BYTES),
        "GAE": (lambda: gae(rewards, state_values, sizes, gamma=1.0, lam=0.95), 16 * tokens),
    }


def _log_probs(device: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The bare product and the sums behind log-probabilities and entropies."""
    import torch

    from hybridflow_kernels.linear_log_probs import partial_sums

    hidden, weight = (torch.randn(rows, HIDDEN, device=device).bfloat16() for rows in (TOKENS, VOCAB))
    targets = torch.randint(0, VOCAB, (TOKENS,), device=device)
    logits = torch.empty(TOKENS, VOCAB, dtype=torch.bfloat16, device=device)

    def sums() -> object:
        return partial_sums(hidden, weight, targets, temperature=1.0, with_entropy=True, chunk=1024)

    return lambda: torch.mm(hidden, weight.t(), out=logits), sums
