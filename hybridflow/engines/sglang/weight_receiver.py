"""The entry point inside every tensor-parallel rank of an unmodified SGLang server.
`engines.weight_receiver` does the work.

SGLang calls `load` (the server's `--custom-weight-loader`) through `/update_weights_from_tensor`.
An exception from a loader would terminate the server, and the HTTP response always reports success,
so every error is caught and reported through the weight-sync store.

A pipeline stage passes a request on only after executing it
(sglang/srt/managers/scheduler_pp_mixin.py:139), but slices for all stages arrive in one stream.
With several stages, `load` therefore receives in a thread and returns immediately, and the engine's
worker waits until all stages have reported. Until then no stage computes: the engine does not
accept requests, and earlier requests have finished.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hybridflow.engines.weight_receiver import WeightReceiver
from hybridflow.sync.session import Control

_log = logging.getLogger(__name__)
_receiver: WeightReceiver | None = None
_target: torch.nn.Module | None = None  # the model of a message that the draft has not got yet


class WithDraft(torch.nn.Module):
    """A model and its draft model (the multi-token-prediction head), combined to receive weights
    together. Both share one embedding and one output layer.
    """

    def __init__(self, served: torch.nn.Module, draft: torch.nn.Module) -> None:
        super().__init__()
        self.served = served
        self.draft = draft

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Pass all weights to both models' loaders. Each loader ignores weights that its model does
        not use."""
        given = list(weights)
        for model in (self.served, self.draft):
            model.load_weights(iter(given))  # type: ignore[operator]

    def post_load_weights(self) -> None:
        """Recompute the tensors that both models derive from their weights."""
        for model in (self.served, self.draft):
            recompute_derived_weights(model)


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Handle a message. Called by SGLang; never raises."""
    global _receiver, _target
    try:
        if _drafts():
            # SGLang passes the message to the model, then to the one that drafts with its head
            # (sglang/srt/managers/scheduler_components/weight_updater.py:245)
            if _target is None:
                _target = model
                return
            served, _target = _target, None
            both = _receiver.model if _receiver is not None else None
            if isinstance(both, WithDraft) and (both.served, both.draft) == (served, model):
                model = both
            else:
                model = WithDraft(served, model)
        if _receiver is None or _receiver.model is not model:
            _receiver = receiver_of(model)
        _receiver.take(Control.from_json(named_tensors[0][0]), in_background=_stages() > 1)
    except BaseException:
        # the engine's worker treats a missing report as a failure
        _log.exception("could not answer a weight-sync message")


def receiver_of(model: torch.nn.Module) -> WeightReceiver:
    """Create this rank's receiver."""
    # tests replace `_rank_in_engine`
    return WeightReceiver(model, lambda: _rank_in_engine(), finish_load)  # noqa: PLW0108


def finish_load(model: Any) -> None:
    """Update this rank after the last write to its weights. Every HybridFlow loader that writes
    parameters itself must call this function."""
    recompute_derived_weights(model)
    forget_image_features()


def forget_image_features() -> None:
    """Discard the outputs of the old vision tower. SGLang keeps them by the hash of their image,
    and does not discard them with cached prefixes (sglang/srt/managers/mm_schedule.py:21)."""
    schedule = sys.modules.get("sglang.srt.managers.mm_schedule")
    cache = getattr(schedule, "embedding_cache", None)
    if cache is not None:
        cache.clear()


def recompute_derived_weights(model: Any) -> None:
    """Recompute `w_kc` and `w_vc` of latent attention (DeepSeek) from `kv_b_proj`, in place. Does
    nothing for models without derived weights.

    SGLang's `load_weights` does this for the layers whose `kv_b_proj` is among the call's tensors.
    After a custom loader, `end_weight_update` skips it
    (sglang/srt/managers/scheduler_components/weight_updater.py:331), and the engine would keep the
    old derived weights.
    """
    # the same condition as in SGLang's own loaders (model_loader/loader.py:315)
    finish = getattr(model, "post_load_weights", None)
    if finish is not None:
        finish()


def _drafts() -> bool:
    """Return True if the engine drafts tokens with the model's head."""
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm is not None


def _stages() -> int:
    """Return the number of pipeline stages of the engine."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().pp_size)


def _rank_in_engine() -> int:
    """Return this rank's index within the engine, counted stage by stage as SGLang does
    (sglang/srt/runtime_context.py:95, spawn_world_rank).
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.pp_rank * parallel.tp_size + parallel.tp_rank)
