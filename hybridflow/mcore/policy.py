"""A trainable causal language model on this rank: the Megatron model, its optimizer, and the
forward and training passes that roles use.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.algorithms.losses import not_applied
from hybridflow.algorithms.vocab_parallel import Scoring
from hybridflow.batch import DataProto, Jagged
from hybridflow.config.derived import tokens_multiple, virtual_pipeline_size
from hybridflow.config.schema import OptimConfig, ParallelConfig
from hybridflow.data.image_tokens import IMAGES, ImageTokens, check_images
from hybridflow.data.packing import (
    check_token_ids,
    lengths_read,
    pack_alike,
    sequence_lengths,
    unpack,
)
from hybridflow.device.residency import HoldsReference
from hybridflow.mcore import parallel, vision
from hybridflow.mcore.head_training import HeadSettings, HeadTraining, train_heads
from hybridflow.mcore.lora import Adapters
from hybridflow.mcore.model import (
    CORE_ATTENTION,
    DTYPES,
    build_model,
    held_weights,
    load_weights,
    local_parameters,
    wrap_for_training,
)
from hybridflow.mcore.optimizer import Optimizer, inner_optimizers
from hybridflow.mcore.packed import Cut, MicroBatch, build_micro_batches
from hybridflow.mcore.prediction_heads import build_heads
from hybridflow.mcore.router_replay import RouterReplay
from hybridflow.mcore.routers import ExpertLoad, RouterLosses
from hybridflow.mcore.shared_base import share_weights, without_linears
from hybridflow.mcore.step import (
    LossFunction,
    Metrics,
    Watch,
    all_ranks_max,
    backward,
    counted,
    forward,
    forward_top,
    metrics_to_floats,
)
from hybridflow.models import Family
from hybridflow.models.family import num_parameters, without_prediction_heads
from hybridflow.models.layout import LocalTensor
from hybridflow.models.lora import AdapterMap
from hybridflow.models.served_adapters import ServedAdapters
from hybridflow.models.vision import is_vision, tower_of
from hybridflow.models.weights import WeightSource

Sums = dict[str, tuple[float, float]]  # metric -> (sum, count)


class Policy(HoldsReference):
    """One rank's model and optimizer. Every method is a collective: all ranks must call the methods
    in the same order.
    """

    optimizer: Optimizer | None  # None until `set_optimizer`

    def __init__(
        self,
        family: Family,
        parallel_config: ParallelConfig,
        dtype: str,
        source: WeightSource,
        *,
        expert_bias_update_rate: float = 0.0,
        router_losses: tuple[float, float] = (0.0, 0.0),
        recompute: str = "none",
        recompute_modules: Sequence[str] = CORE_ATTENTION,
        megatron: Mapping[str, Any] | None = None,
        logits_chunk_tokens: int = 1024,
        on_nonfinite: str = "stop",
        lora: AdapterMap | None = None,
        heads: HeadSettings | None = None,
        freeze_vision_tower: bool = True,
        trains: bool = True,
        base: Policy | None = None,
    ) -> None:
        """Build the stage and load it from `source`. Process groups must exist already
        (`parallel.initialize`).

        Args:
            family, parallel_config, dtype: architecture, sharding and precision of the model.
            source: the weights to load.
            expert_bias_update_rate: step by which each update moves a sigmoid router's expert
                biases toward an even load; 0 disables the bias update.
            router_losses: coefficients of the load-balancing loss and the z-loss.
            recompute, recompute_modules, megatron, logits_chunk_tokens, on_nonfinite,
            freeze_vision_tower: see `ActorConfig`.
            lora: adapters to train instead of the weights.
            heads: training settings of the multi-token-prediction heads, if the family has any.
            trains: if False, no gradient buffers are allocated and the policy cannot have an
                optimizer.
            base: a policy whose frozen weights this policy shares, instead of loading `source`.
                Both policies must have adapters.
        """
        self.base = base
        self.family = family
        self.trunk = without_prediction_heads(family)
        self.config = parallel_config
        self.dtype = DTYPES[dtype]
        self.logits_chunk_tokens = logits_chunk_tokens
        self.on_nonfinite = on_nonfinite
        self.stages = self._build(dtype, recompute, recompute_modules, megatron)
        self._fill(source)
        self._add_tower(freeze_vision_tower)
        self.stages[0].config.moe_router_bias_update_rate = expert_bias_update_rate
        self.replay = RouterReplay(self.stages)
        self.adapters = Adapters(lora, self.stages, family) if lora is not None else None
        is_biased = self.stages[0].config.moe_router_enable_expert_bias
        self.expert_load = ExpertLoad(self.stages) if is_biased else None
        has_losses = any(router_losses)
        self.router_losses = RouterLosses(self.stages, *router_losses) if has_losses else None
        self.trains = trains
        self.chunks: Sequence[Any] = (
            wrap_for_training(self.stages, parallel_config) if trains else self.stages
        )
        learning = self.heads if trains else None
        self.head_training = train_heads(learning, self.stages, parallel_config, heads)
        self.optimizer = None

    def _build(self, *settings: Any) -> list[Any]:
        """Build the stage. If it will share the base's weights, its linears' weights are not
        allocated."""
        with nullcontext() if self.base is None else without_linears():
            return build_model(self.trunk, self.config, *settings)

    def _fill(self, source: WeightSource) -> None:
        """Add the prediction heads. Load the weights from `source`, or share the base's weights."""
        self.heads = build_heads(self.family, self.stages)
        if self.base is None:
            load_weights(self.stages, self.family, source, self.heads)
        else:
            share_weights(self.stages, self.base.stages)

    def _add_tower(self, is_frozen: bool) -> None:
        """Set up image input if the model has a vision tower, and freeze the tower if requested."""
        tower = tower_of(self.family)
        self.images = None if tower is None else ImageTokens(tower.image_token, tower.merge)
        self._frozen = tower.tensors() if tower is not None and is_frozen else {}
        if self._frozen:
            vision.freeze(self.stages)

    # ---- passes

    def log_probs(
        self, batch: DataProto, *, max_tokens: int, temperature: float, with_entropy: bool
    ) -> tuple[Jagged, Jagged] | None:
        """Compute (log-probs, entropies) of all response tokens, in batch order; None on ranks
        outside the last stage. Without `with_entropy`, the log-probs are also returned in place of
        the entropies."""
        micro_batches = self._micro_batches(batch, max_tokens, ())
        with self._evaluating():
            values, entropies = forward(
                self.chunks, micro_batches, self._scoring(temperature, with_entropy)
            )
        if not parallel.is_last_stage():
            return None
        log_probs = unpack(values, micro_batches, len(batch))
        return log_probs, unpack(
            entropies, micro_batches, len(batch)
        ) if with_entropy else log_probs

    def top_log_probs(
        self, batch: DataProto, *, k: int, max_tokens: int, temperature: float
    ) -> tuple[Jagged, Jagged] | None:
        """Compute the k most likely tokens at every response position, for distillation.

        Returns jagged [t, k] fp32 log-probs over the whole vocabulary in descending order, and [t,
        k] int64 token ids; None on ranks outside the last stage.
        """
        micro_batches = self._micro_batches(batch, max_tokens, ())
        with self._evaluating():
            values, tokens = forward_top(
                self.chunks, micro_batches, self._scoring(temperature, False), k
            )
        if not parallel.is_last_stage():
            return None
        return unpack(values, micro_batches, len(batch)), unpack(
            tokens, micro_batches, len(batch), np.int64
        )

    def train_mini_batch(
        self,
        batch: DataProto,
        loss: LossFunction,
        *,
        columns: Sequence[str],
        max_tokens: int,
        temperature: float,
        with_entropy: bool,
    ) -> tuple[Sums, dict[str, float]]:
        """Run one optimizer update on `batch`, this data-parallel rank's share of the mini-batch.

        Returns:
            Metrics as (sum, count) pairs (empty outside the last stage), and {grad_norm, lr,
            applied}.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite and the policy is configured to
                stop. Raised on all ranks, before any weight has changed.
        """
        heads = self.head_training
        micro_batches = self._micro_batches(
            batch, max_tokens, columns, heads=heads.heads.count if heads else 0
        )
        scoring = self._scoring(temperature, with_entropy)
        if self.router_losses:
            counts = (counted(loss, micro) for micro in micro_batches)
            self.router_losses.begin(micro_batches, sum(counts, torch.zeros(())))
        if heads:
            heads.begin(micro_batches)
        metrics, facts = self._update(
            len(micro_batches),
            lambda watch: backward(
                self.chunks, micro_batches, loss, scoring, watch, heads.learn if heads else None
            ),
        )
        if self.router_losses:
            metrics |= self.router_losses.end()
        return metrics | (self._update_heads(heads, facts) if heads else {}), facts

    def _update_heads(self, heads: HeadTraining, facts: dict[str, float]) -> Sums:
        """Update the heads. Does nothing if the policy's update was not applied, because the hidden
        states may not be finite.
        """
        metrics = heads.end()
        if not facts["applied"]:
            return {}
        metrics |= heads.step()
        self.settle()
        heads.heads.refresh()
        return metrics

    def _update(
        self, num_micro_batches: int, accumulate: Callable[[Watch], Metrics]
    ) -> tuple[Sums, dict[str, float]]:
        """Call `accumulate`, and run one optimizer update on the gradients that it accumulates in
        the buffers.

        The return value and errors are the same as for `train_mini_batch`.
        """
        if self.optimizer is None:
            raise RuntimeError("update called before set_optimizer")
        self.optimizer.zero_grad()
        if self.expert_load:
            self.expert_load.begin()
        watch = Watch(num_micro_batches)
        biases = [(bias, bias.clone()) for bias in self._expert_biases]
        metrics = metrics_to_floats(accumulate(watch))
        if problem := watch.report(self.chunks):
            for live, before in biases:
                live.copy_(before)
            return not_applied(problem, self.on_nonfinite, metrics, self.optimizer.learning_rate())
        applied, grad_norm, rate = self.optimizer.step()
        return metrics, {"grad_norm": grad_norm, "lr": rate, "applied": float(applied)}

    @functools.cached_property
    def _expert_biases(self) -> list[Tensor]:
        """The live expert biases. Megatron updates them at the end of the backward pass, before the
        optimizer runs (finalize_model_grads.py:476)."""
        held = held_weights(self.stages)
        return [bias for name, bias in held.items() if name.endswith(".expert_bias")]

    def set_optimizer(self, config: OptimConfig) -> None:
        """Create a fresh optimizer for the current weights, with zero moments."""
        if not self.trains:
            raise RuntimeError("set_optimizer called on a policy that was built with trains=False")
        self.optimizer = Optimizer(self.chunks, config, self.config, self.dtype)
        if self.head_training:
            self.head_training.set_optimizer(config, self.dtype)

    def inner_optimizers(self) -> list[Any]:
        """Return Megatron's inner optimizers of the policy and of its prediction heads; empty
        without an optimizer."""
        found: list[Any] = []
        for owner in (self, self.head_training):
            if owner is not None and owner.optimizer is not None:
                found += inner_optimizers(owner.optimizer.inner)
        return found

    def _scoring(self, temperature: float, with_entropy: bool) -> Scoring:
        return Scoring(self.family.vocab_size, temperature, with_entropy, self.logits_chunk_tokens)

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        for chunk in self.chunks:
            chunk.eval()
        yield
        for chunk in self.chunks:
            chunk.train()

    def _micro_batches(
        self,
        batch: DataProto,
        max_tokens: int,
        columns: Sequence[str],
        *,
        together: int = 1,
        last_token: bool = False,
        heads: int = 0,
    ) -> list[MicroBatch]:
        """Pack the batch into micro-batches.

        Each run of `together` consecutive rows stays in one micro-batch, in order. `last_token` has
        the same meaning as in `lengths_read`, `heads` as in `build_micro_batches`.
        """
        check_token_ids(batch, self.family.vocab_size)
        if any(name in batch for name in IMAGES):
            check_images(batch, self.images)
        cut = self._cut()
        lengths = lengths_read(sequence_lengths(batch), last_token)
        # the interleaved schedule runs micro-batches in groups of the number of stages
        # (schedules.py:1007)
        group = self.config.pipeline if virtual_pipeline_size(self.config) > 1 else 1
        costs = cut.padded(lengths).reshape(-1, together).sum(1)
        bins = pack_alike(
            costs, max_tokens, lambda bins: -(-all_ranks_max(max(bins, 1)) // group) * group
        )
        bins = [(rows[:, None] * together + np.arange(together)).reshape(-1) for rows in bins]
        total = cut.total(lengths, bins)
        # the dispatcher gathers the same number of tokens from every rank (token_dispatcher.py:264)
        if self.config.moe_dispatcher == "allgather":
            total = all_ranks_max(total)
        micro_batches = build_micro_batches(
            batch, bins, columns, cut, total, last_token, heads, self.images
        )
        replays = self.replay.action is not None
        return self.replay.attach(batch, micro_batches) if replays else micro_batches

    def _cut(self) -> Cut:
        config = self.config
        segment = tokens_multiple(config)
        multiple = segment * (config.tensor if config.sequence else 1)
        return Cut(segment, multiple, parallel.context_rank(), config.context)

    # ---- weights

    def parameters(self) -> dict[str, Tensor]:
        """Return the local parameters, keyed by Megatron name and checked against the family's map.

        With virtual stages, names are prefixed with `chunk0.` and so on. Adapters are merged into
        copies of their weights, valid until the next call or `release_copies`.
        """
        held = self._base()
        return held | self.adapters.merged() if self.adapters else held

    def sent_tensors(self) -> dict[str, Tensor]:
        """Return `parameters` or, if engines store adapters unmerged, the base weights and the
        adapter factors.
        """
        if self.served_adapters is None:
            return self.parameters()
        return self._base() | {name: factor.detach() for name, factor in self.weights().items()}

    def _base(self) -> dict[str, Tensor]:
        self.settle()
        held = {}
        for name, (parameter, _) in self.described.items():
            held[name] = parameter.detach()
        return held

    @functools.cached_property
    def described(self) -> dict[str, tuple[Tensor, LocalTensor]]:
        """`local_parameters` of this rank, including its prediction heads. Compared with the model
        once: updates, loading and offloading change these tensors in place."""
        return local_parameters(self.stages, self.family, self.heads)

    def release_copies(self) -> None:
        """Free the copies made by `parameters`."""
        if self.adapters:
            self.adapters.release()

    @property
    def copied_bytes(self) -> int:
        """Size in bytes of the copies that `sent_tensors` makes on this rank."""
        return self.adapters.merged_bytes if self.adapters and not self.served_adapters else 0

    @functools.cached_property
    def served_adapters(self) -> ServedAdapters | None:
        """The adapters that engines store unmerged; None if adapters are merged or there are
        none."""
        if self.adapters is None or self.adapters.map.config.sync == "merged":
            return None
        return self.adapters.map.served()

    def weights(self) -> dict[str, Tensor]:
        """Return the live parameters that the policy's training may change: the adapters if there
        are any, otherwise all parameters except those of prediction heads and of a frozen vision
        tower.

        Names are the same as in `parameters`.
        """
        self.settle()
        if self.adapters:
            return {name: parameter for name, (parameter, _) in self.adapters.parameters().items()}
        held = held_weights(self.stages)
        return {name: one for name, one in held.items() if not (self._frozen and is_vision(name))}

    @functools.cached_property
    def trainable_parameters(self) -> int:
        """Number of trainable parameters in the whole model. Cached, since every step reports
        it."""
        if self.adapters:
            return self.adapters.map.num_parameters()
        frozen = sum(map(math.prod, self._frozen.values()))
        return num_parameters(self.family) - frozen

    def settle(self) -> None:
        """Gather the weights that would otherwise be gathered only in the next forward pass
        (`overlap_param_gather`). Before this call, shards that other ranks have updated still
        contain the values from before the last update.
        """
        if self.config.overlap_param_gather and self.trains:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
