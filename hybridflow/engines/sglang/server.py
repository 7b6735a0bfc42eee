"""One SGLang server as a child of this process: its command line and environment, its start, liveness and end."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import requests

from hybridflow.engines.sglang import guard
from hybridflow.engines.sglang.closed_sockets import SCHEME
from hybridflow.engines.sglang.weight_control import LOADER
from hybridflow.engines.spec import EngineSpec
from hybridflow.errors import EngineError
from hybridflow.process.fork_client import ForkedProcess, fork
from hybridflow.process.rendezvous import master_store
from hybridflow.process.secret import VARIABLE, job_secret, without_credentials

HOST = "127.0.0.1"
KEYS = "keys.yaml"
POLL_S = 0.1
LOG_TAIL_LINES = 40
GRACE_S = {"cpu": 0.0, "cuda": 8.0}  # SGLang looks at SIGTERM every 5 s (sglang/srt/managers/tokenizer_manager.py:3510)
# the file of srt/models that has the class of an architecture; of others SGLang looks through all files
MODEL_FILES = {
    "DeepseekV3ForCausalLM": "deepseek_v2",
    "Glm4MoeForCausalLM": "glm4_moe",
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
INHERITED_BY_RANKS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def has_weights(model_path: str) -> bool:
    """True when the folder holds weight files (a name that is no folder is a hub name and has them)."""
    folder = Path(model_path)
    return not folder.is_dir() or any(
        next(folder.glob(pattern), None) for pattern in ("*.safetensors", "*.bin", "*.pt")
    )


def server_arguments(spec: EngineSpec, port: int) -> dict[str, Any]:
    """SGLang's arguments for the spec, by name, before they become a command line."""
    arguments: dict[str, Any] = {
        "model-path": spec.model_path,
        "host": HOST,
        "port": port,
        "tp-size": spec.tensor,
        "dtype": spec.dtype,
        "mem-fraction-static": spec.mem_fraction_static,
        "max-running-requests": spec.max_running_requests,
        "max-total-tokens": spec.max_total_tokens,
        "random-seed": spec.seed,
        "skip-tokenizer-init": True,  # we send and receive token ids; also spares the detokenizer's work per token
        "incremental-streaming-output": True,  # an event holds the tokens since the one before
        "skip-server-warmup": True,  # wait_ready makes its own one-token request
        "grammar-backend": "none",
        "log-level-http": "warning",
        "custom-weight-loader": [LOADER],
        "sleep-on-idle": True,  # an idle scheduler polls in a busy loop otherwise and takes a core from the trainer
    }
    if spec.device == "cpu":
        arguments["device"] = "cpu"
    if not spec.cache_prefixes:
        arguments["disable-radix-cache"] = True
    if spec.return_routed_experts:
        arguments["enable-return-routed-experts"] = True
    if spec.memory_saver and spec.device == "cuda":
        arguments["enable-memory-saver"] = True  # on CPU the server would die at its start
    if not has_weights(spec.model_path):
        arguments["load-format"] = "dummy"
    if spec.pipeline > 1:
        arguments["pp-size"] = spec.pipeline
    if spec.expert > 1:
        arguments["ep-size"] = spec.expert
    if spec.data_attention > 1:
        arguments |= {"dp-size": spec.data_attention, "enable-dp-attention": True}
    if spec.nnodes > 1:
        arguments |= {"nnodes": spec.nnodes, "node-rank": spec.node_rank, "dist-init-addr": spec.dist_init_addr}
    return arguments | {name.replace("_", "-"): value for name, value in spec.extra_args.items()}


def command_line(arguments: dict[str, Any]) -> list[str]:
    """`{"tp-size": 2, "flag": True}` as `--tp-size 2 --flag`; False and None are left out."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append(f"--{name}")
        if value is True:
            continue
        if isinstance(value, (list, tuple)):
            words += [str(item) for item in value]
        else:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def core_binding(ranks: int, cores: list[int]) -> str:
    """SGLANG_CPU_OMP_THREADS_BIND: cores of each rank, `0,1|2,3`. Ranks share cores when there are fewer cores than
    ranks.

    Why: on CPU SGLang gives one NUMA node to each rank and refuses more ranks than nodes unless told the cores.
    """
    share = max(1, len(cores) // ranks)
    parts = [[cores[(rank * share + i) % len(cores)] for i in range(share)] for rank in range(ranks)]
    return "|".join(",".join(str(core) for core in part) for part in parts)


def unused_model_files(model_path: str) -> list[str]:
    """Names of SGLang's model files but that of this model's architecture; empty when that is not in `MODEL_FILES`.

    SGLang imports every one of its model files to find one class (sglang/srt/models/registry.py:118), about a second of
    processor time a start. It skips those that SGLANG_DISABLED_MODEL_ARCHS names.
    """
    config = Path(model_path) / "config.json"
    package = importlib.util.find_spec("sglang")
    if not config.is_file() or package is None or not package.submodule_search_locations:
        return []
    try:
        architectures = json.loads(config.read_text(encoding="utf-8")).get("architectures") or []
    except (ValueError, AttributeError):
        return []  # SGLang says what is wrong with it
    used = {MODEL_FILES.get(name) for name in architectures}
    files = {path.stem for path in (Path(package.submodule_search_locations[0]) / "srt" / "models").glob("*.py")}
    return sorted(files - used) if used and used <= files else []


def common_environment(device: str) -> dict[str, str]:
    """What is the same for all servers. SGLang and its libraries read some of it when they are imported."""
    env = {
        "TOKENIZERS_PARALLELISM": "false",
        # /health would sleep a second and generate a token each time (sglang/srt/entrypoints/http_server.py:721).
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
    }
    if device == "cpu":
        # Ranks compare free memory before they load (sglang/srt/distributed/bootstrap.py:441); a host's moves with
        # whatever starts on it.
        env |= {"CUDA_VISIBLE_DEVICES": "", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "false"}
        # torch.compile on a CPU needs a C++ tool chain and minutes of warm-up
        env["TORCH_COMPILE_DISABLE"] = os.environ.get("TORCH_COMPILE_DISABLE", "1")
    return env


def environment(spec: EngineSpec, folder: str) -> dict[str, str]:
    """Environment of the server: the caller's, without its own distributed rank, kept on loopback."""
    env = {
        k: v
        for k, v in without_credentials().items()
        if k not in INHERITED_BY_RANKS and not k.startswith("TORCHELASTIC_")
    }
    env |= {
        VARIABLE: job_secret(),  # the ranks meet the trainer's in its store
        "TMPDIR": folder,  # SGLang's zmq sockets: removed with the folder
        # torch's TCPStore listens on every interface whatever its host name says; a file needs no listener
        # (sglang/srt/distributed/bootstrap.py:238).
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{folder}/rendezvous",
        **common_environment(spec.device),
    }
    for name in ALLOCATOR_SETTINGS:  # torch_memory_saver refuses expandable segments, which trainers want
        env.pop(name, None)
    # it permutes expert weights after each load without undoing it first: orders that describe or fail permute twice
    # (sglang/srt/layers/quantization/unquant.py:936)
    env["SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED"] = "0"
    # torch's default lies in TMPDIR, which ends with the engine, and what is compiled would be compiled anew
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    if spec.memory_saver and spec.device == "cuda":
        env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"  # graphs hold gigabytes, and go with `Engine.sleep`
    if spec.host.startswith("127."):
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if Path(spec.model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    if unused := unused_model_files(spec.model_path):
        env.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(unused))
    if spec.device == "cpu":
        env["OMP_NUM_THREADS"] = str(spec.threads)
        if spec.ranks > 1:
            ranks_here = spec.ranks // spec.nnodes
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", core_binding(ranks_here, sorted(os.sched_getaffinity(0))))
    if spec.nnodes > 1:
        env |= _rendezvous_of_nodes(spec)
    return env


def _rendezvous_of_nodes(spec: EngineSpec) -> dict[str, str]:
    """The ranks of all nodes meet in the job's store that the first node's `EngineServer` serves (see
    `EngineServer.start`).

    Left to SGLang, rank 0 would serve torch's store, which listens on every interface and answers anybody.
    """
    host, port = _address(spec)
    return {"SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"{SCHEME}://{host}:{port}"}


def _address(spec: EngineSpec) -> tuple[str, int]:
    host, _, port = spec.dist_init_addr.rpartition(":")
    if not host or not port.isdigit():
        raise EngineError(
            f"nnodes={spec.nnodes} needs dist_init_addr=HOST:PORT, not {spec.dist_init_addr!r}", engine=spec.name
        )
    return host, int(port)


def reserve_port(ports: range) -> tuple[int, socket.socket]:
    """One of `ports` that nobody listens on, and a lock on it that lasts as long as the returned socket.

    The lock is an abstract unix socket: it keeps two engines of this machine from choosing the same port before either
    listens.

    Raises:
        EngineError: none found.
    """
    for port in random.SystemRandom().sample(ports, min(len(ports), 200)):
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lock.bind(f"\0hybridflow-engine-port-{port}")
            with socket.socket() as probe:
                probe.bind((HOST, port))
        except OSError:
            lock.close()
            continue
        return port, lock
    raise EngineError(f"no free port between {ports.start} and {ports.stop}; end what listens there")


class EngineServer:
    """One server. `start` returns at once: call it for all engines, then `wait_ready` for each.

    Args:
        spec: what to serve.
        log_path: receives the output of all its processes; its folder is created.
        check: called by `check_alive` as well; raises EngineError when something that the engine needs elsewhere is
            lost.
    """

    def __init__(self, spec: EngineSpec, log_path: str | Path, check: Callable[[], None] = lambda: None) -> None:
        self.spec, self.log_path, self._check = spec, Path(log_path), check
        self.admin_key = secrets.token_hex(16)
        self.port = 0
        self._lock: socket.socket | None = None
        self._folder = ""
        self._guard: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._store: Any = None

    @property
    def url(self) -> str:
        """Base address of the HTTP interface, on loopback."""
        return f"http://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Pid of the guard, which is also the session id of all processes of the engine; 0 before the start."""
        return self._guard.pid if self._guard else 0

    def start(self) -> None:
        """Start the processes; does not wait for them. The engine ends with this process, however that one ends."""
        if self._guard is not None:
            raise EngineError("already started", engine=self.spec.name)
        if self.spec.nnodes > 1 and self.spec.node_rank == 0:
            host, port = _address(self.spec)
            self._store = master_store(host, port, self.spec.start_timeout_s)
            self.spec = replace(self.spec, dist_init_addr=f"{host}:{self._store.port}")
        self.port, self._lock = reserve_port(self.spec.ports)
        self._folder = os.path.join(tempfile.gettempdir(), f"hf-engine-{secrets.token_hex(4)}")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        command = ["-m", "sglang.launch_server", "--config", os.path.join(self._folder, KEYS)]
        command += command_line(server_arguments(self.spec, self.port))
        watch = [guard.__file__, str(os.getpid()), str(GRACE_S[self.spec.device]), self._folder, "--"]
        env = environment(self.spec, self._folder)
        # SGLang prints its arguments, keys included, to its log: readable by this user only.
        with (
            open(self.log_path, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as log,
            open(os.devnull, "rb") as nothing,
        ):
            files = (nothing.fileno(), log.fileno(), log.fileno())
            if self.spec.fork_server:
                with suppress(OSError):  # it has ended: what it would have spared takes its time
                    self._guard = fork(self.spec.fork_server, [*watch, *command], env, files, leader=True)
            if self._guard is None:
                guarded = [sys.executable, "-S", *watch, sys.executable, *command]
                self._guard = subprocess.Popen(
                    guarded, stdin=files[0], stdout=files[1], stderr=files[2], env=env, start_new_session=True
                )
        try:
            self._make_folder()
        except OSError:
            self.stop()
            raise

    def _make_folder(self) -> None:
        """Make the engine's folder, which its guard waits for. The keys travel in a private file in it: a command line
        is readable by every user of the machine.

        `admin-api-key` protects weights and control, `api-key` generation (sglang/srt/utils/auth.py:74): one key for
        both.
        """
        unfinished = Path(self._folder + guard.UNFINISHED)
        unfinished.mkdir(mode=0o700)
        path = unfinished / KEYS
        path.touch(mode=0o600)
        path.write_text(f"api-key: {self.admin_key}\nadmin-api-key: {self.admin_key}\n", encoding="utf-8")
        unfinished.rename(self._folder)

    def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until the engine has answered a one-token request (of several nodes the first; the others until theirs
        have loaded).

        Args:
            timeout_s: seconds from now; None: the spec's `start_timeout_s`.

        Raises:
            EngineError: it ended or was not ready in time. Carries the log's tail; nothing is left running.
        """
        limit = self.spec.start_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit
        try:
            while not self._answers("/health", None, 5.0):
                self.check_alive()
                self._check_deadline(deadline, limit)
                time.sleep(POLL_S)
            if self.spec.node_rank > 0:
                return
            body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
            while not self._answers("/generate", body, max(0.1, deadline - time.monotonic())):
                self.check_alive()
                self._check_deadline(deadline, limit)
                time.sleep(POLL_S)
        except BaseException:
            self.stop()
            raise

    def _check_deadline(self, deadline: float, limit: float) -> None:
        if time.monotonic() > deadline:
            raise EngineError(f"not ready after {limit:.0f} s", engine=self.spec.name, log_tail=self.log_tail())

    def _answers(self, path: str, body: dict[str, Any] | None, timeout_s: float) -> bool:
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        try:
            answer = requests.request(
                "POST" if body else "GET", self.url + path, json=body, timeout=timeout_s, headers=headers
            )
        except requests.RequestException:
            return False  # not listening yet: the caller looks at liveness and deadline
        return answer.status_code == 200

    def check_alive(self) -> None:
        """Raise when the engine is not running. Costs a system call.

        SGLang ends its main process when one of its children dies, so the main process stands for all.

        Raises:
            EngineError: it was never started or has ended. Carries the log's tail.
        """
        if self._guard is None:
            raise EngineError("not started", engine=self.spec.name)
        status = self._guard.poll()
        if status is not None:
            raise EngineError(f"ended with status {status}", engine=self.spec.name, log_tail=self.log_tail())
        self._check()

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the log without the key, empty when there is none."""
        if not self.log_path.exists():
            return ""
        with open(self.log_path, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 200 * lines))
            text = log.read().decode("utf-8", errors="replace").replace(self.admin_key, "***")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """End all processes of the engine, within about 10 s, and remove its temporary files. Safe to call again.

        On CPU they are killed at once: an engine holds nothing that is not sent to it again. On CUDA they get a few
        seconds to release the device memory themselves.

        Raises:
            EngineError: a process could not be ended.
        """
        process = self._guard
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(GRACE_S[self.spec.device] + 6.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        # only if the guard itself was killed
        leftovers = guard.shared_memory_of(guard.session_members(process.pid))
        leftovers |= guard.noted_shared_memory(self._folder)
        still_there = guard.kill_session(process.pid)
        guard.remove_shared_memory(leftovers)
        guard.remove(self._folder)
        if self._lock is not None:
            self._lock.close()
        self._store = None
        if still_there:
            raise EngineError(
                f"processes {still_there} cannot be ended", engine=self.spec.name, log_tail=self.log_tail()
            )

    def __enter__(self) -> EngineServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
