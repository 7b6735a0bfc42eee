"""A family's decoder with a linear [hidden -> 1] in place of its output layer: the map of critics and reward models.

In Hugging Face form these are transformers' `*ForTokenClassification` (a value at every token: critics) and
`*ForSequenceClassification` (a score at the last token: reward models) with one label; the head is `score.weight` in
both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridflow.models.family import Family
from hybridflow.models.layout import Coordinates, LocalTensor, whole
from hybridflow.models.weights import RandomWeights, WeightSource

TOKENS, SEQUENCE = "ForTokenClassification", "ForSequenceClassification"
WEIGHT, BIAS = "score.weight", "score.bias"
_OUTPUT = "lm_head.weight"


class ScalarHead:
    """`Family` of the model with the scalar head.

    Args:
        backbone: the causal language model's family.
        task: TOKENS or SEQUENCE; only names in config.json depend on it.
        bias: whether the head has one (transformers' token classifiers do, unless `token_classification_bias` is
            false).
    """

    def __init__(self, backbone: Family, task: str, bias: bool = False) -> None:
        self.backbone, self.bias = backbone, bias
        self.num_layers, self.vocab_size = backbone.num_layers, backbone.vocab_size
        self.rotary, self.latent_norm_eps = backbone.rotary, backbone.latent_norm_eps
        self.hidden = int(backbone.hf["hidden_size"])
        self.architecture = backbone.architecture.removesuffix("ForCausalLM") + task
        self.hf: Mapping[str, Any] = {
            **backbone.hf,
            "architectures": [self.architecture],
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            "token_classification_bias": bias,
        }

    def megatron_config(self) -> dict[str, Any]:
        """As the backbone has it."""
        return self.backbone.megatron_config()

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """The embedding is shared with no output layer, whatever the backbone does."""
        return self.backbone.gpt_model_kwargs() | {"share_embeddings_and_output_weights": False}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The backbone's without its output layer, and the head."""
        shapes = {name: shape for name, shape in self.backbone.tensors().items() if name != _OUTPUT}
        shapes[WEIGHT] = (1, self.hidden)
        if self.bias:
            shapes[BIAS] = (1,)
        return shapes

    def check(self, at: Coordinates) -> None:
        """As the backbone; the head is not divided."""
        self.backbone.check(at)

    def local_tensors(self, at: Coordinates) -> list[LocalTensor]:
        """Every tensor-parallel rank of the last stage holds the whole head."""
        tensors = [local for local in self.backbone.local_tensors(at) if local.name != "output_layer.weight"]
        if at.is_last_stage:
            tensors.append(whole("output_layer.weight", WEIGHT, (1, self.hidden)))
            if self.bias:
                tensors.append(whole("output_layer.bias", BIAS, (1,)))
        return tensors


class FreshHead:
    """Weights of a backbone's checkpoint, and a new head: N(0, 1 / (hidden + 1)), so that values start near 0.

    The head depends on the seed alone, not on the layout or the checkpoint.
    """

    def __init__(self, backbone: WeightSource, family: ScalarHead, seed: int) -> None:
        self.backbone = backbone
        self.head = RandomWeights({WEIGHT: (1, family.hidden), BIAS: (1,)}, seed, 1.0 / (family.hidden + 1))

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """From the head by its names, else from the backbone."""
        return (self.head if name in (WEIGHT, BIAS) else self.backbone).read(name, start, shape)
