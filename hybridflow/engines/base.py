"""What an engine is: a server of one model that answers prompts and takes new weights, as the
rollout worker sees it.

`rollout.engine` names a kind of engine: a package of this room, or a file of the user's
(`path/to/file.py:name`). It registers in `ENGINES` what makes an `Engine` of a spec, a log file,
and a check that `check_alive` and `wait_ready` make as well: it raises EngineError when something
that the engine needs elsewhere is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hybridflow.batch import Supports
from hybridflow.config.keys import ENGINE
from hybridflow.config.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    import torch

    from hybridflow.config.schema import SamplingConfig
    from hybridflow.engines.spec import EngineSpec
    from hybridflow.sync.schedule import EngineLayout
    from hybridflow.sync.session import Order, Outcome


@dataclass(frozen=True)
class WeightSpan:
    """Tokens `start` (inclusive) to `end` (exclusive) of a response were made by the weights of
    `version`."""

    version: str
    start: int
    end: int


class Extras(NamedTuple):
    """What is asked for besides tokens and log-probs: the experts of each token, and what it was
    sampled among."""

    routes: bool = False
    support: bool = False


NO_EXTRAS = Extras()


@dataclass(frozen=True)
class Completion:
    """One response."""

    token_ids: Sequence[int] | np.ndarray  # [t] the stop token included when there was one
    # [t] log softmax(logits / temperature), before top-k and top-p cut it; of the logits at 0; with
    # `support` over that
    log_probs: Sequence[float] | np.ndarray
    finish_reason: str  # stop | length | abort
    weight_versions: tuple[WeightSpan, ...]  # which weights made which tokens, in order
    # [prompt + response tokens - 1, layers x experts a token] int32, the experts each token went
    # through, when asked for; None too for a request that was aborted before it ran
    routes: np.ndarray | None = None
    support: Supports | None = None  # of the t tokens, when asked for


class Engine(Protocol):
    """One engine from its start to its end. Calls have deadlines and raise EngineError.

    Of several nodes each has an object; all but the first are only started, checked and stopped.
    """

    spec: EngineSpec  # after `start` with the address where its nodes meet

    def start(self) -> None:
        """Start its processes and return; they end with this process, however that one ends."""

    def wait_ready(self) -> None:
        """Wait until it answers; after an error nothing of it is left running."""

    def check_alive(self) -> None:
        """Raise, with the last lines of its log, when it is not running. Called often."""

    def log_tail(self) -> str:
        """The last lines of its log."""

    def stop(self) -> None:
        """End all its processes. May be called again."""

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
        """One response for each prompt, in order; the stop token ends a response and is part of it.
        An engine that has no argument `with_support` is not asked for it.

        Raises:
            EngineError: with `begun`, where the engine tells what it has before the end: other
                engines go on from there. An answer of `begun` that has not ended has the finish
                reason `abort`.
        """

    def describe(self, host: str, port: int, timeout_s: float) -> EngineLayout:
        """Have each rank post to the sync's store where its weights lie."""

    def receive(self, order: Order, plan: str) -> Outcome:
        """Take all weights of the order or none, by the plan of this digest; raises none of our
        errors."""

    def sleep(self) -> None:
        """Give the memory of weights and KV cache back to the device."""

    def wake(self, tags: Sequence[str]) -> None:
        """Take the memory of `weights` or `kv_cache` again, without contents."""


class LocalEngine(Engine, Protocol):
    """An engine in the trainer's process (`cluster.in_process`), which takes the trainer's weights
    by reference."""

    def take(self, version: str, fill: Callable[[Mapping[str, torch.Tensor]], int]) -> int:
        """Have `fill` write this version into the engine's tensors, by Hugging Face name; returns
        what it returns. After an error the engine answers nothing until it has taken weights
        again."""


ENGINES: Registry[Callable[[EngineSpec, Path, Callable[[], None]], Engine]] = Registry(
    ENGINE.kind, ENGINE.package, "rollout.engine", packages=True
)
