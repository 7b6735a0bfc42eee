"""The rollout worker: a process that starts, supervises and queries one engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.batch import (
    ROUTES,
    SUPPORT,
    DataProto,
    Jagged,
    Supports,
    objects,
    support_columns,
    unknown_routes,
    with_free_end,
)
from hybridflow.config.schema import RolloutConfig, SamplingConfig
from hybridflow.device.platform import Platform
from hybridflow.dispatch import Dispatch, MeshPosition, WorkerContext, register
from hybridflow.engines.base import (
    NO_EXTRAS,
    Completion,
    Engine,
    Extras,
    Load,
    ReportsLoad,
    TokenRequests,
    prompt_images,
)
from hybridflow.engines.nodes import FirstNode
from hybridflow.engines.spec import EngineSpec, has_weights, model_config
from hybridflow.engines.supervisor import UP, EngineState, EngineSupervisor, LoadWatch
from hybridflow.errors import ConfigError, EngineError, EngineSilent, WeightSyncError
from hybridflow.sync.schedule import EngineLayout
from hybridflow.sync.session import Order, Outcome, refuse
from hybridflow.workers.requests import Ended, EngineRequests

# a silent engine not seen to exit within this time counts as hung
_SETTLE_S = 10.0
_SETTLE_POLL_S = 0.2
_ROUTES = Extras(routes=True)
_SUPPORT = Extras(support=True)
_BOTH = Extras(routes=True, support=True)
_MAX_SUPPORT = 4096  # SGLang's limit
FP8_CAPABILITY = (8, 9)
WRITES = (
    "response_ids",
    "response_mask",
    "rollout_log_probs",
    "response_versions",
    "finish_reason",
    "weight_version",
)


def engine_spec(
    config: RolloutConfig,
    number: int,
    model_folder: Path,
    dtype: str,
    seed: int,
    with_routes: bool = False,
    threads: int = 1,
    fork_server: str = "",
    tokenizes: bool = False,
    devices: Sequence[str] = (),
) -> EngineSpec:
    """Return the spec of engine `number` of a run. For a multi-node engine, it describes the first
    node, and its address is not set yet. `devices` lists the devices of all engines, if one process
    starts all of them.
    """
    ranks = config.tensor * config.pipeline
    return EngineSpec(
        name=f"engine-{number}",
        model_path=str(model_folder),
        tensor=config.tensor,
        pipeline=config.pipeline,
        expert=config.expert,
        data_attention=config.data_parallel_attention,
        nnodes=config.nodes_per_engine,
        dtype=dtype,
        max_running_requests=config.max_running_requests,
        max_total_tokens=config.max_total_tokens,
        mem_fraction_static=config.mem_fraction_static,
        # Requests paused in place prevent the cache from being flushed, so prefixes computed with
        # old weights would be reused.
        cache_prefixes=config.sync.pause != "in_place",
        extra_args=dict(config.extra_args),
        python=config.python or "",
        start_timeout_s=config.start_timeout_s,
        request_timeout_s=config.request_timeout_s,
        seed=seed + number,
        device=Platform.detect().kind,
        return_routed_experts=with_routes,
        # twice top_k, since several tokens may tie with the last one
        max_support=max(_MAX_SUPPORT, 2 * config.sampling.top_k),
        draft_tokens=config.speculative.num_steps if config.speculative.method else 0,
        tokenizes=tokenizes,
        memory_saver=config.sleep_while_training,
        threads=threads,
        fork_server=fork_server,
        devices=tuple(devices[number * ranks : (number + 1) * ranks]),
    )


def placed(spec: EngineSpec, config: RolloutConfig, context: WorkerContext) -> EngineSpec:
    """Return the spec with the address and ports of the engine's worker. Raises ConfigError if the
    node cannot run the engine.
    """
    check_node(config, Platform.detect(), context.node)
    return replace(spec, host=context.node, ports=context.ports)


def check_node(config: RolloutConfig, platform: Platform, node: str) -> None:
    """Raise ConfigError if the devices of `node`, as seen by this process, cannot run an engine."""
    if platform.kind == "cpu":
        return
    ranks = config.tensor * config.pipeline // config.nodes_per_engine
    found = platform.device_count()
    if found < ranks:
        raise ConfigError(
            f"node {node} has {found} visible GPUs, but an engine needs {ranks} there; check "
            "nvidia-smi and the GPUs passed to ray start on that node"
        )
    if config.quantization == "fp8" and platform.capability() < FP8_CAPABILITY:
        # sglang/srt/layers/quantization/fp8_utils.py:2798
        raise ConfigError(
            "rollout.quantization=fp8 requires GPUs of compute capability "
            f"{'.'.join(map(str, FP8_CAPABILITY))} or later, but those of node {node} have "
            f"{'.'.join(map(str, platform.capability()))}: the engine would rearrange fp8 weights "
            "for Marlin after each load, so slices could not be written in place; set "
            "rollout.quantization=null"
        )


class RolloutWorker:
    """Owns one engine. Rank r of the group owns engine r."""

    def __init__(self, context: WorkerContext, config: RolloutConfig, *engine: Any) -> None:
        """Start the server process without waiting until it is ready (see `wait_ready`), so that
        engines start up in parallel with other work. `engine` contains the arguments of
        `engine_spec`, starting with `model_folder`.
        """
        self.rank = context.rank
        self.world_size = context.world_size
        self.config = config
        spec = placed(engine_spec(config, context.rank, *engine), config, context)
        nodes = None
        if config.nodes_per_engine > 1:
            spec = replace(spec, dist_init_addr=f"{context.node}:0")
            nodes = FirstNode(spec, context.node)
        self._hf_config = model_config(spec)
        # (engine start number, memory tags released since)
        self._asleep: tuple[int, tuple[str, ...]] = (-1, ())
        self.requests = EngineRequests()
        self._sync_store = ("", 0)
        self._plans: tuple[str, ...] = ("",)
        self._described: EngineLayout | None = None
        # start number of the engine that has received complete weights; -1: none
        self._served_start = -1
        # the same, also while a later sync is in progress or has failed
        self._weights_start = -1
        # the engine loads complete weights from its folder at every start
        self._has_own_weights = has_weights(spec.model_path)
        log_path = context.log_path.with_name(f"{spec.name}.log")
        self.supervisor = EngineSupervisor(
            config.engine, spec, log_path, self._check_layout, config.max_restarts, nodes
        )
        self.watch = LoadWatch(self._load, self.requests.clock)

    def mesh_position(self) -> MeshPosition:
        """Return this engine's data-parallel position. Each engine handles different prompts, so
        each is a separate data-parallel rank.
        """
        return MeshPosition(self.rank, self.world_size, True)

    @register(Dispatch.ONE_TO_ALL)
    def node_store(self) -> tuple[str, int]:
        """Return the address of the store through which the engine's other nodes are started (see
        `RolloutNodeWorker.follow`). Only for multi-node engines.
        """
        assert self.supervisor.nodes is not None
        return self.supervisor.nodes.address

    @register(Dispatch.ONE_TO_ALL)
    def wait_ready(self) -> None:
        """Wait until the engine is ready for requests."""
        self.supervisor.engine.wait_ready()

    # ---- requests

    @register(Dispatch.ALL_TO_ALL)
    def ask(
        self,
        batch: DataProto,
        sampling: SamplingConfig,
        stop_token_ids: Sequence[int],
        extras: Extras,
    ) -> None:
        """Send the batch's prompt_ids to the engine without waiting for responses.

        A stop token is included in the response.

        Each row includes max_new_tokens, a ticket, which identifies its response in `collect`, and
        its images (`data.image_tokens`) if the run has images. If the engine is lost, or has not
        received complete weights since its last start, nothing is sent and the rows finish with the
        reason `CUT_SHORT`.
        """
        prompts = batch.jagged("prompt_ids")
        requests = TokenRequests(
            [prompts.row(i).tolist() for i in range(len(prompts))],
            sampling,
            batch["max_new_tokens"].tolist(),
            list(stop_token_ids),
            extras,
            prompt_images(batch),
        )
        tickets = batch["ticket"].tolist()
        start = self._serving_start()
        if self._lost(start):
            self.requests.refuse(tickets, requests)
        else:
            self.requests.ask(self.supervisor.engine, start, tickets, requests)

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES))
    def collect(self, wait_s: float) -> DataProto:
        """Return the responses finished since the last call. Waits `wait_s`, or less if nothing is
        in flight.

        If the engine is lost, its rows contain the tokens received so far and have the finish
        reason `CUT_SHORT`.

        Raises:
            EngineError: the engine rejected a request but is still running.
        """
        return self._answers(self._ended(wait_s, NO_EXTRAS))

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES, ROUTES))
    def collect_with_routes(self, wait_s: float) -> DataProto:
        """Same as `collect`, for requests that record the experts of each token.

        Both prompt and response tokens are recorded (`batch.routes`).
        """
        return self._answers(self._ended(wait_s, _ROUTES), _ROUTES)

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES, *SUPPORT))
    def collect_with_support(self, wait_s: float) -> DataProto:
        """Same as `collect`, for requests that record the sampling support of each token
        (`batch.support`)."""
        return self._answers(self._ended(wait_s, _SUPPORT), _SUPPORT)

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES, ROUTES, *SUPPORT))
    def collect_with_routes_and_support(self, wait_s: float) -> DataProto:
        """Same as `collect`, for requests that record experts and sampling support."""
        return self._answers(self._ended(wait_s, _BOTH), _BOTH)

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES))
    def so_far(self) -> DataProto:
        """Return partial responses of all uncollected requests without stopping them.

        Unfinished ones have the finish reason `CUT_SHORT`; those without any token are omitted.
        """
        return self._answers(self.requests.so_far(NO_EXTRAS))

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES, ROUTES))
    def so_far_with_routes(self) -> DataProto:
        """Same as `so_far`, for requests that record experts.

        The experts of an unfinished response are not known yet.
        """
        return self._answers(self.requests.so_far(_ROUTES), _ROUTES)

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES, *SUPPORT))
    def so_far_with_support(self) -> DataProto:
        """Same as `so_far`, for requests that record the sampling support of each token."""
        return self._answers(self.requests.so_far(_SUPPORT), _SUPPORT)

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES, ROUTES, *SUPPORT))
    def so_far_with_routes_and_support(self) -> DataProto:
        """Same as `so_far_with_routes`, for requests that record experts and sampling support."""
        return self._answers(self.requests.so_far(_BOTH), _BOTH)

    @register(Dispatch.ALL_TO_ALL)
    def abort_requests(self, tickets: Sequence[int]) -> None:
        """Abort these requests in the engine.

        `collect` returns the tokens generated so far, with the finish reason `abort`.
        """
        self.requests.abort(frozenset(tickets))

    @register(Dispatch.ONE_TO_ALL)
    def forget_requests(self) -> None:
        """Abort all requests and discard their responses."""
        self.requests.forget()

    def _ended(self, wait_s: float, extras: Extras) -> list[Ended]:
        self.requests.wait(wait_s)
        while (failed := self.requests.failed()) is not None:
            error, start = failed
            if not isinstance(error, EngineError) or not self._settle(error, start):
                raise error
            print(f"{error}", flush=True)  # goes to the worker's log
            self.requests.cut_short(start)
        return self.requests.take(extras)

    def _lost(self, start: int) -> bool:
        """Return True if the engine has exited, lacks complete weights, or has been restarted more
        than `start` times."""
        state = self.supervisor.state()
        return state.state != UP or state.restarts != start or start != self._serving_start()

    def _serving_start(self) -> int:
        """Return how often the engine had been restarted when it received complete weights, or
        -1."""
        return self.supervisor.restarts if self._has_own_weights else self._served_start

    def _settle(self, error: EngineError, start: int) -> bool:
        """Determine, after `error`, whether the engine is lost (see `_lost`). A hung engine is
        restarted and counts as lost.
        """
        settled = time.monotonic() + _SETTLE_S
        while not self._lost(start):
            if not isinstance(error, EngineSilent):
                return False
            if time.monotonic() > settled:
                self.supervisor.restart(str(error).splitlines()[0])
                return True
            time.sleep(_SETTLE_POLL_S)
        return True

    def _answers(self, ended: Sequence[Ended], extras: Extras = NO_EXTRAS) -> DataProto:
        found = response_columns([one.completion for one in ended], extras)
        if extras.routes:
            rows = [
                self._routes(one.completion, one.prompt_tokens + len(one.completion.token_ids))
                for one in ended
            ]
            found = found.with_columns(**{ROUTES: Jagged.from_rows(rows, np.int16)})
        return found.with_columns(ticket=np.array([one.ticket for one in ended], dtype=np.int64))

    def _routes(self, completion: Completion, tokens: int) -> np.ndarray:
        layers = int(self._hf_config["num_hidden_layers"])
        if completion.routes is None or not len(completion.token_ids):  # empty or cut short
            return unknown_routes(tokens, layers, int(self._hf_config["num_experts_per_tok"]))
        return with_free_end(
            completion.routes, tokens, layers, f"engine {self.supervisor.spec.name}"
        )

    # ---- memory

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Release the memory of weights and KV cache. Does nothing if the engine has exited."""
        state = self.supervisor.state()
        if state.state == UP:
            self.supervisor.engine.sleep()
            self._asleep = (state.restarts, ("kv_cache", "weights"))

    @register(Dispatch.ONE_TO_ALL)
    def wake(self, tags: Sequence[str]) -> None:
        """Reallocate memory for these parts. Weights stay uninitialised until the next sync. Does
        nothing if the engine has been restarted since `sleep`, because a restarted engine already
        has its memory.
        """
        state = self.supervisor.state()
        start, asleep = self._asleep
        again = [tag for tag in tags if tag in asleep]
        if state.state == UP and state.restarts == start and again:
            self.supervisor.engine.wake(again)
            self._asleep = (start, tuple(tag for tag in asleep if tag not in again))

    # ---- weights

    @register(Dispatch.ONE_TO_ALL)
    def describe_weights(self, host: str, port: int) -> EngineLayout:
        """Return the weight layout reported by the engine's ranks. The engine must be idle."""
        self._sync_store = (host, port)
        self._described = self._describe(self.supervisor.engine)
        return self._described

    @register(Dispatch.ONE_TO_ALL)
    def adopt_plan(self, plan: str, *further: str) -> None:
        """From now on, accept only orders that belong to `plan` or to one of `further`."""
        self._plans = (plan, *further)

    @register(Dispatch.ALL_TO_ALL)
    def receive_weights(self, order: Order) -> Outcome:
        """Run one attempt of a weight sync. If the engine is lost meanwhile, it is restarted in the
        background."""
        state = self.supervisor.state()
        self._has_own_weights = False
        self._served_start = -1
        if state.state != UP:
            return refuse(order, f"{state.name} is not up: {state.reason}")
        if order.plan in self._plans[1:] and state.restarts != self._weights_start:
            return refuse(order, f"{state.name} has restarted and lacks the weights")
        plan = order.plan if order.plan in self._plans else self._plans[0]
        outcome = self.supervisor.engine.receive(order, plan)
        if outcome.status == "served":
            self._served_start = self._weights_start = state.restarts
        else:
            # the engine stays paused until the next order; other engines resume these
            self.requests.give_up()
        if outcome.status == "lost":
            self.supervisor.restart(outcome.error)
        return outcome

    @register(Dispatch.ONE_TO_ALL)
    def engine_state(self, wait_s: float = 0.0) -> EngineState:
        """Return the engine's state, waiting up to `wait_s` for a restart in progress.

        An engine that has exited is restarted.
        """
        self.supervisor.state()
        state = self.supervisor.wait_restarted(wait_s)
        return replace(
            state, has_weights=state.state == UP and state.restarts == self._serving_start()
        )

    @register(Dispatch.ONE_TO_ALL)
    def take_load(self) -> dict[str, float]:
        """Return the engine's load since the last call: `LoadWatch.take` and `BusyClock.take`."""
        found = self.watch.take() | self.requests.take_load()
        engine = self.supervisor.engine
        if not isinstance(engine, ReportsLoad):
            return found
        hits = engine.take_prefix_hits()
        return found | engine.take_drafts() | ({} if hits is None else {"prefix_hits": hits})

    def _load(self) -> Load | None:
        engine = self.supervisor.engine
        if not isinstance(engine, ReportsLoad):
            return None
        try:
            return engine.load()
        except EngineError:  # restarting, or busy with a weight sync
            return None

    @register(Dispatch.ONE_TO_ALL)
    def stop(self) -> None:
        """Stop the engine and all its processes."""
        self.supervisor.stop()

    def _describe(self, engine: Engine) -> EngineLayout:
        return engine.describe(*self._sync_store, self.config.sync.timeout_s)

    def _check_layout(self, engine: Engine) -> None:
        """Raise WeightSyncError if a restarted engine's weight layout does not match the plan."""
        if self._described is not None and self._describe(engine) != self._described:
            raise WeightSyncError(
                f"{engine.spec.name} has a different weight layout after its restart; restart the "
                "run"
            )


def response_columns(completions: list[Completion], extras: Extras = NO_EXTRAS) -> DataProto:
    """Build the columns `WRITES` (and, if requested, `SUPPORT`) from an engine's completions, one
    row per completion.
    """
    columns: dict[str, Any] = {
        "response_ids": Jagged.from_rows([c.token_ids for c in completions], np.int64),
        # all tokens are sampled by the policy, because a single engine request involves no tools
        "response_mask": Jagged.from_rows(
            [np.ones(len(c.token_ids)) for c in completions], np.bool_
        ),
        "rollout_log_probs": Jagged.from_rows([c.log_probs for c in completions], np.float32),
        "finish_reason": objects([c.finish_reason for c in completions]),
        "response_versions": Jagged.from_rows([_versions(c) for c in completions], np.int64),
        # version that sampled the last token; a partial rollout spans several versions
        "weight_version": objects(
            [c.weight_versions[-1].version if c.weight_versions else "" for c in completions]
        ),
    }
    if extras.support:
        columns |= support_columns(
            [c.support or Supports.unknown(len(c.token_ids)) for c in completions]
        )
    return DataProto.from_columns(columns)


def _versions(completion: Completion) -> np.ndarray:
    """Return the weight version that sampled each token [t]. A version name that is not a number,
    as before the first sync, becomes -1.
    """
    versions = np.full(len(completion.token_ids), -1, dtype=np.int64)
    for span in completion.weight_versions:
        versions[span.start : span.end] = int(span.version) if span.version.isdecimal() else -1
    return versions
