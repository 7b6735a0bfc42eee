"""A trainable model with a scalar head on this rank: values of response tokens (critic), scores of sequences (reward model)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hybridflow.config.schema import ParallelConfig
from hybridflow.data.packing import pack_alike
from hybridflow.mcore import parallel
from hybridflow.mcore.model import load_weights
from hybridflow.mcore.packed import MicroBatch, build_micro_batches, sequence_lengths, unpack
from hybridflow.mcore.policy import Policy
from hybridflow.mcore.step import Metrics, all_ranks_max, backward_outputs, forward_outputs, metrics_to_floats
from hybridflow.models.scalar_head import ScalarHead
from hybridflow.models.weights import WeightSource
from hybridflow.protocol import DataProto, Jagged

# (values at response tokens [n] or scores [s], micro-batch) -> (loss sum, count, metric sums with counts)
ScalarLoss = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, torch.Tensor, Metrics]]
# which of the model's outputs [t] of a micro-batch are meant
Rows = Callable[[MicroBatch], torch.Tensor]


def value_rows(micro: MicroBatch) -> torch.Tensor:
    """[n] the state each response token was sampled in: where the policy has the logits of that token."""
    return micro.predict_rows


def score_rows(micro: MicroBatch) -> torch.Tensor:
    """[s] the last token of each sample."""
    samples = len(micro.lengths)
    return micro.packed.cu_seqlens_q[1 : samples + 1].long() - 1


class ValueModel(Policy):
    """Model and optimizer of one rank, as `Policy`, with a scalar in place of logits. Every method is a collective."""

    family: ScalarHead

    def __init__(self, family: ScalarHead, parallel_config: ParallelConfig, dtype: str, source: WeightSource) -> None:
        super().__init__(family, parallel_config, dtype, source)

    def load_from(self, source: WeightSource) -> None:
        """Replace all weights; an optimizer must be set anew afterwards."""
        load_weights(self.stage, self.family, source)
        self.optimizer = None

    def values(self, batch: DataProto, *, max_tokens: int) -> Jagged | None:
        """A value for every response token, in the order of the batch; None on ranks that are not on the last stage."""
        micro_batches = self._micro_batches(batch, max_tokens, ())
        found = self._outputs(micro_batches, value_rows)
        return unpack(found, micro_batches, len(batch)) if parallel.is_last_stage() else None

    def scores(self, batch: DataProto, *, max_tokens: int) -> np.ndarray | None:
        """[B] the value at the last token of each sample; None on ranks that are not on the last stage."""
        micro_batches = self._micro_batches(batch, max_tokens, ())
        found = self._outputs(micro_batches, score_rows)
        if not parallel.is_last_stage():
            return None
        scores = np.zeros(len(batch), np.float32)
        for values, micro in zip(found, micro_batches, strict=True):
            scores[micro.samples] = values
        return scores

    def train_values(
        self, batch: DataProto, loss: ScalarLoss, *, columns: Sequence[str], max_tokens: int
    ) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """One optimizer update on values of response tokens; see `Policy.train_mini_batch`."""
        return self._update(self._micro_batches(batch, max_tokens, columns), loss, value_rows)

    def train_pairs(
        self, batch: DataProto, loss: ScalarLoss, *, max_tokens: int
    ) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """One optimizer update on scores of rows 2i and 2i + 1, which stay in one micro-batch, in this order."""
        return self._update(self._paired_micro_batches(batch, max_tokens), loss, score_rows)

    def _outputs(self, micro_batches: Sequence[MicroBatch], rows: Rows) -> list[np.ndarray]:
        self.model.eval()

        def collect(micro: MicroBatch, output: torch.Tensor) -> np.ndarray:
            return np.asarray(_chosen(output, rows(micro)).cpu().numpy())

        found = forward_outputs(self.model, micro_batches, collect)
        self.model.train()
        return found

    def _update(
        self, micro_batches: Sequence[MicroBatch], loss: ScalarLoss, rows: Rows
    ) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        if self.optimizer is None:
            raise RuntimeError("a training step before set_optimizer")
        self.optimizer.zero_grad()
        metrics = backward_outputs(self.model, micro_batches, lambda micro, output: loss(_chosen(output, rows(micro)), micro))
        applied, grad_norm, rate = self.optimizer.step()
        return metrics_to_floats(metrics), {"grad_norm": grad_norm, "lr": rate, "applied": float(applied)}

    def _paired_micro_batches(self, batch: DataProto, max_tokens: int) -> list[MicroBatch]:
        bins = pack_alike(sequence_lengths(batch).reshape(-1, 2).sum(1), max_tokens, all_ranks_max)
        rows = [np.stack([2 * pairs, 2 * pairs + 1], 1).reshape(-1) for pairs in bins]
        return build_micro_batches(batch, rows, (), multiple_of=self.config.tensor if self.config.sequence else 1)


def _chosen(output: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The model's output [1, t, 1] at these rows, fp32."""
    return output[0, :, 0].float().index_select(0, rows)
