"""An engine (`engines.base.Engine`) backed by one SGLang server: the server's token protocol, its
HTTP client, and the engine itself.

Log-probs: SGLang returns, for each generated token, log softmax(logits / temperature) over the full
vocabulary, *before* top-k, top-p and min-p are applied (sglang/srt/layers/sampler.py, standard
path). At temperature 0 it is log softmax(logits). With `return_sampling_mask`, which requires a
finite top_k, it is normalised over the sampler's support instead. Log-probs arrive packed
(`server_changes`).

Messages to HybridFlow's code inside the ranks (`Control`) go through SGLang's own update endpoint:
`/update_weights_from_tensor` passes a list of (name, tensor) to every tensor-parallel rank and
calls the function named by `load_format` on it (`weight_receiver.load`). The name contains the
message as JSON; the tensor is an unused byte.
"""

from __future__ import annotations

import base64
import os
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridflow.batch import Supports
from hybridflow.engines.base import ENGINES, Load, TokenRequests
from hybridflow.engines.served_engine import ServedEngine, ServerClient
from hybridflow.engines.server import command_line
from hybridflow.engines.sglang.images import encode
from hybridflow.engines.sglang.server import (
    KEYS,
    LOADER,
    environment,
    meeting_address,
    server_arguments,
)
from hybridflow.engines.sglang.server_changes import LOG_PROBS, SUPPORT_IDS, SUPPORT_SIZES
from hybridflow.engines.token_stream import Asked, TokenStreams
from hybridflow.errors import EngineError
from hybridflow.process.rendezvous import master_store

if TYPE_CHECKING:
    from hybridflow.sync.session import Control, PauseMode

EVENT_TOKENS = 256  # tokens between events; the first token and the last also send one
_REFUSED = 400  # statuses from this one upward mean that SGLang ended the request with an error
# start of the error message if the next token's support is larger than --sampling-mask-max-tokens;
# that token is dropped, and the earlier ones are valid
# (managers/scheduler_components/batch_result_processor.py:1333)
_OVERFLOW = "Sampling support exceeds"
# a response's number of drafted tokens, and of passes that accepted 0, 1, 2, ... of a draft
# (managers/tokenizer_manager.py:3171 and 3196)
_DRAFTED = "spec_num_proposed_drafts"
_ACCEPTED = "spec_correct_drafts_histogram"
_LOAD_S = 5.0
_SETTLE_S = 30  # time for the scheduler to release an answered batch


def rank_messages(control: Control) -> list[str]:
    """Return `serialized_named_tensors` for SGLang, one entry per rank.

    SGLang accepts only pickles here (sglang/srt/managers/tp_worker.py:194). Its endpoint requires
    the admin key and unpickles with an allow-list. HybridFlow only writes these pickles and never
    reads any.
    """
    import torch

    packed = pickle.dumps([(control.to_json(), torch.zeros(1, dtype=torch.uint8))])
    return [base64.b64encode(packed).decode()] * control.ranks


class SglangStreams(TokenStreams):
    """Token requests to one SGLang server."""

    reads_images = True
    image_dtype = "float32"  # of the server's vision tower
    # of the requests that ended since `take_prefix_hits`. The server's own rate is only computed
    # with --enable-metrics, which needs prometheus_client
    _prompt_tokens = 0
    _cached_tokens = 0
    # of the same requests: drafted tokens, and passes by how many tokens of a draft they accepted
    _drafted = 0
    _passes: Mapping[int, int] = MappingProxyType({})

    def take_prefix_hits(self) -> float | None:
        """Return the fraction of prompt tokens found in the prefix cache, over all requests since
        the last call; None if there were none.
        """
        read, self._prompt_tokens = self._prompt_tokens, 0
        cached, self._cached_tokens = self._cached_tokens, 0
        return cached / read if read else None

    def take_drafts(self) -> dict[str, float]:
        """Return {accepted_drafts: fraction of drafted tokens that were accepted, tokens_per_pass:
        mean number of tokens per verification pass}, over all requests since the last call; empty
        if nothing was drafted. If drafts have several tokens, `accepted_drafts/depth_K` is the
        fraction of passes that accepted at least the first K tokens of the draft.
        """
        drafted, self._drafted = self._drafted, 0
        passes, self._passes = self._passes, {}
        count = sum(passes.values())
        if not count:
            return {}
        depths = range(1, drafted // count + 1)
        accepted = [sum(n for most, n in passes.items() if most >= depth) for depth in depths]
        found = {
            "accepted_drafts": sum(accepted) / drafted,
            "tokens_per_pass": 1 + sum(accepted) / count,
        }
        if len(depths) > 1:
            for depth, number in zip(depths, accepted, strict=True):
                found[f"accepted_drafts/depth_{depth}"] = number / count
        return found

    def _count_drafts(self, meta: dict[str, Any]) -> None:
        self._drafted += int(meta.get(_DRAFTED) or 0)
        passes = dict(self._passes)
        for accepted, count in enumerate(meta.get(_ACCEPTED) or ()):
            passes[accepted] = passes.get(accepted, 0) + int(count)
        self._passes = passes

    def _body(self, asked: Asked, numbers: range) -> dict[str, Any]:
        body: dict[str, Any] = {
            "rid": [asked.names[number] for number in numbers],
            "input_ids": [asked.prompts[number] for number in numbers],
            "sampling_params": [
                asked.parameters[number] | {"stream_interval": EVENT_TOKENS} for number in numbers
            ],
            "return_logprob": True,
            "stream": True,
        }
        if asked.images:
            images = [asked.images[number] for number in numbers]
            body["image_data"] = encode(images, self.image_dtype)
        wanted = {
            "return_routed_experts": asked.extras.routes,
            "return_sampling_mask": asked.extras.support,
        }
        return body | {name: True for name, value in wanted.items() if value}

    def _read(self, asked: Asked, event: Any, names: Mapping[str, int]) -> str:
        meta = event["meta_info"]
        name = meta["id"]
        ended = meta["finish_reason"]
        if ended is not None and (ended.get("status_code") or 0) >= _REFUSED:
            message = str(ended.get("message"))
            if not message.startswith(_OVERFLOW):
                raise EngineError(f"{self.path} failed: {message[:500]}", engine=self.name)
        if ended is not None:
            self._prompt_tokens += len(asked.prompts[names[name]])
            self._cached_tokens += int(meta.get("cached_tokens") or 0)
            self._count_drafts(meta)
        answer = asked.answers[names[name]]
        tokens = np.array(event["output_ids"], dtype=np.int64)
        log_probs = _decoded(meta, LOG_PROBS, np.float32)
        supports = None
        if asked.extras.support:
            supports = Supports(
                *(_decoded(meta, name, np.int32) for name in (SUPPORT_SIZES, SUPPORT_IDS))
            )
        spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0}]
        answer.routes = meta.get("routed_experts")
        answer.add(tokens, log_probs, ended["type"] if ended is not None else "", spans, supports)
        return str(name)

    async def _call_off(self, names: Sequence[str]) -> None:
        for name in names:
            await self._tell("/abort_request", {"rid": name})


def _decoded(meta: Mapping[str, Any], name: str, kind: type) -> np.ndarray:
    return np.frombuffer(base64.b64decode(meta.get(name, "")), dtype=kind)


class EngineClient(ServerClient):
    """HTTP client of one SGLang server."""

    streams = SglangStreams
    tokens: SglangStreams

    def _parameters(self, requests: TokenRequests, limit: int) -> dict[str, Any]:
        return {
            "temperature": requests.sampling.temperature,
            "top_p": requests.sampling.top_p,
            "top_k": requests.sampling.top_k,
            "min_p": requests.sampling.min_p,
            "frequency_penalty": requests.sampling.frequency_penalty,
            "presence_penalty": requests.sampling.presence_penalty,
            "repetition_penalty": requests.sampling.repetition_penalty,
            **(
                {"stop": list(requests.sampling.stop), "no_stop_trim": True}
                if requests.sampling.stop
                else {}
            ),
            "stop_token_ids": [int(token) for token in requests.stop_token_ids],
            "max_new_tokens": int(limit),
        }

    def load(self) -> Load:
        """Return the load over all of the server's data-parallel ranks
        (sglang/srt/managers/load_snapshot.py).
        """
        found = self._read("/v1/loads?include=core", _LOAD_S)
        try:
            loads = [
                Load(
                    int(one["num_running_reqs"]),
                    int(one["num_waiting_reqs"]),
                    float(one["token_usage"]),
                )
                for one in found["loads"]
            ]
            return Load(
                sum(one.running for one in loads),
                sum(one.waiting for one in loads),
                fmean(one.kv_use for one in loads),
            )
        except (TypeError, KeyError, ValueError) as error:  # `fmean` of nothing too
            raise EngineError(f"/v1/loads: {error!r}", engine=self.name) from error

    # ---- memory

    def release_memory(self, tags: Sequence[str]) -> None:
        """Release the device memory of these parts and discard their contents. Must not be called
        while requests are running.

        On CPU SGLang reports success but frees nothing, because its memory saver needs CUDA's
        virtual memory calls.
        """
        self._request("/release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[str]) -> None:
        """Reallocate memory for these parts. Weights must be sent before the next request."""
        self._request("/resume_memory_occupation", {"tags": list(tags)})

    # ---- weights

    def pause(self, mode: PauseMode = "retract") -> None:
        """Stop generating.

        Args:
            mode: treatment of running requests. `abort` ends them; `retract` suspends them and
                recomputes their KV cache on resume; `in_place` suspends them and keeps the KV cache
                computed with the old weights.
        """
        self._post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Continue generating after `pause`."""
        self._post("/continue_generation", {})

    def begin_weight_update(self) -> None:
        """Open the session that `call_ranks` requires. Call `pause` first; otherwise this call
        waits for the requests in flight."""
        self._post("/begin_weight_update", {})

    def end_weight_update(self) -> None:
        """Close the session. While a session is open, the next `begin_weight_update` fails."""
        self._post("/end_weight_update", {})

    def call_ranks(self, control: Control, *, flush_cache: bool = True) -> None:
        """Deliver a message to HybridFlow's code in every tensor-parallel rank, and wait until all
        have handled it. The ranks report through the weight-sync store.

        Requires an open session.

        Args:
            control: the message.
            flush_cache: drop cached prefixes, because they were computed with the old weights.
                Fails while requests are paused with `pause("in_place")`. `weight_version` is not
                sent, because SGLang would adopt the new name even if the loader failed.
        """
        body = {
            "serialized_named_tensors": rank_messages(control),
            "load_format": LOADER,
            "flush_cache": flush_cache,
        }
        self._post("/update_weights_from_tensor", body)

    def set_weight_version(self, version: int | str) -> None:
        """Set the version of the loaded weights. It is reported for later tokens in
        `Completion.weight_versions`."""
        self._post(
            "/update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )

    def flush_cache(self) -> None:
        """Drop cached prefixes. SGLang rejects this while requests are running, and may take a
        moment to release the last completed batch.
        """
        self._request(f"/flush_cache?timeout={_SETTLE_S}", {})

    # ---- control calls

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make a control call. SGLang responds with `{success, message}` and status 200 or 400."""
        answer = self._call(path, body)
        if not isinstance(answer, dict):
            raise EngineError(
                f"{path} failed: expected a JSON object, got {type(answer).__name__}",
                engine=self.name,
            )
        if answer.get("success") is False:
            raise EngineError(
                f"{path} failed: {answer.get('message', 'no reason given')}", engine=self.name
            )
        return answer


class SglangEngine(ServedEngine):
    """One SGLang server."""

    client_class = EngineClient

    @cached_property
    def client(self) -> EngineClient:
        """The server's client. Valid after `start`."""
        client = EngineClient(
            self.url, self.admin_key, self.spec.request_timeout_s, name=self.spec.name
        )
        client.tokens.image_dtype = self.spec.dtype
        return client

    def load(self) -> Load:
        """Return the server's load."""
        return self.client.load()

    def take_prefix_hits(self) -> float | None:
        """Return the fraction of prompt tokens found in the prefix cache since the last call; None
        if there were no requests."""
        if "client" not in self.__dict__:  # it has just been restarted
            return None
        return self.client.tokens.take_prefix_hits()

    def take_drafts(self) -> dict[str, float]:
        """Return the acceptance rates of drafted tokens since the last call
        (`SglangStreams.take_drafts`)."""
        return {} if "client" not in self.__dict__ else self.client.tokens.take_drafts()

    def sleep(self) -> None:
        """Release device memory. On CPU the server reports success but frees nothing."""
        self.client.flush_cache()
        self.client.release_memory(("kv_cache", "weights", *self._graphs))

    def wake(self, tags: Sequence[str]) -> None:
        """Reallocate device memory. Weights are uninitialised until the next sync; CUDA graphs are
        restored together with the KV cache that they read."""
        self.client.resume_memory((*tags, *(self._graphs if "kv_cache" in tags else ())))

    @property
    def _graphs(self) -> tuple[str, ...]:
        return ("cuda_graph",) if self.spec.memory_saver and self.spec.device == "cuda" else ()

    # ---- the server

    def _prepare(self) -> None:
        if self.spec.nnodes > 1 and self.spec.node_rank == 0:
            host, port = meeting_address(self.spec)
            self._store = master_store(host, port, self.spec.start_timeout_s)
            self.spec = replace(self.spec, dist_init_addr=f"{host}:{self._store.port}")

    def _command(self) -> list[str]:
        command = ["-m", "sglang.launch_server", "--config", os.path.join(self._folder, KEYS)]
        return command + command_line(server_arguments(self.spec, self.port))

    def _environment(self) -> dict[str, str]:
        return environment(self.spec, self._folder)

    def _fill(self, folder: Path) -> None:
        """Write the keys to a private file, because any user of the machine can read command lines.

        `admin-api-key` protects weights and control calls, `api-key` generation
        (sglang/srt/utils/auth.py:74); both are set to the same key.
        """
        path = folder / KEYS
        path.touch(mode=0o600)
        path.write_text(
            f"api-key: {self.admin_key}\nadmin-api-key: {self.admin_key}\n", encoding="utf-8"
        )

    def _one_token(self) -> tuple[str, dict[str, Any]]:
        return "/generate", {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }


ENGINES.register("sglang", SglangEngine)
