"""Trainer ranks as processes, rollout workers with real engines in threads, and the product's
`SliceSync` over both, without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import requests
from safetensors.torch import save_file

from hybridflow.config.schema import (
    DataConfig,
    LoraConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    SyncConfig,
)
from hybridflow.device.platform import Platform
from hybridflow.dispatch import WorkerContext
from hybridflow.engines import guard
from hybridflow.engines.base import Completion
from hybridflow.engines.sglang.engine import EngineClient, SglangEngine
from hybridflow.engines.supervisor import EngineState
from hybridflow.errors import WorkerError
from hybridflow.models import family_of
from hybridflow.models.fp8 import BlockQuantisation
from hybridflow.models.layout import Coordinates, LocalTensor, ParallelShape
from hybridflow.models.lora import AdapterMap
from hybridflow.process.rendezvous import client_store, master_store
from hybridflow.reshard.layout import megatron_layout
from hybridflow.rollout.protocols import SyncReport
from hybridflow.rollout.service import EngineGroup
from hybridflow.rollout.weight_sync import SliceSync
from hybridflow.single_controller import block_on
from hybridflow.sync.schedule import (
    EngineLayout,
    PlanFacts,
    make_weight_plan,
    post_catalog,
    sync_catalog,
)
from hybridflow.sync.session import Order, Outcome
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_node import RolloutNodeWorker
from tests.dist.harness.ranks import free_port, import_path
from tests.dist.harness.sync_senders import tensors_of
from tests.dist.harness.threads import Reply, Threads

HOST = "127.0.0.1"
PROMPTS = [[7], [3, 1, 4], list(range(8)), list(range(20, 60)), [9] * 25]
# for tests of faults, where deadlines pass; a busy machine must not let one pass by itself
SYNC = SyncConfig(transport="tcp", staging_bytes=512 << 10, timeout_s=8.0, max_retries=0)
PATIENT = replace(SYNC, timeout_s=60.0)  # for tests of what arrives


class Senders:
    """The policy's worker group: one process a rank, and the store that the first rank would
    hold."""

    def __init__(
        self,
        model: Mapping[str, Any],
        shape: Mapping[str, Any],
        kind: str = "held",
        quantisation: BlockQuantisation | None = None,
    ) -> None:
        self.kind = kind
        self.quantisation = quantisation
        self.model = dict(model)
        self.shape = dict(shape)
        self.pool = ThreadPoolExecutor(4)
        self.store = master_store(HOST, 0, 60.0)
        self.number = 0
        self.world_size = shape["ranks"]
        self.processes: list[subprocess.Popen[bytes]] = []
        self.facts: PlanFacts | None = None
        self.start()

    def start(self) -> None:
        """Start all ranks (anew)."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.store.set("commands", json.dumps(self.number))
        words = [
            HOST,
            str(self.store.port),
            json.dumps(self.model),
            json.dumps(self.shape),
            self.kind,
        ]
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": import_path(),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        env |= {
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(self.world_size),
        }
        command = [sys.executable, "-m", "tests.dist.harness.sync_senders"]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), *words],
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(self.world_size)
        ]

    def cut(self, shape: Mapping[str, Any]) -> None:
        """Another layout, of as many ranks or fewer, in the same processes."""
        assert shape["ranks"] <= len(self.processes)
        self.shape, self.world_size = dict(shape), shape["ranks"]
        self.command("cut", shape=self.shape)

    def command(self, name: str, wait_s: float = 240.0, **arguments: Any) -> list[Any]:
        """What each rank answers; WorkerError when one has died."""
        number = self.number
        self.number = self.number + 1
        self.store.set(f"command/{number}", json.dumps({"name": name, **arguments}))
        deadline = time.monotonic() + wait_s
        keys = [f"answer/{number}/{rank}" for rank in range(self.world_size)]
        while not self.store.check(keys):
            dead = [
                rank for rank, process in enumerate(self.processes) if process.poll() is not None
            ]
            if dead:
                raise WorkerError(
                    "the worker process died", role="actor", rank=dead[0], method=name
                )
            assert time.monotonic() < deadline, f"{name} not answered"
            time.sleep(0.01)
        return [json.loads(self.store.get(key)) for key in keys]

    def call(self, method: Callable[..., Any], *args: Any, timeout: float | None = None) -> Reply:
        return Reply(self.pool.submit(getattr(self, method.__name__), *args))

    # ---- `PolicyWorker`'s methods
    # ----------------------------------------------------------------------------------------------

    def device_kind(self) -> str:
        return Platform.detect().kind

    def open_sync_store(self) -> tuple[str, int]:
        post_catalog(
            self.store,
            family_of(self.model, mtp=True).tensors(),
            "bfloat16" if self.quantisation else "float32",
            self.quantisation,
            self.adapters.served() if self.adapters else None,
        )
        return HOST, self.store.port

    def plan_weights(
        self, host: str, port: int, engines: Sequence[EngineLayout]
    ) -> list[PlanFacts]:
        if self.kind == "megatron":
            ranks = [
                Coordinates.of_row(at) for at in self.command("coordinates", wait_s=240.0)[0]
            ]  # the ranks are still starting
        else:
            ranks = ParallelShape(**self.shape).coordinates()
        family = family_of(self.model, mtp=True)
        served = self.adapters.served() if self.adapters else None
        catalog = sync_catalog(family, self.quantisation, served)
        source = megatron_layout(family, ranks, "float32", catalog, self._factors)
        self.facts = make_weight_plan(
            self.store,
            family,
            source,
            engines,
            SYNC.staging_bytes,
            20.0,
            quantisation=self.quantisation,
            adapters=served,
        )
        self.command("adopt", plans=self.facts.digests)
        return [self.facts]

    @property
    def adapters(self) -> AdapterMap | None:
        """The adapters that engines keep next to their weights, as `policy_of` makes them."""
        lora = self.shape.get("lora") or {}
        if lora.get("sync") != "adapter":
            return None
        return AdapterMap(family_of(self.model), LoraConfig(**lora), seed=3)

    def _factors(self, tensors: list[LocalTensor]) -> list[LocalTensor]:
        adapted = self.adapters.local(tensors) if self.adapters else []
        return [local for one in adapted for local in (one.a, one.b)]

    def send_weights(self, orders: Sequence[Order], go_timeout_s: float) -> list[list[Outcome]]:
        answers = self.command(
            "send", orders=[asdict(order) for order in orders], go_timeout_s=go_timeout_s
        )
        return [[Outcome(**outcome) for outcome in rank] for rank in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _wait_loaded(server: SglangEngine, wait_s: float = 300.0) -> None:
    deadline = time.monotonic() + wait_s
    while not server._answers("/health", None, 5.0):
        server.check_alive()
        assert time.monotonic() < deadline
        time.sleep(0.2)


class SyncWorld:
    """Engines (each a tensor size, or settings of `RolloutConfig`) that start without weights,
    trainer ranks, and `SliceSync` over them.

    The ranks hold tensors cut by our own map, or are a real Megatron world (`kind` "megatron").
    With a quantisation the engines are in block-wise fp8 and bfloat16, and up as soon as they have
    loaded: on a CPU they cannot generate.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        shape: Mapping[str, int],
        engines: Sequence[int | Mapping[str, Any]],
        folder: Path,
        quantisation: BlockQuantisation | None = None,
        kind: str = "held",
        sync: SyncConfig = PATIENT,
    ) -> None:
        self.model = dict(model)
        self.folder = folder
        self.quantisation = quantisation
        self.usual = sync
        engine_folder = folder / "model"
        engine_folder.mkdir(parents=True)
        (engine_folder / "config.json").write_text(json.dumps(self.hf_config))
        self.senders = Senders(
            self.hf_config if kind == "megatron" else model, shape, kind, quantisation
        )
        dtype = "bfloat16" if quantisation else "float32"
        shapes = [{"tensor": engine} if isinstance(engine, int) else engine for engine in engines]
        self.configs = [
            RolloutConfig(num_engines=len(shapes), **sizes, request_timeout_s=60.0, sync=sync)
            for sizes in shapes
        ]
        contexts = [
            WorkerContext(r, len(shapes), r, HOST, 0, HOST, folder / f"rollout-{r}.log")
            for r in range(len(shapes))
        ]
        self.workers = [
            RolloutWorker(c, config, engine_folder, dtype, 1)
            for c, config in zip(contexts, self.configs, strict=True)
        ]
        if quantisation:
            for worker in self.workers:
                worker.supervisor.engine.wait_ready = partial(
                    _wait_loaded, worker.supervisor.engine
                )  # type: ignore[method-assign]
        self.others = [
            RolloutNodeWorker(c, config, engine_folder, dtype, 1)
            for c, config in self._other_nodes(contexts)
        ]
        for other in self.others:
            other.follow([worker.node_store() for worker in self.workers])
        self.group: Any = Threads(self.workers)
        config = RunConfig(
            output_dir=str(folder), rollout=self.configs[0], data=DataConfig(max_response_length=8)
        )
        self.engines = EngineGroup(self.group, config, [])
        block_on(self.engines.wait_ready())
        self.version = 0
        self.seed = -1
        self.configure()

    def _other_nodes(
        self, contexts: Sequence[WorkerContext]
    ) -> list[tuple[WorkerContext, RolloutConfig]]:
        """Contexts of the workers on other nodes than the first. All engines have several nodes
        then, and as many."""
        more = self.configs[0].nodes_per_engine - 1
        assert {config.nodes_per_engine - 1 for config in self.configs} == {more} or not more
        ranks = [
            (engine * more + node, engine)
            for engine in range(len(contexts))
            for node in range(more)
        ]
        return [
            (replace(contexts[engine], rank=rank), self.configs[engine]) for rank, engine in ranks
        ]

    def configure(self, **sync: Any) -> None:
        """A new `SliceSync` with these settings, described and planned anew."""
        self.settings = settings = replace(self.usual, **sync)
        config = RunConfig(
            output_dir=str(self.folder), rollout=replace(self.configs[0], sync=settings)
        )
        senders: Any = self.senders
        for worker in self.workers:
            worker.config = replace(worker.config, sync=settings)
        self.weights = SliceSync(senders, self.engines, config)
        self.plan_line = block_on(self.weights.prepare())

    def cut(self, shape: Mapping[str, int]) -> None:
        """Trainer ranks of another layout in place of these, in the same processes: loading torch
        five times costs more than the syncs."""
        self.senders.cut(shape)
        self.configure()

    @property
    def hf_config(self) -> dict[str, Any]:
        form = (
            {"quantization_config": self.quantisation.config(), "torch_dtype": "bfloat16"}
            if self.quantisation
            else {}
        )
        return {
            **self.model,
            "architectures": [family_of(self.model, mtp=True).architecture],
            "torch_dtype": "float32",
            **form,
        }

    # ---- weights
    # ----------------------------------------------------------------------------------------------

    def train(self, seed: int) -> int:
        """New weights in the trainer; returns the version to sync."""
        self.senders.command("weights", seed=seed)
        self.version = self.version + 1
        self.seed = seed
        return self.version

    def sync(self, version: int) -> SyncReport:
        """Bring these weights to the engines, as the driver does."""
        return block_on(self.weights.sync(version))

    def exported(self, seed: int) -> Path:
        """A Hugging Face folder with the weights of a seed."""
        folder = self.folder / f"export-{seed}"
        if not folder.exists():
            folder.mkdir()
            save_file(
                {n: t.contiguous() for n, t in tensors_of(self.model, seed).items()},
                folder / "model.safetensors",
                {"format": "pt"},
            )
            (folder / "config.json").write_text(json.dumps(self.hf_config))
        return folder

    # ---- what an engine says
    # ----------------------------------------------------------------------------------------------

    def client(self, number: int, timeout_s: float = 20.0) -> EngineClient:
        return self.workers[number].supervisor.engine.client.with_timeout(timeout_s)

    def difference(
        self,
        number: int,
        weights: int | Path,
        prompts: Sequence[list[int]] = PROMPTS,
        change: Callable[[Any], None] | None = None,
    ) -> float:
        """`rounding.distance` of an engine's greedy tokens from transformers under the weights of a
        seed or folder."""
        from tests.dist.harness.rounding import distance  # transformers takes seconds to import

        completions = self._completions(number, prompts)
        rows = [
            ([*prompt, *completion.token_ids], len(prompt), completion.log_probs)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        return distance(
            weights if isinstance(weights, Path) else self.exported(weights), rows, change=change
        )

    def greedy(self, number: int) -> list[list[int]]:
        """The tokens of an engine's greedy answers."""
        return [answer.token_ids.tolist() for answer in self._completions(number, PROMPTS)]

    def _completions(self, number: int, prompts: Sequence[list[int]]) -> list[Completion]:
        return self.client(number).generate(prompts, SamplingConfig(temperature=0.0), 8)

    def scheduler(self, number: int) -> int:
        """Pid of the engine's last tensor-parallel rank."""
        members = guard.session_members(self.workers[number].supervisor.engine.pid)
        return max(pid for pid in members if "scheduler" in " ".join(psutil.Process(pid).cmdline()))

    def states(self, wait_s: float = 0.0) -> list[EngineState]:
        return block_on(self.engines.states(wait_s))

    def answers(self, number: int, wait_s: float = 1.5) -> bool:
        """Whether the engine, asked directly, produces a token: a paused one does not."""
        server = self.workers[number].supervisor.engine
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
        try:
            return requests.post(
                f"{server.url}/generate",
                json=body,
                timeout=wait_s,
                headers={"Authorization": f"Bearer {server.admin_key}"},
            ).ok
        except requests.RequestException:
            return False

    def wait_for_key(self, key: str, wait_s: float = 240.0) -> None:
        # a client of its own: one that waits answers nobody else
        client_store(HOST, self.senders.store.port, wait_s).wait([key], timedelta(seconds=wait_s))

    def close(self) -> None:
        self.senders.close()
        for worker in (*self.workers, *self.others):
            worker.stop()
