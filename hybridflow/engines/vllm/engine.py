"""An engine (`engines.base.Engine`) backed by one vLLM server: the server and its HTTP client."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hybridflow
from hybridflow.engines.base import ENGINES
from hybridflow.engines.served_engine import ServedEngine
from hybridflow.engines.server import command_line
from hybridflow.engines.vllm.client import VllmClient
from hybridflow.engines.vllm.server import (
    IMPORTS,
    check_python,
    check_spec,
    environment,
    server_arguments,
)
from hybridflow.sync.session import Order, Outcome


class VllmEngine(ServedEngine):
    """One vLLM server, run with the interpreter `EngineSpec.python`."""

    client_class = VllmClient

    def receive(self, order: Order, plan: str) -> Outcome:
        """Receive weights like `ServedEngine.receive`, and record the version for later tokens."""
        outcome = super().receive(order, plan)
        if outcome.status == "served":
            self.client.tokens.version = str(order.version)
        return outcome

    def sleep(self) -> None:
        """Release device memory. On CPU the server reports success but frees nothing."""
        self.client.release_memory()

    def wake(self, tags: Sequence[str]) -> None:
        """Reallocate device memory. Weights are uninitialised until the next sync."""
        self.client.resume_memory(tags)

    # ---- the server

    def _prepare(self) -> None:
        check_spec(self.spec)
        check_python(self.spec)

    def _command(self) -> list[str]:
        return [
            "-m",
            "vllm.entrypoints.openai.api_server",
            *command_line(server_arguments(self.spec, self.port)),
        ]

    def _environment(self) -> dict[str, str]:
        return environment(self.spec, self._folder, self.admin_key)

    def _fill(self, folder: Path) -> None:
        imports = folder / IMPORTS
        imports.mkdir()
        (imports / "hybridflow").symlink_to(
            Path(hybridflow.__file__).parent, target_is_directory=True
        )

    def _one_token(self) -> tuple[str, dict[str, Any]]:
        parameters = {"max_tokens": 1, "temperature": 0.0, "detokenize": False}
        return "/inference/v1/generate", {"token_ids": [0], "sampling_params": parameters}


ENGINES.register("vllm", VllmEngine)
