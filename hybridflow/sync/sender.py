"""The trainer side of a weight sync: on each rank, one thread per engine packs and streams the
rank's slices.

Each engine has a separate session, thread and store client. A stalled engine delays only its own
thread, and no longer than until the deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hybridflow.errors import WeightSyncError
from hybridflow.process.store import StoreClient
from hybridflow.sync import session
from hybridflow.sync.messages import Message
from hybridflow.sync.schedule import SENDER, Schedule, schedule_key
from hybridflow.sync.session import ABORT, Announcement, Board, Order, Outcome
from hybridflow.sync.staging import SendStaging
from hybridflow.sync.stream import send_stream
from hybridflow.sync.transports import open_sender
from hybridflow.sync.transports.base import Endpoint, SendChannel

_POLL_S = 0.1
OpenChannel = Callable[..., SendChannel]


class WeightSender:
    """Keeps this rank's schedules and open sessions between syncs.

    Args:
        rank: this trainer rank's number in the plan.
        parameters: function that returns this rank's tensors, keyed by layout name; called once per
            sync.
        open_channel: `transports.open_sender`, or a function that wraps its result.
    """

    def __init__(
        self,
        rank: int,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
        open_channel: OpenChannel = open_sender,
    ) -> None:
        self.rank = rank
        self._parameters = parameters
        self._open = open_channel
        self._schedules: dict[str, Schedule] = {}
        self._store: StoreClient | None = None
        self._links: dict[int, _Link] = {}

    def adopt(self, plan: str, host: str, port: int, timeout_s: float, *further: str) -> None:
        """Load this rank's schedules for `plan` and the `further` plans, and close the sessions of
        earlier plans.
        """
        self._store = session.connect(host, port, timeout_s)
        self._schedules = {
            digest: Schedule.from_dict(
                session.read(self._store, schedule_key(digest, SENDER, self.rank), timeout_s)
            )
            for digest in (plan, *further)
        }
        self.close()

    def send(self, orders: Sequence[Order], go_timeout_s: float) -> list[Outcome]:
        """Execute this rank's part of all orders concurrently. The parameters must not change
        during the call.

        Args:
            go_timeout_s: time limit in seconds for an engine to pause and become ready.

        Returns:
            One outcome for each order in which this rank is a sender.
        """
        if self._store is None:
            raise WeightSyncError(f"trainer rank {self.rank} has no plan; call adopt() first")
        parameters = self._parameters()
        running = []
        for order in orders:
            if self.rank not in order.endpoint.senders:
                continue
            link = self._links.get(order.number)
            if link is None or link.endpoint.session != order.endpoint.session:
                if link is not None:
                    link.abort()
                link = self._links[order.number] = _Link(
                    self.rank, order.endpoint, self._scheduled(order), self._open
                )
            running.append(_Sending(link, order, parameters, go_timeout_s))
        for sending in running:
            sending.thread.start()
        while any(sending.thread.is_alive() for sending in running):
            for sending in running:
                sending.thread.join(_POLL_S / len(running))
                sending.stop_if_called_off(self._store)
        for sending in running:
            if sending.outcome.error:
                self._links.pop(sending.order.number).abort()
        return [sending.outcome for sending in running]

    def _scheduled(self, order: Order) -> Schedule:
        """Return the schedule of the order's plan. If that plan is unknown, return the first plan's
        schedule; the engine then rejects this rank's announcement.
        """
        return self._schedules.get(order.plan) or next(iter(self._schedules.values()))

    def close(self) -> None:
        """Close all sessions."""
        for link in self._links.values():
            link.close()
        self._links = {}


class _Link:
    """This rank's end of one engine's session."""

    def __init__(
        self, rank: int, endpoint: Endpoint, schedule: Schedule, open_channel: OpenChannel
    ) -> None:
        self.rank = rank
        self.endpoint = endpoint
        self.plan = schedule.plan
        self._open = open_channel
        # the same object in every sync, because the stream caches prepared views by identity
        self.messages: list[Message] = [
            message for message in schedule.messages if message.peer in endpoint.receivers
        ]
        self.staging = SendStaging(rank, endpoint.slots)
        self._channel: SendChannel | None = None

    def stream(self, parameters: Mapping[str, torch.Tensor]) -> int:
        """Send all messages. Returns the number of weight bytes sent."""
        if self._channel is None:
            device = next(iter(parameters.values())).device
            self._channel = self._open(self.endpoint, self.rank, device)
        return send_stream(self.messages, parameters, self._channel, self.staging).payload_bytes

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def abort(self) -> None:
        if self._channel is not None:
            self._channel.abort()
        self._channel = None


class _Sending:
    """One order in progress on this rank."""

    def __init__(
        self, link: _Link, order: Order, parameters: Mapping[str, torch.Tensor], go_timeout_s: float
    ) -> None:
        self.link = link
        self.order = order
        self.parameters = parameters
        self.go_timeout_s = go_timeout_s
        self.outcome = Outcome(
            order.engine, order.number, "stale", "did not finish", rank=link.rank
        )
        self.thread = threading.Thread(target=self._run, name=f"send-{order.engine}", daemon=True)
        self._called_off = False

    def _run(self) -> None:
        started = time.perf_counter()
        nbytes = 0
        error = ""
        try:
            board = Board.open(self.order)
            board.announce(self.link.rank, Announcement(self.link.plan, self.order.version))
            board.wait_for_go(self.go_timeout_s)
            nbytes = self.link.stream(self.parameters)
        except Exception as problem:  # an exception in a thread would be lost
            error = (
                f"{self.order.describe()}: trainer rank {self.link.rank}: "
                f"{session.problem_of(problem)}"
            )
        status = "stale" if error else "served"
        seconds = time.perf_counter() - started
        self.outcome = replace(
            self.outcome, status=status, error=error, nbytes=nbytes, seconds=seconds
        )

    def stop_if_called_off(self, store: Any) -> None:
        """Abort the stream to an engine that has called the order off."""
        if (
            not self._called_off
            and self.thread.is_alive()
            and Board(store, self.order).decision() == ABORT
        ):
            self._called_off = True
            self.link.abort()
