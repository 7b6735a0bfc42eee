"""What the compiler makes of each kernel for a Hopper (sm_90): registers, shared memory and spills, without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def kernels() -> list[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """Name, kernel, types of its arguments, its constants and its options, in the sizes that a GPU takes."""
    import torch

    from hybridflow_kernels import digest, fp8_cast, linear_log_probs, scans, slices

    tiles = linear_log_probs.tiles_for(torch.bfloat16)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    shape = {"n": "i32", "v": "i32", "h": "i32"}
    given = {"hidden": "*bf16", "weight": "*bf16", "targets": "*i64"}
    tile = {**linear_log_probs._constants(tiles, torch.bfloat16), "ENTROPY": True}
    small = linear_log_probs._constants(linear_log_probs.tiles_for(torch.bfloat16, with_best=True), torch.bfloat16)
    sums = {**given, "found": "*fp32", "picked": "*fp32", "keys": "*i64", **shape, "splits": "i32"}
    sums["temperature"] = "fp32"
    rows = dict.fromkeys(("from_log_probs", "from_entropy", "log_z", "entropies"), "*fp32")
    columns = {"rewards": "*fp32", "values": "*fp32", "log_ratios": "*fp32", "mask": "*i1"}
    ends = {"lengths": "*i64", "ends": "*i64", "sums": "*fp32", "targets": "*fp32", "advantages": "*fp32"}
    rates = dict.fromkeys(("gamma", "factor", "rho_clip", "c_clip"), "fp32")
    strides = [f"{of}_{axis}" for of in ("stride", "scales", "out") for axis in "nrc"]
    sizes = (
        "r",
        "c",
        *strides,
        "first_r",
        "first_c",
        "count_r",
        "count_c",
        "row",
        "column",
        "height",
        "width",
        "begin",
    )
    block = {"ROWS": 128, "COLUMNS": 128, "ROWS_2": 128, "COLUMNS_2": 128, "FP8_MAX": 448.0, "LEAST": fp8_cast._LEAST}
    found = [
        (
            "linear_log_probs forward",
            linear_log_probs._sums_kernel,
            sums,
            {**tile, "SPLIT": tiles.split, "LOWEST": linear_log_probs.LOWEST, "BEST": 0},
            options,
        ),
        (
            "linear_log_probs forward, top 32",
            linear_log_probs._sums_kernel,
            sums,
            {**small, "ENTROPY": False, "SPLIT": tiles.split, "LOWEST": linear_log_probs.LOWEST, "BEST": 32},
            options,
        ),
        (
            "linear_log_probs logit gradients",
            linear_log_probs._logit_gradients_kernel,
            {**given, **rows, "out": "*bf16", **shape, "first": "i32", "temperature": "fp32"},
            tile,
            options,
        ),
        (
            "digest",
            digest._digest_kernel,
            {"words": "*i64", "rest": "*u8", "sums": "*i64", "num_words": "i32", "rest_bytes": "i32", "seed": "i64"},
            {"BLOCK": 4096},
            {"num_warps": 4},
        ),
    ]
    for name, chosen in (("GAE", (True, False)), ("V-trace", (True, True))):
        flags = {"VALUES": chosen[0], "RATIOS": chosen[1], "MASKED": True, "BLOCK": 1024}
        found.append((f"scans {name}", scans._scan_kernel, {**columns, **ends, **rates}, flags, {"num_warps": 4}))
    fp8 = {"weights": "*bf16", "scales": "*fp32", "out": "*u8", "sums": "*i64"} | dict.fromkeys(sizes, "i32")
    for name, scales, values in (("scales", True, False), ("values", False, True), ("both and checksum", True, True)):
        flags = {"SCALES": scales, "VALUES": values, "DIGEST": scales and values}
        found.append((f"fp8 {name}", fp8_cast._block_kernel, {**fp8, "seed": "i64"}, block | flags, {"num_warps": 8}))
    message = {"table": "*i64", "count": "i32", "payload": "*u8", "sums": "*i64", "seed": "i64"}
    tile = {"ROWS": slices.ROWS, "WORDS": slices.WORDS, "WIDTH": 2}
    for name, flags in {
        "pack bf16": {"CAST": False, "WIDE": True, "SCATTER": False},
        "pack fp32 as bf16": {"CAST": True, "WIDE": True, "SCATTER": False},
        "pack bf16, any strides": {"CAST": False, "WIDE": False, "SCATTER": False},
        "scatter bf16": {"CAST": False, "WIDE": True, "SCATTER": True},
    }.items():
        found.append((f"slices {name}", slices._move_kernel, message, tile | flags, {"num_warps": 4}))
    again = message | {"nbytes": "i32"}
    found.append(("slices, words again", slices._again_kernel, again, {"WORDS": slices.AGAIN}, {"num_warps": 4}))
    return found


def resources(kernel: Any, types: dict[str, str], constants: dict[str, Any], options: dict[str, int]) -> dict[str, int]:
    """Registers a thread, bytes of local memory a thread (spills) and of shared memory a program."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    signature = {name: signature[name] for name in kernel.arg_names}
    # what a call finds out by itself: pointers, and sizes that are models' or batches', are multiples of 16
    aligned = {
        (number,): [["tt.divisibility", 16]]
        for number, name in enumerate(kernel.arg_names)
        if types.get(name, "").startswith("*")
        or name in ("v", "h", "r", "c", "stride_n", "stride_r", "out_n", "out_r", "scales_n")
    }
    ones = [name for name in ("stride_c", "out_c", "scales_c") if name in types]  # a call makes constants of them
    constants = constants | dict.fromkeys(ones, 1)
    signature |= dict.fromkeys(ones, "constexpr")
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    said = re.findall(r"(REG|STACK|LOCAL):(\d+)", text.stdout)
    counts = {name: int(value) for name, value in said}
    return {
        "registers": counts["REG"],
        "local_bytes": counts["LOCAL"] + counts["STACK"],
        "shared_bytes": compiled.metadata.shared,
    }


def table() -> None:
    """Print one line a kernel."""
    print("for sm_90, from the compiler; no figure was taken")
    for name, kernel, types, constants, options in kernels():
        found = resources(kernel, types, constants, options)
        print(f"{name:<34} warps {options['num_warps']}  " + "  ".join(f"{k} {v}" for k, v in found.items()))
