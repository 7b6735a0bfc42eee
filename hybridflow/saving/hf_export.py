"""Export of a model as a Hugging Face folder. Every rank sends the slices that it owns to the ranks
that write files. Each of those ranks writes one file, tensor by tensor. A rank never holds more
than one whole tensor, plus its slices of the few tensors being written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.models.family import Family
from hybridflow.models.weights import copy_companions
from hybridflow.process.exchange import Exchange, shared_exchange
from hybridflow.saving.carried import (
    Carried,
    carried_from,
    entries_with,
    exported_config,
    nothing_from,
    owners_with,
)
from hybridflow.saving.manifest import sync_folder
from hybridflow.saving.ownership import OwnedPiece
from hybridflow.saving.safetensors_file import (
    Entry,
    ShardWriter,
    entries_of,
    shards_of,
    write_surroundings,
)

MAX_SHARD_BYTES = 4 << 30
_WRITERS = 4  # number of files written concurrently; limits the data in flight per rank


@dataclass(frozen=True)
class _File:
    """An export file and the rank that writes it."""

    name: str
    writer: int
    entries: list[Entry]


@dataclass(frozen=True)
class Held:
    """The distributed model to export: the owner of every piece of each HF tensor, and this rank's
    tensors, keyed by name.
    """

    family: Family
    dtype: torch.dtype
    owners: Mapping[str, list[OwnedPiece]]
    parameters: Mapping[str, torch.Tensor]


def export_held(
    held: Held,
    folder: Path,
    hf_config: Mapping[str, Any],
    tokenizer: Path | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    *,
    source: Path | None = None,
) -> list[str]:
    """Write `folder` (safetensors shards, index, config.json, checksums, tokenizer files)
    atomically. Collective.

    Args:
        source: the model's original folder, from which weights that training does not use are
            copied.

    Returns:
        Messages about tensors and fields that were copied, omitted or changed; the same on all
        ranks.

    Raises:
        OSError: the disk is full or the folder cannot be written; `folder` is then unchanged.
    """
    exchange = shared_exchange()
    carried = _agreed(carried_from(source, held.family), held.family, exchange)
    entries = entries_with(carried, entries_of(held.family, held.dtype))
    held = replace(held, owners=owners_with(carried, held.owners))
    shards = shards_of(entries, max_shard_bytes)
    files = []
    for number, (name, own) in enumerate(shards.items()):
        files.append(_File(name, number % dist.get_world_size(), own))
    partial = folder.with_name(folder.name + ".partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    exchange.gather("")
    written = _write_files(held, carried, partial, files, exchange)
    checksums = {}
    for text in exchange.gather_on_first("\n".join(written)):
        for line in filter(str.strip, text.split("\n")):
            name, checksum = line.split(" ")
            checksums[name] = checksum
    lines = list(carried.lines)
    if dist.get_rank() == 0:
        if tokenizer is not None:
            copy_companions(tokenizer, partial)
        config, changed = exported_config(
            hf_config, held.dtype, entries, partial, is_multimodal=carried.is_multimodal
        )
        write_surroundings(partial, shards, checksums, config)
        _put_in_place(partial, folder)
        lines += changed
    said = exchange.gather("\n".join(lines))[0]
    return [line for line in said.split("\n") if line.strip()]


def _put_in_place(partial: Path, folder: Path) -> None:
    """Rename an export to its final name. An earlier export is removed only afterwards, so that a
    crash never loses both."""
    earlier = folder.with_name(folder.name + ".earlier")
    shutil.rmtree(earlier, ignore_errors=True)
    sync_folder(partial)
    if folder.exists():
        os.replace(folder, earlier)
    os.replace(partial, folder)
    sync_folder(folder.parent)
    shutil.rmtree(earlier, ignore_errors=True)


def _agreed(carried: Carried, family: Family, exchange: Exchange) -> Carried:
    """Return the tensors to copy from the source folder, or none if the ranks see different files
    there.
    """
    if len(set(exchange.gather(carried.digest()))) == 1:
        return carried
    where = carried.source.folder if carried.source else "the model's original folder"
    return nothing_from(family, f"the ranks see different files in {where}")


def _write_files(
    held: Held, carried: Carried, folder: Path, files: Sequence[_File], exchange: Exchange
) -> list[str]:
    """Write all files, `_WRITERS` at a time. Returns a line `name sha256` for each file that this
    rank wrote.
    """
    rank = dist.get_rank()
    owners = held.owners
    parameters = held.parameters
    written: list[str] = []
    waiting = iter(files)
    while wave := list(islice(waiting, min(_WRITERS, dist.get_world_size()))):
        writers = {
            file.name: ShardWriter(folder / file.name, file.entries)
            for file in wave
            if file.writer == rank
        }
        for turn in zip_longest(*(file.entries for file in wave)):
            sends = []
            for file, entry in zip(wave, turn, strict=True):
                if (
                    entry is not None
                    and entry.name in owners
                    and file.writer != rank
                    and (mine := _packed(owners[entry.name], parameters, entry, rank)) is not None
                ):
                    # keep the tensor alive until it has been sent
                    sends.append((dist.isend(mine, file.writer, group=exchange.group), mine))
            for file, entry in zip(wave, turn, strict=True):
                if entry is not None and file.writer == rank:
                    whole = (
                        _assembled(owners[entry.name], parameters, entry, rank, exchange)
                        if entry.name in owners
                        else carried.read(entry.name)
                    )
                    writers[file.name].add(entry.name, whole)
            for send, _ in sends:
                assert send is not None  # this rank is in the group
                send.wait()
        written += [f"{name} {writer.close()}" for name, writer in writers.items()]
    return written


def _packed(
    owned: Sequence[OwnedPiece], parameters: Mapping[str, torch.Tensor], entry: Entry, rank: int
) -> torch.Tensor | None:
    mine = []
    for one in owned:
        if one.rank == rank:
            mine.append(
                parameters[one.parameter][one.piece.slices()].reshape(-1).to("cpu", entry.dtype)
            )
    return torch.cat(mine) if mine else None


def _assembled(
    owned: Sequence[OwnedPiece],
    parameters: Mapping[str, torch.Tensor],
    entry: Entry,
    rank: int,
    exchange: Exchange,
) -> torch.Tensor:
    """Assemble the whole tensor on the rank that writes it."""
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for sender, group in groupby(owned, key=lambda one: one.rank):
        slices = list(group)
        if sender == rank:
            packed = _packed(owned, parameters, entry, rank)
            assert packed is not None
        else:
            packed = torch.empty(sum(one.piece.numel for one in slices), dtype=entry.dtype)
            dist.recv(packed, sender, group=exchange.group)
        for one, values in zip(
            slices, packed.split([one.piece.numel for one in slices]), strict=True
        ):
            into = one.view(whole)
            into.copy_(values.view(into.shape))
    return whole
