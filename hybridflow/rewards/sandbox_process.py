"""The process from which programs are forked. It runs as `python -I -S sandbox_process.py` with a
socket as standard input, imports only the standard library, and has an empty environment and no
secrets that a fork could read.

It enters new user, mount, network, IPC and UTS namespaces once, with a separate root without /proc.
A fork of this process (the nursery) creates a PID and a mount namespace for each program, always
one pair in advance. Each run of the program is a fork of the init process in its PID namespace,
with an empty /tmp, resource limits and a seccomp filter that allows only computing, using /tmp and
starting threads: no fork, exec, socket, mount or ptrace.
"""

from __future__ import annotations

import ctypes
import gc
import io
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the GIL: a fork within a call must hold it
_CLONE_NEWNS = 0x20000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUTS = 0x04000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18
)  # fmt: skip
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SYS_CLONE = 56
_SYS_PIVOT_ROOT = 155
_SYS_CAPSET = 126
_NOBODY = 65534
_PACKAGES = "/packages"
_GIVEN = "--package="
_FILES = 64
_THREADS = 32
_SPARES = 5  # attempts to create namespaces for a program whose first process was killed
_TMP_FLAGS = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
_TMP_OPTIONS = "size={},nr_inodes=1024,mode=1777"
# x86-64. Files, memory, time, thread locks, and signals within the PID namespace; system calls that
# affect other processes are excluded.
_ALLOWED = (
    *range(0, 16),
    *range(17, 26),
    28,
    32,
    33,
    *range(35, 40),
    60,
    61,
    62,
    63,
    72,
    74,
    75,
    76,
    77,
    78,
    79,
    80,
    82,
    83,
    84,
    85,
    87,
    88,
    89,
    90,
    *range(95, 101),
    102,
    104,
    107,
    108,
    110,
    111,
    127,
    128,
    130,
    131,
    137,
    138,
    186,
    200,
    201,
    202,
    204,
    217,
    218,
    219,
    221,
    *range(228, 235),
    257,
    258,
    262,
    263,
    264,
    266,
    267,
    269,
    270,
    271,
    273,
    281,
    290,
    291,
    292,
    293,
    318,
    332,
    334,
    439,
)
_Limits = list[tuple[int, tuple[int, int]]]  # arguments of `resource.setrlimit`
# terminals (isatty), and descriptor flags
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _filter() -> bytes:
    """Build the BPF program of the seccomp filter."""
    refuse = 0x00050001
    no_such = 0x00050026
    allow = 0x7FFF0000
    kill = 0x80000000
    equal = 0x15
    above = 0x25
    at_least = 0x35
    bits = 0x45

    def load(offset: int) -> bytes:
        return struct.pack("HBBI", 0x20, 0, 0, offset)

    def give(what: int) -> bytes:
        return struct.pack("HBBI", 0x06, 0, 0, what)

    def unless(code: int, value: int, skip: int) -> bytes:
        return struct.pack("HBBI", code, 0, skip, value)

    def search(runs: list[tuple[int, int]]) -> bytes:
        if len(runs) == 1:
            first, last = runs[0]
            end = give(allow) + give(refuse)
            return unless(at_least, first, 2) + struct.pack("HBBI", above, 1, 0, last) + end
        lower = runs[: len(runs) // 2]
        upper = runs[len(runs) // 2 :]
        steps = search(lower)
        return (
            struct.pack("HBBI", at_least, len(steps) // 8, 0, upper[0][0]) + steps + search(upper)
        )

    steps = [load(4), struct.pack("HBBI", equal, 1, 0, 0xC000003E), give(kill), load(0)]  # x86-64
    steps += [unless(equal, 435, 1), give(no_such)]  # clone3: the C library falls back to clone
    steps += [
        unless(equal, _SYS_CLONE, 4),
        load(16),
        unless(bits, 0x10000, 1),
        give(allow),
        give(refuse),
    ]
    # prlimit64, of the process itself only
    steps += [unless(equal, 302, 4), load(16), unless(equal, 0, 1), give(allow), give(refuse)]
    steps += [unless(equal, 16, 2 + 2 * len(_IOCTLS)), load(24)]
    for command in _IOCTLS:
        steps += [unless(equal, command, 1), give(allow)]
    # The kernel evaluates the filter for all numbers when it is installed: a binary search takes a
    # third of the time for each program.
    firsts = [number for number in _ALLOWED if number - 1 not in _ALLOWED]
    lasts = [number for number in _ALLOWED if number + 1 not in _ALLOWED]
    return b"".join([*steps, give(refuse), search(list(zip(firsts, lasts, strict=True)))])


# Built once, so that they are ready in each program's process.
_STEPS = ctypes.create_string_buffer(_filter())
_FILTER = struct.pack("HxxxxxxQ", len(_STEPS) // 8, ctypes.addressof(_STEPS))
_NO_CAPABILITIES = struct.pack("Ii", 0x20080522, 0), bytes(24)
# requests to the nursery, and to an init
_NEW = b"n"
_END = b"e"
_END_AND_REPLY = b"s"
_RERUN = b"."


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    given = (
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode(),
    )
    _check(_libc.mount(*given), f"mount {target}")


def _enter_namespaces() -> None:
    """Enter the namespaces. If this process runs as root, the user map also includes `nobody`,
    which runs the programs; otherwise it includes only the current user."""
    uid = os.getuid()
    gid = os.getgid()
    pid = os.getpid()
    begin = os.pipe()
    done = os.pipe()
    helper = os.fork() if uid == 0 else -1
    if helper == 0:
        os.close(begin[1])
        if not os.read(begin[0], 1):  # the parent was killed
            os._exit(1)
        try:
            for name in ("uid", "gid"):
                Path(f"/proc/{pid}/{name}_map").write_text(f"0 0 1\n{_NOBODY} {_NOBODY} 1\n")
            os.write(done[1], b"1")
        finally:
            os._exit(0)
    os.close(done[1])
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    _check(_libc.unshare(flags), "unshare")
    if helper > 0:
        os.write(begin[1], b"1")
        if os.read(done[0], 1) != b"1":
            raise OSError("the user map could not be written")
        os.waitpid(helper, 0)
    else:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1\n")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1\n")
    for file in (*begin, done[0]):
        os.close(file)


def _enter_root() -> None:
    """Switch to a read-only root that contains only the interpreter's library, shared libraries and
    four devices."""
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    root = "/tmp"
    packages = [given.removeprefix(_GIVEN) for given in sys.argv if given.startswith(_GIVEN)]
    library = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
    libraries = [
        os.path.join(prefix, library) for prefix in (sys.base_prefix, sys.base_exec_prefix)
    ]
    system = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
    folders = set(map(os.path.realpath, (*libraries, *system)))
    kept = []
    for folder in folders:
        if not any(folder.startswith(f"{other}/") for other in folders):
            kept.append(folder)
    # opened before mounting: files inside /tmp are hidden once the new root covers it
    opened = {
        folder: os.open(folder, os.O_PATH) for folder in (*kept, *packages) if os.path.isdir(folder)
    }
    _mount("tmpfs", root, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for folder in filter(opened.get, kept):
        _bind(f"/proc/self/fd/{opened[folder]}", root + folder, is_folder=True)
    for link in ("/lib", "/lib64"):
        if os.path.islink(link) and not os.path.lexists(root + link):
            os.symlink(os.path.realpath(link), root + link)
    for folder in filter(opened.get, packages):
        with suppress(OSError):  # not readable by this user: programs lack this package
            _bind(
                f"/proc/self/fd/{opened[folder]}",
                f"{root}{_PACKAGES}/{os.path.basename(folder)}",
                is_folder=True,
            )
    for descriptor in opened.values():
        os.close(descriptor)
    for device in ("null", "zero", "random", "urandom"):
        _bind(f"/dev/{device}", f"{root}/dev/{device}", is_folder=False)
    for folder in ("tmp", "old"):
        os.mkdir(f"{root}/{folder}")
    os.chdir(root)
    _check(_libc.syscall(_SYS_PIVOT_ROOT, b".", b"old"), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/old", 2), "umount /old")
    os.rmdir("/old")
    _mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)


def _bind(source: str, target: str, *, is_folder: bool) -> None:
    os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
    if not is_folder:
        Path(target).touch()
    _mount(source, target, None, _MS_BIND | _MS_REC)
    if is_folder:
        # locked flags must be kept
        flags = os.statvfs(source).f_flag & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        _mount("none", target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags | _MS_NOSUID)


def _limits(order: dict[str, Any]) -> _Limits:
    limits = {
        resource.RLIMIT_AS: order["memory_bytes"],
        resource.RLIMIT_DATA: order["memory_bytes"],
        resource.RLIMIT_CPU: int(order["timeout_s"]) + 2,
        resource.RLIMIT_FSIZE: order["tmp_bytes"],
        resource.RLIMIT_NOFILE: _FILES,
        resource.RLIMIT_NPROC: _THREADS,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    return [(kind, (value, value)) for kind, value in limits.items()]


def _run_program(order: dict[str, Any], limits: _Limits, files: list[int]) -> None:
    """Run the program in this process. Does not return."""
    # otherwise signals to its process group would reach processes outside the namespace
    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(3, 1 << 16)
    os.chdir("/tmp")
    code = 1
    try:
        for kind, pair in limits:
            resource.setrlimit(kind, pair)
        if order["as_nobody"]:
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        _check(_libc.syscall(_SYS_CAPSET, *_NO_CAPABILITIES), "capset")
        _check(_libc.prctl(_PR_SET_SECCOMP, 2, _FILTER, 0, 0), "prctl(PR_SET_SECCOMP)")
        try:
            names = {"__name__": "__main__"}
            exec(compile(order["code"], "program", "exec"), names)
            if order["calls"]:
                _call(names)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        except BaseException as error:
            own = error.__traceback__ and error.__traceback__.tb_next  # without our frame
            traceback.print_exception(type(error), error, own, limit=-3)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code & 0xFF)


def _call(names: dict[str, Any]) -> None:
    """Call a function or a method of `Solution`, or run statements that set `_result`.

    The request is read from standard input. The last line of output is the result, as JSON or as a
    `repr`. The expected value stays outside the sandbox.
    """
    request = json.loads(sys.stdin.read())
    if isinstance(request, str):
        exec(compile(request, "test", "exec"), names)
        found = names["_result"]
        print("\n" + json.dumps(repr(dict(found) if isinstance(found, dict) else found)))
        return
    name, arguments = request
    function = getattr(names["Solution"](), name) if "Solution" in names else names[name]
    print("\n" + json.dumps(function(*arguments)))


def _run_init(requests: socket.socket) -> None:
    """Run the init process of a PID namespace. When it exits, the kernel kills all other processes
    in the namespace. Does not return.

    Each request passes four file descriptors: three for the run, and one for its exit status. The
    first request additionally passes a file that contains the program as the first descriptor, and
    the limits in its message.
    """
    try:
        _isolate(requests)
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        left: tuple[int, ...] = ()  # the state of an unused /tmp
        while True:
            message, (*files, status), _, _ = socket.recv_fds(requests, 1 << 12, 5)
            try:
                if message != _RERUN:
                    order, limits = _read_order(message, files.pop(0))
                if left != _state_of_tmp():
                    if left:
                        _check(_libc.umount2(b"/tmp", 2), "umount /tmp")
                    _mount(
                        "tmpfs",
                        "/tmp",
                        "tmpfs",
                        _TMP_FLAGS,
                        _TMP_OPTIONS.format(order["tmp_bytes"]),
                    )
                    left = _state_of_tmp()
                os.write(status, str(_ended(order, limits, files)).encode())
            except BaseException as error:
                os.write(status, f"init: {error}".encode())
                raise
            for file in (*files, status):
                os.close(file)
    finally:
        os._exit(0)


def _isolate(connection: socket.socket) -> None:
    """Exit when the parent exits, and close all descriptors except the given one and the standard
    streams."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, 1 << 16)


def _read_order(message: bytes, file: int) -> tuple[dict[str, Any], _Limits]:
    order = json.loads(message) | {
        "code": os.read(file, os.fstat(file).st_size).decode(errors="surrogatepass")
    }
    os.close(file)
    return order, _limits(order)


def _state_of_tmp() -> tuple[int, ...]:
    """Return a value that is unchanged only if no program has touched /tmp: creating a file uses an
    inode, and deleting it, changing a mode or listing the folder updates a timestamp.
    """
    folder = os.stat("/tmp")
    system = os.statvfs("/tmp")
    times = folder.st_atime_ns, folder.st_mtime_ns, folder.st_ctime_ns
    return (
        folder.st_mode,
        folder.st_uid,
        folder.st_gid,
        folder.st_size,
        *times,
        system.f_bfree,
        system.f_ffree,
    )


def _ended(order: dict[str, Any], limits: _Limits, files: list[int]) -> int:
    """Run the program once and return its exit code. All its processes are killed afterwards."""
    program = os.fork()
    if program == 0:
        _run_program(order, limits, files)
    ended = 0
    code = 0
    while ended != program:
        ended, code = os.wait()
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return os.waitstatus_to_exitcode(code)


def _run_nursery(requests: socket.socket) -> None:
    """Run the process that creates namespaces ahead of demand. Does not return.

    It never reads programs, so its memory cannot leak data from one program to another. Namespaces
    are destroyed in the order of their creation.
    """
    try:
        _isolate(requests)
        inits: list[int] = []
        while True:
            what, files, _, _ = socket.recv_fds(requests, 1, 1)
            if what == _NEW:
                flags = _CLONE_NEWPID | _CLONE_NEWNS | signal.SIGCHLD
                init = _check(_libc.syscall(_SYS_CLONE, ctypes.c_ulong(flags), 0, 0, 0, 0), "clone")
                if init == 0:
                    ctypes.pythonapi.PyOS_AfterFork_Child()
                    _run_init(socket.socket(fileno=files[0]))
                inits.append(init)
                os.close(files[0])
            else:
                init = inits.pop(0)
                os.kill(init, signal.SIGKILL)
                os.waitpid(init, 0)
                if what == _END_AND_REPLY:
                    requests.send(what)
    finally:
        os._exit(0)


class _Space:
    """A PID and a mount namespace in which a single program runs, on one input at a time.

    Args:
        nursery: a connection to the process that creates and destroys the namespaces.
    """

    def __init__(self, nursery: socket.socket) -> None:
        self.order: dict[str, Any] | None = None
        self._nursery = nursery
        self._requests, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(nursery, [_NEW], [theirs.fileno()])

    def run(self, order: dict[str, Any], given: str, began: float) -> dict[str, Any]:
        """Run the program with this standard input until it exits or hits a limit. The program must
        be the same in every call."""
        out = os.pipe()
        err = os.pipe()
        status = os.pipe()
        theirs = [_file_with(given), out[1], err[1], status[1]]
        message = _RERUN
        if self.order is None:
            self.order = order
            theirs.insert(0, _file_with(order["code"]))
            message = json.dumps(
                {name: value for name, value in order.items() if name != "code"}
            ).encode()
        with suppress(BrokenPipeError):  # the init was killed, which is detected when reading
            socket.send_fds(self._requests, [message], theirs)
        for file in theirs:
            os.close(file)
        found: dict[int, bytearray] = {
            out[0]: bytearray(),
            err[0]: bytearray(),
            status[0]: bytearray(),
        }
        why = _read(found, status[0], order["output_bytes"], began + order["timeout_s"])
        text = {
            name: found[file].decode(errors="replace")
            for name, file in (("stdout", out[0]), ("stderr", err[0]))
        }
        said = found[status[0]].decode()
        for file in found:
            os.close(file)
        if not why and not said.lstrip("-").isdigit():
            why = f"the sandbox failed: {said or 'its first process was killed'}"
        code = int(said) if not why else None
        return text | {"code": code, "why": why, "seconds": time.monotonic() - began}

    @property
    def has_ended(self) -> bool:
        """True if the namespace's init process was killed. Init never writes to the request
        connection, so the connection becomes readable only when it is closed."""
        return bool(select.select([self._requests], [], [], 0)[0])

    def close(self, *, waits: bool) -> None:
        """Kill the processes in the namespace. Raises BrokenPipeError if the nursery was killed.

        Args:
            waits: wait until the processes have exited. Not needed if the program's exit has
                already been reported.
        """
        self._requests.close()
        self._nursery.send(_END_AND_REPLY if waits else _END)
        if waits and not self._nursery.recv(1):
            raise BrokenPipeError("the process that creates namespaces was killed")


def _file_with(text: str) -> int:
    """Create an in-memory file that contains this text, positioned at its start."""
    file = os.memfd_create("text")
    view = memoryview(text.encode(errors="surrogatepass"))
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _read(found: dict[int, bytearray], status: int, most: int, deadline: float) -> str:
    """Read the output until the program exits. Returns the limit that the program hit, or ""."""
    open_files = set(found)
    while open_files:
        if status not in open_files and not select.select(open_files, [], [], 0)[0]:
            return ""
        left = deadline - time.monotonic()
        ready = select.select(open_files, [], [], max(left, 0))[0]
        if not ready and left <= 0:
            return "timeout"
        for file in ready:
            part = os.read(file, 1 << 16)
            if not part:
                open_files.discard(file)
            found[file] += part
            if len(found[file]) > most:
                del found[file][most:]
                return "output"
        if time.monotonic() > deadline:
            return "timeout"
    return ""


def main() -> None:
    """Handle requests, one JSON line each, until the peer closes the connection."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    # otherwise a process that has changed its user may not write its own maps
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
    as_root = os.getuid() == 0
    sys.path.append(_PACKAGES)
    # its buffers per thread exceed a program's memory
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    lines = control.makefile("rwb")
    try:
        if os.uname().machine != "x86_64":
            raise OSError(f"the system-call filter supports only x86_64, not {os.uname().machine}")
        _enter_namespaces()
        _enter_root()
        if as_root:
            os.setgroups([])
        nursery = _nursery()
        answer: dict[str, Any] = {"ready": True}
    except OSError as error:
        answer = {"refused": str(error)}
    lines.write(json.dumps(answer).encode() + b"\n")
    lines.flush()
    if "ready" in answer:
        _answer(lines, nursery, as_root)


def _nursery() -> socket.socket:
    """Start the process that creates namespaces."""
    import bisect  # noqa: F401  # preloaded for programs

    # initializes the interpreter's syntax types, which each fork would otherwise do again
    compile("", "program", "exec")
    gc.freeze()
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        _run_nursery(theirs)
    theirs.close()
    return ours


def _answer(lines: io.BufferedRWPair, nursery: socket.socket, as_root: bool) -> None:
    """Run the requested programs, each in namespaces that were created while an earlier program was
    running.
    """
    space = None
    spare = _Space(nursery)
    for line in lines:
        began = time.monotonic()
        order: dict[str, Any] = json.loads(line) | {"as_nobody": as_root}
        given = order.pop("stdin")
        goes_on = order.pop("goes_on", False)
        order.setdefault("calls", False)
        if space is not None and (space.order != order or space.has_ended):
            space.close(waits=False)
            space = None
        if space is None:
            # if it is killed immediately, e.g. for lack of memory, its run reports that
            for _ in range(_SPARES):
                if not spare.has_ended:
                    break
                spare.close(waits=True)
                spare = _Space(nursery)
            space = spare
        result = space.run(order, given, began)
        over = result["why"] or not goes_on
        if over:
            space.close(waits=bool(result["why"]))
        lines.write(json.dumps(result).encode() + b"\n")
        lines.flush()
        if space is spare:
            spare = _Space(nursery)
        if over:
            space = None


if __name__ == "__main__":
    main()
