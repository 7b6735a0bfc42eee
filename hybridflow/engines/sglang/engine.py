"""An engine (`engines.base.Engine`) backed by one SGLang server: the server and its HTTP client."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridflow.engines.base import ENGINES
from hybridflow.engines.load import Load
from hybridflow.engines.served_engine import ServedEngine
from hybridflow.engines.server import command_line
from hybridflow.engines.sglang.client import EngineClient
from hybridflow.engines.sglang.server import KEYS, environment, meeting_address, server_arguments
from hybridflow.process.rendezvous import master_store


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
