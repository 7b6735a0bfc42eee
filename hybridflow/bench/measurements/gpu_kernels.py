"""Measures the kernels in `hybridflow_kernels` on one GPU, compared with torch and the hardware
limits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from hybridflow.bench.measurements.base import Place, Yields, measurement
from hybridflow.bench.rounds import Call, Side, Timed

BYTES = 1 << 28  # per message
ROW = 4096  # elements per bf16 row of the message
BLOCK = (128, 128)  # fp8 block size
VOCAB = 151936
HIDDEN = 4096


@measurement(
    "gpu_kernels", "micro", needs_gpu=True, timeout_s=300.0, rounds=7, warm_up=2
)
def gpu_kernels(place: Place, tokens: int = 8192) -> Yields:
    """weight messages, checksum, fp8, GAE and log-probabilities, compared with torch and a hardware
    limit"""
    import torch

    from hybridflow.device.platform import Platform

    device = Platform.detect().device()
    source = torch.zeros(BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    copy = partial(target.copy_, source)
    for name, call, nbytes in _memory_bound(source, target):
        limit = Side("a copy of the minimum bytes", copy, scale=nbytes / (2 * BYTES))
        yield _case(name, call, limit)
    yield from _log_probs(tokens, device)


def _case(name: str, call: Call, limit: Side) -> Timed:
    from hybridflow_kernels import only_torch

    calls = {f"gpu_kernels/{name}": call}
    # the context manager is also a decorator
    return Timed(calls, limit, peers=[Side("torch", only_torch()(call))])


def _memory_bound(body: Any, target: Any) -> Iterator[tuple[str, Call, int]]:
    """Yield the memory-bound operations, each with the minimum number of bytes read and written."""
    import torch

    from hybridflow_kernels.digest import digest
    from hybridflow_kernels.scans import gae, vtrace
    from hybridflow_kernels.slices import Slice, Slices

    rows = BYTES // (2 * ROW)
    size = (1, rows, ROW)
    wide = torch.randn(1, rows, 2 * ROW, device=body.device)
    weights = wide[:, :, ROW // 2 : -ROW // 2]  # half of each row
    half = weights.bfloat16()
    cast = Slices([Slice(weights, 0, size, torch.bfloat16)], BYTES)
    scales = Slice(
        half, 0, (1, -(-rows // BLOCK[0]), ROW // BLOCK[1]), torch.float32, BLOCK
    )
    values = Slice(half, scales.end, size, torch.float8_e4m3fn, BLOCK)
    quantized = Slices([scales, values], values.end)
    narrow = target[: values.end]
    buffer = torch.empty_like(wide, dtype=torch.bfloat16)[:, :, :ROW]
    back = Slices([Slice(buffer, 0, size, torch.bfloat16)], BYTES)
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 4097, (BYTES // 65536,), generator=generator)
    tokens = int(lengths.sum())
    lengths = lengths.to(body.device)
    rewards, state_values, log_ratios = torch.randn(3, tokens, device=body.device)
    yield "checksum", partial(digest, body, 7), BYTES
    yield "pack fp32 as bf16", partial(cast.pack, target, 7), 3 * BYTES
    yield "pack bf16 as fp8", partial(quantized.pack, narrow, 7), BYTES + values.end
    yield "scatter bf16", partial(back.scatter, body, 7), 2 * BYTES
    estimate = partial(gae, rewards, state_values, lengths, gamma=1.0, lam=0.95)
    yield "GAE", estimate, 16 * tokens
    trace = partial(vtrace, rewards, state_values, log_ratios, lengths, gamma=0.99)
    yield "V-trace", trace, 20 * tokens


def _log_probs(tokens: int, device: Any) -> Yields:
    """Yield the forward pass, the top logits and the gradients, each compared with the bare matrix
    products."""
    import torch

    from hybridflow_kernels.linear_log_probs import Upstream, gradients, partial_sums

    hidden = torch.randn(tokens, HIDDEN, device=device).bfloat16()
    weight = (torch.randn(VOCAB, HIDDEN, device=device) / HIDDEN**0.5).bfloat16()
    targets = torch.randint(0, VOCAB, (tokens,), device=device)
    logits = torch.empty(tokens, VOCAB, dtype=torch.bfloat16, device=device)
    grad_weight = torch.zeros(VOCAB, HIDDEN, device=device)
    best_values = torch.empty(tokens, min(32, VOCAB), device=device)
    best = (best_values, torch.empty_like(best_values, dtype=torch.int64))
    ones = torch.ones(tokens, device=device)
    options: dict[str, Any] = {"temperature": 1.0, "chunk": 1024}
    sums_of = partial(partial_sums, hidden, weight, targets, **options)
    forward = partial(sums_of, with_entropy=True)
    with_best = partial(sums_of, with_entropy=False, best=best)

    def with_gradients() -> None:
        tops, sums = forward()
        entropies = sums[0].log() - sums[2] / sums[0]
        upstream = Upstream(ones, ones, tops + sums[0].log(), entropies)
        gradients(
            hidden, weight, targets, upstream, grad_weight_VH=grad_weight, **options
        )

    product = partial(torch.mm, hidden, weight.t(), out=logits)

    def three_products() -> None:
        product()
        torch.mm(logits, weight)
        torch.mm(logits.t(), hidden)

    one = Side("the matrix products alone", product)
    three = Side("the matrix products alone", three_products)
    yield _case("log_probs", forward, one)
    yield _case("log_probs and top 32", with_best, one)
    yield _case("log_probs with gradients", with_gradients, three)
