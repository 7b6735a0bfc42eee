"""Families against transformers on the same weights, in many layouts in one set of processes.

Log-probs, and the gradient of an update.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hybridflow.batch import DataProto, Jagged
from hybridflow.data.image_tokens import GRIDS, PIXELS
from tests.dist.harness.exact import exact_layers
from tests.dist.harness.policies import policy_of, share_of, weights_of
from tests.models import IMAGE_TOKEN
from tests.published.multimodal import with_stacked_experts

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2": {"tensor": 2, "sequence": True},
    "PP2": {"pipeline": 2},
    "CP2": {"context": 2},
    "EP2": {"expert": 2},
}
TEMPERATURE = 0.8


def run_cases(
    cases: list[list[Any]],
    folder: str,
    lengths: list[int],
    initial: str = "shaken",
    with_rounding: bool = False,
) -> list[dict[str, Any]]:
    """On each rank: every case [name, config, layout, whether with a gradient] in order; what was
    measured, on the rank that collects. A name stands for one config.

    Weights are `policies.weights_of` ("shaken"), or as transformers initialises the model.
    """
    from hybridflow.mcore.model import load_weights
    from hybridflow.models.weights import SafetensorsFolder
    from tests.dist.harness.worlds import Worlds

    worlds = Worlds()
    found = []
    for name, hf, layout, with_gradient in cases:
        ranks = list(range(1 if layout == "one process" else 2))
        if worlds.mine(ranks):
            with worlds.world(ranks):
                policy = policy_of({**LAYOUTS[layout], "distributed_optimizer": False}, hf)
                batch = batch_of_lengths(lengths, hf["vocab_size"])
                place = Path(folder, name)
                if initial == "transformers":
                    if dist.get_rank() == 0 and not place.exists():
                        _write_initial(hf, place)
                    dist.barrier()
                    load_weights(policy.stages, policy.family, SafetensorsFolder(place))
                result = measure(
                    policy, hf, place, batch, with_gradient, with_rounding=with_rounding
                )
            found.append({"name": f"{name}, {layout}", **result})
    worlds.finish()
    return found


def batch_of_lengths(lengths: list[int], vocab: int) -> DataProto:
    """A row of each length, the first half of it (rounded up) its prompt."""
    rng = np.random.default_rng(7)
    rows = [rng.integers(2, vocab, length + 1) for length in lengths]
    prompts = [row[: (len(row) + 1) // 2] for row in rows]
    responses = [row[(len(row) + 1) // 2 :] for row in rows]
    return DataProto.from_columns(
        {
            "prompt_ids": Jagged.from_rows(prompts, np.int64),
            "response_ids": Jagged.from_rows(responses, np.int64),
        }
    )


def measure(
    policy: Any,
    hf: dict[str, Any],
    folder: Path,
    batch: DataProto,
    with_gradient: bool,
    max_tokens: int = 4096,
    with_rounding: bool = False,
) -> dict[str, Any]:
    """The largest differences of log-probs, and of the gradient in units of the largest one.

    With rounding, those of transformers in float32 too. The folder is written unless it exists.
    """
    ours = _log_probs(policy, batch, max_tokens)
    if dist.get_rank() == 0 and not folder.exists():
        _write(policy.family, hf, folder)
    dist.barrier()
    expected = _expected(folder, batch, with_gradient, with_rounding)
    result: dict[str, Any] = {"log_probs": float((ours - expected.log_probs).abs().max())}
    result["missing in a checkpoint"] = _missing(policy)
    if expected.gradient is not None:
        result["gradient"] = _gradient_difference(policy, batch, expected.gradient, max_tokens)
    return result | ({"rounding": expected.rounding} if with_rounding else {})


@dataclass(frozen=True)
class Expected:
    """What transformers computes in float64, and how far its float32 is from it."""

    log_probs: torch.Tensor
    gradient: dict[str, torch.Tensor] | None
    rounding: dict[str, float]


def _expected(folder: Path, batch: DataProto, with_gradient: bool, with_rounding: bool) -> Expected:
    """The layouts of a configuration, which have one folder, are compared with one result."""
    if folder not in _latest:
        log_probs, model = _oracle(folder, batch)
        gradient = _gradient(model, log_probs) if with_gradient else None
        rounding = {}
        if with_rounding:
            rounded, other = _oracle(folder, batch, torch.float32)
            rounding["log_probs"] = float((rounded - log_probs).detach().abs().max())
            if gradient is not None:
                rounding["gradient"] = _largest(_gradient(other, rounded), gradient)
        _latest.clear()
        _latest[folder] = Expected(log_probs.detach(), gradient, rounding)
    return _latest[folder]


_latest: dict[Path, Expected] = {}


def largest_difference(policy: Any, folder: Path, batch: DataProto) -> float:
    """The largest difference of log-probs from those of transformers' multimodal class."""
    ours = _log_probs(policy, batch, 4096)
    expected, _ = _oracle(folder, batch, multimodal=True)
    return float((ours - expected.detach()).abs().max())


def _log_probs(policy: Any, batch: DataProto, max_tokens: int) -> torch.Tensor:
    """The log-probs of all rows of the batch, on every rank."""
    from hybridflow.mcore.parallel import data_parallel_position

    found = policy.log_probs(
        share_of(batch), max_tokens=max_tokens, temperature=TEMPERATURE, with_entropy=False
    )
    rank, size, collects = data_parallel_position()
    ours = torch.zeros(len(batch["response_ids"].values), dtype=torch.float64)
    if collects:
        # of the rows, data-parallel ranks have consecutive ones
        counts = [len(part["response_ids"].values) for part in batch.chunk(size)]
        start = sum(counts[:rank])
        ours[start : start + counts[rank]] = torch.from_numpy(found[0].values.copy())
    dist.all_reduce(ours)
    return ours


def _missing(policy: Any) -> float:
    """The share of the model's elements that is not in a checkpoint exactly once."""
    from hybridflow.mcore.sharded_state import ShardedState

    shapes = policy.family.tensors()
    counts = dict.fromkeys(shapes, 0)
    for part in ShardedState(policy, with_random_state=False).hf():
        counts[part.source] += prod(part.shape)
    held = torch.tensor(list(counts.values()))
    dist.all_reduce(held)
    wanted = torch.tensor([prod(shape) for shape in shapes.values()])
    return float((held - wanted).abs().sum() / wanted.sum())


def _write(family: Any, hf: dict[str, Any], folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    source = weights_of(family)
    tensors = {
        name: source.read(name, (0,) * len(shape), shape)
        for name, shape in family.tensors().items()
    }
    if hf["model_type"] == "qwen3_vl_moe":
        tensors = with_stacked_experts(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf))


def _write_initial(hf: dict[str, Any], folder: Path) -> None:
    """A folder of a new model of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    sizes = {key: value for key, value in hf.items() if key != "model_type"}
    config = AutoConfig.for_model(hf["model_type"], **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(hf))


def _oracle(
    folder: Path,
    batch: DataProto,
    dtype: torch.dtype = torch.float64,
    *,
    multimodal: bool = False,
) -> tuple[torch.Tensor, Any]:
    """Response log-probs by transformers, one sequence at a time, and its model."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_multimodal = multimodal or GRIDS in batch
    auto = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
    model, loaded = auto.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"], loaded
    if dtype == torch.float64:
        exact_layers(model)
    found = []
    for i in range(len(batch)):
        prompt, response = batch["prompt_ids"].row(i), batch["response_ids"].row(i)
        ids = torch.from_numpy(np.concatenate([prompt, response]))
        seen = _images(batch, i, len(ids)) if GRIDS in batch else {}
        logits = model.eval()(ids[None], use_cache=False, **seen).logits[0, len(prompt) - 1 : -1]
        distribution = (logits.double() / TEMPERATURE).log_softmax(-1)
        found.append(distribution.gather(-1, torch.tensor(response)[:, None])[:, 0])
    return torch.cat(found), model


def _images(batch: DataProto, row: int, length: int) -> dict[str, torch.Tensor]:
    """What transformers reads of a row's images, if it has any."""
    grids = batch.jagged(GRIDS).row(row)
    if not len(grids):
        return {}
    kinds = np.zeros(length, np.int64)
    prompt = batch.jagged("prompt_ids").row(row)
    kinds[: len(prompt)] = prompt == IMAGE_TOKEN
    return {
        "pixel_values": torch.from_numpy(batch.jagged(PIXELS).row(row).astype(np.float64)),
        "image_grid_thw": torch.from_numpy(grids.copy()),
        "mm_token_type_ids": torch.from_numpy(kinds)[None],
    }


def _gradient(model: Any, log_probs: torch.Tensor) -> dict[str, torch.Tensor]:
    """transformers' gradient as HF tensors."""
    from hybridflow.engines.hf.engine import checkpoint_tensors

    (-log_probs.mean()).backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data = parameter.grad
    return dict(checkpoint_tensors(model))


def _largest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any tensor, in units of the largest value of all."""
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    differences = [
        float((tensor.double() - expected[name]).abs().max()) for name, tensor in found.items()
    ]
    return max(differences, default=0.0) / scale


def _gradient_difference(
    policy: Any, batch: DataProto, expected: dict[str, torch.Tensor], max_tokens: int
) -> float:
    from tests.dist.cases.gradient import reduced_gradient

    ours = reduced_gradient(policy, share_of(batch), None, max_tokens, TEMPERATURE)
    frozen = {
        piece.source
        for local in policy.family.local_tensors(_alone())
        if local.is_buffer
        for piece in local.pieces
    }
    trained = {name: tensor for name, tensor in ours.items() if name not in frozen}
    worst = torch.tensor(_largest(trained, expected))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def _alone() -> Any:
    from hybridflow.models.layout import Coordinates

    return Coordinates()
