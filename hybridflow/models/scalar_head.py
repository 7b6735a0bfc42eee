"""A family's decoder with a linear [hidden -> 1] as its output layer: the parameter map of critics
and reward models.

In Hugging Face format these are transformers' `*ForTokenClassification` (one value per token:
critics) and `*ForSequenceClassification` (one score at the last token: reward models) with one
label. The head is `score.weight` in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridflow.models.family import Family
from hybridflow.models.layout import Coordinates, LocalTensor, whole
from hybridflow.models.weights import RandomWeights, WeightSource

TOKENS = "ForTokenClassification"
SEQUENCE = "ForSequenceClassification"
WEIGHT = "score.weight"
BIAS = "score.bias"
_OUTPUT = "lm_head.weight"


class ScalarHead:
    """The `Family` of a model with a scalar head.

    Args:
        backbone: the causal language model's family.
        task: TOKENS or SEQUENCE; affects only the names in config.json.
        bias: True if the head has a bias, as transformers' token classifiers do unless
            `token_classification_bias` is false.
    """

    def __init__(self, backbone: Family, task: str, bias: bool = False) -> None:
        self.backbone = backbone
        self.bias = bias
        self.num_layers = backbone.num_layers
        self.vocab_size = backbone.vocab_size
        self.rotary = backbone.rotary
        self.latent_norm_eps = backbone.latent_norm_eps
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
        """Return the backbone's keyword arguments for TransformerConfig."""
        return self.backbone.megatron_config()

    def gpt_model_kwargs(self) -> dict[str, Any]:
        """Return the backbone's keyword arguments for GPTModel, with untied embeddings.

        The scalar head cannot share the embedding's weights.
        """
        return self.backbone.gpt_model_kwargs() | {"share_embeddings_and_output_weights": False}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the backbone's tensors with the head in place of the output layer."""
        shapes = {}
        for name, shape in self.backbone.tensors().items():
            if name != _OUTPUT:
                shapes[name] = shape
        shapes[WEIGHT] = (1, self.hidden)
        if self.bias:
            shapes[BIAS] = (1,)
        return shapes

    def check(self, at: Coordinates) -> None:
        """Check only the backbone, because the head is never split."""
        self.backbone.check(at)

    def local_tensors(self, at: Coordinates) -> list[LocalTensor]:
        """Return the backbone's local tensors and the head.

        The head is replicated on the tensor-parallel ranks of the last stage.
        """
        tensors = []
        for local in self.backbone.local_tensors(at):
            if local.name != "output_layer.weight":
                tensors.append(local)
        if at.is_last_stage:
            tensors.append(whole("output_layer.weight", WEIGHT, (1, self.hidden)))
            if self.bias:
                tensors.append(whole("output_layer.bias", BIAS, (1,)))
        return tensors


class FreshHead:
    """A checkpoint's backbone weights with a newly initialised head.

    The head is drawn from N(0, 1 / (hidden + 1)), so values start near 0. It depends only on the
    seed, not on the layout or the checkpoint.
    """

    def __init__(self, backbone: WeightSource, family: ScalarHead, seed: int) -> None:
        self.backbone = backbone
        self.head = RandomWeights(
            {WEIGHT: (1, family.hidden), BIAS: (1,)}, seed, 1.0 / (family.hidden + 1)
        )

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """Read a region of the head if `name` belongs to the head, or of the backbone otherwise."""
        return (self.head if name in (WEIGHT, BIAS) else self.backbone).read(name, start, shape)
