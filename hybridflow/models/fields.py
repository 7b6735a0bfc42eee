"""What becomes of every field of a Hugging Face config: used, supported in some values only, or without influence.

A family declares one `Fields`; `Fields.read` is the only place where a config's values are taken and refused. A field
of the config class in transformers that a family declares nowhere fails `tests/dist/test_config_fields.py`, which also
changes every field and compares log-probs with transformers'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.errors import ModelError

REQUIRED = object()  # in the place of a default: config.json must give the field

# sizes of every decoder; families add their own and override defaults
SIZES: Mapping[str, Any] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": None,  # as many as attention heads
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
# fields of `PreTrainedConfig` and of all families that do not change log-probs; `models.rotary` reads the rope_* fields
_WITHOUT_INFLUENCE = frozenset(
    {
        *("architectures", "dtype", "torch_dtype", "transformers_version", "initializer_range", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "output_hidden_states", "return_dict"),
    }
)
_ROTARY = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings"})
_FIXED: Mapping[str, tuple[Any, ...]] = {"hidden_act": ("silu", "swish"), "attention_dropout": (0.0,)}


@dataclass(frozen=True)
class Fields:
    """A family's declaration. Names are those of transformers' config class, values of absent fields its defaults.

    Attributes:
        used: fields that the family follows, each with transformers' default, or REQUIRED.
        fixed: fields with the values that are supported, transformers' default among them; of a list, every element
            must be one of them.
        unused: fields that do not change log-probs.
        nullable: used fields whose null means something else than their absence.
        aliases: other names by which config.json may give a used field.
    """

    used: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    nullable: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def declared(self) -> set[str]:
        """Every field that is decided on."""
        own = {*self.used, *self.fixed, *self.unused, *self.aliases}
        return own | {*SIZES, *_FIXED} | _WITHOUT_INFLUENCE | _ROTARY

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """{used field: its value} for the contents of a config.json.

        Raises:
            ModelError: a required field is missing, or a field has a value that is not supported; names it.
        """
        model = f"the config of model_type {hf.get('model_type')}"
        for name, supported in {**_FIXED, **self.fixed}.items():
            value = hf.get(name)
            if any(one not in supported for one in (value if isinstance(value, list) else [value]) if one is not None):
                wanted = f"set it to {supported[0]!r}" if supported else "leave it out"
                raise ModelError(f"{model} has {name}={value!r}, which is not supported; {wanted}")
        given = {**{main: hf[other] for other, main in self.aliases.items() if other in hf}, **hf}
        found: dict[str, Any] = {}
        for name, default in {**SIZES, **self.used}.items():
            value = given.get(name, default)
            found[name] = default if value is None and name not in self.nullable else value
        missing = [name for name, value in found.items() if value is REQUIRED]
        if missing:
            raise ModelError(f"{model} lacks {', '.join(missing)}")
        return found
