"""Run by test_launches.py: calls launch functions under the stand-in for an sm_90 device and prints
what they compile.

`python -m tests.unit.kernels.launches GROUP [--full]`, with TRITON_INTERPRET=0. One line of JSON a
form: its name, whether a product on tensor cores is meant, the kernels that it compiled first, or
the error. Tensors are on torch's device without memory, so that no size costs any, and host code
behind a launch runs on their shapes; small ones on the CPU show that it runs on numbers too.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hybridflow_kernels import digest, fp8_cast, linear_log_probs, scans, slices
from tests.unit.kernels.sm90 import stand_in

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
FP8 = torch.float8_e4m3fn
U8 = torch.uint8
SEEDS = (0, 1, 16, 7, 2**63, 2**64 - 1)
Form = tuple[str, Callable[[], Any], bool]  # name, call, whether a product on tensor cores is meant


def empty(
    *shape: int, dtype: torch.dtype = BF16, device: str = "meta", skipped: int = 0
) -> torch.Tensor:
    """A tensor whose address is this many elements behind one of 16 bytes."""
    size = 1
    for length in shape:
        size *= length
    return torch.empty(size + skipped, dtype=dtype, device=device)[skipped:].view(shape)


def log_probs(  # one call of the forward, or of the backward where `entropy` or `k` do not matter
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    entropy: bool = True,
    k: int = 0,
    gradients: bool = False,
    temperature: float = 0.7,
    device: str = "meta",
    skipped: int = 0,
) -> Form:
    n, v, h = shape

    def run() -> None:
        hidden, weight = (
            empty(rows, h, dtype=dtype, device=device, skipped=skipped) for rows in (n, v)
        )
        targets = torch.zeros(n, dtype=torch.int64, device=device)
        words: dict[str, Any] = {"temperature": temperature, "chunk": 9}
        if gradients:
            column = empty(n, dtype=FP32, device=device)
            upstream = linear_log_probs.Upstream(
                column, column if entropy else None, column, column
            )
            into = empty(v, h, dtype=FP32, device=device)
            found = linear_log_probs.gradients(
                hidden, weight, targets, upstream, grad_weight_VH=into, **words
            )
            assert found is not None and found.shape == (n, h) and found.dtype == dtype
            return
        best = (
            (empty(n, k, dtype=FP32, device=device), empty(n, k, dtype=torch.int64, device=device))
            if k
            else None
        )
        tops, sums = linear_log_probs.partial_sums(
            hidden, weight, targets, with_entropy=entropy, best=best, **words
        )
        assert tops.shape == (n,) and sums.shape == (3, n)

    options = (
        f"entropy={entropy} k={k} gradients={gradients} temperature={temperature} "
        f"skipped={skipped} {device}"
    )
    return f"log_probs {shape} {dtype} {options}", run, dtype != FP32 and k <= 32


VOCABULARY = (1, 16, 8192, 151937, 8193)
HIDDEN = (1, 16, 64, 97)


def sums(full: bool) -> Iterator[Form]:
    """One group of columns and several; hidden sizes of whole tiles, of 16, of 1 and odd ones; all
    of each dtype."""
    some = [
        (1, 1),
        (16, 16),
        (8192, 64),
        (151937, 64),
        (8193, 97),
        (16, 1),
        (1, 64),
        (151936, 4096),
    ]
    for number, (v, h) in enumerate(itertools.product(VOCABULARY, HIDDEN) if full else some):
        yield log_probs((1 + 15 * (number % 3), v, h), BF16, entropy=number % 2 == 0)
        if full:
            yield log_probs((33, v, h), BF16, entropy=number % 2 == 1)
    for dtype, (v, h) in itertools.product((FP16, FP32), some if full else some[3:4]):
        yield log_probs((33, v, h), dtype)
    yield log_probs((33, 8193, 64), FP16, entropy=False)
    # an integer, as a configuration has it
    yield log_probs((33, 8193, 64), BF16, temperature=1)  # type: ignore[arg-type]
    yield log_probs((9, 40, 64), BF16, device="cpu")
    yield log_probs((9, 40, 97), BF16, skipped=3)


def best(full: bool) -> Iterator[Form]:
    """The highest logits beside the sums."""
    yield log_probs((1, 8192, 64), BF16, k=20)
    yield log_probs((33, 8193, 64), BF16, entropy=False, k=128)
    yield log_probs((9, 40, 64), BF16, k=20, device="cpu")
    if full:
        yield log_probs((33, 1, 64), BF16, entropy=False, k=1)
        yield log_probs((16, 151937, 97), BF16, entropy=False, k=32)
        yield log_probs((9, 97, 97), FP32, k=64)
        for k, dtype, entropy in itertools.product(
            (1, 2, 32, 64, 128), (BF16, FP16, FP32), (False, True)
        ):
            yield log_probs((33, 8192, 97 if k == 2 else 64), dtype, entropy=entropy, k=k)


def gradients(full: bool) -> Iterator[Form]:
    """With parts of the vocabulary that are as wide as all others and shorter ones."""
    some = [(1, 1), (16, 16), (8192, 64), (8193, 64), (8209, 97), (151936, 4096)]
    for number, (v, h) in enumerate(itertools.product(VOCABULARY, HIDDEN) if full else some):
        yield log_probs(
            (1 + 15 * (number % 3), v, h), BF16, entropy=number % 2 == 0, gradients=True
        )
    for dtype in (FP16, FP32):
        yield log_probs((33, 8192, 64), dtype, entropy=False, gradients=True)
        yield log_probs((33, 97, 97), dtype, gradients=True)
    yield log_probs((9, 40, 64), BF16, device="cpu", gradients=True)


def descriptors(full: bool) -> Iterator[Form]:
    """The variant that reads tiles by tensor descriptors."""

    def described(form: Form) -> Form:
        name, run, product = form

        def with_descriptors() -> None:
            kept = linear_log_probs.DESCRIPTORS
            linear_log_probs.DESCRIPTORS = True
            try:
                run()
            finally:
                linear_log_probs.DESCRIPTORS = kept

        return f"{name} by descriptors", with_descriptors, product

    for shape in ((1, 1, 64), (33, 8193, 4096)):
        for entropy in (True, False):
            yield described(log_probs(shape, BF16, entropy=entropy))
        yield described(log_probs(shape, BF16, gradients=True, entropy=shape[0] == 33))
    if full:
        yield described(log_probs((33, 8193, 24), FP16))
        yield described(log_probs((33, 8193, 64), BF16, k=32))


def checksum(full: bool) -> Iterator[Form]:
    """Bodies without a byte, without a word, with a rest or none, larger than int32 counts, and at
    odd addresses."""

    def form(size: int, seed: int, device: str = "meta", skipped: int = 0) -> Form:
        def run() -> None:
            assert digest.digest(
                empty(size, dtype=U8, device=device, skipped=skipped), seed
            ).shape == (1,)

        return f"checksum of {size} bytes, seed {seed}, skipped {skipped}, {device}", run, False

    for size in (0, 1, 7, 8, 16, 128, 8 * 4096, 8 * 4096 + 9, 1 << 28, (1 << 35) + 3):
        yield form(size, SEEDS[-1])
    for seed in SEEDS:
        yield form(129, seed, "cpu")
    for skipped in (3, 8):
        yield form(1 << 20, 5, skipped=skipped)


def fp8(full: bool) -> Iterator[Form]:
    """Scales, values, parts of values, in contiguous weights and others, with messages'
    checksums."""

    def form(
        shape: tuple[int, int, int],
        block: tuple[int, int],
        dtype: torch.dtype,
        pieces: str,
        at: tuple[int, int] = (0, 0),
        apart: int = 0,
        step: int = 1,
        device: str = "meta",
    ) -> Form:
        n, r, c = shape

        def run() -> None:
            weights = empty(n, r, c * step + apart, dtype=dtype, device=device)[
                :, :, : c * step : step
            ]
            counts = (n, -(-r // block[0]), -(-c // block[1]))
            part = (n, r - at[0], c - at[1])
            if pieces == "scales":
                fp8_cast.write_scales(weights, block, empty(*counts, dtype=FP32, device=device))
            elif pieces == "values":
                fp8_cast.write_weights(weights, block, *at, empty(*part, dtype=FP8, device=device))
            else:
                scales = slices.Slice(weights, 0, counts, FP32, block)
                values = slices.Slice(
                    weights, scales.end if pieces == "both" else 0, part, FP8, block, *at
                )
                given = [scales, values] if pieces == "both" else [values]
                prepared = slices.Slices(given, values.end)
                assert prepared.pack(
                    empty(values.end, dtype=U8, device=device), SEEDS[-1]
                ).shape == (1,)

        return (
            f"fp8 {shape} {block} {dtype} {pieces} at={at} apart={apart} step={step} {device}",
            run,
            False,
        )

    square = (128, 128)
    for pieces, dtype in itertools.product(("scales", "values", "both"), (BF16, FP32)):
        yield form((4, 4096, 4096), square, dtype, pieces)
    for shape in ((1, 1, 1), (1, 16, 16), (3, 33, 97), (2, 129, 264)):
        yield form(shape, square, BF16, "both")
        yield form(shape, square, BF16, "values")
    yield form((1, 256, 256), square, BF16, "message", at=(1, 8))
    yield form((1, 256, 256), square, BF16, "values", at=(16, 16))
    yield form((1, 256, 257), square, BF16, "values", at=(255, 1))
    yield form((2, 256, 256), square, BF16, "values", apart=5)
    yield form((2, 256, 256), square, BF16, "both", apart=16, step=2)
    yield form((2, 256, 256), square, BF16, "both", step=16)
    yield form((1, 64, 128), (1, 128), BF16, "both")
    yield form((1, 9, 12), (3, 5), FP32, "both")
    yield form((1, 40, 40), (8, 16), FP16, "both", device="cpu")
    yield form((2, 65536, 65536), square, BF16, "both")  # strides beyond int32
    if full:
        for shape, dtype, apart, at in itertools.product(
            ((1, 1, 1), (1, 16, 16), (3, 33, 97), (2, 256, 264)),
            (BF16, FP16, FP32),
            (0, 1, 16),
            ((0, 0), (0, 8)),
        ):
            if at[1] < shape[2]:
                yield form(shape, square, dtype, "message", at=at, apart=apart)


def packed_scans(full: bool) -> Iterator[Form]:
    """Rates that are integers, as a configuration may have them, with a mask and without."""

    def form(scan: str, lengths: list[int], rate: float, masked: bool) -> Form:
        def run() -> None:
            total = sum(lengths)
            column = torch.zeros(total)
            sizes = torch.tensor(lengths)
            mask = torch.ones(total, dtype=torch.bool) if masked else None
            if scan == "sums":
                assert len(scans.discounted_sums(column, sizes, gamma=rate, mask_T=mask)) == total
            elif scan == "gae":
                found = scans.gae(column, column, sizes, gamma=rate, lam=rate, mask_T=mask)
                assert [len(part) for part in found] == [total, total]
            else:
                clips = {"rho_clip": rate, "c_clip": rate}
                found = scans.vtrace(
                    column, column, column, sizes, gamma=rate, mask_T=mask, **clips
                )
                assert [len(part) for part in found] == [total, total]

        return f"{scan} of rows {lengths}, rate {rate}, masked {masked}", run, False

    for scan, masked in itertools.product(("sums", "gae", "vtrace"), (False, True)):
        for lengths, rate in (([1], 1), ([16, 0], 1.0), ([1023, 2048, 7], 0.99)):
            yield form(scan, lengths, rate, masked)


def messages(full: bool) -> Iterator[Form]:
    """Packed and scattered slices: copied by the word, by elements of each size, cast, and those
    that torch moves."""

    def form(
        size: tuple[int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        layout: str,
        seed: int = SEEDS[-1],
        back: bool = False,
        device: str = "meta",
        front: int = 0,
    ) -> Form:
        a, b, c = size

        def run() -> None:
            local, wire = dtypes
            if layout == "contiguous":
                tensor = empty(*size, dtype=local, device=device)
            elif layout == "rows apart":
                tensor = empty(a, b, c + 16, dtype=local, device=device)[:, :, :c]
            elif layout == "inside":
                tensor = empty(a, b + 1, c + 3, dtype=local, device=device)[:, 1:, 3:]
            else:
                tensor = empty(a, c, b, dtype=local, device=device).transpose(1, 2)
            pieces = (
                [
                    slices.Slice(
                        empty(1, 1, front, dtype=wire, device=device), 0, (1, 1, front), wire
                    )
                ]
                if front
                else []
            )
            pieces.append(slices.Slice(tensor, pieces[-1].end if pieces else 0, size, wire))
            prepared = slices.Slices(pieces, pieces[-1].end)
            payload = empty(pieces[-1].end, dtype=U8, device=device)
            assert (prepared.scatter if back else prepared.pack)(payload, seed).shape == (1,)

        way = "scattered" if back else "packed"
        return f"{size} {dtypes} {layout} {way} behind {front}, seed {seed}, {device}", run, False

    copies = [(BF16, BF16), (FP32, FP32), (U8, U8)]
    some = [((1, 4096, 4096), "rows apart"), ((2, 33, 97), "inside"), ((1, 1, 1), "contiguous")]
    for dtypes, (size, layout), back in itertools.product(copies, some, (False, True)):
        yield form(size, dtypes, layout, back=back)
    for size, layout in [*some, ((8, 16, 4096), "contiguous"), ((1, 16, 16), "transposed")]:
        yield form(size, (FP32, BF16), layout)
    yield form((1, 16, 16), (FP32, FP16), "contiguous")
    yield form((2, 9, 40), (BF16, BF16), "rows apart", device="cpu")
    yield form((2, 9, 40), (FP32, BF16), "inside", device="cpu")
    yield form((1, 64, 64), (BF16, BF16), "contiguous", front=3)
    yield form((1, 1 << 17, 1 << 14), (BF16, BF16), "rows apart")  # a message beyond int32
    for seed in SEEDS:
        yield form((1, 16, 16), (BF16, BF16), "contiguous", seed=seed)
    if full:
        for size, dtypes, layout, back in itertools.product(
            ((1, 1, 1), (1, 16, 16), (2, 33, 97), (3, 256, 264)),
            copies,
            ("contiguous", "rows apart", "inside", "transposed"),
            (False, True),
        ):
            yield form(size, dtypes, layout, back=back, front=0 if size[1] % 2 else 8)


GROUPS = {
    form.__name__: form
    for form in (sums, best, gradients, descriptors, checksum, fp8, packed_scans, messages)
}


def main() -> None:
    found = stand_in()
    for name, form, product in GROUPS[sys.argv[1]]("--full" in sys.argv):
        said: dict[str, Any] = {"form": name, "product": product, "error": None}
        try:
            form()
        except Exception:
            said["error"] = traceback.format_exc()[-3000:]
        print(
            json.dumps(said | {"kernels": [dataclasses.asdict(one) for one in found]}), flush=True
        )
        found.clear()


if __name__ == "__main__":
    main()
