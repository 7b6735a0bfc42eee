"""The entry point inside every tensor-parallel rank of an unmodified SGLang server.
`engines.weight_receiver` does the work.

SGLang calls `load` (the server's `--custom-weight-loader`) through `/update_weights_from_tensor`.
An exception from a loader ends the server, and the HTTP answer always reports success, so every
error is caught and reported through the sync's store.

A pipeline stage passes a request on only after executing it
(sglang/srt/managers/scheduler_pp_mixin.py:139), but slices for all stages come in one stream. With
several stages `load` therefore receives in a thread and returns immediately; the engine's worker
waits for the reports of all stages. Until then no stage computes: the engine accepts no requests,
and earlier ones have ended.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from hybridflow.engines.control import Control
from hybridflow.engines.weight_receiver import WeightReceiver

_log = logging.getLogger(__name__)
_receiver: WeightReceiver | None = None


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Handle a message. Called by SGLang; never raises."""
    global _receiver
    try:
        if _receiver is None or _receiver.model is not model:
            _receiver = receiver_of(model)
        _receiver.take(Control.from_json(named_tensors[0][0]), in_background=_stages() > 1)
    except BaseException:
        # a report that cannot be posted is missing, which the engine's worker treats as a failure
        _log.exception("a weight-sync message could not be answered")


def receiver_of(model: torch.nn.Module) -> WeightReceiver:
    """Create the receiver of this rank."""
    # tests replace it
    return WeightReceiver(model, lambda: _rank_in_engine(), recompute_derived_weights)  # noqa: PLW0108


def recompute_derived_weights(model: Any) -> None:
    """Recompute `w_kc` and `w_vc` of latent attention (DeepSeek) from `kv_b_proj`, in place. Does
    nothing for models without derived weights.

    SGLang's `load_weights` does this for the layers whose `kv_b_proj` is among the tensors of that
    call. A custom loader counts as a load, so `end_weight_update` skips it
    (sglang/srt/managers/scheduler_components/weight_updater.py:331), and the engine would keep the
    old keys and values. Every loader of ours that writes parameters itself must call this after its
    last write.
    """
    # the same condition as in SGLang's own loaders (model_loader/loader.py:315)
    finish = getattr(model, "post_load_weights", None)
    if finish is not None:
        finish()


def _stages() -> int:
    """Return the number of pipeline stages of the engine."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().pp_size)


def _rank_in_engine() -> int:
    """Return this rank's number, stage by stage like SGLang's processes
    (sglang/srt/runtime_context.py:95, spawn_world_rank)."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.pp_rank * parallel.tp_size + parallel.tp_rank)
