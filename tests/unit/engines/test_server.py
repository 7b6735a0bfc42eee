"""What can be said of engines without starting one: arguments, ports, the guard, and that importing
costs nothing."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.config.engine_arguments import refusals
from hybridflow.engines import guard
from hybridflow.engines.server import ServerProcess, command_line, reserve_port
from hybridflow.engines.sglang.engine import SglangEngine
from hybridflow.engines.sglang.server import (
    MODEL_FILES,
    core_binding,
    environment,
    server_arguments,
    unused_model_files,
)
from hybridflow.engines.spec import EngineSpec
from hybridflow.errors import EngineError
from hybridflow.models import family_of
from hybridflow.process.listening import listeners_at
from tests.models import FAMILIES, SYNCED

# SGLang's classes of other names
CLASSES = {
    "Ernie4_5ForCausalLM": "Ernie4_5_ForCausalLM",
    "Olmo3ForCausalLM": "Olmo2ForCausalLM",
    "SeedOssForCausalLM": "TransformersForCausalLM",
}


@pytest.mark.slow
def test_importing_the_room_imports_neither_sglang_nor_torch() -> None:
    code = (
        "import sys, hybridflow.engines, hybridflow.engines.sglang.cpu_plugin, "
        "hybridflow.engines.sglang.cpu_plugin.hooks, hybridflow.engines.sglang.server, "
        "hybridflow.engines.sglang.engine; print(sorted({'torch', 'sglang', 'transformers'} & "
        "set(sys.modules)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_a_folder_without_weights_starts_random(tmp_path: Path) -> None:
    spec = EngineSpec(name="e", model_path=str(tmp_path))
    assert server_arguments(spec, 20000)["load-format"] == "dummy"
    (tmp_path / "model.safetensors").touch()
    assert "load-format" not in server_arguments(spec, 20000)


def test_extra_args_override_ours(tmp_path: Path) -> None:
    extra = {
        "skip_tokenizer_init": False,
        "chunked_prefill_size": 128,
        "cuda-graph-bs": [1, 2],
        "json_model_override_args": {"a": 1},
    }
    words = command_line(
        server_arguments(EngineSpec(name="e", model_path=str(tmp_path), extra_args=extra), 20000)
    )
    assert "--skip-tokenizer-init" not in words and "--skip-server-warmup" in words
    assert words[words.index("--chunked-prefill-size") + 1] == "128"
    assert words[words.index("--cuda-graph-bs") + 1 :][:2] == ["1", "2"]
    assert words[words.index("--json-model-override-args") + 1] == '{"a": 1}'


def test_only_the_model_file_of_the_architecture_is_loaded(tmp_path: Path) -> None:
    package = importlib.util.find_spec("sglang")
    assert package is not None and package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0]) / "srt" / "models"
    files = {path.stem for path in folder.glob("*.py")}
    architectures = {family_of(FAMILIES[name]).architecture for name in SYNCED}
    assert architectures <= set(MODEL_FILES)
    for architecture, file in MODEL_FILES.items():
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        assert set(unused_model_files(str(tmp_path))) == files - {file}
        name = CLASSES.get(architecture, architecture)
        assert f"class {name}(" in (folder / f"{file}.py").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3ForCausalLM", "SomeOtherForCausalLM"]}'
    )
    assert unused_model_files(str(tmp_path)) == []


def test_fields_that_sglang_reads_under_other_names_are_given_to_it(tmp_path: Path) -> None:
    def changes(**config: object) -> object:
        (tmp_path / "config.json").write_text(json.dumps(config))
        spec = EngineSpec(name="e", model_path=str(tmp_path), extra_args=extra)
        return server_arguments(spec, 20000).get("json-model-override-args")

    extra: dict[str, object] = {}
    assert changes(model_type="qwen3") is None
    assert changes(model_type="gpt_oss", swiglu_alpha=1.5) == {"hidden_act_alpha": 1.5}
    assert changes(model_type="glm4_moe_lite") == {"first_k_dense_replace": 1}
    kinds = ["dense", "dense", "sparse"]
    assert changes(model_type="glm4_moe_lite", mlp_layer_types=kinds) == {
        "first_k_dense_replace": 2
    }
    saved = changes(model_type="minimax_m2", head_dim=32, partial_rotary_factor=0.5)
    assert saved == {
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "scoring_func": "sigmoid",
        "rotary_dim": 16,
    }
    published = saved | {"rotary_dim": 8}
    assert changes(model_type="minimax_m2", **published) is None
    for given in ({"a": 1}, '{"a": 1}'):
        extra["json_model_override_args"] = given
        assert changes(model_type="ernie4_5") == {
            "architectures": ["Ernie4_5_ForCausalLM"],
            "a": 1,
        }


def test_the_trainers_rank_and_rays_token_do_not_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alien = {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    for name in alien:
        monkeypatch.setenv(name, "3")
    env = environment(EngineSpec(name="e", model_path=str(tmp_path), tensor=2), "/folder")
    assert not alien & set(env)
    assert env["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1


def test_an_engine_keeps_to_loopback_only_where_its_peers_are_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bond0")  # what its worker was given

    def interfaces(host: str, nodes: int) -> tuple[str | None, str | None]:
        spec = EngineSpec(
            name="e", model_path=str(tmp_path), host=host, nnodes=nodes, dist_init_addr=f"{host}:1"
        )
        env = environment(spec, "/folder")
        return env.get("GLOO_SOCKET_IFNAME"), env.get("NCCL_SOCKET_IFNAME")

    assert interfaces("127.0.0.1", 1) == interfaces("127.0.0.1", 2) == ("lo", "lo")
    assert interfaces("10.0.0.7", 1) == interfaces("10.0.0.7", 2) == ("bond0", None)


def test_settings_that_an_engine_on_a_gpu_cannot_take_do_not_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    env = environment(
        EngineSpec(name="e", model_path=str(tmp_path), device="cuda", memory_saver=True), "/folder"
    )
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(env)
    assert env["SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"] == "0"
    assert env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == "4,5"  # the worker's list is the engine's
    # kept when the engine's folder goes, and no name in /tmp: what is there is loaded as code
    assert env["TORCHINDUCTOR_CACHE_DIR"].startswith(str(Path.home()))


def test_an_engine_that_gives_its_memory_back_has_no_graphs_that_would_keep_it() -> None:
    """The default backend for prefills refuses such an engine at its start, on a GPU alone."""
    spec = EngineSpec(name="e", model_path="none", device="cuda", memory_saver=True)
    assert server_arguments(spec, 1)["cuda-graph-backend-prefill"] == "disabled"
    own = replace(spec, extra_args={"cuda_graph_backend_prefill": "full"})
    assert server_arguments(own, 1)["cuda-graph-backend-prefill"] == "full"
    for other in (replace(spec, memory_saver=False), replace(spec, device="cpu")):
        assert "cuda-graph-backend-prefill" not in server_arguments(other, 1)


def test_an_engine_takes_a_port_of_its_own_range() -> None:
    port, lock = reserve_port(range(21000, 21040))
    assert 21000 <= port < 21040
    lock.close()
    with pytest.raises(EngineError, match="no free port between 21000 and 21000"):
        reserve_port(range(21000, 21000))


@pytest.mark.parametrize(
    ("ranks", "cores", "binding"),
    [(1, [0, 1], "0,1"), (2, [0, 1], "0|1"), (2, [4, 5, 6, 7], "4,5|6,7"), (3, [0, 1], "0|1|0")],
)
def test_cores_of_ranks(ranks: int, cores: list[int], binding: str) -> None:
    assert core_binding(ranks, cores) == binding


def test_a_reserved_port_is_not_given_twice() -> None:
    held = [reserve_port(range(20000, 32500)) for _ in range(50)]
    assert len({port for port, _ in held}) == 50
    assert all(20000 <= port < 32768 - 240 for port, _ in held)
    for _, lock in held:
        lock.close()


def test_names_of_ports_that_a_stranger_has_taken_are_done_without() -> None:
    ports = range(20000, 21000)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    with ExitStack() as taken:
        for port in ports:
            name = taken.enter_context(socket.socket(socket.AF_UNIX))
            with suppress(OSError):  # an engine of another test has it, so it is taken as well
                name.bind(f"\0hybridflow-engine-port-{port}")
        held = [reserve_port(ports) for _ in range(8)]
        assert len({port for port, _ in held}) == 8
    held.append(reserve_port(ports))
    assert len({port for port, _ in held}) == 9  # who knows both names sees those that have one
    for _, lock in held:
        lock.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


STRANGER = """
import os, socket, sys
os.setuid(65534)
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
    connection, _ = listener.accept()
    os.write(1, connection.recv(1 << 16))
    connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can listen as another user")
def test_no_key_is_sent_to_another_user_who_listens_where_the_engine_will(tmp_path: Path) -> None:
    server = SglangEngine(EngineSpec(name="e", model_path=str(tmp_path)), tmp_path / "log")
    read, heard = os.pipe()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server.port = free.getsockname()[1]
    stranger = subprocess.Popen([sys.executable, "-c", STRANGER, str(server.port)], stdout=heard)
    deadline = time.monotonic() + 30
    while not listeners_at("127.0.0.1", server.port):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not server._answers("/health", None, 5.0)
    stranger.kill()
    stranger.wait()
    os.close(heard)
    with open(read, "rb") as told:
        assert told.read() == b""


def test_not_started_is_not_alive(tmp_path: Path) -> None:
    server = SglangEngine(EngineSpec(name="e", model_path=str(tmp_path)), tmp_path / "log")
    with pytest.raises(EngineError, match="engine e: not started"):
        server.check_alive()
    server.stop()


FAMILY = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; "
    "time.sleep(600)']); time.sleep(600)"
)


def start_guard(parent: int, folder: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-S",
        guard.__file__,
        str(parent),
        "0",
        str(folder),
        "--",
        sys.executable,
        "-c",
        FAMILY,
    ]
    return subprocess.Popen(command, start_new_session=True)


@pytest.mark.parametrize("is_orphan", [True, False])
def test_a_parent_that_ends_before_its_folder_is_filled_leaves_none(
    tmp_path: Path, is_orphan: bool
) -> None:
    unfinished = tmp_path / f"folder{guard.UNFINISHED}"
    unfinished.mkdir()
    process = start_guard(1 if is_orphan else os.getpid(), tmp_path / "folder")
    if not is_orphan:
        # not a folder of ours: the server does not start from it
        (tmp_path / "folder").symlink_to(unfinished)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        assert guard.session_members(process.pid) == []
        process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not unfinished.exists()


def wait_for_members(session: int, count: int) -> None:
    deadline = time.monotonic() + 60.0
    while len(guard.session_members(session)) != count:
        assert time.monotonic() < deadline, guard.session_members(session)
        time.sleep(0.02)


def test_the_guard_ends_children_and_grandchildren(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    process = start_guard(os.getpid(), tmp_path / "folder")
    wait_for_members(process.pid, 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGKILL
    assert guard.session_members(process.pid) == []


def test_the_guard_ends_without_its_parent(tmp_path: Path) -> None:
    process = start_guard(1, tmp_path / "folder")  # a parent it does not have
    process.wait(60)
    assert guard.session_members(process.pid) == []


@pytest.mark.slow
def test_the_guard_ends_an_engine_of_which_a_process_was_stopped(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    process = start_guard(os.getpid(), tmp_path / "folder")
    wait_for_members(process.pid, 2)
    os.kill(max(guard.session_members(process.pid)), signal.SIGSTOP)
    assert process.wait(120) == 128 + signal.SIGKILL
    assert guard.session_members(process.pid) == []


STUCK = """
import threading, time
threading.Thread(target=time.sleep, args=(300,)).start()
raise RuntimeError("the scheduler died")
"""


def test_a_forked_server_that_fails_ends_though_its_threads_go_on(tmp_path: Path) -> None:
    """Python waits for them at the end; a start would then last until its deadline."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "stuck.py").write_text(STUCK)
    command = [sys.executable, guard.__file__, str(os.getpid()), "0", str(tmp_path / "folder")]
    ended = subprocess.run(
        [*command, "--", "-m", "stuck"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1 and "RuntimeError: the scheduler died" in ended.stderr


def test_full_shared_memory_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ServerProcess(EngineSpec("an engine", str(tmp_path)), tmp_path / "log")
    assert "full" not in str(server._ended("exited with status 1"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2048))
    assert re.search(
        r"exited with status 1: /dev/shm/ is full \(2 KiB free\); remove .* --shm-size",
        str(server._ended("exited with status 1")),
    )


# maps one file of shared memory, and once the guard has noted it another; ends when that is noted
# too
MAPS_TWO = """
import mmap, os, sys, time
deadline = time.monotonic() + 60
for path in sys.argv[2:]:
    with open(path, "wb+") as file:
        file.write(bytes(mmap.PAGESIZE))
        file.flush()
        kept = globals().setdefault("kept", [])
        kept.append(mmap.mmap(file.fileno(), mmap.PAGESIZE))
    while not (os.path.exists(sys.argv[1]) and path in open(sys.argv[1]).read()):
        if time.monotonic() > deadline:
            sys.exit(3)
        time.sleep(0.05)
"""


@pytest.mark.full
def test_the_guard_removes_shared_memory_that_a_server_made_after_its_start(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    paths = [Path(f"/dev/shm/hybridflow-test-{os.getpid()}-{name}") for name in "ab"]
    command = [
        sys.executable,
        "-S",
        guard.__file__,
        str(os.getpid()),
        "0",
        str(folder),
        "--",
        sys.executable,
        "-c",
    ]
    command += [MAPS_TWO, str(folder / guard.NOTE), *map(str, paths)]
    try:
        assert (
            subprocess.run(command, start_new_session=True, timeout=90, check=False).returncode == 0
        )
        assert not any(path.exists() for path in paths)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)


def test_a_named_semaphore_is_shared_memory_of_its_process() -> None:
    """Schedulers of data-parallel attention have some, which stay behind when they are killed."""
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    path = Path(f"/dev/shm/sem.{semaphore._semlock.name.removeprefix('/')}")
    assert path.exists() and str(path) in guard.shared_memory_of([os.getpid()])


def test_what_a_killed_guard_knew_of_shared_memory_is_found(tmp_path: Path) -> None:
    assert guard.noted_shared_memory(str(tmp_path)) == set()
    guard.note_shared_memory(str(tmp_path), {"/dev/shm/b", "/dev/shm/a", "/etc/passwd"})
    assert guard.noted_shared_memory(str(tmp_path)) == {"/dev/shm/a", "/dev/shm/b"}


def test_the_guard_removes_what_its_parent_noted_of_a_server_that_ends_before_the_guard_looks(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "folder"
    path = Path(f"/dev/shm/hybridflow-test-{os.getpid()}-noted")
    folder.mkdir()
    path.write_bytes(b"1")
    guard.note_shared_memory(str(folder), {str(path)})
    command = [
        sys.executable,
        "-S",
        guard.__file__,
        str(os.getpid()),
        "0",
        str(folder),
        "--",
        sys.executable,
        "-S",
    ]
    try:
        ended = subprocess.run(
            [*command, "-c", "raise SystemExit(7)"], start_new_session=True, timeout=90, check=False
        )
        assert ended.returncode == 7
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_every_server_has_our_loader_and_sleeps_when_idle(tmp_path: Path) -> None:
    words = command_line(server_arguments(EngineSpec(name="e", model_path=str(tmp_path)), 20000))
    assert (
        words[words.index("--custom-weight-loader") + 1]
        == "hybridflow.engines.sglang.weight_receiver.load"
    )
    assert "--sleep-on-idle" in words


def test_an_engine_on_cpus_keeps_one_cache_for_all_layers(tmp_path: Path) -> None:
    spec = EngineSpec(name="e", model_path=str(tmp_path))
    for allowed in ({}, {"disable_hybrid_swa_memory": True}):
        arguments = server_arguments(replace(spec, extra_args=allowed), 1)
        assert arguments["disable-hybrid-swa-memory"] is True
    other = replace(spec, extra_args={"disable_hybrid_swa_memory": False})
    with pytest.raises(EngineError, match="disable-hybrid-swa-memory=False: on CPUs"):
        server_arguments(other, 1)
    assert server_arguments(replace(other, device="cuda"), 1)["disable-hybrid-swa-memory"] is False


@pytest.mark.full
def test_every_argument_of_sglang_is_refused_by_its_whole_name_or_let_through() -> None:
    """A release of SGLang with other arguments fails here: each new one is to be judged."""
    code = """
import argparse, json
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(json.dumps([word[2:] for action in parser._actions for word in action.option_strings if word[:2] == "--"]))
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    names = dict.fromkeys(json.loads(said.splitlines()[-1]))
    refused = dict(refusals(names))
    golden = Path(__file__).parents[2] / "golden" / "sglang_arguments.txt"
    assert sorted(names.keys() - refused) == golden.read_text(encoding="utf-8").split()
    ours = server_arguments(
        EngineSpec(name="e", model_path="x", tensor=2, pipeline=2, expert=2), 20000
    )
    free = {
        "skip-server-warmup",
        "grammar-backend",
        "log-level-http",
        "sleep-on-idle",
        "disable-radix-cache",
        "disable-hybrid-swa-memory",  # only on CPUs, see below
    }
    assert set(ours) - refused.keys() <= free  # what the job sets is not to be set otherwise
