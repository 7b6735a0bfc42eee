"""A decoder-only model assembled from blocks.

It consists of an embedding, layers of (attention, MLP), a final norm, an output head and MTP heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.blocks import TENSOR, Block, DenseMlp, Division, GroupedAttention, Shapes
from hybridflow.models.fields import Fields
from hybridflow.models.layout import Coordinates, LocalTensor, split, vocabulary, whole
from hybridflow.models.rotary import Rotary
from hybridflow.models.windows import megatron_windows

PIPELINE = "actor.parallel.pipeline"


@dataclass(frozen=True)
class HeadNames:
    """Names of a multi-token-prediction head in a checkpoint: the prefix of its layer, and the
    modules that normalise the embedding and the state, project both, and normalise the output.
    """

    layer: str
    embedding_norm: str
    state_norm: str
    projection: str
    output_norm: str

    @property
    def norms(self) -> tuple[str, str, str]:
        """Names of the embedding, state and output norms."""
        return self.embedding_norm, self.state_norm, self.output_norm


class Decoder:
    """Base class of the families.

    Subclasses declare their fields and override `attention` and `mlp` if their layers do not
    consist of grouped-query attention and a gated MLP.

    Args:
        hf: the contents of config.json.
        mtp: True if the checkpoint contains the multi-token-prediction heads that the config
            declares. Published checkpoints do, but transformers drops the heads on save.

    Raises:
        ModelError: config.json lacks a field, or has a value that the family does not support.

    Attributes:
        fields: how each field of config.json is handled; `values` contains the fields that are
            used.
        stem: prefix of all tensor names in a checkpoint except that of the output head.
        positions, theta, partial: transformers' defaults for max_position_embeddings, rope_theta
        and partial_rotary_factor; None: the family always rotates whole heads.
        latent_norm_eps: eps of latent attention's norms, if it differs from rms_norm_eps.
        qkv_bias, qk_norm: whether queries, keys and values have biases, and whether query and key
            heads have norms.
        windows: number of tokens each layer attends to (0 for all); empty if no layer has a window.
        embedding_scale: factor by which token embeddings are multiplied.
        adjacent_pairs: whether rotary embedding pairs adjacent elements of a head, instead of
            pairing the two halves of the rotated part.
        router: keyword arguments of Megatron's TransformerConfig for the experts; empty for a dense
            model.
    """

    fields: Fields
    architecture = ""
    stem = "model."
    positions = 32768
    theta = 10000.0
    partial: float | None = None
    latent_norm_eps: float | None = None
    qkv_bias = False
    qk_norm = False
    adjacent_pairs = False
    windows: tuple[int, ...] = ()
    embedding_scale = 1.0

    def __init__(self, hf: Mapping[str, Any], mtp: bool = False) -> None:
        self.hf = hf
        self.router: dict[str, Any] = {}
        self.values = values = self.fields.read(hf)
        self.num_layers = int(values["num_hidden_layers"])
        self.hidden = int(values["hidden_size"])
        self.heads = int(values["num_attention_heads"])
        self.groups = int(values["num_key_value_heads"] or self.heads)
        self.head_dim = int(values.get("head_dim") or self.hidden // self.heads)
        self.vocab_size = int(values["vocab_size"])
        self.tied = bool(values["tie_word_embeddings"])
        self.num_mtp = self.num_prediction_heads() if mtp else 0
        if self.num_mtp and self.tied:
            raise ModelError(
                "actor.mtp.train=true: tie_word_embeddings=true is not supported together with "
                "multi-token-prediction heads; set actor.mtp.train=false"
            )
        if self.heads % self.groups:
            raise ModelError(
                f"num_attention_heads={self.heads} is not a multiple of "
                f"num_key_value_heads={self.groups} (transformers' default for {hf['model_type']} "
                "if config.json does not set it); set num_key_value_heads"
            )
        self.rotary, self.local_rotary = self.rotaries()

    # ---- overridden by families

    def rotaries(self) -> tuple[Rotary, Rotary | None]:
        """Return the rotary embedding, and that of sliding-window layers (None if it is the
        same)."""
        found = Rotary.of(
            self.hf,
            self.rotary_width,
            theta=self.theta,
            positions=self.positions,
            partial=self.partial,
        )
        return found, None

    @property
    def rotary_width(self) -> int:
        """Number of rotated elements per head, before `partial_rotary_factor` is applied."""
        return self.head_dim

    def attention(self, layer: int) -> Block:
        """Return the attention block of a layer, including the norm before it."""
        return GroupedAttention(
            self.hidden, self.heads, self.groups, self.head_dim, self.qkv_bias, self.qk_norm
        )

    def mlp(self, layer: int) -> Block:
        """Return the MLP or experts block of a layer, including the norm before it."""
        return DenseMlp(self.hidden, int(self.values["intermediate_size"]))

    def num_prediction_heads(self) -> int:
        """Return the number of multi-token-prediction heads that the config declares and this
        family supports."""
        return 0

    def head_names(self, head: int) -> HeadNames:
        """Return the checkpoint names of a prediction head. The default names are those of
        DeepSeek-V3, which stores heads as additional layers.
        """
        prefix = f"{self.stem}layers.{self.num_layers + head}."
        names = (f"{prefix}{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
        return HeadNames(prefix, *names)

    def kind_layers(self) -> list[int]:
        """Return layer indices that cover every kind of attention and MLP block."""
        return [0, self.num_layers - 1]

    def megatron_config(self) -> dict[str, Any]:
        """Return the keyword arguments for Megatron's TransformerConfig.

        If they include `multi_latent_attention`, pass them to MLATransformerConfig instead.
        """
        ffn = self.values.get("intermediate_size")
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "kv_channels": self.head_dim,
            "ffn_hidden_size": int(self.values["moe_intermediate_size"] if ffn is None else ffn),
            "normalization": "RMSNorm",
            "layernorm_epsilon": float(self.values["rms_norm_eps"]),
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "add_qkv_bias": self.qkv_bias,
            "qk_layernorm": self.qk_norm,
            "rotary_interleaved": self.adjacent_pairs,
            **({"mtp_num_layers": self.num_mtp} if self.num_mtp else {}),
            **megatron_windows(self.windows),
            **self.router,
        }

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """Return the keyword arguments for GPTModel."""
        return {
            "position_embedding_type": "rope",
            "rotary_base": self.rotary.theta,
            "share_embeddings_and_output_weights": self.tied,
            "max_sequence_length": int(self.hf.get("max_position_embeddings") or self.positions),
        }

    # ---- the checkpoint

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return {HF tensor: shape} in checkpoint order, excluding `aliases`."""
        shapes: Shapes = {f"{self.stem}embed_tokens.weight": (self.vocab_size, self.hidden)}
        for layer in range(self.num_layers):
            shapes |= self._layer_tensors(f"{self.stem}layers.{layer}.", layer)
        shapes[f"{self.stem}norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden)
        for head in range(self.num_mtp):
            names = self.head_names(head)
            shapes |= self._layer_tensors(names.layer, self.num_layers + head)
            shapes |= {f"{name}.weight": (self.hidden,) for name in names.norms}
            shapes[f"{names.projection}.weight"] = (self.hidden, 2 * self.hidden)
        return shapes

    def aliases(self) -> dict[str, str]:
        """Return the HF tensors that duplicate others, as {name: name of the original}.

        DeepSeek-V3's heads duplicate the embedding and the output head.
        """
        aliases = {}
        for head in range(self.num_mtp):
            prefix = self.head_names(head).layer
            aliases[f"{prefix}embed_tokens.weight"] = f"{self.stem}embed_tokens.weight"
            aliases[f"{prefix}shared_head.head.weight"] = "lm_head.weight"
        return aliases

    def _layer_tensors(self, prefix: str, layer: int) -> Shapes:
        return {**self.attention(layer).tensors(prefix), **self.mlp(layer).tensors(prefix)}

    # ---- sharding

    def local_tensors(self, at: Coordinates) -> list[LocalTensor]:
        """Return the parameters of the (virtual) stage at coordinates `at`.

        Raises:
            ModelError: a size is not divisible by its parallel size; the message names the field
                and the configuration key.
        """
        self.check(at)
        tensors = self.first_tensors(at)
        for local, layer in enumerate(at.layers(self.num_layers)):
            tensors += self._layer(
                f"{self.stem}layers.{layer}.", f"decoder.layers.{local}.", layer, at
            )
        return tensors + self.last_tensors(at)

    def first_tensors(self, at: Coordinates) -> list[LocalTensor]:
        """Return the tensors that precede the layers of the (virtual) stage at coordinates `at`."""
        if not (at.is_first_stage or (self.num_mtp and at.is_last_stage)):
            return []
        # an MTP head embeds tokens too, so Megatron keeps a copy of the embedding on its stage
        embedding = f"{self.stem}embed_tokens.weight"
        return [self._vocab("embedding.word_embeddings.weight", embedding, at)]

    def last_tensors(self, at: Coordinates) -> list[LocalTensor]:
        """Return the tensors that follow the layers of the (virtual) stage at coordinates `at`."""
        if not at.is_last_stage:
            return []
        norm = f"{self.stem}norm.weight"
        tensors = [whole("decoder.final_layernorm.weight", norm, (self.hidden,))]
        if not self.tied:
            tensors.append(self._vocab("output_layer.weight", "lm_head.weight", at))
        elif not at.is_first_stage:
            embedding = f"{self.stem}embed_tokens.weight"
            tensors.append(self._vocab("output_layer.weight", embedding, at))
        for head in range(self.num_mtp):
            tensors += self._mtp_head(head, at)
        return tensors

    def check(self, at: Coordinates) -> None:
        """Raise ModelError if a size is not divisible by its parallel size."""
        rules: list[Division] = []
        for layer in self.kind_layers():
            for block in (self.attention(layer), self.mlp(layer)):
                rules.extend(block.divisions(at))
        if self.num_mtp:
            rules.append(("hidden_size", self.hidden, TENSOR, at.tp_size))
            self._check_heads()
        rules += self._listed_stages(at) if at.layers_per_stage else self._pipeline_rules(at)
        for field, value, key, size in rules:
            if size < 1 or value % size:
                raise ModelError(
                    f"{field} is {value}, which is not divisible by {key} {size}; choose a divisor "
                    f"of {value}"
                )

    def _check_heads(self) -> None:
        """Raise ModelError if the layer in a prediction head differs in kind from the model's last
        layer. Megatron's layer specification requires the same kind (gpt_layer_specs.py:703).
        """
        last = self.num_layers - 1
        for of in (self.attention, self.mlp):
            if type(of(last)) is not type(of(self.num_layers)):
                raise ModelError(
                    f"actor.mtp.train=true: the last layer has {type(of(last)).__name__}, but a "
                    f"multi-token-prediction head has {type(of(self.num_layers)).__name__}; "
                    "set actor.mtp.train=false"
                )

    def _pipeline_rules(self, at: Coordinates) -> list[Division]:
        first = at.first_stage_layers
        last = at.last_stage_layers
        middle = at.pp_size - (first > 0) - (last > 0)
        rules: list[Division] = []
        if first or last:
            field = (
                f"num_hidden_layers without the {first} of the first and the {last} of the last "
                "stage"
            )
            if (
                at.pp_size == 1
                or first + last > self.num_layers
                or (middle and first + last == self.num_layers)
            ):
                raise ModelError(
                    f"actor.parallel: first_stage_layers {first} and last_stage_layers {last} "
                    "leave no layers for the other stages; set them to 0"
                )
            if not middle and first + last != self.num_layers:
                raise ModelError(
                    f"num_hidden_layers is {self.num_layers}, but {PIPELINE} {at.pp_size} has no "
                    f"stage besides the first (first_stage_layers {first}) and the last "
                    f"(last_stage_layers {last}); set one of them to 0"
                )
            if middle:
                rules.append(
                    (
                        field,
                        self.num_layers - first - last,
                        f"{PIPELINE} (its other stages)",
                        middle,
                    )
                )
        else:
            rules.append(("num_hidden_layers", self.num_layers, PIPELINE, at.pp_size))
        return rules + [
            (
                f"layers of pipeline stage {stage}",
                count,
                "actor.parallel.virtual_pipeline",
                at.vpp_size,
            )
            for stage, count in enumerate(at.stage_layers(self.num_layers))
        ]

    def _listed_stages(self, at: Coordinates) -> list[Division]:
        """Check that the listed layers per stage match this model. Divisibility rules do not apply
        to a valid list.
        """
        listed = at.layers_per_stage
        stages = at.pp_size * at.vpp_size
        key = f"actor.parallel.layers_per_stage {list(listed)}"
        if at.first_stage_layers or at.last_stage_layers:
            raise ModelError(
                f"{key} already lists the layers of every stage; set first_stage_layers "
                f"{at.first_stage_layers} and last_stage_layers {at.last_stage_layers} to 0"
            )
        if len(listed) != stages:
            raise ModelError(
                f"{key} has {len(listed)} numbers, but {PIPELINE} {at.pp_size} x virtual_pipeline "
                f"{at.vpp_size} has {stages} stages; list one number per stage"
            )
        if sum(listed) != self.num_layers:
            raise ModelError(
                f"{key} adds up to {sum(listed)} layers, but num_hidden_layers is "
                f"{self.num_layers}; make them equal"
            )
        if empty := [stage for stage, count in enumerate(listed[1:-1], 1) if not count]:
            raise ModelError(
                f"{key} leaves stage {empty[0]} without a layer; only the first stage, with the "
                "embedding, and the last, with the output layer, may have none"
            )
        if self.num_mtp and not listed[-1]:
            raise ModelError(
                f"{key} leaves the last stage without a layer, but its multi-token-prediction "
                "heads need one"
            )
        return []

    def _layer(self, source: str, target: str, layer: int, at: Coordinates) -> list[LocalTensor]:
        return [
            *self.attention(layer).local(source, target, at),
            *self.mlp(layer).local(source, target, at),
        ]

    def _mtp_head(self, head: int, at: Coordinates) -> list[LocalTensor]:
        names = self.head_names(head)
        target = f"mtp.layers.{head}."
        projection = (self.hidden, 2 * self.hidden)
        before, state, after = (
            whole(f"{target}{mine}.weight", f"{name}.weight", (self.hidden,))
            for mine, name in zip(("enorm", "hnorm", "final_layernorm"), names.norms, strict=True)
        )
        source = f"{names.projection}.weight"
        return [
            before,
            state,
            split(f"{target}eh_proj.weight", source, projection, 0, at.tp_rank, at.tp_size),
            *self._layer(names.layer, f"{target}transformer_layer.", self.num_layers + head, at),
            after,
        ]

    def _vocab(self, name: str, source: str, at: Coordinates) -> LocalTensor:
        return vocabulary(name, source, self.vocab_size, self.hidden, at.tp_rank, at.tp_size)
