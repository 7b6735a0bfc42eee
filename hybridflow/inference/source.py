"""Lookup of the weights that were passed to a command, and of the run that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config import hub
from hybridflow.config.model_config import read_model_config
from hybridflow.config.recorded import RECORDED
from hybridflow.errors import ConfigError
from hybridflow.saving import tools
from hybridflow.saving.manifest import Manifest
from hybridflow.saving.store import LATEST

_WANTED = "pass a run, a checkpoint (runs/NAME/checkpoints/global_step_N), an export or a model"
_POLICY = "policy"
_SCALAR = ("ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True)
class Source:
    """Weights on disk.

    Attributes:
        folder: a checkpoint's role folder, or a Hugging Face folder.
        hf_config: the model's Hugging Face config.
        dtype: precision of the weights.
        manifest: the checkpoint's manifest; None for a Hugging Face folder.
        run: the folder of the run that wrote the weights, with its config.yaml; None if unknown.
        role: name of the additional policy (`roles.NAME`) in a checkpoint; empty for the first
            policy.
    """

    folder: Path
    hf_config: Mapping[str, Any]
    dtype: str
    manifest: Manifest | None = None
    run: Path | None = None
    role: str = ""

    @property
    def step(self) -> int | None:
        """The step of the training loop after which the weights were saved; None if unknown."""
        if self.manifest is None:
            return None
        return self.manifest.step if self.manifest.phase == "rl" else 0

    @property
    def name(self) -> str:
        """A short name for the checkpoint or folder."""
        if self.manifest is None:
            return self.folder.resolve().name
        name = self.folder.parent.resolve().name
        return f"{name}-{self.role}" if self.role else name


def find(given: str) -> Source:
    """Find the weights at a path, or in the cache if a hub id is given.

    Raises:
        ConfigError: no model was found; the message lists the names that were tried.
        CheckpointError: a checkpoint's manifest is damaged.
    """
    path = Path(given)
    is_local = path.exists() or (path.parent / LATEST).is_file()
    if not is_local and hub.is_hub_id(given):
        folder = hub.cached(given, "model")
        if folder is None:
            raise ConfigError(f"{given}: {hub.missing(given, 'model')}; or {_WANTED}")
        return _of_folder(folder)
    if path.is_file():
        raise ConfigError(f"{path} is a file; {_WANTED}")
    if (path / "config.json").is_file():
        return _of_folder(path)
    try:
        return _of_checkpoint(tools.locate(path))
    except ConfigError as error:
        if path.is_dir():
            raise ConfigError(
                f"{path} is not a model: no config.json, no checkpoint and no "
                f"checkpoints/latest.json found in it; {_WANTED}"
            ) from error
        raise ConfigError(f"{path}: no such folder; {_WANTED}") from error


def _of_folder(folder: Path) -> Source:
    file = folder / "config.json"
    try:
        values = read_model_config(file)
    except OSError as error:
        raise ConfigError(f"{file} could not be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{file} is {error}") from error
    _refuse_scalar(folder, values)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{folder} has no weights: no .safetensors files in it (other formats are not read, "
            "because they may run code)"
        )
    dtype = str(values.get("dtype") or values.get("torch_dtype") or "bfloat16")
    run = folder.resolve().parent
    is_export = folder.resolve().name.partition("-")[0] == "export" and (run / RECORDED).is_file()
    role = folder.resolve().name.partition("-")[2] if is_export else ""
    return Source(folder, values, dtype, run=run if is_export else None, role=role)


def _of_checkpoint(folder: Path) -> Source:
    manifest = Manifest.read(folder)
    _refuse_scalar(folder, manifest.hf_config)
    runs = [parent for parent in folder.resolve().parents[:3] if (parent / RECORDED).is_file()]
    name = folder.resolve().name
    role = "" if name == _POLICY else name
    return Source(
        folder, manifest.hf_config, manifest.dtype, manifest, runs[0] if runs else None, role
    )


def _refuse_scalar(folder: Path, values: Mapping[str, Any]) -> None:
    """Raise ConfigError if the weights belong to a critic or a reward model."""
    names = values.get("architectures") or []
    if isinstance(names, list) and any(str(name).endswith(_SCALAR) for name in names):
        raise ConfigError(
            f"{folder} contains a critic or a reward model, which cannot generate text; {_WANTED}"
        )
