"""The Engine protocol: an inference server for one model, as used by the rollout worker, with its
requests and responses.

`rollout.engine` selects a kind of engine: a package next to this file, or a user file
(`path/to/file.py:name`). Each kind registers a constructor in `ENGINES`, which receives a spec, a
log file and a check. `check_alive` and `wait_ready` also call this check, which raises EngineError
if a remote component that the engine depends on is lost. An engine that also implements `Streams`
reports each response as soon as it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np

from hybridflow.batch import DataProto, Supports
from hybridflow.config.keys import ENGINE
from hybridflow.config.registry import Registry
from hybridflow.config.schema import SamplingConfig
from hybridflow.data.image_tokens import GRIDS, PIXELS
from hybridflow.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from hybridflow.config.schema import SamplingConfig
    from hybridflow.engines.spec import EngineSpec
    from hybridflow.sync.schedule import EngineLayout
    from hybridflow.sync.session import Order, Outcome

ENGINES: Registry[Callable[[EngineSpec, Path, Callable[[], None]], Engine]] = Registry(
    ENGINE.kind, ENGINE.package, "rollout.engine", packages=True
)


@dataclass(frozen=True)
class WeightSpan:
    """A range of response tokens generated with a single weight version, from `start` (inclusive)
    to `end` (exclusive)."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class PromptImages:
    """The images of a prompt: `pixels` [p, c] contains float32 patches, and `grids` [i, 3] the
    patch grid (frames, rows, columns) of each image. i is 0 for a prompt without images.
    """

    pixels: np.ndarray
    grids: np.ndarray

    def digest(self) -> str:
        """Return the sha256 digest of the patches and grids."""
        found = sha256(self.grids.astype("int64").tobytes())
        found.update(self.pixels.astype("float32").tobytes())
        return found.hexdigest()

    def equals(self, other: PromptImages) -> bool:
        """Return True if the images are the same. Much faster than comparing digests."""
        pairs = ((self.grids, other.grids), (self.pixels, other.pixels))
        return all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)


def prompt_images(prompts: DataProto) -> list[PromptImages]:
    """Return the images of each prompt, or an empty list if no prompt has images."""
    if GRIDS not in prompts or not len(prompts.jagged(GRIDS).values):
        return []
    both = zip(prompts.jagged(PIXELS), prompts.jagged(GRIDS), strict=True)
    return [PromptImages(pixels, grids) for pixels, grids in both]


def check_tokens(prompts: Sequence[Sequence[int]], vocabulary: int, name: str) -> None:
    """Reject tokens outside the model's vocabulary. Servers use token ids as indices into the
    embedding. An invalid id crashes some servers, which fails all other requests too, and makes
    others read padding.

    Args:
        prompts: token ids.
        vocabulary: vocabulary size of the model; 0 if unknown.
        name: name of the engine.

    Raises:
        EngineError: a token is invalid; the message names the prompt and the token.
    """
    for number, prompt in enumerate(prompts):
        if not vocabulary or not len(prompt):
            continue
        wrong = max(prompt) if min(prompt) >= 0 else min(prompt)
        if not 0 <= wrong < vocabulary:
            raise EngineError(
                f"prompt {number} contains token {wrong}, but the model's token ids are 0 to "
                f"{vocabulary - 1}",
                engine=name,
            )


class Extras(NamedTuple):
    """Optional outputs of generation, in addition to tokens and log-probs: the experts and the
    sampling support of each token.
    """

    routes: bool = False
    support: bool = False


NO_EXTRAS = Extras()


@dataclass(frozen=True)
class Completion:
    """One response."""

    token_ids: Sequence[int] | np.ndarray  # [t] including the stop token, if any
    # [t] log softmax(logits / temperature), before top-k and top-p are applied; at temperature 0,
    # log softmax(logits); with `support`, normalised over the support
    log_probs: Sequence[float] | np.ndarray
    finish_reason: str  # stop | length | abort
    weight_versions: tuple[WeightSpan, ...]  # weight versions by token range, in order
    # [prompt + response tokens - 1, layers x experts per token] int32: each token's experts, if
    # requested; also None for a request aborted before it ran
    routes: np.ndarray | None = None
    support: Supports | None = None  # supports of the t tokens, if requested


class Engine(Protocol):
    """Interface of one engine. All calls have deadlines and raise EngineError on failure. An engine
    that spans several nodes is represented by one object per node; objects on nodes other than the
    first are only started, checked and stopped.
    """

    spec: EngineSpec  # after `start`, includes the rendezvous address of the nodes

    def start(self) -> None:
        """Start the processes and return immediately. They exit with this process, even if it is
        killed."""

    def wait_ready(self) -> None:
        """Wait until the engine responds. If this fails, no process is left running."""

    def check_alive(self) -> None:
        """Raise EngineError, including the log tail, if the engine is not running. Must be cheap,
        because it is called often."""

    def log_tail(self) -> str:
        """Return the last lines of the log."""

    def stop(self) -> None:
        """Stop all processes. Idempotent."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        *,
        with_routes: bool = False,
        with_support: bool = False,
    ) -> list[Completion]:
        """Generate one response per prompt, in order. A stop token ends a response and is included
        in it. `with_support` is passed only if supports are requested, so an engine does not have
        to accept it. An engine that reads images also accepts `images`, a sequence with one
        `PromptImages` per prompt, which is passed only if a prompt has images.

        Raises:
            EngineError: if the engine streams responses, the error's `begun` contains the responses
                so far, from which other engines can continue. Unfinished responses have the finish
                reason `abort`.
        """

    def describe(self, host: str, port: int, timeout_s: float) -> EngineLayout:
        """Have each rank post its weight layout to the weight-sync store."""

    def receive(self, order: Order, plan: str) -> Outcome:
        """Load all weights of the order or none of them, using the plan with this digest. Failures
        are reported in the outcome; no HybridFlowError is raised.
        """

    def sleep(self) -> None:
        """Release the device memory of weights and KV cache."""

    def wake(self, tags: Sequence[str]) -> None:
        """Reallocate the memory of `weights` or `kv_cache`. Its contents are uninitialised."""


class LocalEngine(Engine, Protocol):
    """An engine in the trainer's process (`cluster.in_process`), which copies the trainer's weights
    directly."""

    def take(self, version: str, fill: Callable[[Mapping[str, torch.Tensor]], int]) -> int:
        """Call `fill` to write this version into the engine's tensors {Hugging Face name: tensor},
        and return the result of `fill`. If `fill` fails, the engine rejects requests until a later
        call succeeds."""


Told = Callable[[int, Completion], None]


@dataclass(frozen=True)
class TokenRequests:
    """A batch of prompts for one engine.

    Attributes:
        prompts: token ids of each prompt.
        max_new_tokens: maximum length of each response.
        stop_token_ids: tokens that end a response; the response includes this token.
        extras: optional outputs in addition to tokens and log-probs.
        images: the images of each prompt; empty if no prompt has images.
    """

    prompts: Sequence[Sequence[int]]
    sampling: SamplingConfig
    max_new_tokens: Sequence[int]
    stop_token_ids: Sequence[int]
    extras: Extras = NO_EXTRAS
    images: Sequence[PromptImages] = ()


class Asking(Protocol):
    """Interface of a batch of requests in flight."""

    # resolves after the last response was reported; fails if some requests were not answered
    done: Future[None]

    def so_far(self, number: int) -> Completion:
        """Return the response so far, without routed experts. An unfinished response has the finish
        reason `abort`. Thread-safe.
        """

    def abort(self, numbers: Sequence[int]) -> None:
        """Ask the engine to abort these requests. Each is still reported: with the tokens so far
        and the finish reason `abort`, or normally if it finishes first."""

    def give_up(self) -> None:
        """Abort all requests in flight. `done` then fails with an EngineError, unless all requests
        have already finished.
        """


@runtime_checkable
class Streams(Protocol):
    """Interface for engines that run many requests concurrently and report each response when it is
    complete.
    """

    def ask(self, requests: TokenRequests, told: Told) -> Asking:
        """Send the requests and return immediately. `told(prompt index, response)` is called from
        another thread each time a response is complete.
        """


@dataclass(frozen=True)
class Load:
    """A server's metrics at one moment.

    Attributes:
        running, waiting: number of running requests and of queued requests.
        kv_use: fraction of the KV cache in use.
    """

    running: int
    waiting: int
    kv_use: float


@runtime_checkable
class ReportsLoad(Protocol):
    """An engine whose server reports its load."""

    def load(self) -> Load:
        """Return the server's current load. Raises EngineError if the server does not respond."""

    def take_prefix_hits(self) -> float | None:
        """Return the fraction of prompt tokens found in the server's prefix cache, over all
        requests that have ended since the last call; None if there are none.
        """

    def take_drafts(self) -> dict[str, float]:
        """Return the acceptance rate of drafted tokens, overall and per draft depth, and the mean
        number of tokens per forward pass. Covers the same requests as `take_prefix_hits`; empty if
        the engine does not draft.
        """
