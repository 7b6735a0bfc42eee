"""Engines on this machine that load a model's weights from its folder. They run without Ray."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hybridflow.config import check_sampling, derived
from hybridflow.config.schema import RunConfig
from hybridflow.device.platform import Platform
from hybridflow.engines.supervisor import FAILED
from hybridflow.errors import EnginesLostError, HybridFlowError
from hybridflow.inference.model import Model
from hybridflow.observe.progress import Progress
from hybridflow.placement.threads import threads_by_role, user_limit
from hybridflow.rollout.in_process import InProcessRollouts
from hybridflow.rollout.requests import Requests
from hybridflow.rollout.service import EngineGroup
from hybridflow.single_controller import ThreadGroup, block_on
from hybridflow.trainer.generation import EngineHere
from hybridflow.trainer.preload import Preload
from hybridflow.workers.rollout import RolloutWorker

_RESTART_POLL_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Started:
    """Engines that have been started.

    Attributes:
        requests: interface for sending requests; usable after `wait`.
        wait: waits until the engines accept requests.
    """

    requests: Requests
    wait: Callable[[], None]


@contextmanager
def started(
    model: Model, version: int, logs: Path, preload: Preload, progress: Progress
) -> Iterator[Started]:
    """Context manager that starts engines with the model's weights, and stops them at the end of
    the block.

    Args:
        version: version number of the weights; an engine in this process derives its seeds from it.
        logs: folder for the engines' logs.

    Raises:
        EngineError: an engine did not start; also raised by `wait`.
        ConfigError: this machine has too few devices for an engine.
    """
    with ExitStack() as stack:
        if model.config.cluster.in_process:
            yield _here(model, version, logs, stack)
        else:
            yield _served(model, logs, preload, progress, stack)


def _here(model: Model, version: int, logs: Path, stack: ExitStack) -> Started:
    here = EngineHere(model.config, model.engine_folder, logs, model.tokenizer.stop_ids)
    stack.callback(here.engine.stop)
    engines = here.filled_by(model.fill)
    return Started(engines, partial(_fill, engines, version))


def _fill(engines: InProcessRollouts, version: int) -> None:
    block_on(engines.sync(version))


def _served(
    model: Model, logs: Path, preload: Preload, progress: Progress, stack: ExitStack
) -> Started:
    config = _fitting(model.config, progress)
    rollout = config.rollout
    platform = Platform.detect()
    has_stop_texts = any(one.stop for one in check_sampling.sampled(config).values())
    args = (
        rollout,
        model.engine_folder,
        config.model.dtype,
        config.seed,
        False,  # no routes: nothing is trained
        threads_by_role(config, platform.cores, user_limit())["rollout"],
        preload.name("engines"),
        has_stop_texts,
        _visible(platform) if platform.kind == "cuda" else (),
    )
    group = ThreadGroup(RolloutWorker, role="rollout", args=args, log_dir=logs)
    stack.callback(group.close)
    stack.callback(_stop, group)
    group.add(rollout.num_engines)
    engines = EngineGroup(group, config, model.tokenizer.stop_ids)

    def wait() -> None:
        block_on(engines.wait_ready())
        engines.quarantine({})

    async def recover(error: HybridFlowError) -> None:
        await _restarted(engines, error)

    engines.recover = recover
    return Started(engines, wait)


def _stop(group: ThreadGroup) -> None:
    """Stop all engines concurrently, regardless of their workers' state."""
    with ThreadPoolExecutor(max(1, group.world_size)) as threads:
        for stopped in [threads.submit(worker.stop) for worker in group.workers]:
            stopped.result()


async def _restarted(engines: EngineGroup, error: HybridFlowError) -> None:
    """Wait until an engine has restarted with the weights in its folder.

    Raises:
        HybridFlowError: `error` itself, if no engine can be restarted any more.
    """
    if not isinstance(error, EnginesLostError):
        raise error
    _log.warning("%s; waiting for a restart", error)
    deadline = time.monotonic() + engines.config.rollout.start_timeout_s
    while time.monotonic() < deadline:
        states = await engines.states(_RESTART_POLL_S)
        lost = {number: one.reason for number, one in enumerate(states) if not one.has_weights}
        if len(lost) < len(states):
            engines.quarantine(lost)
            return
        if all(one.state == FAILED for one in states):
            break
    raise error


def _fitting(config: RunConfig, progress: Progress) -> RunConfig:
    """Return the configuration with at most as many engines as fit on this machine's GPUs."""
    platform = Platform.detect()
    rollout = config.rollout
    if platform.kind != "cuda":
        return config
    most = max(1, len(_visible(platform)) // derived.engine_ranks(config))
    if rollout.num_engines <= most:
        return config
    progress.message(
        f"rollout.num_engines={rollout.num_engines} is too many for the "
        f"{len(_visible(platform))} visible GPUs; starting {most}"
    )
    return replace(config, rollout=replace(rollout, num_engines=most))


def _visible(platform: Platform) -> list[str]:
    """Return the CUDA devices visible to this process, named as in CUDA_VISIBLE_DEVICES."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    found = [one.strip() for one in named.split(",") if one.strip()]
    return found or [str(number) for number in range(platform.device_count())]
