"""`Sandbox`: runs programs of a model where they can harm nothing, one at a time."""

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
# `ProgramResult.why` where its process was killed, from outside or by the program
ENDED = "the sandbox ended"
COMMAND = ("-I", "-S")  # no environment, no site-packages but numpy


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    timeout_s: float = 6.0  # wall clock
    memory_bytes: int = 512 << 20  # address space
    tmp_bytes: int = 16 << 20  # its /tmp, and a file in it
    output_bytes: int = 1 << 20  # standard output, and standard error


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended.

    Attributes:
        code: its exit code, negative for a signal; None where it reached a limit.
        why: "timeout" or "output" for the limit that it reached, `ENDED`, else empty.
    """

    code: int | None
    why: str
    stdout: str
    stderr: str
    seconds: float


def _packages() -> list[str]:
    """The folders of numpy, which programs of public data sets import, and of the libraries in its
    wheel."""
    found = importlib.util.find_spec("numpy")
    folder = Path(str(found and found.origin)).parent
    return [
        f"--package={path}" for path in (folder, folder.with_name("numpy.libs")) if path.is_dir()
    ]


class Sandbox:
    """Starts the process that programs are forked from (`sandbox_process`); each program costs
    forks, no interpreter. The process ends with the thread that has made this object.

    Raises:
        ResourceError: this machine forbids user namespaces or the like, so that nothing can be run;
            says what.
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
        answer = json.loads(line) if line else {"refused": "its process ended"}
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
        """Run a Python program with this standard input. A sandbox that has ended starts again, in
        this thread.

        Args:
            code: the program.
            stdin: its standard input.
            limits: of this run; None: the default ones.
            calls: whether to call a function of the program then. Its name and its arguments are
                the standard input, [name, [argument, ...]] as JSON, and its result is the last line
                printed, as JSON. Or the standard input is a JSON text of statements that leave
                `_result`, and the last line is its `repr` as JSON.
            goes_on: whether the same program is expected to run again next, in the same namespaces.
                That costs one fork; the process and /tmp are new, as for another program.
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
        """Whether its process is known to have ended."""
        return self._process.returncode is not None

    def close(self) -> None:
        """End the process, and a program with it."""
        self._process.kill()
        self._process.wait(_PATIENCE_S)
        self._connection.close()
