"""Runs inside every rank of a vLLM server, as its `--worker-extension-cls`: takes new weights.

vLLM may lay weights out otherwise than its loader wrote them: on a CPU it packs each linear layer
for oneDNN and drops the parameter (vllm/model_executor/layers/utils.py,
`dispatch_cpu_unquantized_gemm`). A loader that is traced says nothing of such a layout. So slices
go to the places of the traced loader where every layer is known to compute with what its loader
wrote, and otherwise the rank receives whole tensors and hands them to vLLM's own reload, which lays
them out anew.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from hybridflow.engines.control import Control
from hybridflow.engines.weight_receiver import WeightReceiver
from hybridflow.models.layout import whole
from hybridflow.reshard.layout import Catalog, RankLayout
from hybridflow.sync import session
from hybridflow.sync.schedule import layout_digest, post_layout
from hybridflow.sync.session import Board
from hybridflow.sync.stream import receive_stream

_log = logging.getLogger(__name__)
# what vLLM does to the weights of these after a load changes nothing on a GPU
_AS_LOADED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


class WeightExtension:
    """vLLM makes it a base class of its worker. Its attributes must not have the names of the
    worker's own."""

    _weight_receiver: WeightReceiver | None = None

    def take_weight_message(self, text: str) -> None:
        """What `collective_rpc` calls, with a `Control` as JSON. Never raises: an error in a rank
        would end the server."""
        try:
            if self._weight_receiver is None:
                self._weight_receiver = receiver_of(self)
            self._weight_receiver.handle(Control.from_json(text))
        except BaseException:
            # a report that cannot be posted is missed: the engine's worker takes it for a failure
            _log.exception("a weight-sync message could not be answered")


def receiver_of(worker: Any) -> WeightReceiver:
    """What receives for the rank of vLLM's worker: slices where it can, else whole tensors."""
    model = worker.model_runner.get_model()
    if computes_with_what_was_loaded(model):
        return WeightReceiver(model, lambda: int(worker.rank))
    return WholeTensors(worker, model)


def computes_with_what_was_loaded(model: torch.nn.Module) -> bool:
    """Whether every layer computes with its parameters as the loader wrote them."""
    if next(model.parameters()).device.type == "cpu":
        return False
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _AS_LOADED:
            return False
        # attention of one kind computes scales there, that of DeepSeek other weights
        if (
            hasattr(module, "process_weights_after_loading")
            and type(module).__name__ != "Attention"
        ):
            return False
    return True


class WholeTensors(WeightReceiver):
    """Receives every tensor of the checkpoint whole, and has vLLM load them.

    The rank holds a second copy of the whole model, not of its part alone, during a sync. All
    tensors are received and verified before vLLM loads the first. Where vLLM fails after that the
    engine stays paused.
    """

    def __init__(self, worker: Any, model: torch.nn.Module) -> None:
        super().__init__(model, lambda: int(worker.rank))
        self._worker = worker
        self._tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def _traced(self, store: Any, timeout_s: float) -> RankLayout:
        """Each tensor of the catalog is a buffer by its own name."""
        if self._layout is None:
            catalog = session.read(store, session.CATALOG_KEY, timeout_s)
            shapes = {name: tuple(shape) for name, shape in catalog["tensors"].items()}
            kinds = {name: catalog["dtypes"].get(name, catalog["dtype"]) for name in shapes}
            self._tensors = {
                name: (shape, getattr(torch, kinds[name])) for name, shape in shapes.items()
            }
            buffers = [
                replace(whole(name, name, shape), dtype=kinds[name])
                for name, shape in shapes.items()
            ]
            self._layout = RankLayout.of(buffers, Catalog.of(shapes).index(), catalog["dtype"])
            self._digest = layout_digest(self._layout)
        return self._layout

    def _describe(self, store: Any, layout: RankLayout) -> None:
        post_layout(store, layout, {name: shape for name, (shape, _) in self._tensors.items()})

    def _receive(self, board: Board, rank: int) -> int:
        order = board.order
        device = next(self.model.parameters()).device
        schedule = self._scheduled(board, rank)
        channel = self._opened(order, rank)
        given = {
            name: torch.empty(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in self._tensors.items()
        }
        # these tensors are nobody's yet: nothing need be staged before it is written to them
        received = receive_stream(schedule.messages, channel, self._staging, False, given)
        self._agree_to_commit(board, rank)
        self._worker.reload_weights(weights_iterator=iter(given.items()), is_checkpoint_format=True)
        return received.stats.payload_bytes
