"""The rollout worker: one process for each engine, which it starts, watches, and asks for tokens."""

from __future__ import annotations

import json
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
from hybridflow.engines.asking import TokenRequests
from hybridflow.engines.base import NO_EXTRAS, Completion, Engine, Extras
from hybridflow.engines.nodes import FirstNode
from hybridflow.engines.spec import EngineSpec
from hybridflow.engines.supervisor import UP, EngineState, EngineSupervisor
from hybridflow.errors import ConfigError, EngineError, EngineSilent, WeightSyncError
from hybridflow.sync.schedule import EngineLayout
from hybridflow.sync.session import Order, Outcome, refuse
from hybridflow.workers.requests import Ended, EngineRequests

_SETTLE_S, _SETTLE_POLL_S = 10.0, 0.2  # an engine that does not answer is found to have ended within this, or it hangs
_ROUTES, _SUPPORT, _BOTH = Extras(routes=True), Extras(support=True), Extras(routes=True, support=True)
_MAX_SUPPORT = 4096  # SGLang's own
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
) -> EngineSpec:
    """What engine `number` of a run serves; for several nodes, the spec of the first one, without an address yet."""
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
        # requests paused in place keep the cache from being emptied, and prefixes of old weights would go on being used
        cache_prefixes=config.sync.pause != "in_place",
        extra_args=dict(config.extra_args),
        python=config.python or "",
        start_timeout_s=config.start_timeout_s,
        request_timeout_s=config.request_timeout_s,
        seed=seed + number,
        device=Platform.detect().kind,
        return_routed_experts=with_routes,
        # twice of what is sampled among: several tokens may be as likely as the last one
        max_support=max(_MAX_SUPPORT, 2 * config.sampling.top_k),
        tokenizes=tokenizes,
        memory_saver=config.sleep_while_training,
        threads=threads,
        fork_server=fork_server,
    )


def placed(spec: EngineSpec, config: RolloutConfig, context: WorkerContext) -> EngineSpec:
    """The spec at the address and with the ports of its worker. ConfigError where the node cannot run it."""
    check_node(config, Platform.detect(), context.node)
    return replace(spec, host=context.node, ports=context.ports)


def check_node(config: RolloutConfig, platform: Platform, node: str) -> None:
    """Raise ConfigError where the devices of `node`, which this process sees, cannot run an engine."""
    if platform.kind == "cpu":
        return
    ranks, found = config.tensor * config.pipeline // config.nodes_per_engine, platform.device_count()
    if found < ranks:
        raise ConfigError(
            f"node {node} shows {found} GPUs to an engine with {ranks} ranks on it; look at nvidia-smi there, and at "
            f"the GPUs that its ray start offers"
        )
    if config.quantization == "fp8" and platform.capability() < FP8_CAPABILITY:
        # sglang/srt/layers/quantization/fp8_utils.py:2798
        raise ConfigError(
            f"rollout.quantization=fp8 needs GPUs of compute capability {'.'.join(map(str, FP8_CAPABILITY))} or "
            f"later, and those of node {node} have {'.'.join(map(str, platform.capability()))}: there the engine "
            f"rearranges fp8 weights for Marlin after each load, and slices would land in the wrong form; set "
            f"rollout.quantization=null"
        )


class RolloutWorker:
    """Owns one engine. Rank r of the group owns engine r."""

    def __init__(self, context: WorkerContext, config: RolloutConfig, *engine: Any) -> None:
        """Start the server process; `wait_ready` waits for it, so engines come up while other things happen. The
        arguments `engine` are those of `engine_spec` from `model_folder` on."""
        self.rank, self.world_size, self.config = context.rank, context.world_size, config
        spec = placed(engine_spec(config, context.rank, *engine), config, context)
        nodes = None
        if config.nodes_per_engine > 1:
            spec = replace(spec, dist_init_addr=f"{context.node}:0")
            nodes = FirstNode(spec, context.node)
        self._hf_config = json.loads(Path(spec.model_path, "config.json").read_text(encoding="utf-8"))
        # the number of the engine's start, and what of its memory has been given away since
        self._asleep: tuple[int, tuple[str, ...]] = (-1, ())
        self.requests = EngineRequests()
        self._sync_store, self._plan = ("", 0), ""
        self._described: EngineLayout | None = None
        self._served_start = -1  # the number of the engine's start that holds whole weights; -1: none does
        log_path = context.log_path.with_name(f"{spec.name}.log")
        self.supervisor = EngineSupervisor(
            config.engine, spec, log_path, self._check_layout, config.max_restarts, nodes
        )

    def mesh_position(self) -> MeshPosition:
        """Engines are data-parallel: each answers prompts of its own."""
        return MeshPosition(self.rank, self.world_size, True)

    @register(Dispatch.ONE_TO_ALL)
    def node_store(self) -> tuple[str, int]:
        """Where the other nodes of this engine learn when to start (`RolloutNodeWorker.follow`). Only with several
        nodes an engine."""
        assert self.supervisor.nodes is not None
        return self.supervisor.nodes.address

    @register(Dispatch.ONE_TO_ALL)
    def wait_ready(self) -> None:
        """Wait until the engine answers."""
        self.supervisor.engine.wait_ready()

    # ---- requests

    @register(Dispatch.ALL_TO_ALL)
    def ask(self, batch: DataProto, sampling: SamplingConfig, stop_token_ids: Sequence[int], extras: Extras) -> None:
        """Send prompt_ids of the batch to the engine and return; the stop token is part of a response.

        Each row has the ticket by which `collect` tells its answer, and max_new_tokens. Where the engine is lost, or
        holds no whole weights since its last start, nothing is sent and the answers are cut short.
        """
        prompts = batch.jagged("prompt_ids")
        requests = TokenRequests(
            [prompts.row(i).tolist() for i in range(len(prompts))],
            sampling,
            batch["max_new_tokens"].tolist(),
            list(stop_token_ids),
            extras,
        )
        tickets, start = batch["ticket"].tolist(), self._served_start
        if self._lost(start):
            self.requests.refuse(tickets, requests)
        else:
            self.requests.ask(self.supervisor.engine, start, tickets, requests)

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES))
    def collect(self, wait_s: float) -> DataProto:
        """What has ended since the last call, after `wait_s`, or earlier when nothing is under way. Where the engine is
        lost, rows have the finish reason `CUT_SHORT` and the tokens that had come.

        Raises:
            EngineError: the engine refused, and still runs.
        """
        return self._answers(self._ended(wait_s, NO_EXTRAS))

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES, ROUTES))
    def collect_with_routes(self, wait_s: float) -> DataProto:
        """As `collect`, of requests with the experts that each token of prompt and response went through
        (`batch.routes`)."""
        return self._answers(self._ended(wait_s, _ROUTES), _ROUTES)

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES, *SUPPORT))
    def collect_with_support(self, wait_s: float) -> DataProto:
        """As `collect`, of requests with what each token was sampled among (`batch.support`)."""
        return self._answers(self._ended(wait_s, _SUPPORT), _SUPPORT)

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES, ROUTES, *SUPPORT))
    def collect_with_routes_and_support(self, wait_s: float) -> DataProto:
        """As `collect`, of requests with both."""
        return self._answers(self._ended(wait_s, _BOTH), _BOTH)

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES))
    def so_far(self) -> DataProto:
        """What has come of the requests that have not been collected, which go on: with the finish reason `CUT_SHORT`
        where one has not ended. Those without a token are left out."""
        return self._answers(self.requests.so_far(NO_EXTRAS))

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES, ROUTES))
    def so_far_with_routes(self) -> DataProto:
        """As `so_far`, of requests with experts; those of an answer that has not ended are not known yet."""
        return self._answers(self.requests.so_far(_ROUTES), _ROUTES)

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES, *SUPPORT))
    def so_far_with_support(self) -> DataProto:
        """As `so_far`, of requests with what each token was sampled among."""
        return self._answers(self.requests.so_far(_SUPPORT), _SUPPORT)

    @register(Dispatch.ONE_TO_ALL, writes=("ticket", *WRITES, ROUTES, *SUPPORT))
    def so_far_with_routes_and_support(self) -> DataProto:
        """As `so_far_with_routes`, of requests with both."""
        return self._answers(self.requests.so_far(_BOTH), _BOTH)

    @register(Dispatch.ALL_TO_ALL)
    def abort_requests(self, tickets: Sequence[int]) -> None:
        """Have the engine end these requests. `collect` brings what has come of them, with the finish reason
        `abort`."""
        self.requests.abort(frozenset(tickets))

    @register(Dispatch.ONE_TO_ALL)
    def forget_requests(self) -> None:
        """Give up all requests, of which no answer will be collected."""
        self.requests.forget()

    def _ended(self, wait_s: float, extras: Extras) -> list[Ended]:
        self.requests.wait(wait_s)
        while (failed := self.requests.failed()) is not None:
            error, start = failed
            if not isinstance(error, EngineError) or not self._settle(error, start):
                raise error
            print(f"{error}", flush=True)  # the worker's log
            self.requests.cut_short(start)
        return self.requests.take(extras)

    def _lost(self, start: int) -> bool:
        """Whether this start of the engine has ended, or holds no whole weights."""
        state = self.supervisor.state()
        return state.state != UP or state.restarts != start or start != self._served_start

    def _settle(self, error: EngineError, start: int) -> bool:
        """Whether this start of the engine is lost, after an error of it; one that hangs is given up and the engine
        started again."""
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
            rows = [self._routes(one.completion, one.prompt_tokens + len(one.completion.token_ids)) for one in ended]
            found = found.with_columns(**{ROUTES: Jagged.from_rows(rows, np.int16)})
        return found.with_columns(ticket=np.array([one.ticket for one in ended], dtype=np.int64))

    def _routes(self, completion: Completion, tokens: int) -> np.ndarray:
        layers = int(self._hf_config["num_hidden_layers"])
        if completion.routes is None or not len(completion.token_ids):  # empty, or cut short
            return unknown_routes(tokens, layers, int(self._hf_config["num_experts_per_tok"]))
        return with_free_end(completion.routes, tokens, layers, f"engine {self.supervisor.spec.name}")

    # ---- memory

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Give the memory of weights and KV cache back to the device. An engine that has ended holds none."""
        state = self.supervisor.state()
        if state.state == UP:
            self.supervisor.engine.sleep()
            self._asleep = (state.restarts, ("kv_cache", "weights"))

    @register(Dispatch.ONE_TO_ALL)
    def wake(self, tags: Sequence[str]) -> None:
        """Take the memory of these parts again; weights stay empty until the next sync. An engine that was started
        since has its memory."""
        state, (start, asleep) = self.supervisor.state(), self._asleep
        again = [tag for tag in tags if tag in asleep]
        if state.state == UP and state.restarts == start and again:
            self.supervisor.engine.wake(again)
            self._asleep = (start, tuple(tag for tag in asleep if tag not in again))

    # ---- weights

    @register(Dispatch.ONE_TO_ALL)
    def describe_weights(self, host: str, port: int) -> EngineLayout:
        """Have the engine's ranks say where their weights lie. For an engine without requests."""
        self._sync_store = (host, port)
        self._described = self._describe(self.supervisor.engine)
        return self._described

    @register(Dispatch.ONE_TO_ALL)
    def adopt_plan(self, plan: str) -> None:
        """Take orders of this plan only."""
        self._plan = plan

    @register(Dispatch.ALL_TO_ALL)
    def receive_weights(self, order: Order) -> Outcome:
        """One attempt of a sync. An engine that is lost meanwhile is started again in the background."""
        state = self.supervisor.state()
        self._served_start = -1
        if state.state != UP:
            return refuse(order, f"{state.name} is not up: {state.reason}")
        outcome = self.supervisor.engine.receive(order, self._plan)
        if outcome.status == "served":
            self._served_start = state.restarts
        else:
            self.requests.give_up()  # paused until the next order: other engines go on with them
        if outcome.status == "lost":
            self.supervisor.restart(outcome.error)
        return outcome

    @register(Dispatch.ONE_TO_ALL)
    def engine_state(self, wait_s: float = 0.0) -> EngineState:
        """The engine's state, after waiting up to `wait_s` for a restart in progress. An engine that has ended is
        started again."""
        self.supervisor.state()
        state = self.supervisor.wait_restarted(wait_s)
        return replace(state, has_weights=state.state == UP and state.restarts == self._served_start)

    @register(Dispatch.ONE_TO_ALL)
    def stop(self) -> None:
        """Stop the engine and all its processes."""
        self.supervisor.stop()

    def _describe(self, engine: Engine) -> EngineLayout:
        return engine.describe(*self._sync_store, self.config.sync.timeout_s)

    def _check_layout(self, engine: Engine) -> None:
        """Refuse an engine that was started again and holds its weights elsewhere than the plan says."""
        if self._described is not None and self._describe(engine) != self._described:
            raise WeightSyncError(
                f"{engine.spec.name} holds its weights otherwise than before its restart; start the run again"
            )


def response_columns(completions: list[Completion], extras: Extras = NO_EXTRAS) -> DataProto:
    """The columns `WRITES` of the answers of an engine, a row each, and `SUPPORT` where that was asked for."""
    columns: dict[str, Any] = {
        "response_ids": Jagged.from_rows([c.token_ids for c in completions], np.int64),
        # which tokens the policy sampled: an engine alone answers without tools, and all of them are
        "response_mask": Jagged.from_rows([np.ones(len(c.token_ids)) for c in completions], np.bool_),
        "rollout_log_probs": Jagged.from_rows([c.log_probs for c in completions], np.float32),
        "finish_reason": objects([c.finish_reason for c in completions]),
        "response_versions": Jagged.from_rows([_versions(c) for c in completions], np.int64),
        # the version that made the last token; a response may span several once rollouts are partial
        "weight_version": objects([c.weight_versions[-1].version if c.weight_versions else "" for c in completions]),
    }
    if extras.support:
        columns |= support_columns([c.support or Supports.unknown(len(c.token_ids)) for c in completions])
    return DataProto.from_columns(columns)


def _versions(completion: Completion) -> np.ndarray:
    """The version of the weights that made each token `[t]`; -1 for a name that is no number (before the first
    sync)."""
    versions = np.full(len(completion.token_ids), -1, dtype=np.int64)
    for span in completion.weight_versions:
        versions[span.start : span.end] = int(span.version) if span.version.isdecimal() else -1
    return versions
