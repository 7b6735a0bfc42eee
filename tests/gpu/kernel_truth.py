"""Each kernel against float64, or byte for byte against torch's form, on random inputs and poisoned
outputs."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hybridflow_kernels import digest, fp8_cast, linear_log_probs, scans, slices
from tests.gpu.measure import DEVICE, REHEARSAL, result

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
FP8 = torch.float8_e4m3fn
BOUNDS = {
    "log_z": 1e-4,
    "entropy": 1e-3,
    "top": 1e-4,
    "d_hidden": 6e-3,
    "d_weight": 6e-3,
    "scan": 1e-5,
}
FLOAT32_GRADIENT = 1e-5
SMALL = ((77, 51, 64, FP32), (1, 3, 8, FP32), (33, 40, 24, BF16))
LARGE = (
    *(
        (300, 8192, 1024, BF16),
        (300, 8193, 1024, BF16),
        (257, 32000, 896, BF16),
        (129, 16384, 1000, BF16),
    ),
    *((512, 151936, 1024, BF16), (130, 20000, 4096, FP16)),
)
FLOAT64_ELEMENTS = 1 << 27  # logits beyond are compared with torch's form in float32


@contextlib.contextmanager
def torch_form(*modules: Any) -> Iterator[None]:
    """Operations of these modules take torch's form."""
    kept = [(module, module.uses_triton) for module in modules]
    for module in modules:
        module.uses_triton = lambda tensor: False
    try:
        yield
    finally:
        for module, uses_triton in kept:
            module.uses_triton = uses_triton


def off(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Relative difference, in the norm."""
    return float((mine.double() - theirs.double()).norm() / theirs.double().norm().clamp_min(1e-30))


def log_probs(
    n: int,
    v: int,
    h: int,
    dtype: torch.dtype,
    temperature: float = 1.0,
    entropy: bool = True,
    k: int = 0,
) -> dict[str, float]:
    """Differences of sums, highest logits and gradients."""
    hidden = torch.randn(n, h, device=DEVICE, dtype=dtype)
    weight = torch.randn(v, h, device=DEVICE).div_(h**0.5).mul_(3).to(dtype)
    targets = torch.randint(-1, v, (n,), device=DEVICE)
    best = None
    if k:
        nothing = torch.full((n, k), torch.nan, device=DEVICE)
        best = nothing, torch.full((n, k), -7, device=DEVICE, dtype=torch.int64)
    options: dict[str, Any] = {"temperature": temperature, "with_entropy": entropy}
    tops, sums = linear_log_probs.partial_sums(
        hidden, weight, targets, chunk=1024, best=best, **options
    )
    log_z = tops + sums[0].log()
    entropies = sums[0].log() - sums[2] / sums[0]
    if n * v > FLOAT64_ELEMENTS:
        with torch_form(linear_log_probs):
            tops, theirs = linear_log_probs.partial_sums(
                hidden, weight, targets, chunk=256, **options
            )
        return {"log_z": float((log_z - tops - theirs[0].log()).abs().max())}
    logits = (hidden.double() @ weight.double().t() / temperature).requires_grad_()
    log_p = logits.log_softmax(-1)
    exact_z = logits.logsumexp(-1)
    exact_entropy = -(log_p.exp() * log_p).sum(-1)
    found = {"log_z": float((log_z - exact_z).abs().max())}
    if entropy:
        found["entropy"] = float((entropies - exact_entropy).abs().max())
    if best is not None:
        found["top"] = float((best[0] - logits.topk(k).values).abs().max())
    upstream = torch.randn(n, device=DEVICE), torch.randn(n, device=DEVICE)
    grad_weight = torch.zeros(v, h, device=DEVICE)
    given = linear_log_probs.Upstream(
        upstream[0], upstream[1] if entropy else None, log_z.float(), entropies.float()
    )
    grad_hidden = linear_log_probs.gradients(
        hidden,
        weight,
        targets,
        given,
        temperature=temperature,
        chunk=1024,
        grad_weight_VH=grad_weight,
    )
    picked = torch.where(
        targets >= 0, log_p.gather(-1, targets.clamp(min=0)[:, None])[:, 0], -exact_z
    )
    loss = (picked * upstream[0]).sum() + ((exact_entropy * upstream[1]).sum() if entropy else 0.0)
    loss.backward()
    of_logits = logits.grad / temperature
    assert grad_hidden is not None
    found["d_hidden"] = off(grad_hidden, of_logits @ weight.double())
    found["d_weight"] = off(grad_weight, of_logits.t() @ hidden.double())
    return found


def checksum(size: int) -> dict[str, float]:
    """Two checksums of the same bytes."""
    body = torch.randint(0, 256, (size,), dtype=torch.uint8, device=DEVICE)
    mine = int(digest.digest(body, 7))
    with torch_form(digest):
        assert mine == int(digest.digest(body, 7)), "checksums differ"
    return {}


def packed(pieces: list[slices.Slice]) -> dict[str, float]:
    """A message, its checksum, and what comes back out of it."""
    nbytes = pieces[-1].end
    payload = torch.full((nbytes,), 0xA5, dtype=torch.uint8, device=DEVICE)
    prepared = slices.Slices(pieces, nbytes)
    mine = int(prepared.pack(payload, 7))
    other = torch.full_like(payload, 0x5A)
    with torch_form(fp8_cast, digest):
        slices._move(pieces, other, scatter=False)
        theirs = int(digest.digest(other, 7))
    different = float((payload != other).float().mean())
    assert not different and mine == theirs, (
        f"{different:.2%} of the bytes differ, checksums equal: {mine == theirs}"
    )
    if all(piece.block is None and piece.dtype == piece.tensor.dtype for piece in pieces):
        before = [piece.tensor.clone() for piece in pieces]
        for piece in pieces:
            piece.tensor.zero_()
        assert int(prepared.scatter(payload, 7)) == mine, "checksums of pack and scatter differ"
        assert all(
            torch.equal(piece.tensor, kept) for piece, kept in zip(pieces, before, strict=True)
        )
    return {}


def strided(
    rows: int, columns: int, dtype: torch.dtype, source: torch.dtype | None = None
) -> list[slices.Slice]:
    """Half of each row of a tensor."""
    whole = torch.randn(2, rows, 2 * columns, device=DEVICE).to(source or dtype)
    return [slices.Slice(whole[:, :, :columns], 0, (2, rows, columns), dtype)]


def in_fp8(rows: int, columns: int) -> list[slices.Slice]:
    """Scales and values of one weight."""
    weight = torch.randn(1, rows, columns, device=DEVICE, dtype=BF16)
    scales = slices.Slice(weight, 0, (1, -(-rows // 128), -(-columns // 128)), FP32, (128, 128))
    return [scales, slices.Slice(weight, scales.end, (1, rows, columns), FP8, (128, 128))]


def scanned(name: str) -> dict[str, float]:
    """GAE or V-trace of rows of many lengths."""
    sizes = [1, 0, 5, 33] if REHEARSAL else [1, 0, 5, 1023, 1024, 1025, 7168]
    lengths = torch.tensor(sizes, device=DEVICE)
    rewards, values, ratios = (torch.randn(sum(sizes), device=DEVICE) for _ in range(3))

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        if name == "gae":
            return scans.gae(rewards, values, lengths, gamma=0.99, lam=0.95)
        return scans.vtrace(rewards, values, ratios, lengths, gamma=0.99)

    mine = run()
    with torch_form(scans):
        return {"scan": max(off(a, b) for a, b in zip(mine, run(), strict=True))}


def cases() -> Iterator[tuple[str, Callable[[], dict[str, float]], torch.dtype]]:
    """Name, case, dtype whose rounding its gradients have."""
    for n, v, h, dtype in SMALL if REHEARSAL else (*SMALL, *LARGE):
        yield (
            f"log-probs {n} x {v} x {h} {dtype}",
            lambda size=(n, v, h, dtype): log_probs(*size),
            dtype,
        )
    n, v, h, k = (70, 40, 16, 3) if REHEARSAL else (70, 9000, 512, 20)
    yield (
        f"log-probs, top {k}, temperature 0.7",
        lambda: log_probs(n, v, h, BF16, 0.7, False, k),
        BF16,
    )
    for size in (0, 1, 7, 8, 9, 4096 * 8, (1 << 20) + 3, *(() if REHEARSAL else ((1 << 31) + 5,))):
        if not REHEARSAL or size < 10_000:
            yield f"checksum of {size}", lambda size=size: checksum(size), FP32
    rows, columns = (9, 40) if REHEARSAL else (1536, 4096)
    blocks = (130, 136) if REHEARSAL else (1536, 4096)
    yield "pack bf16", lambda: packed(strided(rows, columns, BF16)), FP32
    yield "pack fp32 as bf16", lambda: packed(strided(rows, columns, BF16, FP32)), FP32
    yield "pack odd rows", lambda: packed(strided(7, 13, BF16)), FP32
    yield "pack fp8", lambda: packed(in_fp8(*blocks)), FP32
    for name in ("gae", "v-trace"):
        yield name, lambda name=name: scanned(name), FP32


def main() -> int:
    """The exit status: 1 where a kernel is wrong. All cases run."""
    torch.manual_seed(1)
    worst: dict[str, float] = {}
    wrong = []
    for name, case, dtype in cases():
        try:
            found = case()
        except Exception:
            traceback.print_exc()
            wrong.append(name)
            continue
        print(name, found, flush=True)
        for figure, value in found.items():
            is_gradient = figure.startswith("d_")
            bound = FLOAT32_GRADIENT if is_gradient and dtype is FP32 else BOUNDS[figure]
            if not value <= bound:  # also what is no number
                wrong.append(f"{name}: {figure} {value:.2e} > {bound:.0e}")
            key = "gradient" if is_gradient else figure
            worst[key] = max(worst.get(key, 0.0), value)
    result({"wrong": len(wrong), "cases": wrong, **worst})
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
