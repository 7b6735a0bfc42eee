"""Comparison of a tiny random copy of a model with transformers, using a run's own loader, forward
pass and export.

`python -P -m hybridflow.doctor.parity FOLDER SOURCE BACKEND` runs in a separate process, so that
Megatron's groups and a loopback port are released when it exits. FOLDER contains the copy's
`config.json` (`models.miniature`); SOURCE is the published folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hybridflow.config.model_config import published_form
from hybridflow.errors import HybridFlowError, ModelError

if TYPE_CHECKING:
    import torch

    from hybridflow.models import Family

# Separates rounding from faults: two float32 results of these sizes differ by up to 5e-6. An expert
# scale off by 0.04%, a rotary base off by 0.1% or an epsilon off by a power of ten changes a log-
# prob by 1e-4 to 0.2.
BOUND = 5e-5
Backend = Literal["megatron", "fsdp"]  # `actor.backend`
_SEED = 7
_ROWS = 4
_TOKENS = 24
_RESULT = "parity.json"


@dataclass(frozen=True)
class Parity:
    """The result of the comparison.

    Attributes:
        log_probs: largest difference between HybridFlow's log-probs and those of transformers in
            float64.
        exported: largest difference between transformers' log-probs on the exported and on the
            original model.
        parameters: number of parameters in the copy.
        reference: name of the transformers class.
    """

    log_probs: float
    exported: float
    parameters: int
    reference: str


def compare_with_transformers(
    copy: Mapping[str, Any], source: Path, backend: Backend, timeout_s: float
) -> Parity:
    """Run the comparison in a separate process.

    Args:
        copy: the config of the small model.
        source: the published folder, whose tokenizer is copied into the export.
        backend: the run's `actor.backend`.

    Raises:
        ModelError: the backend or transformers cannot build the model, or the comparison takes
            longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="hybridflow-doctor-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(copy), encoding="utf-8")
        command = [
            sys.executable,
            "-P",
            "-m",
            "hybridflow.doctor.parity",
            str(folder),
            str(source.resolve()),
            backend,
        ]
        environ = {
            **os.environ,
            "HYBRIDFLOW_PLATFORM": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "0",
        }
        try:
            done = subprocess.run(
                command,
                env=environ,
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ModelError(
                f"a small copy took more than {timeout_s:g} s to build and compare"
            ) from error
        if done.returncode or not (folder / _RESULT).exists():
            said = done.stderr.strip().splitlines() or [
                f"its process exited with status {done.returncode}"
            ]
            raise ModelError(said[-1])
        return Parity(**json.loads((folder / _RESULT).read_text(encoding="utf-8")))


def main(folder: Path, source: Path, backend: Backend) -> None:
    """Run the comparison in the child process and write the result to `folder`."""
    from hybridflow.models import family_of
    from hybridflow.models.family import num_parameters

    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    family = family_of(hf)
    write_weights(family, folder)
    ids = sequences(family.vocab_size)
    ours = _ours(hf, folder, backend, ids, source)
    reference = reference_class(family)
    expected = log_probs(reference, family, folder, ids)
    again = log_probs(reference, family, folder / "exported", ids)
    found = Parity(
        float((ours - expected).abs().max()),
        float((again - expected).abs().max()),
        num_parameters(family),
        reference.__name__,
    )
    (folder / _RESULT).write_text(json.dumps(vars(found)), encoding="utf-8")


def sequences(vocabulary: int) -> torch.Tensor:
    """Draw random token ids [rows, tokens] int64."""
    import torch

    return torch.randint(
        0, vocabulary, (_ROWS, _TOKENS), generator=torch.Generator().manual_seed(_SEED)
    )


def write_weights(family: Family, folder: Path) -> None:
    """Write random weights, as an export does. Norm weights differ from 1 and biases from 0, so
    that an omitted norm or bias is detected."""
    import torch
    from safetensors.torch import save_file

    from hybridflow.models.weights import zero_centered_norms
    from hybridflow.saving.carried import carried_from, entries_with
    from hybridflow.saving.safetensors_file import entries_of

    generator = torch.Generator().manual_seed(_SEED)
    zero_centered = zero_centered_norms(family)

    def values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        drawn = torch.empty(shape).normal_(0.0, 1.0, generator=generator)
        if len(shape) == 1:
            is_factor = "norm" in name and name not in zero_centered
            return 0.1 * drawn + float(is_factor)
        # as small as in a trained model, so that the epsilon of a norm matters
        return drawn * 0.02 if "embed_tokens" in name else drawn / shape[-1] ** 0.5

    carried = carried_from(None, family)
    entries = entries_with(carried, entries_of(family, torch.float32))
    tensors = {entry.name: torch.empty(entry.shape) for entry in entries}
    for name, shape in family.tensors().items():
        place = carried.place(name)
        place.view(tensors[place.tensor], (0,) * len(shape), shape).copy_(values(name, shape))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _ours(
    hf: Mapping[str, Any], folder: Path, backend: Backend, ids: torch.Tensor, source: Path
) -> torch.Tensor:
    """Compute HybridFlow's log-probs of all tokens except the first of each row, in float64, and
    export the policy to `folder`/exported.
    """
    from dataclasses import replace

    import torch

    from hybridflow.batch import DataProto, Jagged
    from hybridflow.config.schema import RunConfig
    from hybridflow.device.platform import Platform
    from hybridflow.process.rendezvous import world_of_one
    from hybridflow.workers.backend import open_backend

    world_of_one()
    default = RunConfig()
    model = replace(default.model, path=str(folder), dtype="float32")
    config = replace(default, model=model, actor=replace(default.actor, backend=backend))
    policy = open_backend(config, hf, Platform.detect(), 0)
    rows = [row.numpy() for row in ids]
    columns = {
        "prompt_ids": Jagged.from_rows([row[:1] for row in rows], rows[0].dtype),
        "response_ids": Jagged.from_rows([row[1:] for row in rows], rows[0].dtype),
    }
    batch = DataProto.from_columns(columns)
    found = policy.log_probs(batch, max_tokens=ids.numel(), temperature=1.0, with_entropy=False)
    assert found is not None  # one rank is the last stage
    policy.export(folder / "exported", hf, source)
    return torch.from_numpy(found[0].values.copy()).double().reshape(len(rows), -1)


def reference_class(family: Family) -> Any:
    """Return the transformers class for the architecture. `kimi_k2`, which transformers does not
    support, uses DeepSeek-V3's class."""
    import transformers

    found = getattr(transformers, family.architecture, None)
    if found is None:
        raise ModelError(
            f"{family.architecture} not found in transformers {transformers.__version__}; there is "
            "nothing to compare with"
        )
    return found


def log_probs(reference: Any, family: Family, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Compute the log-probs of all tokens except the first of each row with transformers, in
    float64."""
    import torch

    # deepcopy, because transformers modifies nested settings
    wanted = {**family.hf, "model_type": reference.config_class.model_type}
    given = deepcopy(published_form(wanted))
    config = reference.config_class.from_dict(given)
    # grouped matrix products do not support float64
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model, loaded = reference.from_pretrained(
        folder,
        config=config,
        dtype=torch.float64,
        local_files_only=True,
        output_loading_info=True,
        **plain,
    )
    if absent := sorted(
        {*loaded["missing_keys"], *loaded["unexpected_keys"], *loaded["mismatched_keys"]}
    ):
        raise ModelError(
            "tensors differ between transformers and the family's map: "
            f"{', '.join(map(str, absent[:4]))}"
        )
    with torch.no_grad():
        logits = model.eval()(ids).logits[:, :-1].double()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), "fsdp" if sys.argv[3] == "fsdp" else "megatron")
    except HybridFlowError as error:
        sys.exit(str(error).replace("\n", "; "))
