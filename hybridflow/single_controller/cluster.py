"""Starting, joining and stopping a Ray cluster.

A local cluster listens only on loopback, requires a random token from every client, uses a private
temporary folder, and ends together with the driver, even if the driver is killed with SIGKILL.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import secrets
import shutil
import signal
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
SYSTEM_CONFIG = {  # for every cluster that this project starts
    # Otherwise Ray prestarts a process for every logical CPU.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    # Children of a killed worker (the engines' guards) clean up and exit. Ray must not kill them
    # first.
    "kill_child_processes_on_worker_exit": False,
}
# Unless this is 0, Ray replaces 127.0.0.1 with the machine's external address and listens on all
# interfaces: get_node_ip_address (ray/_private/services.py:811) returns loopback only if multi-node
# clusters are disabled.
_ONE_MACHINE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_PREFIX = "hf-ray-"
_LOCK = "owner.lock"
_MIN_AGE_TO_SWEEP_S = 60.0
_POLL_S = 0.3


@dataclass(frozen=True)
class NodeState:
    """A live node's address, and its total and free resources (Ray resource name → amount)."""

    node_id: str
    address: str
    total: dict[str, float]
    free: dict[str, float]


@dataclass
class _Local:
    """A local cluster's private folder (mode 0700), the lock held by its owner, and the guard
    process that cleans up after a SIGKILL."""

    temp_dir: Path
    lock: int
    guard: watch.Guard

    @classmethod
    def make(cls) -> _Local:
        """Create a new folder and start its guard."""
        temp_dir = make_private_folder(_PREFIX, ROOM_FOR_RAY)
        lock = os.open(temp_dir / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return cls(temp_dir, lock, watch.Guard(temp_dir))

    def remove(self) -> None:
        """Stop the guard and delete the folder. Call after Ray has shut down."""
        os.close(self.lock)
        self.guard.stop()
        shutil.rmtree(self.temp_dir, ignore_errors=True)


class Cluster:
    """A started or joined Ray cluster: `with Cluster.start(...) as cluster`. A process can have
    only one at a time."""

    def __init__(self, config: ClusterConfig, run_dir: Path, local: _Local | None) -> None:
        self.config = config
        self.run_dir = run_dir
        self.temp_dir = local.temp_dir if local else None
        # this process started the cluster: one node, on loopback
        self.is_local = local is not None
        self._local = local
        self._open = True
        self._remote: dict[str, RemoteNode] = {}
        if local:
            self._watch = watch.Watch(watch.Processes(_ray_processes()), local.guard.keep)
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
            run_dir: Ray's own logs are copied to `run_dir/logs/ray` if it fails to start.
            num_cpus: number of logical CPUs of a local cluster. It only limits the number of slots,
                and may exceed the number of cores.

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
            watch.Starting(_starting_processes, config.start_timeout_s), local.guard.keep
        )
        try:
            ray.init(
                address="local",  # ignore RAY_ADDRESS
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
            starting.stop()  # before Ray's processes are ended below
            lost = starting.interrupted_over()
            _copy_ray_logs(local.temp_dir, run_dir)
            ray.shutdown()
            # an interrupted start leaves processes that Ray does not track yet
            guard.clear_up(local.temp_dir)
            local.remove()
            if isinstance(error, SystemExit):  # Ray's reaction to SIGTERM during its start
                raise KeyboardInterrupt from error
            if not isinstance(error, Exception) and not lost:
                raise
            raise ResourceError(
                f"could not start a local Ray cluster: {lost or error}; its logs are in "
                f"{run_dir / 'logs' / 'ray'}; on a busy machine, retry the same command later"
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
                "check the address (cluster.address), and that RAY_AUTH_TOKEN, the file at "
                f"RAY_AUTH_TOKEN_PATH or {TOKEN_OF_SCRIPT} contains the cluster's token"
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
                f"the Ray cluster at {address} does not require a token, so anyone who reaches it "
                "can run code as you; start it with RAY_AUTH_MODE=token and RAY_AUTH_TOKEN, or "
                "set cluster.trusted_network=true if no one else can reach its machines"
            )
        return cluster

    def device_kind(self) -> Kind:
        """Return the nodes' device type. For a local cluster, this is the machine's device type.
        For a joined cluster, it is cuda if a node has GPUs or `cluster.devices_per_node` is set.
        `HYBRIDFLOW_PLATFORM` overrides both.
        """
        if self.is_local and self.config.devices_per_node is None:
            return Platform.detect().kind
        wish = os.environ.get("HYBRIDFLOW_PLATFORM")
        if wish in ("cpu", "cuda"):
            return "cpu" if wish == "cpu" else "cuda"
        has_gpus = any(node.total.get("GPU") for node in self.nodes())
        return "cuda" if has_gpus or self.config.devices_per_node is not None else "cpu"

    @property
    def address(self) -> str:
        """Address (HOST:PORT) at which other programs can join this cluster, given the same Ray
        token in their environment.
        """
        self.require_open()
        return _gcs_address()

    def nodes(self) -> list[NodeState]:
        """Return the live nodes, ordered by IP address."""
        import ray

        # the public function only returns the sum over all nodes
        from ray._private.state import available_resources_per_node

        self.require_open()
        free = available_resources_per_node()
        states = []
        for node in ray.nodes():
            if node["Alive"]:
                name = node["NodeID"]
                total = dict(node["Resources"])
                free_here = dict(free.get(name, {}))
                states.append(NodeState(name, node["NodeManagerAddress"], total, free_here))
        return sorted(states, key=lambda state: (_ip_key(state.address), state.node_id))

    def processes_of(self, address: str) -> RemoteNode | None:
        """Return an observer of the processes on the node at this address, or None for this
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
                f"node {address} has left the Ray cluster; remaining nodes: {', '.join(alive)}"
            )
        known = self._remote.get(address)
        # a new Ray node may have joined at the same address
        if known is None or known.node_id != alive[address]:
            known = self._remote[address] = RemoteNode(alive[address])
        return known

    def lost(self) -> str:
        """Return a description of the part of Ray that was lost, or an empty string if Ray is
        intact.
        """
        return self._watch.lost()

    def require_open(self) -> None:
        """Raise ResourceError if the cluster has been shut down, or ClusterLostError if Ray is
        lost."""
        if not self._open:
            raise ResourceError("the cluster is shut down")
        if self.lost():
            raise ClusterLostError(self.lost())

    def shutdown(self) -> None:
        """Stop a local cluster, or leave a joined one. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._watch.stop()
        import ray

        if self._local is not None and self.lost():
            guard.clear_up(self._local.temp_dir)  # first, because Ray would wait for lost processes
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
        if lost:  # takes precedence over the exception raised in the main thread
            logs = f" (its logs are in {self.run_dir / 'logs' / 'ray'})" if self.is_local else ""
            raise ClusterLostError(f"{lost}{logs}") from error


def wait_for_nodes(
    address: str, nodes: int, timeout_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """Wait until the cluster at HOST:PORT is healthy and `nodes` nodes have joined it. Does not
    connect a driver.

    Args:
        address: address of the cluster's head. The Ray token is read from the environment.
        nodes: number of nodes that must be alive.
        timeout_s: total timeout in seconds.
        check: called between polls; may raise an error to abort early.

    Raises:
        ResourceError: at the deadline, the head does not respond or nodes are missing. The message
            lists the nodes that have joined.
    """
    from ray._private.services import GcsClient  # the client that `ray health-check` uses

    deadline = time.monotonic() + timeout_s
    joined: list[str] = []
    why = "it did not answer"
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
            why = "it did not answer"
        except Exception as error:  # Ray raises RpcError, RaySystemError and others
            why = f"{type(error).__name__}: {error}"
        if time.monotonic() >= deadline:
            raise ResourceError(
                f"{len(joined)} of {nodes} nodes have joined Ray at {address} after "
                f"{timeout_s:.0f} s ({why}); check the logs of the missing nodes, and that all "
                "nodes have the same token"
            )
        time.sleep(_POLL_S)


def _set_environment() -> None:
    """Set the variables that Ray reads on import and passes on to every process of the cluster."""
    if "ray" in sys.modules and "RAY_AUTH_TOKEN" not in os.environ:
        raise ResourceError(
            "ray was imported before Cluster.start, so the token would not be used; import ray "
            "only in single_controller"
        )
    # If they were set after the import, the client would ignore them and retry for 20 s
    # (ray/_private/authentication).
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # may refer to another cluster, to which Ray's own calls in this process would connect
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Otherwise a thread that calls Ray after its shutdown would start another cluster unnoticed.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    os.environ[_ONE_MACHINE] = "0"


def _gcs_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


def _ray_processes() -> dict[str, int]:
    """Return the processes {name: pid} whose exit ends a local cluster. The agents need no check,
    because the raylet exits with them."""
    import ray

    running = ray._private.worker._global_node.live_processes()
    return {name: process.pid for name, process in running if name in ("gcs_server", "raylet")}


def _starting_processes() -> dict[str, int]:
    """Return the processes that `ray.init` is starting: children of this process, keyed by name,
    including those that have exited.
    """
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has ended
            for pid in (task / "children").read_text().split():
                with suppress(OSError):  # the process has ended
                    name = Path(f"/proc/{pid}/comm").read_text().strip()
                    if name in ("gcs_server", "raylet"):
                        found[name] = int(pid)
    return found


def _prepare_client(ray: Any) -> None:
    if ray.is_initialized():
        raise ResourceError(
            "Ray is already running in this process; shut down the other Cluster first"
        )
    # One of Ray's threads prints output of its processes, and the end of a killed process's log.
    # Our errors report the problem once, and Ray's logs are kept.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None


def _restore_sigterm(handler: Any) -> None:
    """Restore the trainer's SIGTERM handler, which `ray.init` replaces (ray/_private/worker.py,
    `sigterm_handler`)."""
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)


def _sweep_stale_dirs() -> None:
    """Remove the folders of killed drivers, i.e. folders of this user that are older than a minute
    and not locked.
    """
    for parent in {Path(tempfile.gettempdir()), Path("/tmp")}:
        for path in parent.glob(_PREFIX + "*"):
            try:
                # another user's link may point to a folder that must not be removed
                status = path.lstat()
                if (
                    status.st_uid != os.getuid()
                    or time.time() - status.st_mtime < _MIN_AGE_TO_SWEEP_S
                ):
                    continue
                lock = os.open(path / _LOCK, os.O_RDWR)
            except OSError:
                continue  # removed meanwhile, or owned by another user
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            except BlockingIOError:
                continue  # its driver is alive
            finally:
                os.close(lock)


def _copy_ray_logs(temp_dir: Path, run_dir: Path) -> None:
    """Copy the existing Ray logs of a failed cluster to the run folder. Disk errors are ignored."""
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
