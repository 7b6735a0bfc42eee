"""The rollout worker: one process beside each SGLang engine, which it starts, watches, and speaks to over loopback HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.config.schema import RolloutConfig, SamplingConfig
from hybridflow.dispatch import Dispatch, MeshPosition, WorkerContext, register
from hybridflow.engines.client import Completion, EngineClient, SamplingParams
from hybridflow.engines.server import EngineServer, EngineSpec
from hybridflow.platform import Platform
from hybridflow.protocol import DataProto, Jagged
from hybridflow.workers.weights_offer import WeightsOffer


class RolloutWorker:
    """Owns one engine. Rank r of the group owns engine r."""

    def __init__(self, context: WorkerContext, config: RolloutConfig, model_folder: Path, dtype: str, seed: int) -> None:
        """Start the server process; `wait_ready` waits for it, so engines come up while other things happen."""
        self.rank, self.world_size, self.config = context.rank, context.world_size, config
        name = f"engine-{context.rank}"
        spec = EngineSpec(
            name=name,
            model_path=str(model_folder),
            tensor=config.tensor,
            pipeline=config.pipeline,
            expert=config.expert,
            data_attention=config.data_parallel_attention,
            dtype=dtype,
            max_running_requests=config.max_running_requests,
            max_total_tokens=config.max_total_tokens,
            mem_fraction_static=config.mem_fraction_static,
            extra_args=dict(config.extra_args),
            start_timeout_s=config.start_timeout_s,
            request_timeout_s=config.request_timeout_s,
            seed=seed + context.rank,
            device=Platform.detect().kind,
        )
        self.server = EngineServer(spec, context.log_path.with_name(f"{name}.log"))
        self.server.start()
        self.client = EngineClient(self.server.url, self.server.admin_key, config.request_timeout_s, name=name)

    def mesh_position(self) -> MeshPosition:
        """Engines are data-parallel: each takes a share of the prompts."""
        return MeshPosition(self.rank, self.world_size, True)

    @register(Dispatch.ONE_TO_ALL)
    def wait_ready(self) -> str:
        """Wait until the engine serves; returns its address."""
        self.server.wait_ready()
        return self.server.url

    @register(Dispatch.DP, reads=("prompt_ids",), writes=("response_ids", "rollout_log_probs", "finish_reason", "weight_version"))
    def generate(self, batch: DataProto, sampling: SamplingConfig, max_new_tokens: int, stop_token_ids: Sequence[int]) -> DataProto:
        """One response a row. The stop token is part of the response."""
        self.server.check_alive()
        prompts = batch.jagged("prompt_ids")
        params = SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k)
        rows = [prompts.row(i).tolist() for i in range(len(prompts))]
        return _columns(self.client.generate(rows, params, max_new_tokens, list(stop_token_ids)))

    # ---- weights ----------------------------------------------------------------------------------------------------------------------

    @register(Dispatch.ONE_TO_ALL)
    def join_weights(self, offers: Sequence[WeightsOffer]) -> None:
        """Join the group of each stage, in order (each blocks until it is complete)."""
        first = 1 + self.rank * self.server.spec.ranks
        for offer in offers:
            self.client.init_weights_group(offer.host, offer.port, first, offer.world_size, offer.group, backend=offer.backend)

    @register(Dispatch.ONE_TO_ALL)
    def leave_weights(self, offers: Sequence[WeightsOffer]) -> None:
        """Leave the group of each stage."""
        for offer in offers:
            self.client.destroy_weights_group(offer.group)

    @register(Dispatch.ONE_TO_ALL)
    def receive_weights(self, offers: Sequence[WeightsOffer], version: int) -> None:
        """One sync: pause, receive every bucket of every stage, commit under `version`, go on."""
        self.client.pause("retract")
        self.client.begin_weight_update()
        for offer in offers:
            for bucket in offer.buckets:
                self.client.receive_weights(offer.group, bucket.names, bucket.dtypes, bucket.shapes)
        self.client.end_weight_update()
        self.client.set_weight_version(version)
        self.client.resume()

    @register(Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        """Of all parameters of the engine."""
        return self.client.weights_checksum()

    @register(Dispatch.ONE_TO_ALL)
    def stop(self) -> None:
        """End the engine and all its processes."""
        self.server.stop()


def _columns(completions: list[Completion]) -> DataProto:
    columns: dict[str, Any] = {
        "response_ids": Jagged.from_rows([np.asarray(c.token_ids, np.int64) for c in completions], np.int64),
        "rollout_log_probs": Jagged.from_rows([np.asarray(c.log_probs, np.float32) for c in completions], np.float32),
        "finish_reason": np.array([c.finish_reason for c in completions], dtype=object),
        # the version that made the last token; a response may span several once rollouts are partial
        "weight_version": np.array([c.weight_versions[-1].version if c.weight_versions else "" for c in completions], dtype=object),
    }
    return DataProto.from_columns(columns)
