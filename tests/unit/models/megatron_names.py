"""Run alone, not by pytest: build tiny Megatron models of all families and print {family: {name:
shape}} of one rank as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})

from hybridflow.config.schema import ParallelConfig
from hybridflow.mcore import (
    bootstrap,
    layers,
    megatron_versions,
    model,
    parallel,
    routers,
    torch_modules,
)
from hybridflow.models.decoder import Decoder
from hybridflow.models.layout import Coordinates
from tests.models import FAMILIES
from tests.unit.reshard import reshard_cases as cases


def shapes_of(decoder: Decoder) -> dict[str, list[int]]:
    """Parameters and persistent buffers of the model that Megatron's own specification builds."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_mtp_block_spec,
    )

    config = model.transformer_config(decoder, ParallelConfig(), "float32")
    spec = layers.block_spec(decoder, config, Coordinates())
    mtp = (
        get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True)
        if decoder.num_mtp
        else None
    )
    kwargs = decoder.gpt_model_kwargs()
    built = GPTModel(config, spec, vocab_size=decoder.vocab_size, mtp_block_spec=mtp, **kwargs)
    routers.shape_biases(built, decoder.local_tensors(Coordinates()))
    named = dict(built.named_parameters()) | {
        n: b for n, b in built.named_buffers() if n in built.state_dict()
    }
    return {name: list(tensor.shape) for name, tensor in named.items()}


def main() -> None:
    """Print the JSON as the last line."""
    parallel.initialize(ParallelConfig(), 0, "gloo", 60)
    megatron_versions.install()
    if not bootstrap.HAVE_TRANSFORMER_ENGINE:
        torch_modules.install()
    found = {}
    for name in FAMILIES:
        try:
            found[name] = shapes_of(cases.decoder_of(name))
        except Exception as error:
            found[name] = repr(error)
    try:
        found["mtp"] = shapes_of(cases.decoder_of("deepseek_v3", mtp=True))
    except Exception as error:
        found["mtp"] = repr(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
