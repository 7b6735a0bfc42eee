"""What Triton makes of each kernel for a Hopper (sm_90) when its own launch function calls it, on any machine.

A stand-in for Triton's driver reports an sm_90 device, takes every compiled kernel and launches none. What is compiled
is therefore exactly what a run on that device would be given, with Triton's specialisation of arguments: an integer of
1 becomes a constant, multiples of 16 are marked. The environment must hold TRITON_INTERPRET=0 before
`hybridflow_kernels` is imported. `cuobjdump` is Triton's own; TRITON_CUOBJDUMP_PATH names another.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SHARED_BYTES = 232_448  # that a program may have on an sm_90 device
_RESOURCE = re.compile(r"(REG|STACK|LOCAL):(\d+)")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", re.MULTILINE)


@dataclass(frozen=True)
class Compiled:
    """A kernel as compiled for one launch.

    Attributes:
        kernel: its name.
        arguments: of each argument its type, "1" where Triton made a constant of it, and " 16" behind the type where
            it is known to be a multiple of 16.
        registers: of a thread.
        local_bytes: of a thread, spills and stack.
        shared_bytes: of a program.
        instructions: in the machine code, without padding.
        wgmma: those of them that multiply matrices on a Hopper's tensor cores.
    """

    kernel: str
    arguments: dict[str, str]
    warps: int
    registers: int
    local_bytes: int
    shared_bytes: int
    instructions: int
    wgmma: int


class _Utils:
    """What Triton asks of a driver while it loads a kernel."""

    def __init__(self, found: list[Compiled]) -> None:
        self.found = found
        self.source: Any = None
        self.warps = 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel)
            file.flush()
            counts = {
                key: int(value) for key, value in _RESOURCE.findall(_cuobjdump("--dump-resource-usage", file.name))
            }
            opcodes = _INSTRUCTION.findall(_cuobjdump("-sass", file.name))
        registers, local = counts["REG"], counts["LOCAL"] + counts["STACK"]
        self.found.append(
            Compiled(
                kernel=name,
                arguments=_arguments(self.source),
                warps=self.warps,
                registers=registers,
                local_bytes=local,
                shared_bytes=shared,
                instructions=sum(opcode != "NOP" for opcode in opcodes),
                wgmma=sum(opcode == "HGMMA" for opcode in opcodes),
            )
        )
        return 0, 0, registers, local, 1024


def _cuobjdump(*words: str) -> str:
    from triton import knobs

    return subprocess.run([knobs.nvidia.cuobjdump.path, *words], capture_output=True, text=True, check=True).stdout


def _arguments(source: Any) -> dict[str, str]:
    found = {}
    for number, (name, kind) in enumerate(source.signature.items()):
        if kind != "constexpr":
            found[name] = kind + (" 16" if ["tt.divisibility", 16] in source.attrs.get((number,), []) else "")
        elif not source.fn.params[number].is_constexpr:
            found[name] = str(source.constants[(number,)])
    return found


def stand_in() -> list[Compiled]:
    """Make an sm_90 device of nothing Triton's device, and take Triton for tensors that are on none. What launches
    compile from now on is appended to the list that is returned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    from hybridflow_kernels import digest, fp8_cast, linear_log_probs, scans, slices

    found: list[Compiled] = []
    utilities = _Utils(found)

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            utilities.source, utilities.warps = source, metadata.num_warps

        def __call__(self, *words: Any) -> None:
            """Launch nothing."""

    class Driver(DriverBase):
        utils, launcher_cls = utilities, Launcher

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_active_torch_device(self) -> Any:
            raise NotImplementedError

        def get_benchmarker(self) -> Any:
            raise NotImplementedError

    triton.runtime.driver.set_active(Driver())
    for module in (digest, fp8_cast, linear_log_probs, scans, slices):
        module.uses_triton = lambda tensor: True  # type: ignore[attr-defined]
    return found


def forms() -> dict[str, Callable[[], Any]]:
    """By name, the launches of the table, in the sizes that a GPU takes. The tensors are on torch's device without
    memory, but for the lengths of the scans, which the host reads."""
    import torch

    from hybridflow_kernels import digest, fp8_cast, linear_log_probs, scans, slices

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    n, v, h, fp32, fp8 = 8192, 151936, 4096, torch.float32, torch.float8_e4m3fn
    rows = empty(n, h), empty(v, h), empty(n, dtype=torch.int64)
    best = empty(n, 32, dtype=fp32), empty(n, 32, dtype=torch.int64)
    ones, grad_weight = empty(n, dtype=fp32), empty(v, h, dtype=fp32)
    upstream = linear_log_probs.Upstream(ones, ones, ones, ones)
    words: dict[str, Any] = {"temperature": 1.0, "chunk": 1024}
    column, lengths, mask = torch.zeros(64), torch.tensor([64]), torch.ones(64, dtype=torch.bool)
    blocks, odd = empty(1, 4096, 4096), empty(1, 4096, 4097)[:, :, 1:]
    shard = empty(1, 4096, 8192)[:, :, :4096]
    scales = slices.Slice(blocks, 0, (1, 32, 32), fp32, (128, 128))
    made = slices.Slice(blocks, scales.end, (1, 4096, 4096), fp8, (128, 128))

    def moved(*pieces: slices.Slice, back: bool = False) -> None:
        prepared = slices.Slices(pieces, pieces[-1].end)
        (prepared.scatter if back else prepared.pack)(empty(pieces[-1].end, dtype=torch.uint8), 1 << 60)

    def copied(tensor: torch.Tensor, back: bool = False) -> None:
        moved(slices.Slice(tensor, 0, (1, 4096, 4096), torch.bfloat16), back=back)

    return {
        "log-probs forward": lambda: linear_log_probs.partial_sums(*rows, with_entropy=True, **words),
        "log-probs forward, no entropy": lambda: linear_log_probs.partial_sums(*rows, with_entropy=False, **words),
        "log-probs forward, top 32": lambda: linear_log_probs.partial_sums(
            *rows, with_entropy=False, best=best, **words
        ),
        "logit gradients": lambda: linear_log_probs.gradients(*rows, upstream, grad_weight_VH=grad_weight, **words),
        "checksum": lambda: digest.digest(empty(1 << 28, dtype=torch.uint8), 1 << 60),
        "GAE": lambda: scans.gae(column, column, lengths, gamma=1.0, lam=0.95, mask_T=mask),
        "V-trace": lambda: scans.vtrace(column, column, column, lengths, gamma=1.0, mask_T=mask),
        "fp8 scales": lambda: fp8_cast.write_scales(blocks, (128, 128), empty(1, 32, 32, dtype=fp32)),
        "fp8 values": lambda: fp8_cast.write_weights(blocks, (128, 128), 0, 0, empty(1, 4096, 4096, dtype=fp8)),
        "fp8 values, scales, checksum": lambda: moved(scales, made),
        "pack bf16": lambda: copied(shard),
        "pack fp32 as bf16": lambda: copied(empty(1, 4096, 8192, dtype=fp32)[:, :, :4096]),
        "pack bf16, any strides": lambda: copied(odd),
        "scatter bf16": lambda: copied(shard, back=True),
    }


def table() -> None:
    """Print one line a kernel."""
    print("for sm_90, as launched, from the compiler; no figure was taken")
    found = stand_in()
    for name, form in forms().items():
        form()
        for one in found:
            print(
                f"{name:<30} {one.kernel:<24} warps {one.warps}  registers {one.registers:>3}  "
                f"local {one.local_bytes:>3}  shared {one.shared_bytes:>6}  instructions {one.instructions:>5}"
                + (f"  wgmma {one.wgmma}" if one.wgmma else "")
            )
        found.clear()
