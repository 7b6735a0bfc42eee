"""Preflight: nodes that check each other over real sockets, and the choice of the good ones."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hybridflow.errors import ResourceError
from hybridflow.launch import preflight
from hybridflow.launch.preflight import (
    Record,
    Wanted,
    check_node,
    choose,
    node_address,
    parse,
    usable,
)

LITTLE = Wanted(min_free_gib=0.0, min_shm_gib=0.0, min_open_files=1)


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Node nK has the address 127.0.0.K."""
    monkeypatch.setattr(preflight, "node_address", lambda node, interface: f"127.0.0.{node[1:]}")


def check_all(
    folders: dict[str, Path],
    hosts: list[str],
    clocks: dict[str, Callable[[], float]] | None = None,
    wait_s: float = 60.0,
) -> dict[str, Record]:
    """What each node with a folder says, all checking at the same time."""
    found: dict[str, Record] = {}

    def one(node: str) -> None:
        clock = (clocks or {}).get(node, time.time)
        found[node] = check_node(node, hosts, folders[node], LITTLE, wait_s, clock)

    threads = [threading.Thread(target=one, args=(node,)) for node in folders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_good_nodes_reach_each_other_and_are_chosen_in_order(tmp_path: Path) -> None:
    hosts = ["n1", "n2", "n3"]
    found = check_all(dict.fromkeys(hosts, tmp_path), hosts)
    assert all(record.problems == [] and record.complaints == {} for record in found.values())
    assert all(abs(offset) < 1 for record in found.values() for offset in record.clocks.values())
    chosen = choose(hosts, found, 2, 2.0)
    _, bad = usable(hosts, found, 2.0)
    assert [record.node for record in chosen] == ["n1", "n2"] and bad == {}


def test_a_folder_that_is_not_shared_names_the_node(tmp_path: Path) -> None:
    hosts = ["n1", "n2"]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    found = check_all({"n1": tmp_path / "a", "n2": tmp_path / "b"}, hosts, wait_s=0.5)
    with pytest.raises(
        ResourceError, match=r"n2: problem with n1: .*choose an output_dir that all nodes mount"
    ):
        choose(hosts, found, 2, 2.0)
    found = check_all({"n1": tmp_path / "a", "n2": tmp_path / "absent"}, hosts, wait_s=0.5)
    with pytest.raises(
        ResourceError,
        match=r"n2: \S+absent does not exist on that node; choose an output_dir that all nodes mount",
    ):
        choose(hosts, found, 2, 2.0)


def test_a_clock_that_is_off_and_a_node_that_never_came_up_are_replaced_by_spares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ["n1", "n2", "n3", "n4"]
    present = dict.fromkeys(["n1", "n2", "n4"], tmp_path)
    awaited = preflight._await

    def without_n3(paths: Iterable[Path], deadline: float) -> Iterator[tuple[str, Any]]:
        wanted = list(paths)
        yield from awaited([path for path in wanted if path.stem != "n3"], deadline)
        # its deadline has passed
        yield from ((path.stem, None) for path in wanted if path.stem == "n3")

    monkeypatch.setattr(preflight, "_await", without_n3)
    found = check_all(present, hosts, {"n1": lambda: time.time() - 60.0})
    errors = (
        "srun: error: Task launch for StepId=7.0 failed on node n3: Communication connection "
        "failure"
    )
    for record in found.values():
        record.complaints.pop("n3")
    chosen = choose(hosts, found, 2, 2.0, errors)
    _, bad = usable(hosts, found, 2.0, errors)
    assert [record.node for record in chosen] == ["n2", "n4"]
    assert (
        "Communication connection failure" in bad["n3"]
        and "s off" in bad["n1"]
        and "chrony" in bad["n1"]
    )
    with pytest.raises(ResourceError, match="2 of 4 nodes are usable, but the job requires 3"):
        choose(hosts, found, 3, 2.0, errors)


def test_a_thousand_strangers_do_not_make_a_node_unreachable() -> None:
    """They connect and reset at once, or say nothing and stay, as another user of a node may do
    while a job starts."""
    record = Record("n1", nonce="n")
    other = Record("n2")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server, ExitStack() as silent:
        address = server.getsockname()
        strangers = [
            silent.enter_context(socket.create_connection(address, 60)) for _ in range(200)
        ]
        for _ in range(800):
            with socket.create_connection(address, 60) as link:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        threading.Thread(
            target=preflight._answer, args=(server, record, lambda: 100.0), daemon=True
        ).start()
        found = {"address": address[0], "port": address[1], "nonce": "n"}
        preflight._visit(other, "n1", found, lambda: 100.0)
        assert not other.complaints and other.clocks == {"n1": 0.0}
        assert len(strangers) == 200


def test_something_else_at_the_port_of_a_node_is_said() -> None:
    record = Record("n2")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"[1]")

        threading.Thread(target=answer, daemon=True).start()
        found = {"address": "127.0.0.1", "port": server.getsockname()[1], "nonce": "n"}
        preflight._visit(record, "n1", found, lambda: 0.0)
    assert "unexpected answer [1]" in record.complaints["n1"]


@pytest.mark.parametrize(
    ("begun", "ended", "off"), [(97.0, 101.0, 0.0), (37.0, 41.0, 59.0), (161.0, 165.0, -61.0)]
)
def test_a_clock_is_off_by_what_no_slow_answer_explains(
    begun: float, ended: float, off: float
) -> None:
    record = Record("n2", nonce="n")
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(
        target=preflight._answer, args=(server, record, lambda: 100.0), daemon=True
    ).start()
    mine = Record("n1")
    looks = iter([begun, ended])
    found = {"address": "127.0.0.1", "port": server.getsockname()[1], "nonce": "n"}
    preflight._visit(mine, "n2", found, lambda: next(looks))
    assert (mine.clocks, mine.complaints) == ({"n2": off}, {})


def test_what_a_node_lacks_is_said_with_its_remedy(tmp_path: Path) -> None:
    wanted = Wanted(gpus=99, min_free_gib=1e9, min_shm_gib=1e9, min_open_files=10**9)
    record = check_node("n1", ["n1"], tmp_path, wanted, 5.0)
    text = "; ".join(record.problems)
    assert all(word in text for word in ("GiB free", "/dev/shm", "LimitNOFILE", "of 99 GPUs"))
    with pytest.raises(ResourceError, match="0 of 1 nodes are usable"):
        choose(["n1"], {"n1": record}, 1, 2.0)


def test_an_address_that_leads_to_another_node_is_a_complaint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ["n1", "n2"]
    written = preflight.records.write

    def lie(
        path: Path, value: dict[str, object]
    ) -> None:  # n2's file names n1's server, as two names on one loopback do
        written(path, {**value, "nonce": "of nobody"} if path.name == "n2.json" else value)

    monkeypatch.setattr(preflight.records, "write", lie)
    found = check_all(dict.fromkeys(hosts, tmp_path), hosts)
    assert "choose another `interface`" in found["n1"].complaints["n2"]


def test_records_are_found_among_what_else_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    preflight.print_record(Record("n1", "127.0.0.1"))
    text = f"module loaded\n{capsys.readouterr().out}preflight not json\n"
    assert parse(text) == {"n1": Record("n1", "127.0.0.1")}


def test_an_interface_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_address("n1", "lo") == "127.0.0.1"
    with pytest.raises(
        ResourceError, match=r"interface nothing9 has no IPv4 address; available: .*lo"
    ):
        node_address("n1", "nothing9")


def test_the_health_of_a_node_names_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Wanted(min_free_gib=0.0, min_shm_gib=0.0, min_open_files=1)
    assert preflight.problems_here(tmp_path, wanted) == [] and list(tmp_path.iterdir()) == []
    lacking = preflight.problems_here(
        tmp_path, Wanted(min_free_gib=1e9, min_shm_gib=0.0, min_open_files=1)
    )
    assert lacking and "GiB free" in lacking[0]
    assert "could not write to" in preflight.problems_here(tmp_path / "absent", wanted)[-1]
