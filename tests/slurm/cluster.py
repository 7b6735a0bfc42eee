"""A real Slurm of our own on this machine: munged, slurmctld and a slurmd for each node, as the
present user.

Each node has an address of its own in 127.0.0.0/8, so that Ray sees as many machines. Partitions
`low` and `abrupt` are preempted by `high`: jobs there are requeued, those of `low` after a time of
grace. Slurm's own time-outs are long, since a busy machine may keep a daemon waiting.
"""

from __future__ import annotations

import getpass
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
# cred_expire is also how long a requeued job waits (two minutes unless it is set).
CONFIGURATION = """\
ClusterName=tests
FirstJobId={port}
SlurmctldHost=localhost
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={state}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={port}
StateSaveLocation={state}/state
SlurmdSpoolDir={state}/spool-%n
SlurmctldPidFile={state}/ctld.pid
SlurmdPidFile={state}/d-%n.pid
SlurmctldLogFile={state}/ctld.log
SlurmdLogFile={state}/d-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=300
MessageTimeout=60
TCPTimeout=20
KillWait=10
MinJobAge=600
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=240
PartitionName=abrupt Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """Programs of Slurm that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


_TRIES = 5  # to start the daemons with other ports
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class SlurmCluster:
    """The daemons, from `with SlurmCluster(["n1", "n2"])` to its end. `environment` makes Slurm's
    commands use it."""

    def __init__(self, names: Sequence[str], cpus: int = 8) -> None:
        self.names = list(names)
        self.cpus = cpus
        # short: sockets lie in it
        self.state = Path(tempfile.mkdtemp(prefix="hft-slurm-", dir="/tmp"))
        self.environment = {
            **os.environ,
            "PATH": _PATH,
            "SLURM_CONF": str(self.state / "slurm.conf"),
        }
        kept = ("SLURM_CONF", "RAY_worker_niceness")
        for name in [
            name
            for name in self.environment
            if name.startswith(("SLURM_", "RAY_")) and name not in kept
        ]:
            del self.environment[name]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        try:
            self._munge()
            if not any(self._came_up() for _ in range(_TRIES)):
                raise AssertionError(
                    f"Slurm's daemons ended as soon as they started, {_TRIES} times\n{self._logs()}"
                )
        except BaseException:
            self.__exit__()
            raise
        return self

    def _came_up(self) -> bool:
        """Whether slurmctld and the nodes run. A daemon whose port another program has taken
        meanwhile ends."""
        self._configure()
        self.start("slurmctld", ["slurmctld", "-D", "-f", str(self.state / "slurm.conf")])
        for name in self.names:
            self.start_node(name)
        own = ["slurmctld", *self.names]
        self.wait_for(
            lambda: (
                any(self.daemons[name].poll() is not None for name in own)
                or self.idle() == len(self.names)
            ),
            240,
            "all nodes are idle",
        )
        if all(self.daemons[name].poll() is None for name in own):
            return True
        for name in own:
            _end(self.daemons.pop(name))
        return False

    def __exit__(self, *details: object) -> None:
        if set(self.names) <= set(self.daemons):  # else it has not come up
            for name in self.names:  # a node that a test has stopped would keep its job for ever
                if self.daemons[name].poll() is not None:
                    self.start_node(name)
            try:
                self.cancel_all()
            except (AssertionError, subprocess.SubprocessError) as error:
                print(error)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            _end(daemon)
        shutil.rmtree(self.state, ignore_errors=True)

    def start(self, name: str, command: list[str]) -> None:
        """Start a daemon in the foreground; what it prints goes to a file."""
        with (self.state / f"{name}.print").open("ab") as printed:
            self.daemons[name] = subprocess.Popen(
                command,
                env=self.environment,
                stdout=printed,
                stderr=printed,
                start_new_session=True,
            )

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self.start(name, ["slurmd", "-D", "-f", str(self.state / "slurm.conf"), "-N", name])

    def kill_node(self, name: str) -> None:
        """End the slurmd of a node, as when the machine has lost its network: its processes run
        on."""
        self.daemons[name].send_signal(signal.SIGKILL)
        self.daemons[name].wait()

    def lose_node(self, name: str) -> None:
        """End the slurmd of a node, and tell slurmctld what it would find out after
        SlurmdTimeout."""
        self.kill_node(name)
        self.ask(
            "scontrol",
            "update",
            f"NodeName={name}",
            "State=DOWN",
            "Reason=its slurmd does not answer",
        )

    def ask(self, *words: str) -> str:
        """What a command of Slurm's prints."""
        return subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=True, timeout=180
        ).stdout.strip()

    def look(self, *words: str) -> str:
        """What a command prints that changes nothing. It is asked again when a busy slurmctld has
        dropped it."""
        for _ in range(9):
            try:
                return self.ask(*words)
            except subprocess.CalledProcessError:
                time.sleep(1.0)
        return self.ask(*words)

    def idle(self) -> int:
        """How many nodes are idle."""
        try:
            return (
                self.ask("sinfo", "--noheader", "--Node", "--partition=debug", "--format=%T")
                .split()
                .count("idle")
            )
        except subprocess.CalledProcessError:
            return 0  # slurmctld is starting

    def cancel_all(self) -> None:
        """Cancel every job, and wait until none is left."""
        self.ask("scancel", "--user", getpass.getuser())
        self.wait_for(lambda: not self.look("squeue", "--noheader"), 180, "no job is left")

    def wait_until_idle(self) -> None:
        """Until no node has a job, and every one takes jobs."""
        self.wait_for(lambda: self.idle() == len(self.names), 240, "all nodes are idle")

    def wait_until_up(self, name: str) -> None:
        """Until a node takes jobs, after its slurmd was started again."""
        words = ("sinfo", "--noheader", "--partition=debug", f"--nodes={name}", "--format=%T")
        self.wait_for(lambda: self.look(*words) == "idle", 240, f"{name} is idle")

    def field(self, job: str, name: str) -> str:
        """A field of `scontrol show job`."""
        words = self.look("scontrol", "show", "job", job, "--oneliner").split()
        return next(word.removeprefix(f"{name}=") for word in words if word.startswith(f"{name}="))

    def wait_for(self, what: Callable[[], object], timeout_s: float, text: str) -> None:
        """Until `what()` holds; fails with the daemons' last words after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not what():
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {timeout_s:g} s: {text}\n{self._logs()}")
            time.sleep(0.2)

    def _logs(self) -> str:
        """The daemons' last words."""
        paths = sorted([*self.state.glob("*.log"), *self.state.glob("*.print")])
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in paths
        )

    def _configure(self) -> None:
        port = _free_ports(1 + len(self.names))
        nodes = "\n".join(
            (
                f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.{11 + number} "
                f"Port={port + 1 + number} CPUs={self.cpus} RealMemory=4000 State=UNKNOWN"
            )
            for number, name in enumerate(self.names)
        )
        text = CONFIGURATION.format(
            state=self.state, user=getpass.getuser(), port=port, nodes=nodes
        )
        (self.state / "slurm.conf").write_text(text)
        shutil.rmtree(self.state / "state", ignore_errors=True)
        (self.state / "state").mkdir()

    def _munge(self) -> None:
        key = self.state / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = [
            f"--{what}-file={self.state}/munge.{what}" for what in ("key", "pid", "log", "seed")
        ]
        self.start(
            "munged",
            ["munged", "--foreground", "--force", f"--socket={self.state}/munge.socket", *files],
        )
        self.wait_for((self.state / "munge.socket").exists, 120, "munged is up")


def _end(daemon: subprocess.Popen[bytes]) -> None:
    """End a daemon, with SIGKILL after a minute."""
    daemon.terminate()
    try:
        daemon.wait(60)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free now, above those of outgoing connections
    where these end at 60999 as they do by default, so that only another Slurm of ours may take them
    before the daemons do."""
    while True:
        first = random.SystemRandom().randrange(61000, 65000)
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
