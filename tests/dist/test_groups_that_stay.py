"""Groups that outlive something: a rank that died (restart) and the driver (detached, joined by
name); and the debugger."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.schema import ClusterConfig
from hybridflow.errors import ResourceError, WorkerError
from hybridflow.single_controller import Cluster, ResourcePool, WorkerGroup, block_on
from tests.dist.harness import sc_workers as sw

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ClusterConfig(nodes=1, procs_per_node=2, start_timeout_s=90, call_timeout_s=60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster.start(CONFIG, tmp_path_factory.mktemp("run")) as started:
        yield started


def test_a_group_that_lost_its_ranks_starts_again_and_runs_its_hooks(
    cluster: Cluster, tmp_path: Path
) -> None:
    pool = ResourcePool.allocate(cluster, 1, 2)
    group = WorkerGroup(cluster, pool, sw.Counter, role="counter", args=(40,), log_dir=tmp_path)
    seen: list[object] = []

    async def first() -> None:
        seen.append(await group.call(sw.Counter.next))

    async def second() -> None:
        seen.append("second")

    group.on_restart(first)
    group.on_restart(second)
    assert group.run(sw.Counter.next) == [41, 41]
    assert group.run(sw.Counter.next) == [42, 42]
    before = group.pids()
    with pytest.raises(WorkerError, match="died"):
        group.run(sw.Counter.die)
    with pytest.raises(WorkerError, match="died"):
        group.run(sw.Counter.next)
    block_on(group.restart())
    assert seen == [[41, 41], "second"]
    assert group.run(sw.Counter.next) == [42, 42]
    assert not set(before) & set(group.pids())
    group.kill()
    pool.release()


def test_a_call_under_way_when_its_group_starts_again_does_not_break_the_new_ranks(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Its ranks are killed, which the waiter learns while the new ones start."""
    pool = ResourcePool.allocate(cluster, 1, 2)
    group = WorkerGroup(cluster, pool, sw.Worker, role="napping", log_dir=tmp_path)

    async def restarted() -> None:
        async def nap() -> None:
            await group.call(sw.Worker.nap, 1, 300.0)

        under_way = asyncio.ensure_future(nap())
        await asyncio.sleep(0)
        await group.restart()
        with pytest.raises(WorkerError, match="died"):
            await under_way

    block_on(restarted())
    assert group.is_alive() and group.run(sw.Worker.nap, 2, 0.0) == [[2], [2]]
    group.kill()
    pool.release()


def test_another_driver_joins_a_detached_group_by_name(cluster: Cluster, tmp_path: Path) -> None:
    import ray

    pool = ResourcePool.allocate(cluster, 1, 2, detached=True)
    group = WorkerGroup(cluster, pool, sw.Counter, role="stays", log_dir=tmp_path, name="counter")
    assert group.run(sw.Counter.next) == [1, 1]
    with pytest.raises(ResourceError, match="'counter' already exists"):
        WorkerGroup(cluster, pool, sw.Counter, role="twin", log_dir=tmp_path, name="counter")
    command = [
        sys.executable,
        "-m",
        "tests.dist.harness.sc_workers",
        "join",
        ray.get_runtime_context().gcs_address,
        str(tmp_path),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False
    )
    assert "joined stays 2 [2, 2]" in done.stdout, done.stderr[-2000:]
    assert group.run(sw.Counter.next) == [3, 3]
    same = WorkerGroup.join(cluster, sw.Counter, "counter")
    assert (same.pids(), same.log_paths()) == (group.pids(), group.log_paths())
    with pytest.raises(ResourceError, match="only the driver that started it"):
        block_on(same.restart())
    group.kill()
    with pytest.raises(ResourceError, match="detached group 'counter' not found"):
        WorkerGroup.join(cluster, sw.Counter, "counter")
    pool.release()


def test_the_debugger_sees_a_worker_that_stopped_at_a_breakpoint_and_can_attach(
    cluster: Cluster, tmp_path: Path
) -> None:
    pool = ResourcePool.allocate(cluster, 1, 1)
    group = WorkerGroup(
        cluster, pool, sw.Counter, role="paused", env={"RAY_DEBUG": "legacy"}, log_dir=tmp_path
    )
    future = group.call(sw.Counter.stop_here, 41)
    stop = _wait_for_breakpoint()
    assert Path(stop["filename"]).name == "sc_workers.py"
    assert not future.done()
    host, port = stop["pdb_address"].rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=120) as console:
        stream = console.makefile("rw")
        stream.write("p 'seen is', seen\ncontinue\n")
        stream.flush()
        answer = stream.read()
    assert "('seen is', 42)" in answer
    assert future.result(timeout=120) == 42
    # where the guide tells people to look
    assert f"localhost:{port}" in group.log_paths()[0].read_text()
    group.kill()
    pool.release()


def test_ray_debug_lists_the_worker_that_stopped_and_attaches_to_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The fourth step of docs/debugging.md, from a second terminal that knows the token."""
    import ray

    pool = ResourcePool.allocate(cluster, 1, 1)
    group = WorkerGroup(
        cluster, pool, sw.Counter, role="paused", env={"RAY_DEBUG": "legacy"}, log_dir=tmp_path
    )
    future = group.call(sw.Counter.stop_here, 41)
    _wait_for_breakpoint()
    command = [
        Path(sys.executable).with_name("ray"),
        "debug",
        "--address",
        ray.get_runtime_context().gcs_address,
    ]
    env = {**os.environ, "RAY_DEBUG": "legacy", "PYTHONUNBUFFERED": "1"}
    assert env["RAY_AUTH_MODE"] == "token" and env["RAY_AUTH_TOKEN"]
    with subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as terminal:
        try:
            shown = _read_until(terminal, "to refresh: ")
            assert "Host.call" in shown and "sc_workers.py:" in shown
            _type(terminal, "0")
            _read_until(terminal, "(Pdb) ")
            _type(terminal, "p 'seen is', seen")
            assert "('seen is', 42)" in _read_until(terminal, "(Pdb) ")
            _type(terminal, "continue")
            assert future.result(timeout=120) == 42
        finally:
            terminal.kill()
    group.kill()
    pool.release()


def _type(terminal: subprocess.Popen[str], line: str) -> None:
    assert terminal.stdin is not None
    terminal.stdin.write(line + "\n")
    terminal.stdin.flush()


def _read_until(terminal: subprocess.Popen[str], end: str, seconds: float = 60.0) -> str:
    """What it prints until `end`, which need not be a whole line."""
    assert terminal.stdout is not None
    seen = b""
    deadline = time.monotonic() + seconds
    out = terminal.stdout.fileno()
    while end.encode() not in seen:
        ready, _, _ = select.select([out], [], [], max(0.0, deadline - time.monotonic()))
        found = os.read(out, 65536) if ready else b""
        assert found, (
            f"no {end!r} within {seconds:.0f} s, or it ended: "
            f"{seen.decode(errors='replace')[-2000:]}"
        )
        seen += found
    return seen.decode(errors="replace")


def _wait_for_breakpoint() -> dict[str, Any]:
    """What `ray debug` lists: the stopped workers of the cluster."""
    from ray._private.ray_constants import KV_NAMESPACE_PDB
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        keys = [
            key
            for key in _internal_kv_list("RAY_PDB_", namespace=KV_NAMESPACE_PDB)
            if b"CONTINUE" not in key
        ]
        if keys:
            stop: dict[str, Any] = json.loads(_internal_kv_get(keys[0], namespace=KV_NAMESPACE_PDB))
            return stop
        time.sleep(0.1)
    raise AssertionError("no breakpoint became visible")
