"""The weight receiver inside every rank of an engine: it describes the rank's weight layout and
receives new weights.

The engine's loader is traced (`layout_tracer`), and incoming weights are written to the locations
that the loader would write. Errors are reported through the weight-sync store, because the server's
response does not contain them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridflow.device.platform import Platform
from hybridflow.engines.kept_adapters import keep
from hybridflow.engines.layout_tracer import TracedLayout, trace_layout
from hybridflow.errors import WeightSyncError
from hybridflow.models.served_adapters import ServedAdapters
from hybridflow.reshard.layout import PADDING, Catalog, RankLayout
from hybridflow.sync import session
from hybridflow.sync.schedule import RECEIVER, Schedule, layout_digest, post_layout, schedule_key
from hybridflow.sync.session import (
    ABORT,
    COMMIT,
    DESCRIBE,
    RECEIVE,
    Board,
    Control,
    Order,
    RankReport,
    problem_of,
)
from hybridflow.sync.staging import ReceiveStaging, rectangle
from hybridflow.sync.stream import receive_stream
from hybridflow.sync.transports import open_receiver
from hybridflow.sync.transports.base import ReceiveChannel

_log = logging.getLogger(__name__)


class _CalledOff(WeightSyncError):
    """Raised if another rank, a sender or the engine's worker has already cancelled the order."""


class WeightReceiver:
    """The state of one engine rank across syncs: its traced layout, schedule and open session.

    Args:
        model: the engine's model; `load_weights` is the engine's own loader.
        rank: returns this process's rank in the engine.
        finish: called with the model after the last weight is written.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        rank: Callable[[], int],
        finish: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self.model = model
        self._rank = rank
        self._finish = finish
        self._layout: RankLayout | None = None
        self._digest = ""
        self._parts: frozenset[str] = frozenset()  # digests of all layouts that a plan may have
        self._pointers: dict[str, int] = {}
        self._transposed: frozenset[str] = frozenset()
        self._schedule: Schedule | None = None
        self._planned = ""  # digest of the schedule's layout
        self._channel: ReceiveChannel | None = None
        self._session = ""
        self._staging = ReceiveStaging(-1)
        self._thread: threading.Thread | None = None

    def take(self, control: Control, in_background: bool) -> None:
        """Handle a message. If `in_background` is True, weights are received in a thread."""
        if not in_background or control.action != RECEIVE:
            return self.handle(control)
        # these modes are per thread, and weights created in inference mode must not be written
        # outside it
        modes = (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
        before = self._thread

        def work() -> None:
            try:
                device = _device(self.model)
                platform = Platform(device.type)  # type: ignore[arg-type]
                platform.set_device(device.index or 0)
                if before is not None:
                    before.join()  # the rank has reported, or this engine is being abandoned
                platform.synchronize()  # wait for kernels started before the pause
                with torch.inference_mode(modes[0]), torch.set_grad_enabled(modes[1]):
                    self.handle(control, platform.synchronize)
            except BaseException:  # like `load`
                _log.exception("could not answer a weight-sync message")

        self._thread = threading.Thread(target=work, name="receive-weights", daemon=True)
        return self._thread.start()

    def handle(self, control: Control, finish: Callable[[], None] | None = None) -> None:
        """Execute the command, call `finish`, and post a report."""
        started = time.perf_counter()
        rank = control.first_rank + self._rank()
        store = session.connect(control.host, control.port, control.timeout_s)
        nbytes = 0
        error = ""
        called_off = False
        try:
            nbytes = self._act(control, rank, store)
            if finish is not None:
                finish()
        except BaseException as problem:
            self._give_up()
            called_off = isinstance(problem, _CalledOff)
            error = f"rank {rank}: {problem_of(problem)}"
            _log.exception("weight sync: rank %d failed", rank)
        seconds = time.perf_counter() - started
        report = RankReport(rank, error, nbytes, seconds, self._digest, os.getpid(), called_off)
        session.write_report(store, control.report, report)

    def _act(self, control: Control, rank: int, store: Any) -> int:
        layout = self._traced(store, control.timeout_s)
        if control.action == DESCRIBE:
            self._describe(store, layout)
            return 0
        if control.order is None:
            raise WeightSyncError("a RECEIVE message must include an order")
        board = Board.open(control.order, store)
        try:
            return self._receive(board, rank)
        except BaseException as problem:
            was_called_off = board.decision() == ABORT
            board.decide(ABORT)
            # stop the other ranks from waiting for this one; they then read the decision
            board.staged(rank)
            if was_called_off and not isinstance(problem, _CalledOff):
                raise _CalledOff(
                    f"cancelled before commit (error on this rank: {problem_of(problem)})"
                ) from problem
            raise

    # ---- layout

    def _describe(self, store: Any, layout: RankLayout) -> None:
        buffers = self._buffers()
        parameters = {name: tuple(buffers[name].shape) for name, _ in self.model.named_parameters()}
        post_layout(store, layout, parameters)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return the model's weights. Weights that the layout describes by their transpose are
        returned as transposed views.
        """
        buffers: dict[str, torch.Tensor] = {}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            buffers[name] = tensor.data.mT if name in self._transposed else tensor.data
        return buffers

    def _addresses(self) -> dict[str, int]:
        """Return the address of each buffer."""
        return {name: tensor.data_ptr() for name, tensor in self._buffers().items()}

    def _traced(self, store: Any, timeout_s: float) -> RankLayout:
        """Return the layout. Retraces the loader first if a buffer has moved (because weights were
        repacked or memory was reallocated).
        """
        if self._layout is None or self._addresses() != self._pointers:
            catalog = session.read(store, session.CATALOG_KEY, timeout_s)
            tensors = {name: tuple(shape) for name, shape in catalog["tensors"].items()}
            loader: Callable[..., Any] = self.model.load_weights  # type: ignore[assignment]
            dtype = getattr(torch, catalog["dtype"])
            others = {name: getattr(torch, other) for name, other in catalog["dtypes"].items()}
            traced = trace_layout(self.model, loader, tensors, dtype, others)
            self._transposed = frozenset(traced.transposed)
            if catalog.get("adapters"):
                self._adopt_with_adapters(traced, tensors, catalog["adapters"])
            else:
                self._adopt(traced, Catalog.of(tensors))
        assert self._layout is not None
        return self._layout

    def _adopt(self, traced: TracedLayout, catalog: Catalog) -> None:
        self._layout = traced.rank_layout(catalog)
        self._pointers = self._addresses()
        self._digest = layout_digest(self._layout)
        self._parts = frozenset((self._digest,))

    def _adopt_with_adapters(
        self, traced: TracedLayout, tensors: Mapping[str, Sequence[int]], described: Any
    ) -> None:
        """Add adapters to the model, and accept plans that transfer only the adapters' buffers."""
        adapters = ServedAdapters.from_dict(described)
        traced = keep(self.model, traced, adapters)
        self._adopt(traced, Catalog.of({**tensors, **adapters.shapes}))
        assert self._layout is not None
        self._parts |= {layout_digest(self._layout.part(len(tensors)))}

    # ---- one sync

    def _receive(self, board: Board, rank: int) -> int:
        order = board.order
        schedule = self._scheduled(board, rank)
        channel = self._opened(order, rank)
        buffers = self._buffers()
        received = receive_stream(schedule.messages, channel, self._staging, order.staged, buffers)
        if order.staged:
            self._agree_to_commit(board, rank)
            received.commit(buffers)
        self._clear_padding(buffers)
        self._finish(self.model)
        return received.stats.payload_bytes

    def _agree_to_commit(self, board: Board, rank: int) -> None:
        """Wait until every rank of the engine has staged all weights and agrees to copy them.
        Raises `_CalledOff` if the order is cancelled."""
        board.staged(rank)
        board.wait_all_staged(board.order.endpoint.timeout_s)
        if board.decide(COMMIT) != COMMIT:
            raise _CalledOff("cancelled before commit")

    def _scheduled(self, board: Board, rank: int) -> Schedule:
        order = board.order
        if self._schedule is None or self._schedule.plan != order.plan:
            key = schedule_key(order.plan, RECEIVER, rank)
            found = session.read(board.store, key, order.endpoint.timeout_s)
            self._schedule = Schedule.from_dict(found)
            self._planned = layout_digest(self._schedule.layout)
        if self._planned not in self._parts:
            raise WeightSyncError(
                "the weight layout has changed since the plan was made; restart the engine"
            )
        return self._schedule

    def _opened(self, order: Order, rank: int) -> ReceiveChannel:
        """Return the session's channel, after closing the channel of any earlier session."""
        if self._channel is None or self._session != order.endpoint.session:
            self._give_up()
            self._channel = open_receiver(order.endpoint, rank, _device(self.model))
            self._session = order.endpoint.session
            self._staging = ReceiveStaging(rank, order.endpoint.slots)
        return self._channel

    def _give_up(self) -> None:
        channel = self._channel
        self._channel = None
        self._staging.release()
        if channel is not None:
            channel.abort()

    def _clear_padding(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Zero the padding, as the loader does. No message writes to it, and in an engine that
        started without weights it is uninitialised.
        """
        layout = self._layout
        if layout is None:
            return
        for row in np.flatnonzero(layout.tensor == PADDING):
            buffer = buffers[layout.names[layout.buffer[row]]]
            padding = rectangle(buffer, layout.local[row], layout.size[row])
            padding.zero_()


def _device(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device
