"""Starting, joining and stopping a Ray cluster.

A local cluster listens on loopback only, asks every client for a random token, has a temporary
folder of its own, and ends with the driver, even when the driver was killed with SIGKILL.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hybridflow.config.schema import ClusterConfig
from hybridflow.device.platform import Kind, Platform
from hybridflow.errors import ClusterLostError, HybridFlowError, ResourceError
from hybridflow.process.private_folder import RAY, ROOM_FOR_RAY, make_private_folder
from hybridflow.single_controller import guard, watch
from hybridflow.single_controller.joining import (
    ASK_S,
    TOKEN_OF_SCRIPT,
    answers_strangers,
    find_address,
    find_token,
    plain_job_config,
    require_listener,
    within,
)
from hybridflow.single_controller.remote_node import RemoteNode

LOOPBACK = "127.0.0.1"
SYSTEM_CONFIG = {  # of every cluster that this project starts
    # Otherwise Ray starts a process for every logical CPU in advance.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    # Children of a killed worker (the engines' guards) clear up and end. Killed by Ray they could
    # not.
    "kill_child_processes_on_worker_exit": False,
}
# Without 0 here Ray replaces 127.0.0.1 by the machine's external address and listens on all
# interfaces: get_node_ip_address (ray/_private/services.py:811) returns loopback only when clusters
# over several machines are disabled.
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_PREFIX = "hf-ray-"
_LOCK = "owner.lock"
_MIN_AGE_TO_SWEEP_S = 60.0
_POLL_S = 0.3


@dataclass(frozen=True)
class NodeState:
    """One live node: its address, and its total and free resources (Ray resource name → amount)."""

    node_id: str
    address: str
    total: dict[str, float]
    free: dict[str, float]


@dataclass
class _Local:
    """The private folder (mode 0700) of a local cluster, the lock that its owner holds, and the
    guard process that clears up after a SIGKILL."""

    temp_dir: Path
    lock: int
    guard: subprocess.Popen[bytes]

    @classmethod
    def make(cls) -> _Local:
        """A fresh folder."""
        temp_dir = make_private_folder(_PREFIX, ROOM_FOR_RAY)
        lock = os.open(temp_dir / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(temp_dir, lock, _start_guard(temp_dir))

    def keep_guarded(self) -> list[int]:
        """Replace the guard when it has ended: somebody killed it, or the kernel for its memory.
        Returns its pid."""
        if self.guard.poll() is not None:
            assert self.guard.stdin is not None
            self.guard.stdin.close()
            self.guard = _start_guard(self.temp_dir)
        return [self.guard.pid]

    def remove(self) -> None:
        """Dismiss the guard and delete the folder, once Ray is down."""
        assert self.guard.stdin is not None
        os.close(self.lock)
        try:
            self.guard.stdin.write(b"x")
            self.guard.stdin.close()
            self.guard.wait(timeout=5)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.guard.kill()
            self.guard.wait()
        shutil.rmtree(self.temp_dir, ignore_errors=True)


class Cluster:
    """A started or joined Ray cluster: `with Cluster.start(...) as cluster`. A process has one at a
    time."""

    def __init__(self, config: ClusterConfig, run_dir: Path, local: _Local | None) -> None:
        self.config = config
        self.run_dir = run_dir
        self.temp_dir = local.temp_dir if local else None
        self._local = local
        self._open = True
        self._remote: dict[str, RemoteNode] = {}
        if local:
            self._watch = watch.Watch(watch.Processes(_ray_processes()), local.keep_guarded)
        else:
            self._watch = watch.Watch(watch.Address(_gcs_address()))

    @classmethod
    def start(
        cls,
        config: ClusterConfig,
        run_dir: str | Path,
        *,
        num_cpus: int | None = None,
    ) -> Cluster:
        """Start a local cluster (`config.address` None) or join the one at `config.address`.

        Args:
            config: address, sizes and deadlines.
            run_dir: Ray's own logs are copied to `run_dir/logs/ray` when it fails to start.
            num_cpus: logical CPUs of a local cluster. They only count slots and may exceed the
                number of cores.

        Raises:
            ResourceError: Ray cannot be started or reached, or is already running in this process.
        """
        run_dir = Path(run_dir)
        return (
            cls._join(config, run_dir)
            if config.address
            else cls._start_local(config, run_dir, num_cpus)
        )

    @classmethod
    def _start_local(cls, config: ClusterConfig, run_dir: Path, num_cpus: int | None) -> Cluster:
        _set_environment()
        import ray

        _prepare_client(ray)
        _sweep_stale_dirs()
        local = _Local.make()
        slots = config.nodes * config.procs_per_node
        before = signal.getsignal(signal.SIGTERM)
        starting = watch.Watch(
            watch.Starting(_starting_processes, config.start_timeout_s), local.keep_guarded
        )
        try:
            ray.init(
                address="local",  # whatever RAY_ADDRESS says
                job_config=plain_job_config(),
                num_cpus=num_cpus or max(os.cpu_count() or 1, 4 * slots, 16),
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                object_store_memory=config.object_store_bytes,
                _temp_dir=str(local.temp_dir / RAY),
                _node_ip_address=LOOPBACK,
                _system_config=dict(SYSTEM_CONFIG),
            )
        except BaseException as error:
            starting.stop()  # first: what follows ends Ray's processes
            lost = starting.interrupted_over()
            _copy_ray_logs(local.temp_dir, run_dir)
            ray.shutdown()
            # an interrupted start leaves processes that Ray does not know of yet
            guard.clear_up(local.temp_dir)
            local.remove()
            if isinstance(error, SystemExit):  # how Ray answers SIGTERM while it starts
                raise KeyboardInterrupt from error
            if not isinstance(error, Exception) and not lost:
                raise
            raise ResourceError(
                f"a local Ray cluster could not be started: {lost or error}; its logs are in "
                f"{run_dir / 'logs' / 'ray'}; on a busy machine the same command may succeed later"
            ) from error
        finally:
            _restore_sigterm(before)
        starting.stop()
        return cls(config, run_dir, local)

    @classmethod
    def _join(cls, config: ClusterConfig, run_dir: Path) -> Cluster:
        find_token()
        address = find_address(str(config.address))
        require_listener(address, config.start_timeout_s)
        if address.startswith(f"{LOOPBACK}:"):
            os.environ[_ONE_MACHINE] = "0"
        import ray

        _prepare_client(ray)
        before = signal.getsignal(signal.SIGTERM)
        starting = watch.Watch(watch.Starting(dict, config.start_timeout_s))
        try:
            ray.init(
                address=address,
                job_config=plain_job_config(),
                log_to_driver=False,
                configure_logging=False,
            )
        except BaseException as error:
            starting.stop()
            lost = starting.interrupted_over()
            if not isinstance(error, Exception) and not lost:
                raise
            hint = (
                "check the address (cluster.address), and that RAY_AUTH_TOKEN, the file of "
                f"RAY_AUTH_TOKEN_PATH or {TOKEN_OF_SCRIPT} holds the cluster's token"
            )
            raise ResourceError(
                f"cannot join the Ray cluster at {address}: {lost or error}; {hint}"
            ) from error
        finally:
            _restore_sigterm(before)
        starting.stop()
        cluster = cls(config, run_dir, None)
        if not config.trusted_network and answers_strangers(cluster.address):
            cluster.shutdown()
            raise ResourceError(
                f"the Ray cluster at {address} asks nobody for a token: whoever reaches it runs "
                "code as you; start it with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or set "
                "cluster.trusted_network=true if nobody else can send to its machines"
            )
        return cluster

    @property
    def is_local(self) -> bool:
        """Whether this process started the cluster (one node, on loopback)."""
        return self.temp_dir is not None

    def device_kind(self) -> Kind:
        """The kind of device that the nodes have: in a local cluster this machine's, in a joined
        one cuda where a node has GPUs or `cluster.devices_per_node` says that nodes must.
        `HYBRIDFLOW_PLATFORM` overrides it."""
        if self.is_local and self.config.devices_per_node is None:
            return Platform.detect().kind
        wish = os.environ.get("HYBRIDFLOW_PLATFORM")
        if wish in ("cpu", "cuda"):
            return "cpu" if wish == "cpu" else "cuda"
        has_gpus = any(node.total.get("GPU") for node in self.nodes())
        return "cuda" if has_gpus or self.config.devices_per_node is not None else "cpu"

    @property
    def address(self) -> str:
        """HOST:PORT at which another program joins this cluster, with the same Ray token in its
        environment."""
        self.require_open()
        return _gcs_address()

    def nodes(self) -> list[NodeState]:
        """Live nodes, ordered by IP address."""
        import ray

        # the public call sums over nodes
        from ray._private.state import available_resources_per_node

        self.require_open()
        free = available_resources_per_node()
        states = [
            NodeState(
                node["NodeID"],
                node["NodeManagerAddress"],
                dict(node["Resources"]),
                dict(free.get(node["NodeID"], {})),
            )
            for node in ray.nodes()
            if node["Alive"]
        ]
        return sorted(states, key=lambda state: (_ip_key(state.address), state.node_id))

    def processes_of(self, address: str) -> RemoteNode | None:
        """Where the processes of the node at this address are looked at; None for those of this
        machine.

        Raises:
            ResourceError: the node has left the cluster.
        """
        import ray

        if self.is_local or address == ray.util.get_node_ip_address():
            return None
        alive = {state.address: state.node_id for state in self.nodes()}
        if address not in alive:
            raise ResourceError(
                f"the node {address} has left the Ray cluster; nodes that are left: "
                f"{', '.join(alive)}"
            )
        known = self._remote.get(address)
        # another Ray node may come back at its address
        if known is None or known.node_id != alive[address]:
            known = self._remote[address] = RemoteNode(alive[address])
        return known

    def lost(self) -> str:
        """What of Ray itself is lost, in words; empty when all is well."""
        return self._watch.lost()

    def require_open(self) -> None:
        """ResourceError once the cluster is shut down, ClusterLostError when Ray is lost."""
        if not self._open:
            raise ResourceError("the cluster is shut down")
        if self.lost():
            raise ClusterLostError(self.lost())

    def shutdown(self) -> None:
        """Stop a local cluster, or leave a joined one. A second call does nothing."""
        if not self._open:
            return
        self._open = False
        self._watch.stop()
        import ray

        if self._local is not None and self.lost():
            guard.clear_up(self._local.temp_dir)  # first: Ray would wait for what is lost
        ray.shutdown()
        if self._local is not None:
            self._local.remove()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        lost = self.lost() if error is not None else ""
        if (
            error is not None
            and self.temp_dir is not None
            and (lost or not isinstance(error, HybridFlowError))
        ):
            _copy_ray_logs(self.temp_dir, self.run_dir)
        self.shutdown()
        if lost:  # whatever was raised where the main thread happened to be
            logs = f" (its logs are in {self.run_dir / 'logs' / 'ray'})" if self.is_local else ""
            raise ClusterLostError(f"{lost}{logs}") from error


def wait_for_nodes(
    address: str, nodes: int, timeout_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """Wait until the cluster at HOST:PORT is healthy and `nodes` nodes have joined it; no driver is
    connected.

    Args:
        address: of the cluster's head; the Ray token is taken from the environment.
        nodes: how many must be alive.
        timeout_s: for all of it.
        check: called between questions; raises to give up early.

    Raises:
        ResourceError: the head does not answer, or nodes are missing, by the deadline. Names those
            that joined.
    """
    from ray._private.services import GcsClient  # what `ray health-check` asks with

    deadline = time.monotonic() + timeout_s
    joined: list[str] = []
    why = "it does not answer"
    while True:
        check()
        try:
            found = within(
                min(ASK_S, timeout_s),
                lambda: GcsClient(address=address).get_all_node_info(timeout=ASK_S).values(),
            )
            # GcsNodeInfo.ALIVE
            joined = sorted(info.node_manager_address for info in found if info.state == 0)
            if len(joined) >= nodes:
                return
            why = f"joined: {', '.join(joined) or 'none'}"
        except TimeoutError:
            why = "it does not answer"
        except Exception as error:  # Ray raises RpcError, RaySystemError and others
            why = f"{type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            raise ResourceError(
                f"{len(joined)} of {nodes} nodes have joined Ray at {address} after "
                f"{timeout_s:.0f} s ({why}); look at the logs of the missing nodes, and whether "
                "all have the same token"
            )
        time.sleep(_POLL_S)


def _start_guard(temp_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", guard.__file__, str(temp_dir), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def _set_environment() -> None:
    """Set the variables that Ray reads when it is imported and passes on to every process of the
    cluster."""
    if "ray" in sys.modules and "RAY_AUTH_TOKEN" not in os.environ:
        raise ResourceError(
            "ray was imported before Cluster.start: its token would not be used; import ray only "
            "in single_controller"
        )
    # When they are set after the import, the client ignores them and retries for 20 s
    # (ray/_private/authentication).
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # of another cluster, which Ray's own calls in this process would ask
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Without it a thread that calls Ray after its shutdown would start another cluster, of which
    # nobody knows.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    os.environ[_ONE_MACHINE] = "0"


def _gcs_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _ray_processes() -> dict[str, int]:
    """The processes of a local cluster whose end is the end of the cluster. The agents' ends the
    raylet's."""
    import ray

    running = ray._private.worker._global_node.live_processes()
    return {name: process.pid for name, process in running if name in ("gcs_server", "raylet")}


def _starting_processes() -> dict[str, int]:
    """The same processes while `ray.init` starts them: children of this process by their names,
    also such as ended."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            for pid in (task / "children").read_text().split():
                with suppress(OSError):  # the process has ended
                    found[Path(f"/proc/{pid}/comm").read_text().strip()] = int(pid)
    return {name: pid for name, pid in found.items() if name in ("gcs_server", "raylet")}


def _prepare_client(ray: Any) -> None:
    if ray.is_initialized():
        raise ResourceError(
            "Ray is already running in this process; shut the other Cluster down first"
        )
    # A thread of Ray prints what its processes have to say, when one is killed the end of its log.
    # What is wrong is said once, by our errors, and Ray's logs are kept.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None


def _restore_sigterm(handler: Any) -> None:
    """Put the trainer's SIGTERM handler back, which `ray.init` replaces (ray/_private/worker.py,
    `sigterm_handler`)."""
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def _sweep_stale_dirs() -> None:
    """Remove folders of killed drivers: this user's, older than a minute, and with a lock that
    nobody holds."""
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for path in parent.glob(_PREFIX + "*"):
            try:
                # a link may lead to a folder that somebody else wants removed
                status = path.lstat()
                if (
                    status.st_uid != os.getuid()
                    or time.time() - status.st_mtime < _MIN_AGE_TO_SWEEP_S
                ):
                    continue
                lock = os.open(path / _LOCK, os.O_RDWR)
            except OSError:
                continue  # removed meanwhile, or another user's
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            except BlockingIOError:
                continue  # its driver is alive
            finally:
                os.close(lock)


def _copy_ray_logs(temp_dir: Path, run_dir: Path) -> None:
    """Keep Ray's own logs of a failed cluster, as far as there are any and the disk takes them."""
    target = run_dir / "logs" / "ray"
    for name in ("gcs_server.out", "gcs_server.err", "raylet.out", "raylet.err", "monitor.log"):
        for source in temp_dir.glob(f"{RAY}/session_2*/logs/{name}"):
            with suppress(OSError):
                target.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target / name)


def _ip_key(address: str) -> tuple[int, int | str]:
    try:
        return 0, int(ipaddress.ip_address(address))
    except ValueError:
        return 1, address
