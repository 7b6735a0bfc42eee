"""Streams in one process: the channel is a dictionary, everything else is what runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hybridflow.device.platform import Platform
from hybridflow.errors import WeightSyncError
from hybridflow.models.layout import ParallelShape
from hybridflow.reshard.engine_layouts import EngineShape, engine_layout
from hybridflow.reshard.layout import Catalog, megatron_layout
from hybridflow.reshard.planner import make_plan
from hybridflow.sync.messages import Item, Message, Messages
from hybridflow.sync.staging import Copies, ReceiveStaging, SendStaging
from hybridflow.sync.stream import receive_stream, send_stream
from hybridflow.sync.transports import chosen, open_sender, part_bytes
from hybridflow.sync.transports.base import LAST_TAG, Endpoint, Payload
from tests.unit.reshard import reshard_cases as cases


def tensors(held: list[cases.Buffers]) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.from_numpy(values) for name, values in mine.items()} for mine in held]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3", "glm4_moe"])
def test_messages_of_mixed_dtypes_are_cast_and_arrive(name: str) -> None:
    """bf16 engines with a few fp32 buffers (biases of experts), tied embeddings, odd vocabularies;
    two syncs, staged and in place."""
    decoder = cases.decoder_of(name)
    shape = ParallelShape(4, tensor=2, pipeline=2, expert=2 if name != "qwen3" else 1)
    catalog = Catalog.of(decoder.tensors())
    engines = [EngineShape(tensor=2), EngineShape()]
    source = megatron_layout(decoder, shape.coordinates(), "float32")
    target = engine_layout(decoder, engines, "bfloat16")
    plan = make_plan(catalog, source, target, 1 << 17)
    messages = Messages(plan)
    weights = cases.random_weights(decoder)
    trainers = tensors(cases.trainer_buffers(decoder, shape.coordinates(), weights))
    want = tensors(cases.engine_buffers(target, catalog, weights))
    dtypes = [
        dict(zip(target.classes[c].names, target.classes[c].dtypes, strict=True))
        for c in target.rank_class.tolist()
    ]
    empty = tensors(cases.engine_buffers(target, catalog, None))
    live = [
        {n: v.to(getattr(torch, kinds[n])) for n, v in mine.items()}
        for mine, kinds in zip(empty, dtypes, strict=True)
    ]
    if name != "qwen3":
        assert any(
            len({item.dtype for item in m.items}) == 2
            for r in range(3)
            for m in messages.incoming(r)
        ), "no mixed message"
    mail: cases.Mail = {}
    senders = [(messages.outgoing(r), cases.Post(mail, r), SendStaging(r)) for r in range(4)]
    receivers = [(messages.incoming(r), cases.Post(mail, r), ReceiveStaging(r)) for r in range(3)]
    for staged in (True, False):
        sent = [
            send_stream(m, trainers[r], channel, staging)
            for r, (m, channel, staging) in enumerate(senders)
        ]
        for rank, (m, channel, staging) in enumerate(receivers):
            received = receive_stream(m, channel, staging, staged, live[rank])
            received.commit(live[rank])
            for buffer, values in want[rank].items():
                assert torch.equal(live[rank][buffer], values.to(live[rank][buffer].dtype)), buffer
                live[rank][buffer].fill_(3)
                live[rank][buffer][torch.from_numpy(_padding(target, catalog, rank, buffer))] = 0
        assert not mail
        assert sum(s.payload_bytes for s in sent) == sum(
            message.nbytes for m, _, _ in receivers for message in m
        )


def _padding(target: Any, catalog: Catalog, rank: int, buffer: str) -> np.ndarray:
    return ~np.isnan(cases.engine_buffers(target, catalog, None)[rank][buffer])


def test_what_is_staged_is_freed_by_the_commit() -> None:
    """Else a second shard would stay beside the engine's weights until the next sync, and through
    training."""
    columns = ((0, 0, 1), (1, 4, 3))  # packed: views of the slab are prepared
    message = Message(0, 0, 0, 48, (Item("a", *columns, "float32"),))
    sent = {"a": torch.arange(24.0).view(4, 6)}
    live = {"a": torch.zeros(4, 6)}
    mail = dict[Any, Any]()
    staging = ReceiveStaging(0)
    sending = SendStaging(0)
    for version in (1, 2):
        sent["a"] += version
        send_stream([message], sent, cases.Post(mail, 0), sending)
        received = receive_stream([message], cases.Post(mail, 0), staging, True, live)
        slab = StorageWeakRef(staging.slabs[0].untyped_storage())
        assert received.stats.peak_staging_bytes >= 48 and live["a"].count_nonzero() == 12 * (
            version - 1
        )
        received.commit(live)
        assert slab.expired() and staging.nbytes == 0
        assert torch.equal(live["a"][:, 1:4], sent["a"][:, 1:4])


def test_neighbouring_slices_are_copied_as_one_and_others_are_not() -> None:
    live = {"a": torch.arange(24.0).view(2, 3, 4)}

    def item(start: tuple[int, ...], size: tuple[int, ...]) -> Item:
        return Item("a", start, size, "float32")

    rows = (item((0, 0, 0), (1, 1, 4)), item((0, 1, 0), (1, 2, 4)), item((1, 0, 0), (1, 3, 4)))
    columns = (item((0, 0, 0), (1, 3, 2)), item((0, 0, 2), (1, 3, 2)))
    for items, pieces in ((rows, 1), (columns, 2)):
        message = Message(0, 0, 0, 4 * sum(int(np.prod(i.size)) for i in items), items)
        copies = Copies([message], live)
        payload = Payload(torch.zeros(message.nbytes, dtype=torch.uint8))
        copies.pack(0, payload, 0)
        parts = [
            live["a"][tuple(slice(s, s + n) for s, n in zip(i.start, i.size, strict=True))].reshape(
                -1
            )
            for i in items
        ]
        assert torch.equal(payload.tensor.view(torch.float32), torch.cat(parts))
        assert len(copies._local[0]) == pieces


def test_a_contiguous_slice_is_sent_from_its_buffer_and_received_in_it() -> None:
    rows = ((0, 1, 0), (1, 2, 6))
    columns = ((0, 0, 1), (1, 4, 3))
    for (start, size), is_whole in ((rows, True), (columns, False)):
        live = {"a": torch.arange(24.0).view(4, 6)}
        message = Message(0, 0, 0, 4 * int(np.prod(size)), (Item("a", start, size, "float32"),))
        copies = Copies([message], live)
        whole = copies.whole(0)
        assert (whole is not None) == is_whole
        if whole is not None:
            assert (
                whole.tensor.data_ptr() == live["a"][1:].data_ptr()
                and whole.nbytes == message.nbytes
            )
            mail: cases.Mail = {}
            send_stream([message], live, cases.Post(mail, 0), sending := SendStaging(0))
            into = {"a": torch.zeros(4, 6)}
            receive_stream(
                [message], cases.Post(mail, 0), receiving := ReceiveStaging(0), False, into
            )
            assert torch.equal(into["a"][1:3], live["a"][1:3]) and into["a"].count_nonzero() == 12
            assert sending.nbytes == receiving.nbytes == 0, "nothing had to be packed"
            assert live["a"].untyped_storage().resizable(), (
                "parameters are offloaded by resizing them"
            )
    cast = Message(0, 0, 0, 24, (Item("a", *rows, "bfloat16"),))
    assert Copies([cast], {"a": torch.zeros(4, 6)}).whole(0) is None, "a cast is made while packing"


def test_a_plan_of_other_buffers_is_refused_by_name() -> None:
    message = Message(0, 0, 0, 16, (Item("b", (0, 0, 0), (1, 1, 4), "float32"),))
    with pytest.raises(WeightSyncError, match="the plan's buffer b does not exist"):
        Copies([message], {"a": torch.zeros(4)})
    with pytest.raises(WeightSyncError, match=r"b has shape \(3,\)"):
        Copies([message], {"b": torch.zeros(3)})


def test_moved_buffers_are_noticed() -> None:
    message = Message(0, 0, 0, 16, (Item("b", (0, 0, 0), (1, 1, 4), "float32"),))
    mail: cases.Mail = {}
    channel = cases.Post(mail, 0)
    staging = SendStaging(0)
    messages = [message]
    for value in (1.0, 2.0):
        send_stream(messages, {"b": torch.full((4,), value)}, channel, staging)
        assert mail.pop((0, 0, 0)).view(torch.float32).tolist() == [value] * 4
        assert mail.pop((0, 0, LAST_TAG)).numel() == 8 and not mail


def test_an_unknown_transport_or_rank_is_refused_with_the_valid_ones() -> None:
    endpoint = Endpoint("smoke", "s", "127.0.0.1", 1, (0, 1), (0,), 8, 1.0)
    with pytest.raises(WeightSyncError, match=r"unknown weight transport.*p2p, shared_memory, tcp"):
        open_sender(endpoint, 0)
    with pytest.raises(WeightSyncError, match=r"trainer rank 7 is not in session .* \[0, 1\]"):
        open_sender(Endpoint(**{**vars(endpoint), "transport": "tcp"}), 7)


def test_a_store_that_nobody_serves_is_an_error_within_the_deadline() -> None:
    with pytest.raises(
        WeightSyncError, match=r"could not reach the store at 127.0.0.1:9 within 0.3 s"
    ):
        open_sender(Endpoint("p2p", "s", "127.0.0.1", 9, (0,), (0,), 8, 0.3), 0)
    assert Endpoint.from_dict(asdict(Endpoint("p2p", "s", "h", 9, (0,), (0,), 8, 0.3))).senders == (
        0,
    )


def test_the_transport_and_the_messages_fit_the_device() -> None:
    cpu = Platform("cpu")
    cuda = Platform("cuda")
    assert (chosen("auto", cpu), chosen("auto", cuda), chosen("shared_memory", cpu)) == (
        "tcp",
        "p2p",
        "shared_memory",
    )
    assert 0 < part_bytes("tcp", cpu) < part_bytes("p2p", cpu) and part_bytes("p2p", cuda) == 0
