"""Noticing that processes or an address are lost, and interrupting the main thread over it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest

from hybridflow.single_controller import watch
from hybridflow.single_controller.cluster import _Local
from hybridflow.single_controller.future import _STOPPED_LOOKS
from tests.unit.single_controller.replies import Reply, call_of


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def test_a_process_that_ended_is_named_at_once(sleeper: subprocess.Popen[bytes]) -> None:
    watched = watch.Processes({"gcs_server": sleeper.pid})
    assert watched.ended() == watched.silent() == ""
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert watched.ended() == f"Ray's gcs_server (process {sleeper.pid}) has ended"


def test_a_stopped_process_is_lost_after_some_looks_and_one_that_goes_on_is_not(
    sleeper: subprocess.Popen[bytes],
) -> None:
    watched = watch.Processes({"raylet": sleeper.pid})
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    assert [watched.silent() for _ in range(watch._STOPPED_LOOKS - 1)] == [""] * (
        watch._STOPPED_LOOKS - 1
    )
    sleeper.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED | os.WNOWAIT)
    assert watched.silent() == "" and watched.ended() == ""
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    assert "is stopped (SIGSTOP)" in [watched.silent() for _ in range(watch._STOPPED_LOOKS)][-1]


def test_a_process_that_ends_while_others_are_started_is_named(
    sleeper: subprocess.Popen[bytes],
) -> None:
    running = dict[str, int]()
    watched = watch.Starting(lambda: dict(running), 60.0)
    assert watched.ended() == watched.silent() == "" and not watched.pids()
    running["gcs_server"] = sleeper.pid
    assert watched.ended() == "" and watched.pids() == [sleeper.pid]
    sleeper.kill()
    sleeper.wait()
    running.clear()  # Ray lists what is alive
    assert watched.ended() == f"Ray's gcs_server (process {sleeper.pid}) has ended"


def test_what_is_left_of_an_earlier_cluster_is_no_loss_of_one_that_starts(
    sleeper: subprocess.Popen[bytes],
) -> None:
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # a zombie, which is a child still
    watched = watch.Starting(lambda: {"gcs_server": sleeper.pid}, 60.0)
    assert watched.ended() == "" and not watched.pids()


def test_a_start_that_takes_too_long_is_over() -> None:
    assert watch.Starting(dict, 60.0).silent() == ""
    assert (
        watch.Starting(dict, 0.0).silent() == "Ray did not respond within cluster.start_timeout_s=0"
    )


def test_an_address_is_lost_after_some_refusals() -> None:
    with socket.socket() as gcs:
        gcs.bind(("127.0.0.1", 0))  # held throughout: nobody else can answer there
        watched = watch.Address(f"127.0.0.1:{gcs.getsockname()[1]}")
        refused = [watched.silent() for _ in range(watch._FAILED_LOOKS)]
        assert (
            refused[:-1] == [""] * (len(refused) - 1)
            and "does not accept connections" in refused[-1]
        )
        again = watch.Address(watched._address)
        assert [again.silent() for _ in refused[1:]] == refused[:-1]
        gcs.listen()
        assert again.silent() == "" and again._failures == 0


def test_the_main_thread_is_interrupted_where_it_waits(sleeper: subprocess.Popen[bytes]) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    watched = watch.Watch(watch.Processes({"gcs_server": sleeper.pid}))
    with pytest.raises(KeyboardInterrupt):  # which may come as soon as the process has ended
        sleeper.kill()
        time.sleep(120)
    assert "has ended" in watched.lost()
    watched.stop()
    assert signal.getsignal(signal.SIGUSR2) == before


def test_a_signal_that_comes_just_before_a_system_call_is_sent_again(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = signal.pthread_kill
    sent = []

    def lose_the_first(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) > 1:
            send(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", lose_the_first)
    watched = watch.Watch(watch.Processes({"gcs_server": sleeper.pid}))
    with pytest.raises(KeyboardInterrupt):
        sleeper.kill()
        time.sleep(120)
    watched.stop()
    assert sent == [signal.SIGUSR2] * 2


def test_a_guard_that_was_killed_is_replaced(sleeper: subprocess.Popen[bytes]) -> None:
    local = _Local.make()
    killed = local.guard.process
    watched = watch.Watch(watch.Processes({"gcs_server": sleeper.pid}), local.guard.keep)
    try:
        killed.kill()
        deadline = time.monotonic() + 60
        while local.guard.process is killed and time.monotonic() < deadline:
            time.sleep(0.05)
        assert local.guard.process is not killed and local.guard.process.poll() is None
    finally:
        watched.stop()
        local.remove()
    assert local.guard.process.poll() is not None
    assert not local.temp_dir.exists()


def test_the_end_of_a_process_is_noticed_without_waiting_for_the_next_look(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a driver that is killed just after its guard has a guard."""
    monkeypatch.setattr(watch, "_POLL_S", 3600.0)
    looks = threading.Semaphore(0)

    def keep() -> list[int]:
        looks.release()
        return [kept.pid]

    with subprocess.Popen(["sleep", "600"]) as kept:
        watched = watch.Watch(watch.Processes({"gcs_server": sleeper.pid}), keep)
        assert looks.acquire(timeout=60)
        kept.kill()
        assert looks.acquire(timeout=60), "the kept process"
        assert not looks.acquire(timeout=0.2), "an ended process is noticed once"
    with pytest.raises(KeyboardInterrupt):
        sleeper.kill()
        time.sleep(120)
    assert "has ended" in watched.lost()
    watched.stop()


@pytest.mark.slow
def test_a_driver_inside_of_a_call_that_hears_no_signal_is_ended_with_a_message() -> None:
    code = """
        import ctypes, subprocess
        from hybridflow.single_controller import watch

        watch._DEAF_S = 0.5
        # it ends when the driver is in the call: Python code before it would hear the signal
        with subprocess.Popen(["sleep", "2"]) as lost:
            watch.Watch(watch.Processes({"gcs_server": lost.pid}))
            mutex = ctypes.create_string_buffer(64)
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
            ctypes.CDLL(None).pthread_mutex_lock(mutex)  # for ever, as a call of Ray's whose gcs was stopped
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.fullmatch(
        r"hybridflow: Ray's gcs_server \(process \d+\) has ended; .* was terminated; the same command "
        r"resumes .*\n",
        done.stderr,
    )


def test_a_rank_that_owes_an_answer_and_is_stopped_is_found(
    sleeper: subprocess.Popen[bytes],
) -> None:
    waiting = call_of({0: Reply(), 1: Reply()}, [os.getpid(), sleeper.pid])
    looks: dict[int, int] = {}
    assert [waiting._stopped(looks) for _ in range(20)] == [None] * 20  # busy, but not stopped
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    found = [waiting._stopped(looks) for _ in range(_STOPPED_LOOKS)]
    assert found == [None] * (_STOPPED_LOOKS - 1) + [1]
