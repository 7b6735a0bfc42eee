"""Runs inside every tensor-parallel rank of an unmodified SGLang server, where
`engines.weight_receiver` does the work.

SGLang calls `load` (it is the server's `--custom-weight-loader`) through
`/update_weights_from_tensor`. An exception that leaves a loader ends the server, and the HTTP
answer says success whatever happened, so everything is caught and reported through the sync's
store.

A stage of a pipeline passes a request on only when it has carried it out
(sglang/srt/managers/scheduler_pp_mixin.py:139), and slices come to all stages in one stream. There
`load` starts a thread that receives, and returns; the reports, which the engine's worker waits for,
say when all stages have everything. Until then no stage computes: the engine takes no requests, and
those it had have ended.
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
    """What SGLang calls. Never raises."""
    global _receiver
    try:
        if _receiver is None or _receiver.model is not model:
            _receiver = receiver_of(model)
        _receiver.take(Control.from_json(named_tensors[0][0]), in_background=_stages() > 1)
    except BaseException:
        # a report that cannot be posted is missed: the engine's worker takes it for a failure
        _log.exception("a weight-sync message could not be answered")


def receiver_of(model: torch.nn.Module) -> WeightReceiver:
    """What receives for this rank."""
    # tests replace it
    return WeightReceiver(model, lambda: _rank_in_engine(), recompute_derived_weights)  # noqa: PLW0108


def recompute_derived_weights(model: Any) -> None:
    """Bring `w_kc` and `w_vc` of latent attention (DeepSeek) up to date with `kv_b_proj`, in place;
    nothing for models that derive nothing.

    SGLang's `load_weights` does it, for the layers whose `kv_b_proj` is among the tensors of that
    one call. A custom loader counts as a load, so `end_weight_update` leaves it out
    (sglang/srt/managers/scheduler_components/weight_updater.py:331), and the engine would go on
    with the old keys and values. Every loader of ours that writes parameters itself calls this
    after its last write.
    """
    # as SGLang's own loaders ask (model_loader/loader.py:315)
    finish = getattr(model, "post_load_weights", None)
    if finish is not None:
        finish()


def _stages() -> int:
    """Pipeline stages of the engine."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().pp_size)


def _rank_in_engine() -> int:
    """Stage by stage, as SGLang numbers its processes (sglang/srt/runtime_context.py:95,
    spawn_world_rank)."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.pp_rank * parallel.tp_size + parallel.tp_rank)
