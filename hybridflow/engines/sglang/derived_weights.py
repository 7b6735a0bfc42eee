"""What an SGLang model computes from its weights after a load. Imported only inside SGLang processes."""

from __future__ import annotations

from typing import Any


def recompute_derived_weights(model: Any) -> None:
    """Bring `w_kc` and `w_vc` of latent attention (DeepSeek) up to date with `kv_b_proj`; nothing for models that
    derive nothing.

    Every loader of ours that writes parameters itself must call this after its last write and before generation goes
    on. SGLang's `load_weights` does it, for the layers whose `kv_b_proj` is among the tensors of that one call. A
    custom loader counts as a load, so `end_weight_update` leaves it out
    (sglang/srt/managers/scheduler_components/weight_updater.py:331), and the engine would go on with the old keys and
    values. The derived tensors are written in place.
    """
    finish = getattr(model, "post_load_weights", None)  # as SGLang's own loaders ask (model_loader/loader.py:315)
    if finish is not None:
        finish()
