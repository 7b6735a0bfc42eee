"""Router replay. During training, a mixture of experts uses the experts that an earlier pass
selected for the same tokens.

A router that computes with slightly different numerics (another kernel, bfloat16) selects different
experts for some tokens, and the log-probability of such a token jumps. Replay reuses the
*selection* of an earlier pass: the engine's (R3) or that of the trainer's own old-log-prob pass
(R2). The probabilities of the selected experts still come from the live logits, with their
gradient.

Integration with Megatron-Core 0.16.1: `TopKRouter.router_replay` (moe/router.py:219) is an object
whose `get_replay_topk` returns the selection (moe/moe_utils.py:705). Megatron's own class stores
one set of routes at a time, and its caller must switch to a second list for recomputations. Under
1F1B, however, forward passes of later micro-batches alternate with recomputations of earlier ones.
The class here instead finds the routes in the micro-batch's `PackedSeqParams`;
`routers` identifies the micro-batch that is being computed or recomputed.

The replayed selection determines expert outputs, token dispatch, and the counts behind the expert
bias (`local_tokens_per_expert`). The auxiliary balancing losses use the live selection
(moe_utils.py:788), since they train the router itself.

Replay is verified, not assumed: a hook on each router's *output* compares the routing map with the
routes sent, token by token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.batch import FREE, ROUTES, DataProto, Jagged, unknown_routes
from hybridflow.data.packing import lengths_read, sequence_lengths
from hybridflow.errors import ModelError, RouterReplayError
from hybridflow.mcore.packed import MicroBatch
from hybridflow.mcore.parallel import ZigZag, tensor_share
from hybridflow.mcore.routers import MicroBatchTracker, RecomputationQueue, routers_of

Action = Literal["replay", "record", "compare"]
_COUNTS = ("sent", "used", "mismatched", "differing", "drifted")


@dataclass
class MicroRoutes:
    """The routes that one micro-batch replays on, or records from, this rank's routers.

    Attributes:
        action: replay, record or compare.
        given: [t, layers, k] expert ids for this rank's share of the packed tokens, `FREE` where
            the live router selects the experts; None when recording.
        recorded: [t, k] by layer (counted from 0), filled in by the pass.
    """

    action: Action
    given: torch.Tensor | None
    recorded: dict[int, torch.Tensor] = field(default_factory=dict)


class RouterReplay:
    """Replays, records or compares the routes of all routers on this rank. The routers have hooks
    only inside `during`.

    Attributes:
        action: the action inside `during`; None outside.
    """

    def __init__(self, stages: Sequence[torch.nn.Module]) -> None:
        """`stages` are this rank's model chunks, not yet wrapped for training.

        For a dense model, which has no routers, `during` raises an error.
        """
        self.config: Any = stages[0].config
        # MTP heads process different tokens than the decoder and are not part of an engine's routes
        self._replayed = [router for name, router in routers_of(stages) if "mtp." not in name]
        self._stages = stages
        self._routers: list[_RouterHook] = []
        self.action: Action | None = None
        self._micro_batches: Sequence[MicroBatch] = ()
        # counts of one pass; sums stay on the device until they are read once
        self._tally: Counter[str] = Counter()
        self._taken = dict.fromkeys(_COUNTS, 0)

    # ---- one pass

    @contextmanager
    def during(self, action: Action) -> Iterator[None]:
        """Context manager in which passes replay, record or compare the routes of their batch.

        Raises:
            ModelError: the model has no experts, or its router does not support replay.
            RouterReplayError: on exit, if a router did not use the routes sent to it, or was never
                called.
        """
        self._check_model()
        self.action = action
        self.tracker = MicroBatchTracker(self._stages if self._replayed else (), "routes")
        self._routers = [_RouterHook(self, router) for router in self._replayed]
        try:
            yield
            self._check()
        finally:
            self.action = None
            self._tally.clear()
            for router in self._routers:
                router.remove()
            self.tracker.remove()

    def attach(self, batch: DataProto, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Attach routes from `batch`'s column `routed_experts` to each micro-batch. Called inside
        `during`.

        Raises:
            RouterReplayError: the column does not match the batch or the model.
        """
        assert self.action is not None
        routes = None if self.action == "record" else self._checked(batch)
        lengths = sequence_lengths(batch)
        read = lengths_read(lengths)
        for micro in micro_batches:
            given = None if routes is None else self._given(routes, micro, read)
            micro.packed.routes = MicroRoutes(self.action, given)
            if given is not None:
                self._tally["sent"] += sum(
                    int((given[:, router.layer, 0] != FREE).sum()) for router in self._routers
                )
        self._micro_batches = micro_batches
        self._lengths = lengths
        return micro_batches

    def recorded(self) -> Jagged:
        """Return the routes of the last recording pass: jagged int16 [prompt + response tokens,
        layers, k].

        Collective over the model's ranks.

        Entries of layers without experts, and of each sample's last token, which no pass reads, are
        `FREE`.
        """
        layers = self.config.num_layers
        topk = self.config.moe_router_topk
        rows = [unknown_routes(length, layers, topk) for length in self._lengths]
        read = lengths_read(self._lengths)
        for micro in self._micro_batches:
            whole = self._gathered(micro)
            for sample, start in zip(
                micro.samples.tolist(), _segment_bounds(micro).tolist(), strict=False
            ):
                rows[sample][: read[sample]] = whole[start : start + read[sample]]
        return Jagged.from_rows(rows, np.int16)

    def count(self, **masks: torch.Tensor) -> None:
        """Add the number of True entries in each mask to the count with the mask's name."""
        for name, mask in masks.items():
            self._tally[name] += mask.sum()  # type: ignore[assignment]

    def take_counts(self) -> Mapping[str, int]:
        """Return token-layer counts since the last call.

        sent: routes sent to this rank's routers; used: routed by them; mismatched: always 0,
        because an error is raised otherwise. differing and drifted: tokens for which the live
        router would have selected other experts, in passes without gradient and in training passes
        (where earlier updates have changed the weights). `routers` is the number of this rank's
        routers. Ranks that process the same tokens as another rank return zeros.
        """
        once = self.config.sequence_parallel or parallel_state.get_tensor_model_parallel_rank() == 0
        taken = {name: count * once for name, count in self._taken.items()}
        first = (
            parallel_state.get_tensor_model_parallel_rank()
            == parallel_state.get_data_parallel_rank(with_context_parallel=True)
            == 0
        )
        self._taken = dict.fromkeys(self._taken, 0)
        return taken | {"routers": len(self._replayed) if first else 0}

    # ---- checks

    def _check_model(self) -> None:
        if not self.config.num_moe_experts:
            raise ModelError(
                "actor.router_replay requires a mixture of experts, but this model is dense; set "
                "it to none"
            )
        if self.config.moe_router_fusion:
            raise ModelError(
                "router replay is not supported with Megatron's fused router (moe_router_fusion), "
                "which does not call the replay hook"
            )

    def _checked(self, batch: DataProto) -> Jagged:
        if ROUTES not in batch:
            raise RouterReplayError(
                f"the batch has no column {ROUTES!r}: no routes to replay were recorded"
            )
        routes = batch.jagged(ROUTES)
        lengths = sequence_lengths(batch)
        wanted = (self.config.num_layers, self.config.moe_router_topk)
        if routes.values.shape[1:] != wanted:
            found = list(routes.values.shape[1:])
            raise RouterReplayError(
                f"{ROUTES} has shape {found} per token, but the model has {wanted[0]} layers and "
                f"{wanted[1]} experts per token"
            )
        if not np.array_equal(routes.lengths, lengths):
            row = int(np.argmax(routes.lengths != lengths))
            raise RouterReplayError(
                f"{ROUTES} of row {row} has {routes.lengths[row]} tokens, but prompt and response "
                f"have {lengths[row]}"
            )
        if routes.values.size and not (
            routes.values.min() >= FREE and routes.values.max() < self.config.num_moe_experts
        ):
            raise RouterReplayError(
                f"{ROUTES} contains expert {routes.values.max()} (smallest {routes.values.min()}), "
                f"but the model has {self.config.num_moe_experts} experts"
            )
        return routes

    def _check(self) -> None:
        found = {name: int(self._tally[name]) for name in _COUNTS}
        sent = found["sent"]
        used = found["used"]
        mismatched = found["mismatched"]
        waiting = sum(router.queue.pending() for router in self._routers)
        if mismatched or used != sent or waiting:
            raise RouterReplayError(
                f"router replay failed on global rank {dist.get_rank()}: {sent} token-layers had "
                f"routes to replay, {used} were routed, and {mismatched} of these to other "
                f"experts; {waiting} recomputations are missing. The trained function therefore "
                "differs from the one that generated the samples. Set actor.router_replay=none to "
                "train without replay."
            )
        self._taken = {name: count + found[name] for name, count in self._taken.items()}

    # ---- which tokens are this rank's

    def _rows(self, micro: MicroBatch) -> np.ndarray:
        """Return the packed rows routed by this rank, in local order.

        These are the rows of its context rank, split evenly under sequence parallelism.
        """
        rows = ZigZag.of(
            _segment_bounds(micro), parallel_state.get_context_parallel_world_size()
        ).rows_of(parallel_state.get_context_parallel_rank())
        return tensor_share(rows) if self.config.sequence_parallel else rows

    def _given(self, routes: Jagged, micro: MicroBatch, read: np.ndarray) -> torch.Tensor:
        """Return the routes [t, layers, k] of this rank's tokens.

        They cover the tokens that the model reads from each sample; padding is `FREE`.
        """
        bounds = _segment_bounds(micro)
        whole = np.full((int(bounds[-1]), *routes.values.shape[1:]), FREE, dtype=np.int16)
        for sample, start in zip(micro.samples.tolist(), bounds.tolist(), strict=False):
            row = routes.row(sample)[: read[sample]]
            whole[start : start + len(row)] = row
        return torch.from_numpy(whole[self._rows(micro)]).to(micro.tokens.device)

    def _gathered(self, micro: MicroBatch) -> np.ndarray:
        """Return the routes [t, layers, k] of all stages and token shards.

        They are summed over ranks, because each (token, layer) entry is set on exactly one rank and
        zero on the others.
        """
        shape = (
            int(_segment_bounds(micro)[-1]),
            self.config.num_layers,
            self.config.moe_router_topk,
        )
        # NCCL does not support int16
        whole = torch.zeros(shape, dtype=torch.int32, device=micro.tokens.device)
        mine = torch.from_numpy(self._rows(micro)).to(whole.device)
        for layer, experts in micro.packed.routes.recorded.items():
            whole[mine, layer] = experts.to(torch.int32) - FREE
        if self.config.sequence_parallel:
            dist.all_reduce(whole, group=parallel_state.get_tensor_model_parallel_group())
        if parallel_state.get_context_parallel_world_size() > 1:
            dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
        dist.all_reduce(whole, group=parallel_state.get_pipeline_model_parallel_group())
        return np.asarray((whole + FREE).to(torch.int16).cpu().numpy())


class _RouterHook:
    """Replaces Megatron's RouterReplay on one router, until it is removed."""

    def __init__(self, replay: RouterReplay, router: TopKRouter) -> None:
        self.replay = replay
        self.topk = router.topk
        self.layer = router.layer_number - 1
        self.queue = RecomputationQueue(replay.tracker)
        self._active: MicroRoutes | None = None
        self._recomputed = False
        self._live: torch.Tensor | None = None
        self._router = router
        self._hooks = [
            router.register_forward_pre_hook(self._begin),
            router.register_forward_hook(self._observe),
        ]
        router.router_replay = self

    def remove(self) -> None:
        """Remove the hooks."""
        self._router.router_replay = None
        for hook in self._hooks:
            hook.remove()

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (scores [t, k] with gradient, expert ids [t, k]) for scores [t, experts].

        Called from moe_utils.py:705.
        """
        routes = self._active
        if routes is None or routes.action != "replay":
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        _, live = default_compute_topk(
            scores.detach(), topk, num_groups=num_groups, group_topk=group_topk
        )
        given = self._given(routes)
        # Megatron requires topk distinct experts per token: routes with duplicates are ignored
        # here, and `_observe` reports them
        ordered = given.sort(1).values
        repeats = (ordered[:, 1:] == ordered[:, :-1]).any(1, keepdim=True)
        chosen = torch.where(repeats | (given == FREE), live, given)
        self._live = live
        return scores.gather(1, chosen), chosen

    def _given(self, routes: MicroRoutes) -> torch.Tensor:
        assert routes.given is not None
        return routes.given[:, self.layer].long()

    def _begin(self, *_: Any) -> None:
        self._active, self._recomputed = self.queue.take()

    @torch.no_grad()
    def _observe(
        self, _: torch.nn.Module, __: Any, output: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        """Compare the given routes with the routing map [t, experts] that the router used."""
        routes = self._active
        live = self._live
        self._active = None
        self._live = None
        if routes is None:
            return
        routing_map = output[1]
        if routes.action == "record":
            routes.recorded[self.layer] = marked(routing_map, self.topk)
            return
        given = self._given(routes)
        wanted = given[:, 0] != FREE
        named = torch.zeros_like(routing_map).scatter(1, given.clamp(min=0), True)
        same = (routing_map == named).all(1) & (named.sum(1) == self.topk)
        if routes.action == "compare":
            self.replay.count(used=wanted, differing=wanted & ~same)
        elif not self._recomputed:
            other = (
                (live.sort(1).values != given.sort(1).values).any(1)
                if live is not None
                else torch.ones_like(wanted)
            )
            self.replay.count(used=wanted, mismatched=wanted & ~same)
            self.replay.count(
                **{"drifted" if self.replay.tracker.with_gradient else "differing": wanted & other}
            )
        else:  # a recomputation has been counted before, but it must still match the routes
            self.replay.count(mismatched=wanted & ~same)


def marked(routing_map: torch.Tensor, topk: int) -> torch.Tensor:
    """Return the experts [t, k] of each row of a routing map [t, experts] with k marks per row, in
    ascending order.

    Unlike `nonzero`, this does not force a device sync.
    """
    return routing_map.to(torch.int8).topk(topk, dim=1).indices.sort(dim=1).values


def _segment_bounds(micro: MicroBatch) -> np.ndarray:
    """Return the start of each sample and of the padding tail among the packed rows, followed by
    the total length: [segments + 1]."""
    return np.asarray(micro.packed.bounds.numpy())
