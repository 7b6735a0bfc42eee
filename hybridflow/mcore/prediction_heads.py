"""Multi-token-prediction heads (DeepSeek-V3, arXiv 2412.19437, section 2.2) on the last pipeline
stage.

The head of depth k turns the state h_i of depth k - 1 (depth 0: the model's output after its final
norm) into

    norm(layer(eh_proj [enorm(embedding of token i + k); hnorm(h_i)]))

whose logits, by the model's output layer, predict token i + k + 1. Heads are built from the parts
of Megatron's own module (`multi_token_prediction.py`, 0.16) and use its parameter names.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import megatron.core.models.gpt.gpt_layer_specs as layer_specs
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

import hybridflow.mcore.bootstrap  # noqa: F401  (before megatron)
from hybridflow.device.platform import Platform
from hybridflow.mcore import rotary
from hybridflow.mcore.layers import head_spec
from hybridflow.mcore.model import adapt_modules, hidden_states, output_weight
from hybridflow.mcore.parallel import coordinates
from hybridflow.models.decoder import Decoder
from hybridflow.models.family import Family, num_prediction_heads
from hybridflow.models.layout import Coordinates, padded_vocab_size

_EMBEDDING = "embedding.word_embeddings.weight"


class Head(MegatronModule):
    """The prediction head of one depth."""

    def __init__(
        self, config: TransformerConfig, layer: ModuleSpec, number: int, stage: int | None
    ) -> None:
        """`layer` is the spec of the head's transformer layer. `number` is the layer number in
        virtual stage `stage`, counted from 1."""
        super().__init__(config=config)
        parts = layer_specs.TESpecProvider()
        norm = {
            "config": config,
            "hidden_size": config.hidden_size,
            "eps": config.layernorm_epsilon,
        }
        self.enorm = parts.layer_norm()(**norm)
        self.hnorm = parts.layer_norm()(**norm)
        self.eh_proj = parts.column_parallel_linear()(
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
        )
        self.transformer_layer = build_module(
            layer, config=config, layer_number=number, vp_stage=stage
        )
        self.final_layernorm = parts.layer_norm()(**norm)

    def forward(self, hidden: Tensor, embedded: Tensor, angles: Any, packed: Any) -> Tensor:
        """Return the hidden states [s, 1, h] of this depth for this rank's share of the sequence.

        Args:
            hidden: [s, 1, h] the hidden states of the previous depth.
            embedded: [s, 1, h] the embeddings of the tokens `depth` positions later.
            angles: the rotary angles used by the model's layers; None for latent attention.
            packed: bounds of the rows (`PackedSeqParams`).
        """
        pair = torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1)
        projected = gather_from_tensor_model_parallel_region(self.eh_proj(pair)[0])
        if self.config.sequence_parallel:
            projected = scatter_to_sequence_parallel_region(projected)
        output, _ = self.transformer_layer(
            projected, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packed
        )
        normed: Tensor = self.final_layernorm(output)
        return normed


def build_heads(family: Family, stages: Sequence[GPTModel]) -> Heads | None:
    """Build the family's prediction heads with uninitialised weights. Returns None if the family
    has no heads."""
    if num_prediction_heads(family) == 0:
        return None
    assert isinstance(family, Decoder)  # no other family has heads
    return Heads(family, stages)


class Heads(MegatronModule):
    """All heads of a model on its last stage; an empty module on other stages.

    The heads share the model's embedding and output layer, but contribute nothing to their
    gradients. If the embedding is on another stage, the last stage stores a frozen copy
    (`refresh`).

    Attributes:
        count: number of heads of the model, on every stage.
        layers: the heads on this rank, by depth.
    """

    # `finalize_model_grads` asks for these attributes of a model
    pre_process = False
    share_embeddings_and_output_weights = False

    def __init__(self, decoder: Decoder, stages: Sequence[GPTModel]) -> None:
        """Build the heads with uninitialised weights.

        Args:
            decoder: the family, including its heads.
            stages: this rank's model chunks, which do not include the heads.
        """
        at = coordinates().virtual_stages()[-1]
        super().__init__(config=_config(stages[-1].config))
        self.count = decoder.num_mtp
        self._stages = [*stages]  # in a list, so that they are not part of this module
        if at.is_last_stage:
            with Platform.detect().current_device():
                self._build(decoder, at)

    def _build(self, decoder: Decoder, at: Coordinates) -> None:
        config = self.config
        spec = head_spec(decoder, config, at)
        stage = at.vpp_rank if at.vpp_size > 1 else None
        # the layer adds the number of the stage's first layer
        first = decoder.num_layers - at.layers(decoder.num_layers).start + 1
        heads = [Head(config, spec, first + depth, stage) for depth in range(self.count)]
        self.mtp = nn.ModuleDict({"layers": nn.ModuleList(heads)})
        if not at.is_first_stage:
            self.embedding = LanguageModelEmbedding(
                config,
                padded_vocab_size(decoder.vocab_size, at.tp_size),
                self._stages[-1].max_sequence_length,
                "rope",
                tp_group=parallel_state.get_tensor_model_parallel_group(),
            ).requires_grad_(False)
        if decoder.rotary.kind != "default":
            rotary.use_frequencies(self, config, decoder.rotary)
        own = [local for local in decoder.local_tensors(at) if local.name.startswith("mtp.")]
        adapt_modules(self, decoder, own)

    @property
    def layers(self) -> Sequence[Head]:
        """The heads on this rank, by depth."""
        if not hasattr(self, "mtp"):
            return []
        heads: Any = self.mtp["layers"]
        return list(heads)

    @torch.no_grad()
    def embedded(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the embeddings [s, 1, h] of `tokens` [1, t'], limited to this rank's share of the
        sequence."""
        embedding = self.embedding if hasattr(self, "embedding") else self._stages[0].embedding
        found: Tensor = embedding(tokens, positions)
        return found

    def gathered(self, states: Tensor) -> Tensor:
        """Return the hidden states [t', 1, h] of all tokens, as input to the output layer's matrix
        product."""
        return hidden_states(self._stages[-1].output_layer, states)[0]

    def output_weight(self) -> Tensor:
        """Return this rank's rows [v, h] of the output layer, without a gradient."""
        return output_weight(self._stages[-1]).detach()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the embedding to the last stage after an update. Collective.

        The weights must be complete (`Policy.settle`).
        """
        at = coordinates()
        if at.pp_size == 1 or 0 < at.pp_rank < at.pp_size - 1:
            return
        model: Any = self if at.pp_rank else self._stages[0]
        group = parallel_state.get_embedding_group()
        weight = model.embedding.word_embeddings.weight
        dist.broadcast(weight.data, dist.get_process_group_ranks(group)[0], group=group)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the checkpoint layout of each head. The copy of the embedding is declared as
        a replica of the first stage's embedding."""
        sharded: dict[str, Any] = {}
        for depth, head in enumerate(self.layers):
            sharded |= head.sharded_state_dict(
                f"{prefix}mtp.layers.{depth}.", sharded_offsets, metadata
            )
        if hasattr(self, "embedding"):
            group = metadata["dp_cp_group"]
            sharded[prefix + _EMBEDDING] = make_tp_sharded_tensor_for_checkpoint(
                tensor=self.embedding.word_embeddings.weight,
                key=prefix + _EMBEDDING,
                replica_id=(1, 0, dist.get_rank(group)),
                allow_shape_mismatch=True,
                tp_group=parallel_state.get_tensor_model_parallel_group(),
                dp_cp_group=group,
            )
        return sharded


def _config(config: TransformerConfig) -> TransformerConfig:
    """Return the model's config for its heads.

    The heads' backward pass immediately follows their forward pass, so recomputation is disabled.
    Expert biases of the heads are not updated.
    """
    own = copy.copy(config)
    own.recompute_granularity = None
    own.moe_router_bias_update_rate = 0.0
    return own
