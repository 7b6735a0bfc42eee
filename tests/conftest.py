"""Settings that every test runs under."""

from __future__ import annotations

import gc
import inspect
import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

# One thread a process: tests run several processes on few cores, where more threads cost a factor
# of ten.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("HYBRIDFLOW_TRACEBACK", None)
# Ray gives its workers a niceness of 15: beside a test that computes in its own process they would
# hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")
# the processes that a test starts are one job
os.environ.setdefault("HYBRIDFLOW_JOB_SECRET", secrets.token_hex(32))

# What a shell starts in the background ignores SIGINT, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What takes a minute or more comes first: a file that a process begins last runs beside nothing.
LONG = (
    *("tests/slurm", "tests/walks/test_cluster_user.py", "tests/dist/test_weight_sync.py"),
    *("tests/dist/test_weight_layouts.py", "tests/e2e/test_resume.py"),
    *("tests/walks/test_login_node.py", "tests/walks/test_readme.py"),
    *("tests/unit/kernels/test_launches.py", "tests/unit/kernels/test_kernels.py"),
    *("tests/unit/trainer/test_killed_anywhere.py", "tests/unit/test_gpu_checks.py"),
)
SHARE_NOTHING = (
    "tests/e2e/test_recipes_learn.py",
    "tests/unit/kernels/test_launches.py",
    "tests/gpu",
)
LOST: list[object] = []  # processes of pytest-xdist that ended by themselves


def file_and_folder(nodeid: str) -> tuple[str, str]:
    file = nodeid.partition("::")[0]
    return file, file.rpartition("/")[0]


class Scheduling(LoadFileScheduling):
    """A file's tests run in one process, which shares its fixtures. The files of tests/slurm share
    one Slurm, those of tests/arch the syntax trees of the project; the recipes that learn, the
    kernels that are compiled and the checks of a GPU share nothing."""

    def _split_scope(self, nodeid: str) -> str:
        file, folder = file_and_folder(nodeid)
        if file in SHARE_NOTHING or folder in SHARE_NOTHING:
            return nodeid
        return folder if folder in ("tests/arch", "tests/slurm") else super()._split_scope(nodeid)


class FailuresAtOnce:
    """Shows a failure when it happens. Pytest itself shows it after the last test, which may be
    hours later."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # a process of pytest-xdist has none
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(
                f"{report.nodeid} failed in its {report.when}:\n{report.longreprtext[-2000:]}"
            )


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in the event loop of this thread."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    from hybridflow.single_controller import block_on

    block_on(
        pyfuncitem.obj(
            **{
                name: pyfuncitem.funcargs[name]
                for name in inspect.signature(pyfuncitem.obj).parameters
            }
        )
    )
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: half as many processes again as cores, because tests of the units wait a third of
    their time."""
    return max(2, len(os.sched_getaffinity(0)) * 3 // 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling:
    return Scheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    if error:
        LOST.append(error)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailuresAtOnce(config))
    # Hypothesis takes as long to import as pytest, which the runs of tests/arch/test_run.py, that
    # load no plugin of the environment, would pay in each of their processes.
    if not config.pluginmanager.hasplugin("hypothesispytest"):
        return
    from hypothesis import settings

    # No deadline: a busy machine is no failure. Derandomized and without a database: the same
    # commit gives the same verdict.
    settings.register_profile("hybridflow", deadline=None, derandomize=True, database=None)
    settings.load_profile("hybridflow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {path: place for place, path in enumerate(LONG)}

    def place(item: pytest.Item) -> int:
        return min(places.get(path, len(LONG)) for path in file_and_folder(item.nodeid))

    items.sort(key=place)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Without this a process of tests that ends while it imports them looks as if there were none
    to run."""
    if LOST and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What the collection imports stays until the end of the process: Python need not look for
    garbage in it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def later_collections_are_short() -> Iterator[None]:
    """What a file of tests leaves behind, such as modules and caches, stays: later collections need
    not scan it. Without this they take seconds at the end of a long run."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def no_task_outlives_its_file() -> Iterator[None]:
    """A call that a test has left waiting would go on in the next test that waits. At its deadline
    it asks its ranks for their stacks, by a signal that ends a process of tests."""
    yield
    if event_loop := sys.modules.get("hybridflow.single_controller.event_loop"):
        event_loop.end_tasks()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's own working folder: relative paths of the recipes must not find what a developer has
    prepared."""
    monkeypatch.chdir(tmp_path)
