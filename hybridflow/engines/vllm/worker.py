"""The `--worker-extension-cls` that receives new weights inside every rank of a vLLM server.

vLLM may convert weights to another layout after its loader has written them. On CPU, for example,
it packs each linear layer for oneDNN and drops the parameter (vllm/model_executor/layers/utils.py,
`dispatch_cpu_unquantized_gemm`). Tracing the loader does not reveal such a layout. If every layer
is known to use its parameters in the layout that was loaded, slices are written to the traced
locations. Otherwise the rank receives whole tensors and passes them to vLLM's own reload.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from hybridflow.engines.weight_receiver import WeightReceiver
from hybridflow.models.layout import whole
from hybridflow.reshard.layout import Catalog, RankLayout
from hybridflow.sync import session
from hybridflow.sync.schedule import layout_digest, post_layout
from hybridflow.sync.session import Board, Control
from hybridflow.sync.stream import receive_stream

_log = logging.getLogger(__name__)
# methods that leave weights unchanged after a load on a GPU
_AS_LOADED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


class WeightExtension:
    """A base class that vLLM adds to its worker. Its attribute names must not clash with the
    worker's."""

    _weight_receiver: WeightReceiver | None = None

    def take_weight_message(self, text: str) -> None:
        """Handle a `Control` message encoded as JSON. Called by `collective_rpc`; never raises,
        because an error in a rank would terminate the server."""
        try:
            if self._weight_receiver is None:
                self._weight_receiver = receiver_of(self)
            self._weight_receiver.handle(Control.from_json(text))
        except BaseException:
            # the engine's worker treats a missing report as a failure
            _log.exception("could not answer a weight-sync message")


def receiver_of(worker: Any) -> WeightReceiver:
    """Create the receiver for a vLLM worker's rank: for slices if possible, otherwise for whole
    tensors."""
    model = worker.model_runner.get_model()
    if computes_with_what_was_loaded(model):
        return WeightReceiver(model, lambda: int(worker.rank))
    return WholeTensors(worker, model)


def computes_with_what_was_loaded(model: torch.nn.Module) -> bool:
    """Return True if every layer uses its parameters in the layout that the loader wrote."""
    if next(model.parameters()).device.type == "cpu":
        return False
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in _AS_LOADED:
            return False
        # `Attention` only computes scales there, but DeepSeek's attention computes other weights
        if (
            hasattr(module, "process_weights_after_loading")
            and type(module).__name__ != "Attention"
        ):
            return False
    return True


class WholeTensors(WeightReceiver):
    """Receives whole checkpoint tensors and passes them to vLLM's loader. During a sync, the rank
    keeps a second copy of the full model in memory, not just of its own shard. All tensors are
    received and verified before vLLM loads the first one. If vLLM fails after that, the engine
    stays paused.
    """

    def __init__(self, worker: Any, model: torch.nn.Module) -> None:
        super().__init__(model, lambda: int(worker.rank))
        self._worker = worker
        self._tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def _traced(self, store: Any, timeout_s: float) -> RankLayout:
        """Return a layout in which each tensor of the catalog is a separate buffer."""
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
            self._parts = frozenset((self._digest,))
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
        # these tensors are not in use yet, so nothing needs staging
        received = receive_stream(schedule.messages, channel, self._staging, False, given)
        self._agree_to_commit(board, rank)
        self._worker.reload_weights(weights_iterator=iter(given.items()), is_checkpoint_format=True)
        return received.stats.payload_bytes
