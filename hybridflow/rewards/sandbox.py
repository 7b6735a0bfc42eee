"""`Sandbox`: isolated execution of model-written programs, one at a time."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hybridflow.errors import ResourceError

_START_S = 60.0
_PATIENCE_S = 30.0
# `ProgramResult.why` if its process was killed, from outside or by the program
ENDED = "the sandbox ended"
COMMAND = ("-I", "-S")  # no environment, no site-packages except numpy


@dataclass(frozen=True)
class Limits:
    """The resource limits of a sandboxed program."""

    timeout_s: float = 6.0  # wall clock
    memory_bytes: int = 512 << 20  # address space
    tmp_bytes: int = 16 << 20  # its /tmp, and each file in it
    output_bytes: int = 1 << 20  # standard output and standard error, each


@dataclass(frozen=True)
class ProgramResult:
    """The result of running a program.

    Attributes:
        code: the exit code, negative for a signal; None if the program hit a limit.
        why: the limit that the program hit ("timeout" or "output"), `ENDED`, or empty.
    """

    code: int | None
    why: str
    stdout: str
    stderr: str
    seconds: float


def _packages() -> list[str]:
    """Return the arguments that make numpy and its bundled libraries available in the sandbox,
    because programs in public datasets import it."""
    found = importlib.util.find_spec("numpy")
    folder = Path(str(found and found.origin)).parent
    return [
        f"--package={path}" for path in (folder, folder.with_name("numpy.libs")) if path.is_dir()
    ]


class Sandbox:
    """Starts the process from which programs are forked (`sandbox_process`), so that no interpreter
    has to be started per program. The process ends with the thread that created this object.

    Raises:
        ResourceError: this machine does not provide user namespaces or another required feature.
    """

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    *COMMAND,
                    str(Path(__file__).with_name("sandbox_process.py")),
                    *_packages(),
                ],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
            )
        ours.settimeout(_START_S)
        self._connection = ours
        self._lines = ours.makefile("rwb")
        line = self._lines.readline()
        answer = json.loads(line) if line else {"refused": "its process exited"}
        if "refused" in answer:
            self.close()
            raise ResourceError(
                f"programs cannot be run safely on this machine: {answer['refused']}. Code rewards "
                "need Linux with user namespaces (sysctl user.max_user_namespaces, "
                "kernel.apparmor_restrict_unprivileged_userns; in a container, its seccomp profile)"
            )

    def run(
        self,
        code: str,
        stdin: str = "",
        limits: Limits | None = None,
        *,
        calls: bool = False,
        goes_on: bool = False,
    ) -> ProgramResult:
        """Run a Python program with this standard input. A sandbox that has died is restarted in
        this thread.

        Args:
            code: the program.
            stdin: its standard input.
            limits: resource limits for this run; None uses the defaults.
            calls: after running the program, call one of its functions. The standard input is the
                JSON list [name, [argument, ...]], and the last line printed is the result as JSON.
                Alternatively, the standard input is a JSON string with statements that set
                `_result`, and the last line is its `repr` as JSON.
            goes_on: True if the same program is expected to run next. The next run then reuses the
                namespaces and needs only one fork. Each run still gets a new process and an empty
                /tmp.
        """
        limits = limits or Limits()
        if self.has_ended:
            self._start()
        order = {"code": code, "stdin": stdin, "calls": calls, "goes_on": goes_on, **vars(limits)}
        self._connection.settimeout(limits.timeout_s + _PATIENCE_S)
        try:
            self._lines.write(json.dumps(order).encode() + b"\n")
            self._lines.flush()
            line = self._lines.readline()
        except OSError:
            line = b""
        if not line:
            self.close()
            return ProgramResult(None, ENDED, "", "", 0.0)
        return ProgramResult(**json.loads(line))

    @property
    def has_ended(self) -> bool:
        """True if the sandbox process is known to have exited."""
        return self._process.returncode is not None

    def close(self) -> None:
        """Kill the sandbox process and the program that it is running."""
        self._process.kill()
        self._process.wait(_PATIENCE_S)
        self._connection.close()
