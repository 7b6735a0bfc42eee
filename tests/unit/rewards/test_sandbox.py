"""Programs in the sandbox: ordinary ones run, hostile ones end within their limits and change
nothing outside."""

import io
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from hybridflow.config.schema import RewardConfig
from hybridflow.errors import ResourceError
from hybridflow.rewards import RewardManager, sandbox_process
from hybridflow.rewards.sandbox import ENDED, Limits, Sandbox

try:
    Sandbox().close()
except ResourceError as error:
    pytest.skip(str(error), allow_module_level=True)

FILTER = list(struct.iter_unpack("HBBI", sandbox_process._filter()))
SECRET = "sandbox-secret-5c1f"
# Each prints "harm" where it got what it wanted; PID, FILE and PORT are the test's own.
HOSTILE = {
    "fork": "import os\nos.fork(); print('harm')",
    "fork bomb": "import os\nwhile True: os.fork()",
    "vfork": "import ctypes\nprint('harm' if ctypes.CDLL(None).vfork() >= 0 else 1/0)",
    "double fork": (
        "import os\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0: open('FILE', "
        "'w').write('x')"
    ),
    "daemon by subprocess": (
        "import subprocess\nsubprocess.Popen(['sleep', '9'], process_group=0); print('harm')"
    ),
    "shell": "import os\nprint('harm' if os.system('id') == 0 else 1/0)",
    "exec": "import os\nos.execv('/bin/sh', ['sh', '-c', 'echo harm'])",
    "spawn": "import os\nos.posix_spawn('/bin/sh', ['sh'], {}); print('harm')",
    "multiprocessing": "import multiprocessing as m\nm.Pool(2).map(abs, [1]); print('harm')",
    "memory": "x = bytearray(4 << 30); print('harm')",
    "memory in steps": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory mapped": "import mmap\nx = mmap.mmap(-1, 4 << 30); print('harm')",
    "memory by recursion": (
        "def f(x): return f([x] * 10**6 + [x])\nimport sys; sys.setrecursionlimit(10**9); f(1)"
    ),
    "integer": "x = 10 ** 10 ** 9; print('harm')",
    "threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, "
        "args=(99,)).start()"
    ),
    "disk": "f = open('/tmp/x', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
    "many files": "i = 0\nwhile True: open(f'/tmp/{i}', 'w').close(); i += 1",
    "many large files": (
        "i = 0\nwhile True: open(f'/tmp/{i}', 'wb').write(b'x' * (8 << 20)); i += 1"
    ),
    "memory file": "import os\nos.memfd_create('x'); print('harm')",
    "descriptors": "import os\nx = []\nwhile True: x.append(os.open('/dev/null', os.O_RDONLY))",
    "pipes": "import os\nx = []\nwhile True: x.append(os.pipe())",
    "inotify": (
        "import ctypes\nl = ctypes.CDLL(None)\nprint('harm' if l.inotify_init() >= 0 else 1/0)"
    ),
    "endless loop": "while True: pass",
    "sleep": "import time\ntime.sleep(10**6)",
    "endless output": "while True: print('x' * 4096)",
    "endless errors": "import sys\nwhile True: sys.stderr.write('x' * 4096)",
    "ignores TERM": (
        "import signal, time\nfor s in range(1, 32):\n try: signal.signal(s, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\nwhile True: time.sleep(1)"
    ),
    "environment": "import os\nprint('harm' if 'SECRET' in str(os.environ) else 1/0)",
    "descriptors of others": (
        "import os\nfor i in range(3, 4096):\n try: os.fstat(i); print('harm')\n"
        " except OSError: pass\n1/0"
    ),
    "reads a file": "print('harm', open('FILE').read())",
    "reads passwords": "print('harm', open('/etc/shadow').read())",
    "reads homes": "import os\nprint('harm' if os.listdir(os.path.expanduser('~')) else 1/0)",
    "writes a file": "open('FILE', 'w').write('x')",
    "writes to the library": "import os\nopen(os.__file__, 'a').write('x'); print('harm')",
    "writes to the root": "open('/x', 'w'); print('harm')",
    "removes the library": "import os\nos.unlink(os.__file__); print('harm')",
    "symlink": "import os\nos.symlink('FILE', '/tmp/l'); print('harm', open('/tmp/l').read())",
    "hard link": "import os\nos.link(os.__file__, '/tmp/l'); print('harm')",
    "parent folders": "print('harm', open('../' * 40 + 'FILE').read())",
    "proc": "print('harm', open('/proc/1/environ').read())",
    "proc of itself": "import os\nprint('harm', os.listdir('/proc/self/fd'))",
    "sys": "import os\nprint('harm', os.listdir('/sys'))",
    "connects": "import socket\ns = socket.create_connection(('127.0.0.1', PORT)); print('harm')",
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX); print('harm')",
    "raw socket": "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('harm')",
    "kills the parent": "import os\nos.kill(PID, 9); print('harm')",
    "kills all": "import os, signal\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)\n1/0",
    "kills its group": "import os\nos.killpg(0, 9)",
    "stops its parent": "import os\nfor s in (1, 2, 3, 15, 19): os.kill(os.getppid(), s)\n1/0",
    "ptrace": "import ctypes\nprint('harm' if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 else 1/0)",
    "mount": (
        "import ctypes\nprint('harm' if ctypes.CDLL(None).mount(b'x', b'/tmp', b'tmpfs', 0, 0) == "
        "0 else 1/0)"
    ),
    "namespaces": (
        "import ctypes\nprint('harm' if ctypes.CDLL(None).unshare(0x10000000) == 0 else 1/0)"
    ),
    "becomes root": "import os\nos.setuid(0); print('harm')",
    "chroot": "import os\nos.chroot('/tmp'); print('harm')",
    "device": "import os\nos.mknod('/tmp/d', 0o60600, os.makedev(254, 0)); print('harm')",
    "raises its limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1)); print('harm')"
    ),
    "crash": "import ctypes\nctypes.string_at(0)",
    "hard exit": "import os\nos._exit(7)",
    "syntax": "def",
    "keyring": (
        "import ctypes\nprint('harm' if ctypes.CDLL(None).syscall(248, b'user', b'a', b'', 0, -3) "
        "> 0 else 1/0)"
    ),
    "host name": "import socket\nsocket.sethostname('x'); print('harm')",
    "bpf": "import ctypes\nprint('harm' if ctypes.CDLL(None).syscall(321, 0, 0, 0) >= 0 else 1/0)",
    "io_uring": (
        "import ctypes\nprint('harm' if ctypes.CDLL(None).syscall(425, 1, bytes(120)) >= 0 else "
        "1/0)"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [False, True])
def test_hostile_programs_end_as_failures_and_harm_nothing(tmp_path, monkeypatch, goes_on):
    monkeypatch.setenv("SECRET", SECRET)
    file = tmp_path / "file"
    file.write_text(SECRET)
    victim = subprocess.Popen(["sleep", "600"])
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    limits = Limits(timeout_s=2.0, memory_bytes=256 << 20)
    values = {"PID": victim.pid, "FILE": file, "PORT": listener.getsockname()[1]}

    def run(part: list[str]) -> dict[str, object]:
        sandbox = Sandbox()
        found = {}
        for name in part:
            code = HOSTILE[name]
            for word, value in values.items():
                code = code.replace(word, str(value))
            found[name] = sandbox.run(code, "", limits, goes_on=goes_on)
            if goes_on:  # whatever the first run did, the second one ends as such programs do
                found[f"{name}, again"] = sandbox.run(code, "", limits)
        assert sandbox.run("print(input())", "still here").stdout == "still here\n"
        sandbox.close()
        return found

    names = list(HOSTILE)
    with ThreadPoolExecutor(4) as threads:
        found = {
            name: end
            for part in threads.map(run, [names[i::4] for i in range(4)])
            for name, end in part.items()
        }
    assert len(found) >= 40
    succeeded = [name for name, end in found.items() if not (end.why or end.code)]
    assert succeeded == []
    assert [
        name
        for name, end in found.items()
        if "harm" in end.stdout or SECRET in end.stdout + end.stderr
    ] == []
    assert [name for name, end in found.items() if end.why not in ("", "timeout", "output")] == []
    assert found["endless output"].why == "output" and found["ignores TERM"].why == "timeout"
    assert len(found["endless output"].stdout) <= limits.output_bytes
    assert victim.poll() is None and file.read_text() == SECRET and os.listdir(tmp_path) == ["file"]
    with pytest.raises(BlockingIOError):
        listener.accept()
    victim.kill()
    victim.wait()
    listener.close()


def test_ordinary_programs_find_a_python_with_its_library_and_a_folder():
    sandbox = Sandbox()
    code = """
        import collections, json, math, re, statistics, sys, threading
        def solve():
            open("scratch", "w").write(input())
            print(json.dumps({"read": open("/tmp/scratch").read(), "pi": round(math.pi, 2)}))
        sys.setrecursionlimit(10000)
        thread = threading.Thread(target=solve); thread.start(); thread.join()
    """
    for _ in range(2):  # nothing of one program is left for the next
        result = sandbox.run(textwrap.dedent(code) + "import os; print(os.listdir('/tmp'))", "42\n")
        assert (result.code, result.why) == (0, ""), result
        first, second = result.stdout.splitlines()
        assert json.loads(first) == {"read": "42", "pi": 3.14} and second == "['scratch']"
    assert sandbox.run("raise SystemExit(3)").code == 3
    sandbox.close()


def test_a_program_that_goes_on_finds_nothing_of_its_earlier_runs() -> None:
    sandbox = Sandbox()
    code = """
        import builtins, os, sys
        print(sys.stdin.read(), os.listdir("/tmp"), hasattr(builtins, "left"), os.getpid(), len(os.listdir("/")))
        builtins.left = 1
        open("/tmp/left", "w").write("x")
        for number in range(3, 64):
            try:
                os.fstat(number)
                print("an open descriptor", number)
            except OSError:
                pass
    """
    found = [sandbox.run(textwrap.dedent(code), word, goes_on=word != "c") for word in "abc"]
    assert all((result.code, result.why, result.stderr) == (0, "", "") for result in found), found
    words, folders = zip(
        *((result.stdout.split()[0], result.stdout.split()[1:3]) for result in found), strict=True
    )
    assert words == ("a", "b", "c") and list(folders) == [["[]", "False"]] * 3
    # the same namespace, another process
    assert len({result.stdout.split()[3] for result in found}) == 3
    assert not any("descriptor" in result.stdout for result in found)
    again = sandbox.run(textwrap.dedent(code), "d")
    assert again.stdout.split()[3] == found[0].stdout.split()[3]  # a namespace of its own
    sandbox.close()


@pytest.mark.slow
def test_a_run_that_reaches_a_limit_or_ends_badly_does_not_end_those_that_follow() -> None:
    sandbox = Sandbox()
    code = """
        import os, signal, time
        what = input()
        if what == "sleep": time.sleep(60)
        if what == "write":
            while True: print("x" * 4096)
        if what == "memory": bytearray(4 << 30)
        if what == "end": os._exit(3)
        if what == "kill":
            for victim in (-1, 1, os.getpid()):
                try: os.kill(victim, signal.SIGKILL)
                except OSError: pass
        open("/tmp/full", "wb").write(b"x" * (1 << 20))
        print("well")
    """
    words = ["well", "sleep", "well", "write", "well", "memory", "end", "kill", "well"]
    limits = Limits(timeout_s=2.0, memory_bytes=256 << 20, tmp_bytes=3 << 19)  # the file fits once
    found = [
        sandbox.run(textwrap.dedent(code), f"{word}\n", limits, goes_on=True) for word in words
    ]
    ends = [(result.why, result.code) for result in found]
    well = ("", 0)
    assert ends == [
        well,
        ("timeout", None),
        well,
        ("output", None),
        well,
        ("", 1),
        ("", 3),
        ("", -9),
        well,
    ], found
    assert "MemoryError" in found[5].stderr
    other = sandbox.run(
        "import os; print(os.getpid(), os.listdir('/tmp'))", limits=limits, goes_on=True
    )
    assert other.stdout == "2 []\n"
    sandbox.close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_has_the_sandbox_as_well():
    python = shutil.which("python3", path="/usr/bin")  # one that another user can read
    if python is None:
        pytest.skip("no python3 in /usr/bin")
    source = (
        Path(__file__).parents[3] / "hybridflow" / "rewards" / "sandbox_process.py"
    ).read_text()
    become = (
        "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); exec(sys.argv[1])"
    )
    code = "import os; print(os.getpid(), os.listdir('/tmp')); open('/tmp/x', 'w'); os.kill(1, 9)"
    order = {"code": code, "stdin": "", "goes_on": True, **vars(Limits())}
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(
        [python, "-I", "-S", "-c", become, source], stdin=theirs, env={}, cwd="/"
    )
    theirs.close()
    with ours, ours.makefile("rwb") as lines:
        assert json.loads(lines.readline()) == {"ready": True}
        for number in (2, 3):  # the first process of the namespace has the same user, and lives on
            lines.write(json.dumps(order).encode() + b"\n")
            lines.flush()
            result = json.loads(lines.readline())
            assert (result["code"], result["stdout"]) == (0, f"{number} []\n"), result
    process.wait(60)


def test_where_namespaces_are_forbidden_nothing_runs_and_the_reason_is_said(monkeypatch):
    # a user without a map may make none
    code = "import ctypes, os, sys; ctypes.CDLL(None).unshare(0x10000000)"
    monkeypatch.setattr(
        "hybridflow.rewards.sandbox.COMMAND",
        (
            "-I",
            "-S",
            "-c",
            f"{code}; os.execv(sys.executable, [sys.executable, '-I', '-S', sys.argv[1]])",
        ),
    )
    with pytest.raises(
        ResourceError, match=r"programs cannot be run safely on this machine: .*namespaces"
    ):
        Sandbox()


def test_code_is_scored_by_its_tests():
    manager = RewardManager(RewardConfig(processes=0))
    double = "```python\nprint(2 * int(input()))\n```"
    solution = (
        "Thus:\n```python\nclass Solution:\n    def add(self, a, b):\n        print('x')\n        "
        "return a + b\n```"
    )
    tests = {"inputs": ["1\n", "2\n", "5\n"], "outputs": ["2", "4\n", "11"]}
    calls = json.dumps({"fn_name": "add", "inputs": [[1, 2], "3\n4"], "outputs": [3, [7]]})
    found = manager.score(
        ["apps"] * 4,
        [double, solution, "none", "```\nimport os\nos.fork()\n```"],
        [tests, calls, tests, tests],
    )
    assert [round(result.score, 3) for result in found] == [0.667, 1.0, 0.0, 0.0]
    assert found[0].extra == {"passed": 2, "tests": 3, "failed_with": "wrong output"}
    assert found[2].extra["failed_with"] == "no program"
    assert "PermissionError" in found[3].extra["failed_with"]


@pytest.mark.slow
def test_rows_that_cannot_hang_are_scored_here_and_programs_in_the_pool(tmp_path):
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def started() -> bool:  # what other tests have left may end meanwhile
        return not {child.pid for child in psutil.Process().children(recursive=True)} <= before

    with RewardManager(RewardConfig(processes=1), tmp_path / "rewards.log") as manager:
        manager.check_data_sources(["arithmetic"])
        assert manager.score(["arithmetic"] * 2, ["1", "2"], ["1", "1"])[0].score == 1.0
        assert not started()
        truth = json.dumps({"inputs": ["4\n"], "outputs": ["5\n"]})
        program = "```python\nprint(int(input()) + 1)\n```"
        sources = ["arithmetic", "codecontests", "arithmetic"]
        results = manager.score(sources, ["1", program, "2"], ["1", truth, "1"])
        assert [result.score for result in results] == [1.0, 1.0, 0.0]
        assert started()


@pytest.mark.skipif(os.getuid() != 0, reason="only root has a helper that writes the map of users")
def test_a_sandbox_that_is_killed_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import os, runpy, signal, sys, types\n"
        "start = runpy.run_path(sys.argv[1])['_enter_namespaces']\n"
        "kill = lambda flags: os.kill(os.getpid(), signal.SIGKILL)\n"
        "start.__globals__['_libc'] = types.SimpleNamespace(unshare=kill)\n"
        "start()\n"
    )
    command = [sys.executable, "-c", script, sandbox_process.__file__, str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -9
    deadline = time.monotonic() + 60
    while any(
        str(tmp_path) in one.info["cmdline"]
        for one in psutil.process_iter(["cmdline"])
        if one.info["cmdline"]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def _answering(ordinary_user: bool) -> Iterator[Callable[..., dict[str, Any]]]:
    """A sandbox of this user, or of one whose programs own their /tmp."""
    if not ordinary_user:
        sandbox = Sandbox()
        yield lambda code, **more: vars(sandbox.run(code, **more))
        sandbox.close()
        return
    python = shutil.which("python3", path="/usr/bin")  # one that another user can read
    if os.getuid() != 0 or python is None:
        pytest.skip("only root can become another user, who needs a python3 in /usr/bin")
    become = (
        "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534); exec(sys.argv[1])"
    )
    command = [python, "-I", "-S", "-c", become, Path(sandbox_process.__file__).read_text()]
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(command, stdin=theirs, env={}, cwd="/")
    theirs.close()
    ours.settimeout(60)
    with ours, ours.makefile("rwb") as lines:
        assert json.loads(lines.readline()) == {"ready": True}

        def run(code: str, **more: Any) -> dict[str, Any]:
            lines.write(
                json.dumps({"code": code, "stdin": "", **vars(Limits()), **more}).encode() + b"\n"
            )
            lines.flush()
            result: dict[str, Any] = json.loads(lines.readline())
            return result

        yield run
    process.wait(60)


LEFT = {
    "nothing": "pass",
    "file": "open('/tmp/x', 'w')",
    "hidden file": "open('/tmp/.x', 'w').write('x')",
    "folder": "os.mkdir('/tmp/x')",
    "link": "os.symlink('/', '/tmp/x')",
    "deep": "os.makedirs('/tmp/x/y/z'); open('/tmp/x/y/z/x', 'w')",
    "removed file": "open('/tmp/x', 'w'); os.remove('/tmp/x')",
    "full, removed and open": (
        "left = open('/tmp/x', 'wb')\nos.remove('/tmp/x')\nleft.write(b'x' * (15 << 20))"
    ),
    "all inodes": "for i in range(2000):\n open(f'/tmp/{i}', 'w')",
    "mode": "os.chmod('/tmp', 0o700)",
    "mode and back": "os.chmod('/tmp', 0o700); os.chmod('/tmp', 0o1777)",
    "attribute": "os.setxattr('/tmp', 'user.x', b'x')",
    "time": "os.utime('/tmp', (1, 1))",
    "listing": "os.listdir('/tmp')",
    "ended by a signal": "open('/tmp/x', 'w'); os.kill(os.getpid(), 9)",
}


@pytest.mark.parametrize("ordinary_user", [False, True])
def test_whatever_a_run_leaves_in_its_folder_the_next_one_finds_it_as_new(
    ordinary_user: bool,
) -> None:
    look = (
        "import os\nfolder, system = os.stat('/tmp'), os.statvfs('/tmp')\n"
        "print(folder.st_mode, folder.st_uid, folder.st_size, system.f_bfree, system.f_ffree,\n"
        "      folder.st_atime_ns == folder.st_mtime_ns == folder.st_ctime_ns)\n"
    )
    names = (
        "import os, sys\ntry: names = os.getxattr('/tmp', 'user.x')\nexcept OSError: names = b''\n"
    )
    code = (
        names
        + look
        + "what = sys.stdin.read()\nif what: exec(what)\nprint(names, os.listdir('/tmp'))\n"
    )
    with _answering(ordinary_user) as run:
        new = run(code)["stdout"]
        assert new.endswith(" True\nb'' []\n")
        for name, what in LEFT.items():
            run(code, stdin=what, goes_on=True)
            assert run(code, goes_on=True)["stdout"] == new, name


def test_a_folder_that_no_run_has_used_is_kept_and_another_one_is_not() -> None:
    code = "import os\nprint(os.stat('/tmp').st_ctime_ns)\nif input(): open('/tmp/x', 'w')\n"
    sandbox = Sandbox()
    made = [sandbox.run(code, f"{word}\n", goes_on=True).stdout for word in ("", "", "x", "", "")]
    assert made[0] == made[1] == made[2] != made[3] == made[4]
    sandbox.close()


def test_limits_are_those_of_the_run_though_namespaces_are_made_ahead() -> None:
    code = (
        "import os, resource\nsize = os.statvfs('/tmp')\n"
        "print(resource.getrlimit(resource.RLIMIT_AS)[1], size.f_blocks * size.f_bsize, end='')"
    )
    sandbox = Sandbox()
    for megabytes in (256, 300, 300, 256):  # of the same program, which is expected to go on
        limits = Limits(memory_bytes=megabytes << 20, tmp_bytes=megabytes << 12)
        assert (
            sandbox.run(code, limits=limits, goes_on=True).stdout
            == f"{megabytes << 20} {megabytes << 12}"
        )
    sandbox.close()


def test_a_program_finds_nothing_of_another_in_its_memory() -> None:
    look = """
        import gc, sys
        found, frame = [], sys._getframe()
        while frame:
            found += [name for name, value in frame.f_locals.items() if "margorp-rehtona"[::-1] in repr(value)]
            frame = frame.f_back
        found += [1 for one in gc.get_objects() if type(one) in (dict, list) and "margorp-rehtona"[::-1] in repr(one)]
        print(len(found))
    """
    look = textwrap.dedent(look)
    sandbox = Sandbox()
    assert int(sandbox.run(look + "# another-program").stdout) > 0  # its own text is found
    for _ in range(3):
        assert (
            sandbox.run("print(input())  # another-program", "another-program", goes_on=True).code
            == 0
        )
        result = sandbox.run(look, goes_on=True)
        assert (result.stdout, result.stderr) == ("0\n", "")
    sandbox.close()


def _inits(sandbox: Sandbox) -> tuple[psutil.Process, list[psutil.Process]]:
    """The process that makes namespaces, and the first ones of the namespace in use and of the
    spare one."""
    (nursery,) = psutil.Process(sandbox._process.pid).children()
    deadline = time.monotonic() + 60
    while len(found := nursery.children()) != 2:  # the spare one is made after the answer
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return nursery, sorted(found, key=lambda process: process.pid)


def test_killed_processes_of_a_sandbox_are_replaced() -> None:
    """A namespace that waits for a program, one whose program goes on, and the process that makes
    them."""
    sandbox = Sandbox()

    def kill(process: psutil.Process) -> None:
        process.kill()
        deadline = time.monotonic() + 60
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def says(word: str) -> str:
        return sandbox.run("print(input())", f"{word}\n", goes_on=True).stdout

    assert says("a") == "a\n"
    for _ in range(2):
        nursery, (going_on, _) = _inits(sandbox)
        kill(going_on)
        assert says("b") == "b\n"
        _, (_, spare) = _inits(sandbox)
        kill(spare)
        assert sandbox.run("print('c')", goes_on=True).stdout == "c\n" and says("d") == "d\n"
    kill(nursery)
    assert sandbox.run("print('e')").why == ENDED
    assert says("f") == "f\n"
    sandbox.close()


def test_namespaces_whose_first_processes_are_killed_at_once_are_not_made_for_ever() -> None:
    """The kernel kills each of them when memory is short. The result of the run says so."""
    made: list[object] = []

    def make(*sent: object) -> None:  # nobody keeps the other end of the requests
        made.append(sent)
        assert len(made) < 50

    nursery = SimpleNamespace(
        sendmsg=make, send=lambda _: None, recv=lambda _: sandbox_process._END_AND_REPLY
    )
    order = json.dumps({"code": "print('a')", "stdin": "", **vars(Limits())}).encode() + b"\n"
    answers = io.BytesIO()
    lines = io.BufferedRWPair(io.BytesIO(2 * order), answers)  # type: ignore[arg-type]
    sandbox_process._answer(lines, nursery, False)  # type: ignore[arg-type]
    reasons = [json.loads(line)["why"] for line in answers.getvalue().splitlines()]
    assert reasons == ["the sandbox failed: its first process was killed"] * 2


def test_a_sandbox_that_ends_leaves_no_process() -> None:
    sandbox = Sandbox()
    assert sandbox.run("print('a')", goes_on=True).code == 0
    nursery, inits = _inits(sandbox)
    sandbox.close()
    assert psutil.wait_procs([nursery, *inits], 60)[1] == []


def _verdict(number: int, first: int = 0, second: int = 0, machine: int = 0xC000003E) -> int:
    """What the filter answers to a system call with these arguments."""
    call = struct.pack("IIQQQ", number, machine, 0, first, second)
    value = 0
    at = 0
    while True:
        code, yes, no, operand = FILTER[at]
        at += 1
        if code == 0x06:
            return int(operand)
        if code == 0x20:
            (value,) = struct.unpack_from("I", call, operand)
        else:
            true = {
                0x15: value == operand,
                0x25: value > operand,
                0x35: value >= operand,
                0x45: value & operand,
            }[code]
            at += yes if true else no


@pytest.mark.slow
def test_the_filter_allows_the_listed_system_calls_and_no_other() -> None:
    allow = 0x7FFF0000
    refuse = 0x00050001
    special = {16, 56, 302, 435}
    for number in [*range(600), *(0x40000000 + number for number in range(600)), 2**31, 2**32 - 1]:
        if number not in special:
            assert _verdict(number) == (allow if number in sandbox_process._ALLOWED else refuse), (
                number
            )
    assert special.isdisjoint(sandbox_process._ALLOWED)
    # clone: threads alone
    assert [_verdict(56, flags) for flags in (0, 17, 0x3D0F00)] == [refuse, refuse, allow]
    # limits: its own alone
    assert [_verdict(302, process) for process in (0, 1)] == [allow, refuse]
    commands = {command for command in range(1 << 16) if _verdict(16, 0, command) == allow}
    assert commands == set(sandbox_process._IOCTLS)
    assert _verdict(435) == 0x00050026 and _verdict(0, machine=0x40000003) == 0x80000000
