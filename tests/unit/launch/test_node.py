"""Ports of a job, the environment that Ray gets, and what happens where Ray cannot start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybridflow.errors import ResourceError
from hybridflow.launch import node, records
from hybridflow.launch.node import (
    PORTS,
    RayOptions,
    choose_ports,
    clean_environment,
    ray_command,
    run,
)


def test_ports_of_two_jobs_and_of_two_nodes_do_not_meet() -> None:
    blocks = [
        choose_ports(job, position, "127.0.0.1").values() for job in (7, 8) for position in range(4)
    ]
    ports = [port for block in blocks for port in block]
    assert len(set(ports)) == len(ports) and min(ports) >= node.FIRST_PORT
    assert max(ports) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_a_taken_port_moves_the_job_to_the_next_block() -> None:
    before = choose_ports(9, 0, "127.0.0.1")
    with socket.create_server(("127.0.0.1", before["metrics-export-port"])):
        after = choose_ports(9, 0, "127.0.0.1")
    assert not set(before.values()) & set(after.values()) and set(after) == set(PORTS)


def test_a_job_without_free_ports_says_so_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "_is_free", lambda address, port: False)
    records.write(tmp_path / records.CHOSEN, {"use": [{"node": "n1", "address": "127.0.0.1"}]})
    assert run("n1", tmp_path, RayOptions(), 9) == 1
    [failed] = records.failures(tmp_path)
    assert failed["node"] == "n1" and "no free ports for Ray on 127.0.0.1" in failed["what"]
    assert "ss -ltnp" in failed["what"]


def test_a_node_that_was_not_chosen_ends_at_once(tmp_path: Path) -> None:
    records.write(tmp_path / records.CHOSEN, {"use": [{"node": "n1", "address": "127.0.0.1"}]})
    assert run("n2", tmp_path, RayOptions(), 9) == 0 and records.failures(tmp_path) == []


def test_a_head_that_never_answers_is_said_within_the_deadline(tmp_path: Path) -> None:
    use = [{"node": name, "address": "127.0.0.1"} for name in ("n1", "n2")]
    records.write(tmp_path / records.CHOSEN, {"use": use})
    assert run("n2", tmp_path, RayOptions(start_timeout_s=0.3), 9) == 1
    assert "the Ray head node did not respond" in records.failures(tmp_path)[0]["what"]


@pytest.mark.parametrize(("joined", "starts"), [(False, 3), (True, 1)])
def test_ray_is_started_again_until_all_nodes_have_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joined: bool, starts: int
) -> None:
    folder = tmp_path / "restart-0"
    records.write(folder / records.CHOSEN, {"use": [{"node": "n1", "address": "127.0.0.1"}]})
    if joined:
        (folder / records.DRIVER_LOG).touch()
    log = folder / records.NODE_LOG.format("n1")
    command = ["bash", "-c", f"echo the agent is late >> '{log}'; exit 3"]
    monkeypatch.setattr(node, "ray_command", lambda *given: command)
    assert run("n1", folder, RayOptions(), 9) == 1
    [failed] = records.failures(folder)
    assert failed["what"] == "Ray exited with status 3"
    assert failed["tail"].splitlines() == ["the agent is late"] * starts


def test_the_end_of_ray_is_told_before_the_rest_of_it_is_cleared_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver on the node of the head is cleared up too: its end would count as the cause of the
    job's."""
    folder = tmp_path / "restart-0"
    told = []
    records.write(folder / records.CHOSEN, {"use": [{"node": "n1", "address": "127.0.0.1"}]})
    (folder / records.DRIVER_LOG).touch()
    clear_up = node.guard.clear_up

    def note(temporary: Path) -> None:
        told.append(bool(records.failures(folder)))
        clear_up(temporary)

    monkeypatch.setattr(node.guard, "clear_up", note)
    monkeypatch.setattr(node, "ray_command", lambda *given: ["false"])
    assert run("n1", folder, RayOptions(), 9) == 1
    assert told and all(told)


LISTENS = (
    "import socket; s = socket.create_server(('127.0.0.1', {})); open({!r}, 'w').close(); input()"
)


def test_the_head_is_told_once_it_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, anybody could take the port, and be sent the job's token by every other node."""
    folder = tmp_path / "restart-0"
    go = tmp_path / "listens"
    records.write(folder / records.CHOSEN, {"use": [{"node": "n1", "address": "127.0.0.1"}]})
    write = records.write
    told = []

    def note(path: Path, value: dict[str, object]) -> None:
        told.append((path.name, go.exists()))
        write(path, value)
        (tmp_path / "restart-1").mkdir(exist_ok=True)  # which ends it

    def command(head: object, address: str, ports: dict[str, int], *rest: object) -> list[str]:
        python = f'{sys.executable} -c "{LISTENS.format(ports["port"], str(go))}" < <(sleep 60)'
        return ["bash", "-c", f"sleep 1; {python}"]

    monkeypatch.setattr(node, "ray_command", command)
    monkeypatch.setattr(records, "write", note)
    assert run("n1", folder, RayOptions(), 9) == 0
    assert told == [(records.HEAD, True)]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can listen as another user")
def test_a_stranger_at_the_port_of_the_head_is_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "restart-0"
    records.write(folder / records.CHOSEN, {"use": [{"node": "n1", "address": "127.0.0.1"}]})
    strangers = []

    def command(head: object, address: str, ports: dict[str, int], *rest: object) -> list[str]:
        code = LISTENS.format(ports["port"], "/dev/null")
        strangers.append(
            subprocess.Popen(
                [sys.executable, "-c", f"import os, socket; os.setuid(65534); {code}"],
                stdin=subprocess.PIPE,
            )
        )
        return ["sleep", "20"]

    (folder / records.DRIVER_LOG).touch()
    monkeypatch.setattr(node, "ray_command", command)
    assert run("n1", folder, RayOptions(), 9) == 1
    strangers[0].communicate()
    assert "taken by user 65534" in records.failures(folder)[0]["what"]
    assert records.read(folder / records.HEAD) is None


def test_no_start_of_ray_opens_the_folder_around_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray opens what it is given to everybody; between two starts nobody can take its place."""
    seen = []

    def command(
        head: object, address: object, ports: object, temporary: Path, options: object
    ) -> list[str]:
        seen.append(temporary.parent)
        modes = f"stat --format=%a '{temporary.parent}' >> '{tmp_path}/modes'"
        return [
            "bash",
            "-c",
            f"mkdir -m 777 '{temporary}'; chmod 777 '{temporary}'; {modes}; exit 3",
        ]

    folder = tmp_path / "restart-0"
    records.write(folder / records.CHOSEN, {"use": [{"node": "n1", "address": "127.0.0.1"}]})
    monkeypatch.setattr(node, "ray_command", command)
    assert run("n1", folder, RayOptions(), 9) == 1
    assert (tmp_path / "modes").read_text().split() == ["700"] * 3
    assert seen[0].name.startswith("hf-job-9-") and not seen[0].exists()


def test_ray_ends_when_the_job_has_a_later_start_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm has lost this node: no signal of the job's script reaches it any more."""
    records.write(
        tmp_path / "restart-0" / records.CHOSEN, {"use": [{"node": "n1", "address": "127.0.0.1"}]}
    )
    (tmp_path / "restart-1").mkdir()
    monkeypatch.setattr(node, "ray_command", lambda *given: ["sleep", "600"])
    assert run("n1", tmp_path / "restart-0", RayOptions(), 9) == 0
    assert records.failures(tmp_path / "restart-0") == []


def test_variables_of_slurm_of_pmi_and_of_a_local_run_do_not_reach_ray() -> None:
    leaking = {
        "SLURM_PROCID": "1",
        "PMI_RANK": "1",
        "PMIX_ID": "x",
        "SLURMD_NODENAME": "n1",
        "RAY_AUTH_TOKEN": "old",
    }
    leaking["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "RAY_AUTH_TOKEN_PATH": "/x/token"}
    assert clean_environment({**leaking, **kept}) == kept


def test_a_worker_node_gets_no_ports_of_the_head() -> None:
    ports = {name: 20000 + number for number, name in enumerate(PORTS)}
    head = ray_command(
        None, "10.0.0.1", ports, Path("/tmp/x"), RayOptions(gpus=8, object_store_gib=1.0)
    )
    other = ray_command("10.0.0.1:20000", "10.0.0.2", ports, Path("/tmp/x"), RayOptions())
    assert "--head" in head and "--port=20000" in head and f"--object-store-memory={2**30}" in head
    assert "--address=10.0.0.1:20000" in other and not [
        word for word in other if word.startswith("--port")
    ]
    with pytest.raises(ResourceError, match="ephemeral ports begin at"):
        _few_ports()


def _few_ports() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "_first_ephemeral_port", lambda: node.FIRST_PORT)
        choose_ports(1, 0, "127.0.0.1")
