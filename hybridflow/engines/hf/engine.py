"""The engine `hf`: a transformers model and its `generate`, in the trainer's process.

Intended for debugging and for very small machines. It is slower than a server with continuous
batching, because each batch runs until its longest response is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hybridflow.batch import Supports
from hybridflow.config.model_config import with_tower
from hybridflow.config.schema import SamplingConfig
from hybridflow.device.platform import Platform
from hybridflow.engines.base import (
    ENGINES,
    Completion,
    PromptImages,
    WeightSpan,
    check_tokens,
)
from hybridflow.engines.hf.images import read_images
from hybridflow.engines.spec import EngineSpec
from hybridflow.errors import EngineError, ModelError
from hybridflow.models import family_of
from hybridflow.models.causal import allocate, causal_on_meta, checkpoint_views
from hybridflow.sync.session import Order, Outcome, refuse

if TYPE_CHECKING:
    from transformers import DynamicCache

    from hybridflow.sync.schedule import EngineLayout

_WHY = (
    "the engine hf runs only in the trainer's process; set cluster=in-process or choose another "
    "rollout.engine"
)


class HfEngine:
    """An engine that runs in the caller's thread."""

    def __init__(self, spec: EngineSpec, log_path: Path, check: Callable[[], None]) -> None:
        self.spec = spec
        self._check = check
        self._model: Any = None
        self._version: str | None = None

    # ---- start and stop

    def start(self) -> None:
        """Build the model with uninitialised weights.

        Raises:
            ModelError: the tensors of the transformers model do not match the family's map.
        """
        config = json.loads(
            (Path(self.spec.model_path) / "config.json").read_text(encoding="utf-8")
        )
        family = family_of(with_tower(config))
        model = causal_on_meta(family, getattr(torch, self.spec.dtype))
        allocate(model, Platform.detect().device(0))
        held = {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(model)}
        if held != family.tensors():
            wrong = sorted(held.items() ^ family.tensors().items())
            raise ModelError(
                f"transformers' {type(model).__name__} and the family's map differ in {wrong[:4]}; "
                "use another rollout.engine"
            )
        self._model = model.eval().requires_grad_(False)
        # a response ends only at the requested stop tokens
        self._model.generation_config.eos_token_id = None

    def wait_ready(self) -> None:
        """Return immediately, since a started engine is ready. Raises EngineError if the engine was
        not started."""
        self.check_alive()

    def check_alive(self) -> None:
        """Raise EngineError if the engine was not started or has been stopped."""
        self._check()
        if self._model is None:
            raise EngineError("not running", engine=self.spec.name)

    def log_tail(self) -> str:
        """Return an empty string, because the engine writes to this process's log."""
        return ""

    def stop(self) -> None:
        """Release the model."""
        self._model = None
        self._version = None

    # ---- tokens

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        *,
        with_routes: bool = False,
        with_support: bool = False,
        images: Sequence[PromptImages] = (),
    ) -> list[Completion]:
        """Generate one response per prompt, in order, as documented in `Engine.generate`.

        Sampling depends only on seed, weight version, prompts and images, so a resumed run samples
        the same tokens as an uninterrupted one.
        """
        self.check_alive()
        if self._version is None:
            raise EngineError("weights are missing or incomplete", engine=self.spec.name)
        if with_routes:
            raise EngineError("returning routed experts is not supported", engine=self.spec.name)
        for name in ("frequency_penalty", "presence_penalty", "stop"):
            if value := getattr(sampling, name):
                raise EngineError(
                    f"rollout.sampling.{name}={value} is not supported; remove it",
                    engine=self.spec.name,
                )
        self._check_prompts(prompts)
        found: list[Completion] = []
        longest = max((len(prompt) for prompt in prompts), default=0) + max_new_tokens
        size = max(1, min(self.spec.max_running_requests, self.spec.max_total_tokens // longest))
        for start in range(0, len(prompts), size):
            found += self._answer(
                prompts[start : start + size],
                sampling,
                max_new_tokens,
                stop_token_ids,
                with_support,
                images[start : start + size],
            )
        return found

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise EngineError for a prompt that would make transformers crash or generate a wrong
        response."""
        config = self._model.config.get_text_config()
        check_tokens(prompts, config.vocab_size, self.spec.name)
        longest = config.max_position_embeddings
        for number, prompt in enumerate(prompts):
            if len(prompt) >= longest:
                said = (
                    f"prompt {number} has {len(prompt)} tokens, but the model's limit is {longest} "
                    "including the response"
                )
                raise EngineError(said, engine=self.spec.name)

    def _answer(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        most: int,
        stops: Sequence[int],
        with_support: bool,
        images: Sequence[PromptImages],
    ) -> list[Completion]:
        from transformers import GenerationConfig, LogitsProcessorList

        width = max(map(len, prompts))
        device = self._model.device
        rows = []
        flags = []
        for prompt in prompts:
            padding = [0] * (width - len(prompt))
            rows.append([*padding, *prompt])
            flags.append(padding + [1] * len(prompt))
        ids = torch.tensor(rows, device=device)
        mask = torch.tensor(flags, device=device)
        greedy = sampling.temperature == 0
        drawing: dict[str, Any] = {}
        if not greedy:
            drawing["temperature"] = sampling.temperature
            drawing["top_p"] = sampling.top_p
            drawing["top_k"] = max(0, sampling.top_k)
            drawing["min_p"] = sampling.min_p or None
        config = GenerationConfig(
            max_new_tokens=most,
            do_sample=not greedy,
            eos_token_id=list(stops) or None,
            pad_token_id=stops[0] if stops else 0,
            **drawing,
            repetition_penalty=sampling.repetition_penalty,
            return_dict_in_generate=True,
            output_scores=with_support,
        )
        scores = _LogProbs(1.0 if greedy else sampling.temperature)
        images = images if any(len(one.grids) for one in images) else ()
        keys = _keys(prompts, images)
        read = self._read_once(keys, ids, mask, images)
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else None):
            torch.manual_seed(self._seed(keys))
            made = self._model.generate(
                ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=LogitsProcessorList([scores]),
                **read,
            )
        tokens = made.sequences[:, width:]
        supports = list[Supports | None]([None] * len(prompts))
        log_probs = scores.of(made.sequences)
        if with_support:
            log_probs, supports = _among(torch.stack(made.scores, 1), tokens)
        answers = zip(tokens.tolist(), log_probs.tolist(), supports, strict=True)
        return [self._completion(*answer, stops) for answer in answers]

    def _read_once(
        self,
        keys: Sequence[Hashable],
        ids: torch.Tensor,
        mask: torch.Tensor,
        images: Sequence[PromptImages],
    ) -> dict[str, DynamicCache]:
        """Run the prefill once per distinct prompt (the samples of a group share a prompt). Returns
        `generate` arguments that contain the keys and values of all prompt tokens except the last,
        or an empty dict if no prompt is repeated or has images.

        Args:
            keys: one key per prompt; equal prompts have equal keys.
            ids, mask: [b, s] left-padded tokens, and a mask that is 0 at padding.
        """
        from transformers import DynamicCache

        self._set_rope_deltas(None)
        numbers: dict[Hashable, int] = {}
        which = [numbers.setdefault(key, len(numbers)) for key in keys]
        if (len(numbers) == len(keys) and not images) or ids.shape[1] == 1:
            return {}
        rows = [which.index(number) for number in range(len(numbers))]
        first = torch.tensor(rows, device=ids.device)
        ids = ids[first, :-1]
        mask = mask[first, :-1]
        cache = DynamicCache(config=self._model.config.get_text_config(decoder=True))
        if images:
            shown = [images[row] for row in rows]
            deltas = read_images(self._model, shown, ids, mask, cache)
            self._set_rope_deltas(deltas[which])
        else:
            positions = mask.cumsum(-1) - 1
            self._model(
                ids,
                attention_mask=mask,
                position_ids=positions.clamp(min=0),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        cache.reorder_cache(torch.tensor(which, device=ids.device))
        return {"past_key_values": cache}

    def _set_rope_deltas(self, deltas: torch.Tensor | None) -> None:
        """Set each prompt's offset between token positions and token counts, which its images
        cause. transformers stores the offset in the model, so it persists between calls.
        """
        if hasattr(self._model.model, "rope_deltas"):
            self._model.model.rope_deltas = deltas

    def _completion(
        self,
        tokens: list[int],
        log_probs: list[float],
        support: Supports | None,
        stops: Sequence[int],
    ) -> Completion:
        length = len(tokens)
        reason = "length"
        for number, token in enumerate(tokens):
            if token in stops:
                length = number + 1
                reason = "stop"
                break
        span = (WeightSpan(str(self._version), 0, length),)
        if support is not None:
            support = support.take(slice(length))
        return Completion(tokens[:length], log_probs[:length], reason, span, support=support)

    def _seed(self, keys: Sequence[tuple[tuple[int, ...], str]]) -> int:
        given = [(tokens, digest) if digest else tokens for tokens, digest in keys]
        text = json.dumps([self.spec.seed, self._version, given])
        digest = hashlib.sha256(text.encode()).digest()
        return int.from_bytes(digest[:7], "little")

    # ---- weights and memory

    def take(self, version: str, fill: Callable[[Mapping[str, torch.Tensor]], int]) -> int:
        """Call `fill` to write a weight version into this model's tensors, and return its
        result."""
        self.check_alive()
        self._version = None
        written = fill(dict(checkpoint_tensors(self._model)))
        self._version = version
        return written

    def describe(self, host: str, port: int, timeout_s: float) -> EngineLayout:
        """Raise EngineError, because this engine does not receive weights over the network."""
        raise EngineError(_WHY, engine=self.spec.name)

    def receive(self, order: Order, plan: str) -> Outcome:
        """Reject the order: this engine does not receive weights over the network."""
        return refuse(order, _WHY)

    def sleep(self) -> None:
        """Do nothing, because the engine shares the trainer's device and keeps its memory."""

    def wake(self, tags: Sequence[str]) -> None:
        """Do nothing, because `sleep` releases no memory."""


class _LogProbs:
    """A transformers `LogitsProcessor` that records the log-prob of each sampled token, computed
    from the logits before top-k and top-p. The token sampled in one step is the last id in the next
    call.
    """

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature
        self._last: torch.Tensor | None = None  # [b, v] of the latest step
        self._taken: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._take(input_ids)
        logits = scores.float() / self._temperature
        self._last = torch.log_softmax(logits, dim=-1)
        return scores

    def of(self, sequences: torch.Tensor) -> torch.Tensor:
        """Return the log-probs of all generated tokens [b, t]; `sequences` is the result of
        `generate`."""
        self._take(sequences)
        return torch.stack(self._taken, dim=1)

    def _take(self, input_ids: torch.Tensor) -> None:
        if self._last is not None:
            taken = self._last.gather(1, input_ids[:, -1:])
            self._taken.append(taken[:, 0])


def _keys(
    prompts: Sequence[Sequence[int]], images: Sequence[PromptImages]
) -> list[tuple[tuple[int, ...], str]]:
    """Return one key per prompt; equal prompts have equal keys. Prompts with the same tokens may
    have different images.
    """
    digests = [one.digest() for one in images] or [""] * len(prompts)
    return [(tuple(prompt), digest) for prompt, digest in zip(prompts, digests, strict=True)]


def _among(
    scores: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, list[Supports | None]]:
    """Return the tokens' log-probs [b, t], normalised over the sampling support, and the supports
    of each row's tokens. `scores` [b, t, v] are -inf outside the support."""
    log_probs = scores.float().log_softmax(-1).gather(-1, tokens[..., None])
    rows: list[Supports | None] = []
    for row in scores.isfinite().unbind(0):
        counts = row.sum(-1).int()
        members = row.nonzero()[:, 1].int()
        rows.append(Supports(counts.cpu().numpy(), members.cpu().numpy()))
    return log_probs[..., 0], rows


def checkpoint_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, tensor) for each tensor of a transformers model. The tensors are
    views of the model's memory."""
    saved = model.state_dict().keys()
    kind = model.config.model_type
    for name, tensor in model.named_parameters():
        yield from checkpoint_views(kind, name, tensor.detach())
    for name, tensor in model.named_buffers():
        if name in saved:
            yield from checkpoint_views(kind, name, tensor.detach())


ENGINES.register("hf", HfEngine)
