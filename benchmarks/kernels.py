"""Every kernel on one GPU against plain torch, `torch.compile` and the peers that are installed, beside the bandwidth
and the matrix rate measured there.

`make bench NAME=kernels` (under ten minutes). Without a GPU no figure is taken and nothing is written.
`ARGS=--compile` prints registers, spills and shared memory of each kernel as its launch function has it compiled for a
Hopper, on any machine.
"""

from __future__ import annotations

import os
import sys

if "--compile" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "0"

from support import conditions

if __name__ == "__main__":
    conditions.ensure()

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from support.report import Figure, faster, median, write

ROUNDS, VOCAB, HIDDEN, CHUNK = 7, 151936, 4096, 1024
TOKENS = (8192, 32768, 65536)
Form = Callable[[], Any]


def seconds(form: Form) -> float:
    """Median of some runs, after two that compile and warm up."""
    for _ in range(2):
        form()
    found = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        form()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return median(found)


def copy_bandwidth() -> float:
    """Bytes read and written a second by a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds(lambda: target.copy_(source))


def peak_bytes(form: Form) -> int:
    """Bytes that a run allocates at most beyond what is there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    form()
    return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True)
class Work:
    """What an operation must move and compute at least, and the seconds that this machine takes for it."""

    limit: float
    nbytes: int
    flops: int = 0


def compared(metric: str, ours: Form, others: dict[str, Form], least: Work) -> list[Figure]:
    """One figure a peer, with the share of what was measured of this machine."""
    mine = seconds(ours)
    return [
        replace(faster(metric, mine, seconds(form), name, limit=least.limit), nbytes=least.nbytes, flops=least.flops)
        for name, form in others.items()
    ]


def in_torch(module: Any, form: Form) -> Form:
    """The same call with the torch form of the operation."""

    def run() -> None:
        kept = module.uses_triton
        module.uses_triton = lambda tensor: False
        try:
            form()
        finally:
            module.uses_triton = kept

    return run


def log_probs_peers(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> dict[str, Form]:
    """Forward and backward of the peers that can be imported."""
    found: dict[str, Form] = {}
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        def liger() -> None:
            Liger.apply(hidden, weight, targets)[0].backward()

        found["liger"] = liger
    except ImportError:
        print("liger_kernel is not installed: left out")
    try:
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

        found["verl"] = lambda: sum(x.sum() for x in linear_cross_entropy(hidden, weight, targets, 1.0)).backward()
    except ImportError:
        print("verl is not installed: left out")
    try:
        from cut_cross_entropy import linear_cross_entropy as cut_cross_entropy

        found["cut-cross-entropy"] = lambda: cut_cross_entropy(hidden, weight, targets).backward()
    except ImportError:
        print("cut_cross_entropy is not installed: left out")
    return found


def log_probs(tokens: int) -> list[Figure]:
    """Forward, and forward with backward, against the bare matrix products."""
    from hybridflow_kernels import linear_log_probs as kernel

    hidden = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5).requires_grad_()
    targets = torch.randint(0, VOCAB, (tokens,), device="cuda")
    plain, matrix = hidden.detach(), weight.detach()
    grad_weight = torch.zeros(VOCAB, HIDDEN, device="cuda")
    chunks = [slice(start, start + 8192) for start in range(0, tokens, 8192)]
    logits = torch.empty(8192, VOCAB, device="cuda", dtype=torch.bfloat16)

    def products() -> None:
        for rows in chunks:
            torch.mm(plain[rows], matrix.t(), out=logits)

    def all_products() -> None:
        for rows in chunks:
            torch.mm(plain[rows], matrix.t(), out=logits)
            logits @ matrix, logits.t() @ plain[rows]

    def forward() -> Any:
        return kernel.partial_sums(plain, matrix, targets, temperature=1.0, with_entropy=True, chunk=CHUNK)

    def both() -> None:
        tops, sums = forward()
        log_z = tops + sums[0].log()
        entropies = sums[0].log() - sums[2] / sums[0]
        ones = torch.ones_like(log_z)
        given = kernel.Upstream(ones, ones, log_z, entropies)
        kernel.gradients(plain, matrix, targets, given, temperature=1.0, chunk=CHUNK, grad_weight_VH=grad_weight)

    best = torch.empty(tokens, 32, device="cuda"), torch.empty(tokens, 32, device="cuda", dtype=torch.int64)

    def highest() -> Any:
        return kernel.partial_sums(plain, matrix, targets, temperature=1.0, with_entropy=False, chunk=CHUNK, best=best)

    compiled = torch.compile(in_torch(kernel, forward))
    once, thrice = seconds(products), seconds(all_products)
    name = f"{tokens} tokens x {VOCAB} x {HIDDEN}"
    plain_forms = {"torch, chunked": in_torch(kernel, forward), "torch.compile": compiled}
    read, product = plain.nbytes + matrix.nbytes, 2 * tokens * VOCAB * HIDDEN
    # read once; with gradients once more, and both gradients written, the weight's added to what is there
    forwards = Work(once, read, product)
    backwards = Work(thrice, 2 * read + 2 * plain.nbytes + 2 * grad_weight.nbytes, 3 * product)
    figures = compared(f"log-probs and entropy, {name}", forward, plain_forms, forwards)
    top_32 = {"torch, chunked": in_torch(kernel, highest)}
    figures += compared(f"log-probs and top 32, {name}", highest, top_32, forwards)
    peers = {"torch, chunked": in_torch(kernel, both), **log_probs_peers(hidden, weight, targets)}
    figures += compared(f"with gradients, {name}", both, peers, backwards)
    figures.append(Figure(f"matrix rate, {name}", product / once / 1e12, "TFLOP/s"))
    figures.append(Figure(f"memory of the forward, {name}", peak_bytes(forward) / tokens, "bytes a token"))
    figures.append(Figure(f"memory with gradients, {name}", peak_bytes(both) / tokens, "bytes a token"))
    return figures


def moved(nbytes: int, bandwidth: float) -> Work:
    """The work of an operation that memory traffic bounds."""
    return Work(nbytes / bandwidth, nbytes)


def messages(bandwidth: float) -> list[Figure]:
    """Slices of a weight message packed and scattered, with its checksum; the limit is one read and one write."""
    from hybridflow_kernels import digest, fp8_cast, slices

    figures = []
    for rows, columns in ((4096, 4096), (14336, 4096)):
        wide = torch.randn(1, rows, 2 * columns, device="cuda")[:, :, :columns]  # a shard: half of each row
        size, bf16, fp8 = (1, rows, columns), torch.bfloat16, torch.float8_e4m3fn
        half, shape = wide.to(bf16), (1, -(-rows // 128), -(-columns // 128))
        scales = slices.Slice(half, 0, shape, torch.float32, (128, 128))
        forms = {
            "bf16": [slices.Slice(half, 0, size, bf16)],
            "fp32 as bf16": [slices.Slice(wide, 0, size, bf16)],
            "bf16 as fp8": [scales, slices.Slice(half, scales.end, size, fp8, (128, 128))],
        }
        for name, pieces in forms.items():
            prepared = slices.Slices(pieces, pieces[-1].end)
            payload = torch.empty(pieces[-1].end, dtype=torch.uint8, device="cuda")
            least = moved(pieces[-1].tensor.nbytes + len(payload), bandwidth)

            def pack() -> None:
                prepared.pack(payload, 7)  # noqa: B023  called within this turn

            def in_two_reads() -> None:
                slices._move(pieces, payload, scatter=False)  # noqa: B023
                digest.digest(payload, 7)  # noqa: B023

            others = {"copy, then checksum": in_two_reads, "torch": in_torch(digest, in_torch(fp8_cast, in_two_reads))}
            figures += compared(f"pack {name}, {rows} x {columns}", pack, others, least)
        buffer = torch.empty(1, rows, 2 * columns, device="cuda", dtype=bf16)[:, :, :columns]
        back = slices.Slices([slices.Slice(buffer, 0, size, bf16)], 2 * rows * columns)
        payload = torch.randint(0, 256, (2 * rows * columns,), dtype=torch.uint8, device="cuda")

        def scatter() -> None:
            back.scatter(payload, 7)  # noqa: B023

        def copied() -> None:
            digest.digest(payload, 7)  # noqa: B023
            buffer.copy_(payload.view(torch.bfloat16).view(buffer.shape))  # noqa: B023

        others = {"checksum, then copy": copied, "torch": in_torch(digest, copied)}
        figures += compared(f"scatter bf16, {rows} x {columns}", scatter, others, moved(2 * len(payload), bandwidth))
    return figures


def memory_bound(bandwidth: float) -> list[Figure]:
    """Messages, checksum and fp8; the limit is the least bytes over the bandwidth of a copy."""
    from hybridflow_kernels import digest, fp8_cast

    figures = messages(bandwidth)
    for size in (1 << 24, 1 << 28):
        body = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")

        def checksum() -> None:
            digest.digest(body, 7)  # noqa: B023  called within this turn

        forms = {"torch": in_torch(digest, checksum)}
        figures += compared(f"checksum of {size >> 20} MiB", checksum, forms, moved(size, bandwidth))
    for rows, columns in ((4096, 4096), (14336, 4096)):
        weights = torch.randn(4, rows, columns, device="cuda", dtype=torch.bfloat16)
        scales = torch.empty(4, -(-rows // 128), -(-columns // 128), device="cuda")
        out = torch.empty(weights.shape, dtype=torch.float8_e4m3fn, device="cuda")

        def cast() -> None:
            fp8_cast.write_scales(weights, (128, 128), scales)  # noqa: B023
            fp8_cast.write_weights(weights, (128, 128), 0, 0, out)  # noqa: B023

        forms = {"torch": in_torch(fp8_cast, cast)}
        figures += compared(f"fp8 of 4 x {rows} x {columns}", cast, forms, moved(3 * weights.numel(), bandwidth))
    return figures


def packed_scans(bandwidth: float) -> list[Figure]:
    """GAE, discounted sums and V-trace over packed rows; the limit is each column read and each result written once."""
    from hybridflow_kernels import scans

    figures = []
    for name, lengths in {
        "1024 rows of 7168": torch.full((1024,), 7168),
        "1024 rows of 1 to 7168": torch.randint(1, 7169, (1024,), generator=torch.Generator().manual_seed(1)),
    }.items():
        sizes, total = lengths.cuda(), int(lengths.sum())
        rewards, values, log_ratios = (torch.randn(total, device="cuda") for _ in range(3))
        forms: dict[str, tuple[Form, int]] = {  # with the columns read and written
            "GAE": (partial(scans.gae, rewards, values, sizes, gamma=1.0, lam=0.95), 4),
            "discounted sums": (partial(scans.discounted_sums, rewards, sizes, gamma=0.99), 2),
            "V-trace": (partial(scans.vtrace, rewards, values, log_ratios, sizes, gamma=0.99), 5),
        }
        for scan, (form, columns) in forms.items():
            others = {"torch": in_torch(scans, form)}
            figures += compared(f"{scan}, {name}", form, others, moved(4 * columns * total, bandwidth))
    return figures


def main() -> None:
    """All figures."""
    if "--compile" in sys.argv:
        from support.compiled_kernels import table

        table()
        return
    if not torch.cuda.is_available():
        print("there is no GPU here: no figure was taken")
        return
    bandwidth = copy_bandwidth()
    figures = [Figure("copy bandwidth, read and written", bandwidth / 1e9, "GB/s"), *memory_bound(bandwidth)]
    figures += packed_scans(bandwidth)
    for tokens in TOKENS:
        figures += log_probs(tokens)
    note = {"rounds": ROUNDS, "statistic": "median", "limit": "bare matrix products, or least bytes over the bandwidth"}
    write("kernels", figures, note | {"device": torch.cuda.get_device_name()})


if __name__ == "__main__":
    main()
