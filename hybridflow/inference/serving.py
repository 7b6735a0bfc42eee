"""Serving of a model to OpenAI clients until the process is stopped."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from hybridflow.agents.call_reading import format_of
from hybridflow.agents.conversation import Sampled
from hybridflow.agents.model_server import ModelServer
from hybridflow.config import derived
from hybridflow.config.schema import RunConfig, SamplingConfig
from hybridflow.errors import ConfigError, EnginesLostError, HybridFlowError
from hybridflow.inference.engines import started
from hybridflow.inference.model import Model, opened
from hybridflow.inference.source import Source
from hybridflow.observe.progress import Progress
from hybridflow.process.secret import API_KEY
from hybridflow.rollout.conversations import sampled_of
from hybridflow.rollout.requests import Request, Requests
from hybridflow.single_controller import block_on
from hybridflow.trainer.preload import Preload

# tokens at the end of an engine's context in which no prompt may end
_MARGIN = 8


@dataclass(frozen=True)
class Address:
    """The address on which to listen. Port 0 selects a free port."""

    host: str
    port: int


def serve(
    source: Source, config: RunConfig, address: Address, preload: Preload, progress: Progress
) -> None:
    """Serve the model until this process is interrupted. Never returns normally.

    Raises:
        KeyboardInterrupt: SIGINT or SIGTERM arrived; the server and the engines have been stopped.
        ConfigError: the address cannot be used.
        EngineError: engines did not start, or were lost too often.
    """
    with ExitStack() as stack:
        model = stack.enter_context(opened(source, config, progress))
        logs = model.temporary / "logs"
        engines = stack.enter_context(started(model, source.step or 0, logs, preload, progress))
        with progress.stage(f"start {config.rollout.engine}"):
            engines.wait()
        key = os.environ.get(API_KEY) or secrets.token_urlsafe(32)
        asking = Asking(engines.requests)
        server = server_of(model, source.name, key, asking.sample)
        stack.callback(lambda: block_on(server.close()))
        block_on(_serve(server, address, key, asking, progress))


def server_of(
    model: Model,
    name: str,
    key: str,
    sample: Callable[[Sequence[int], int, SamplingConfig], Awaitable[Sampled]],
) -> ModelServer:
    """Create the server of a model without opening it."""
    config = model.config
    template = model.tokenizer.template
    shown = format_of(template.example_call) if template.example_call else None
    limit = derived.hf_config(config.model).get("max_position_embeddings")
    longest = config.rollout.max_total_tokens
    context = min(limit, longest) if isinstance(limit, int) else longest
    return ModelServer(
        model.tokenizer,
        sample,
        model=name,
        key=key,
        context=context - _MARGIN,
        defaults=config.rollout.val_sampling,
        call_format=shown or config.rollout.agent.call_format,
    )


async def _serve(
    server: ModelServer, address: Address, key: str, asking: Asking, progress: Progress
) -> None:
    try:
        await server.open(address.host, address.port)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"could not listen on {address.host} port {address.port} ({error}); choose another "
            "--host or --port (0: any free one)"
        ) from error
    progress.message(f"model {server.model} at {server.base_url}")
    if os.environ.get(API_KEY):
        progress.message(f"the API key is read from {API_KEY}")
    else:
        progress.message(f"API key, for this server only: {key}")
    progress.message("press Ctrl-C to stop the server")
    await asking.run()


class Asking:
    """Forwards client requests to the engines."""

    def __init__(self, engines: Requests) -> None:
        self.engines = engines
        self._pending: set[Request] = set()

    async def sample(self, tokens: Sequence[int], most: int, sampling: SamplingConfig) -> Sampled:
        """Sample up to `most` tokens that continue the given ones.

        Raises:
            HybridFlowError: the engines failed.
        """
        request = self.engines.ask(tokens, most, training=False, sampling=sampling)
        self._pending.add(request)
        try:
            answer, row = await self.engines.answer(request)
        finally:
            self._pending.discard(request)
        return sampled_of(answer, row, len(tokens), most)

    async def run(self) -> None:
        """Send requests and receive answers. Never returns normally. If an engine fails, its
        requests fail, and all others continue after the restart.

        Raises:
            EnginesLostError: no engine is left.
        """
        engines = self.engines
        while True:
            engines.asked.clear()
            if engines.is_idle:
                await engines.asked.wait()
            try:
                await engines.advance()
            except HybridFlowError as error:
                await self._fail(error)
                if isinstance(error, EnginesLostError):
                    raise

    async def _fail(self, error: HybridFlowError) -> None:
        for request in list(self._pending):
            if request.is_over is not None and not request.is_over.done():
                request.is_over.set_exception(error)
        await self.engines.forget()
        await asyncio.sleep(0)  # let their clients be answered
