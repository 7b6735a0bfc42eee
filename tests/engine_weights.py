"""What tests ask SGLang's servers of the weights that they hold, beside what a run asks."""

from __future__ import annotations

from hybridflow.engines.sglang.engine import EngineClient


def weights_checksum(client: EngineClient) -> str:
    """One checksum over all parameters of all ranks: equal exactly when the loaded weights are
    equal bit for bit."""
    return str(client._post("/weights_checker", {"action": "checksum"})["per_engine_checksum"])


def load_weights_from_disk(client: EngineClient, folder: str) -> None:
    """Load a Hugging Face folder, as a cold start would."""
    # not the server's load format, which may be dummy
    client._post("/update_weights_from_disk", {"model_path": folder, "load_format": "auto"})
