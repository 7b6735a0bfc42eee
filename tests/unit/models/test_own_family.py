"""A family of the user's, from a file outside of the package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from hybridflow.cli.main import main
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models import FAMILIES, family_of, use_family
from hybridflow.models.layout import Coordinates
from hybridflow.reshard.layout import Catalog, megatron_layout
from tests.models import FIELD_MODELS

FILE = '''
from hybridflow.models.blocks import DenseMlp, GroupedAttention
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import FAMILIES
from hybridflow.models.fields import REQUIRED, Fields


class Plain(Decoder):
    """Llama's layers; the queries' and keys' heads have norms."""

    architecture = "PlainForCausalLM"
    fields = Fields(used={"intermediate_size": REQUIRED}, fixed={"rotary": ("whole",)})

    def attention(self, layer):
        return GroupedAttention(self.hidden, self.heads, self.groups, self.head_dim, qk_norm=True)

    def mlp(self, layer):
        return DenseMlp(self.hidden, self.values["intermediate_size"])


FAMILIES.register("plain", Plain)
'''
CONFIG = {**FIELD_MODELS["llama"], "model_type": "plain"}


def test_a_family_from_a_file_has_a_catalog_and_a_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FAMILIES, "_entries", dict(FAMILIES._entries))
    with pytest.raises(ModelError, match=r"model\.family=path/to/file\.py:plain"):
        family_of(CONFIG)
    (tmp_path / "own.py").write_text(FILE)
    with pytest.raises(ConfigError, match="does not register the model family 'other'"):
        use_family(f"{tmp_path}/own.py:other")
    use_family(f"{tmp_path}/own.py:plain")
    family = family_of(CONFIG)
    catalog = Catalog.of(family.tensors())
    assert "model.layers.1.self_attn.k_norm.weight" in catalog.names
    ranks = [Coordinates(rank, 2) for rank in range(2)]
    assert megatron_layout(family, ranks, "float32", catalog).num_ranks == 2
    with pytest.raises(ModelError, match="rotary='half'"):
        family_of({**CONFIG, "rotary": "half"})
    with pytest.raises(ModelError, match="sliding"):
        family_of({**CONFIG, "hidden_act": "sliding"})


def test_a_folder_of_such_a_family_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FAMILIES, "_entries", dict(FAMILIES._entries))
    file = tmp_path / "own.py"
    source = tmp_path / "source"
    out = tmp_path / "out"
    file.write_text(FILE)
    source.mkdir()
    (source / "config.json").write_text(json.dumps({**CONFIG, "dtype": "float32"}))
    use_family(f"{file}:plain")
    save_file(
        {name: np.ones(shape, np.float32) for name, shape in family_of(CONFIG).tensors().items()},
        source / "model.safetensors",
    )
    FAMILIES._entries.pop("plain")
    words = ["checkpoint", "import", str(source), str(out)]
    assert main(words) == 2
    assert "--family" in capsys.readouterr().err
    assert main([*words, "--family", f"{file}:plain"]) == 0
    assert "k_norm" in (out / "model.safetensors.index.json").read_text()
