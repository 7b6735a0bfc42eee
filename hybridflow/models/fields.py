"""Declaration of how each field of a Hugging Face config is handled: used, supported only with
certain values, or without effect.

A family declares one `Fields`; `Fields.read` is the only place where values of a config are read
and validated. `tests/dist/test_config_fields.py` fails if a family omits a field of the
transformers config class. It also varies every field and compares the log-probs with those from
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridflow.errors import ModelError

REQUIRED = object()  # used instead of a default: the field must be in config.json

# sizes common to all decoders; families add their own and override defaults
SIZES: Mapping[str, Any] = {
    "vocab_size": REQUIRED,
    "hidden_size": REQUIRED,
    "num_hidden_layers": REQUIRED,
    "num_attention_heads": REQUIRED,
    "num_key_value_heads": None,  # same as attention heads
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
# fields of `PreTrainedConfig` and of all families that do not affect log-probs; `models.rotary`
# reads the rope_* fields
_WITHOUT_INFLUENCE = frozenset(
    {
        *(
            "architectures",
            "dtype",
            "torch_dtype",
            "transformers_version",
            "initializer_range",
            "use_cache",
        ),
        *("bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "problem_type"),
        *("chunk_size_feed_forward", "is_encoder_decoder", "output_hidden_states", "return_dict"),
    }
)
_ROTARY = frozenset({"rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings"})
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_dropout": (0.0,),
}


@dataclass(frozen=True)
class Fields:
    """A family's declaration. Field names and the values of absent fields are the same as in
    transformers' config class.

    Attributes:
        used: fields that the family implements, each with transformers' default, or REQUIRED.
        fixed: fields with their supported values, including transformers' default; in a list-valued
            field every element must be a supported value.
        unused: fields that do not change log-probs.
        nullable: used fields for which null and a missing field have different meanings.
        aliases: alternative names of used fields in config.json.
    """

    used: Mapping[str, Any]
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    nullable: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)

    def declared(self) -> set[str]:
        """Return all declared fields."""
        own = {*self.used, *self.fixed, *self.unused, *self.aliases}
        return own | {*SIZES, *_FIXED} | _WITHOUT_INFLUENCE | _ROTARY

    def read(self, hf: Mapping[str, Any]) -> dict[str, Any]:
        """Return {used field: value} for the contents of a config.json.

        Raises:
            ModelError: a required field is missing, or a field has an unsupported value; the
                message names the field.
        """
        model = f"the config of model_type {hf.get('model_type')}"
        for name, supported in {**_FIXED, **self.fixed}.items():
            value = hf.get(name)
            if any(
                one not in supported
                for one in (value if isinstance(value, list) else [value])
                if one is not None
            ):
                wanted = f"set it to {supported[0]!r}" if supported else "remove it"
                raise ModelError(f"{model} has {name}={value!r}, which is not supported; {wanted}")
        given = {**{main: hf[other] for other, main in self.aliases.items() if other in hf}, **hf}
        found: dict[str, Any] = {}
        for name, default in {**SIZES, **self.used}.items():
            value = given.get(name, default)
            found[name] = default if value is None and name not in self.nullable else value
        missing = [name for name, value in found.items() if value is REQUIRED]
        if missing:
            raise ModelError(f"{model} has no {', '.join(missing)}")
        return found
