"""Kernels compiled for a Hopper (sm_90) by their own launch functions, on any machine.

A stand-in for Triton's driver reports an sm_90 device, takes every compiled kernel and launches
none. The code is the one that a run on that device gets, with Triton's specialisation of arguments:
an integer of 1 becomes a constant, multiples of 16 are marked. The environment must have
TRITON_INTERPRET=0 before `hybridflow_kernels` is imported. `cuobjdump` is Triton's own;
TRITON_CUOBJDUMP_PATH names another.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
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
        arguments: of each argument its type, "1" where Triton made a constant of it, and " 16"
            behind the type where it is known to be a multiple of 16.
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

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel)
            file.flush()
            counts = {
                key: int(value)
                for key, value in _RESOURCE.findall(_cuobjdump("--dump-resource-usage", file.name))
            }
            opcodes = _INSTRUCTION.findall(_cuobjdump("-sass", file.name))
        registers = counts["REG"]
        local = counts["LOCAL"] + counts["STACK"]
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

    return subprocess.run(
        [knobs.nvidia.cuobjdump.path, *words], capture_output=True, text=True, check=True
    ).stdout


def _arguments(source: Any) -> dict[str, str]:
    found = {}
    for number, (name, kind) in enumerate(source.signature.items()):
        if kind != "constexpr":
            found[name] = kind + (
                " 16" if ["tt.divisibility", 16] in source.attrs.get((number,), []) else ""
            )
        elif not source.fn.params[number].is_constexpr:
            found[name] = str(source.constants[(number,)])
    return found


def stand_in() -> list[Compiled]:
    """Make an sm_90 device of nothing Triton's device, and take Triton for tensors that are on
    none. What launches compile from now on is appended to the list that is returned."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    from hybridflow_kernels import digest, fp8_cast, linear_log_probs, scans, slices

    found: list[Compiled] = []
    utilities = _Utils(found)

    class Launcher:
        def __init__(self, source: Any, metadata: Any) -> None:
            utilities.source = source
            utilities.warps = metadata.num_warps

        def __call__(self, *words: Any) -> None:
            """Launch nothing."""

    class Driver(DriverBase):
        utils = utilities
        launcher_cls = Launcher

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
