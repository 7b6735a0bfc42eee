"""Kernels beside the bare matrix product and beside a copy. Bytes and operations are counted by
hand."""

from __future__ import annotations

from typing import Any

import torch

from hybridflow_kernels import digest, linear_log_probs, slices
from tests.gpu.measure import DEVICE, REHEARSAL, result, seconds

BF16 = torch.bfloat16


def log_probs(tokens: int, hidden_size: int, vocabulary: int) -> dict[str, float]:
    """Shares of the bare product: forward, and forward with gradients against three products."""
    hidden = torch.randn(tokens, hidden_size, device=DEVICE, dtype=BF16)
    weight = torch.randn(vocabulary, hidden_size, device=DEVICE, dtype=BF16) / hidden_size**0.5
    targets = torch.randint(0, vocabulary, (tokens,), device=DEVICE)
    main_grad = torch.zeros(vocabulary, hidden_size, device=DEVICE)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return linear_log_probs.partial_sums(
            hidden, weight, targets, temperature=1.0, with_entropy=True, chunk=1024
        )

    def both() -> None:
        tops, sums = forward()
        log_z = tops + sums[0].log()
        ones = torch.ones_like(tops)
        given = linear_log_probs.Upstream(ones, None, log_z, log_z)
        linear_log_probs.gradients(
            hidden, weight, targets, given, temperature=1.0, chunk=1024, grad_weight_VH=main_grad
        )

    product = _product_seconds(hidden, weight)
    one = seconds(forward)
    all_three = seconds(both, 5)
    found = {
        "product_TFLOP_s": 2 * tokens * vocabulary * hidden_size / product / 1e12,
        "forward_share": product / one,
        "all_over_three_products": all_three / (3 * product),
    }
    if not REHEARSAL:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both()
        found["peak_MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {f"{name}_{hidden_size}": value for name, value in found.items()}


def _product_seconds(hidden: torch.Tensor, weight: torch.Tensor) -> float:
    """Seconds of the bare product. Its result, which the kernels never hold, is freed before they
    run."""
    logits = torch.empty(len(hidden), len(weight), device=DEVICE, dtype=BF16)
    return seconds(lambda: torch.mm(hidden, weight.t(), out=logits))


def moves() -> dict[str, float]:
    """Shares of a copy's bandwidth: the checksum reads each byte once; a message is read and
    written once."""
    nbytes, rows, columns = (1 << 12, 16, 64) if REHEARSAL else (1 << 30, 65536, 4096)
    body = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=DEVICE)
    copy = torch.empty_like(body)
    a_byte = seconds(lambda: copy.copy_(body)) / (2 * nbytes)
    found = {"checksum_share": nbytes * a_byte / seconds(lambda: digest.digest(body, 7))}
    shard = torch.randn(1, rows, 2 * columns, device=DEVICE, dtype=BF16)[:, :, :columns]
    message = slices.Slices([slices.Slice(shard, 0, tuple(shard.shape), BF16)], shard.numel() * 2)
    payload = torch.empty(shard.numel() * 2, dtype=torch.uint8, device=DEVICE)
    for name, form in (("pack", message.pack), ("scatter", message.scatter)):
        found[f"{name}_share"] = (
            2 * len(payload) * a_byte / seconds(lambda form=form: form(payload, 7))
        )
    return found


def main() -> None:
    """Print after each part, so that a part that fails leaves those before it."""
    found: dict[str, Any] = moves()
    result(found)
    for tokens, hidden_size, vocabulary in (
        ((32, 16, 64),) if REHEARSAL else ((8192, 1024, 151936), (8192, 4096, 151936))
    ):
        found |= log_probs(tokens, hidden_size, vocabulary)
        result(found)


if __name__ == "__main__":
    main()
