"""The rollout worker: one process beside each SGLang engine, which it starts, watches, and speaks to over loopback HTTP."""

from __future__ import annotations

import json
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
from hybridflow.routes import ROUTES, unknown, with_free_end
from hybridflow.workers.weights_offer import WeightsOffer


class RolloutWorker:
    """Owns one engine. Rank r of the group owns engine r."""

    def __init__(
        self, context: WorkerContext, config: RolloutConfig, model_folder: Path, dtype: str, seed: int, with_routes: bool = False
    ) -> None:
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
            return_routed_experts=with_routes,
            memory_saver=config.sleep_while_training,
        )
        self._hf_config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
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
        return _columns(self._generate(batch, sampling, max_new_tokens, stop_token_ids))

    @register(Dispatch.DP, reads=("prompt_ids",), writes=("response_ids", "rollout_log_probs", "finish_reason", "weight_version", ROUTES))
    def generate_with_routes(
        self, batch: DataProto, sampling: SamplingConfig, max_new_tokens: int, stop_token_ids: Sequence[int]
    ) -> DataProto:
        """The same, with the experts that each token of prompt and response went through (`hybridflow.routes`)."""
        completions = self._generate(batch, sampling, max_new_tokens, stop_token_ids, with_routes=True)
        tokens = batch.lengths("prompt_ids") + [len(completion.token_ids) for completion in completions]
        rows = [self._routes(completion, int(count)) for completion, count in zip(completions, tokens, strict=True)]
        return _columns(completions).with_columns(**{ROUTES: Jagged.from_rows(rows, np.int16)})

    def _generate(
        self, batch: DataProto, sampling: SamplingConfig, max_new_tokens: int, stop_token_ids: Sequence[int], with_routes: bool = False
    ) -> list[Completion]:
        self.server.check_alive()
        prompts = batch.jagged("prompt_ids")
        params = SamplingParams(sampling.temperature, sampling.top_p, sampling.top_k)
        rows = [prompts.row(i).tolist() for i in range(len(prompts))]
        return self.client.generate(rows, params, max_new_tokens, list(stop_token_ids), with_routes=with_routes)

    def _routes(self, completion: Completion, tokens: int) -> np.ndarray:
        layers = int(self._hf_config["num_hidden_layers"])
        if completion.routes is None or not completion.token_ids:  # an empty response: nothing of it is trained on
            return unknown(tokens, layers, int(self._hf_config["num_experts_per_tok"]))
        return with_free_end(completion.routes, tokens, layers, f"engine {self.client.name}")

    # ---- memory -----------------------------------------------------------------------------------------------------------------------

    @register(Dispatch.ONE_TO_ALL)
    def sleep(self) -> None:
        """Give weights and KV cache of the engine back to the device. On CPU the engine agrees and keeps them."""
        self.client.flush_cache()
        self.client.release_memory()

    @register(Dispatch.ONE_TO_ALL)
    def wake(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take the memory of these parts again. Weights are then empty until the next sync."""
        self.client.resume_memory(tags)

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
