"""The index of a checkpoint in torch's distributed format, as `dist_checkpointing.load` reads it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hybridflow.saving.files import Chunk, check_cover, write_bytes
from hybridflow.saving.manifest import INDEX, FileRecord, digest_of, sync_folder, write_json

COMMON = "common.pt"


def write_index(
    folder: Path, chunks: Sequence[Chunk], hf: Sequence[Any], common: Mapping[str, Any]
) -> dict[str, FileRecord]:
    """What one rank writes for all: torch's `.metadata`, Megatron's `common.pt` and `metadata.json`, and `index.json`,
    which says the same as `.metadata` (and where the Hugging Face tensors lie) without a pickle.

    Raises:
        CheckpointError: the rectangles do not cover a tensor exactly.
    """
    check_cover(chunks)
    stream = io.BytesIO()
    torch.save(dict(common), stream)
    write_bytes(folder / COMMON, stream.getvalue())
    write_bytes(folder / ".metadata", pickle.dumps(_metadata(chunks)))
    write_json(folder / INDEX, {"chunks": list(chunks), "hf": list(hf)})
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))
    sync_folder(folder)
    return {name: digest_of(folder / name) for name in (COMMON, ".metadata", INDEX, "metadata.json")}


def _metadata(chunks: Sequence[Chunk]) -> Metadata:
    tensors: dict[str, Any] = {}
    storage = {}
    for chunk in chunks:
        key, start = chunk["key"], torch.Size(chunk["start"])
        if key not in tensors:
            properties = TensorProperties(dtype=getattr(torch, chunk["dtype"]))
            tensors[key] = TensorStorageMetadata(properties, torch.Size(chunk["shape"]), [])
        tensors[key].chunks.append(ChunkStorageMetadata(offsets=start, sizes=torch.Size(chunk["size"])))
        storage[MetadataIndex(key, start)] = _StorageInfo(chunk["file"], chunk["offset"], chunk["length"])
    return Metadata(
        state_dict_metadata=tensors,
        planner_data={},
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
