"""A trainable model with a scalar head on this rank.

It computes values of response tokens (critic) or scores of sequences (reward model).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from hybridflow.batch import DataProto, Jagged
from hybridflow.data.packing import unpack
from hybridflow.mcore import parallel
from hybridflow.mcore.backend import MegatronPolicy
from hybridflow.mcore.packed import MicroBatch
from hybridflow.mcore.parallel import gather_tokens
from hybridflow.mcore.step import Metrics, backward_outputs, forward_outputs
from hybridflow.models.scalar_head import ScalarHead

# (values at response tokens [n] or scores [s], micro-batch) -> (loss sum, count, metric sums with
# counts)
ScalarLoss = Callable[[Tensor, MicroBatch], tuple[Tensor, Tensor, Metrics]]
# selects from the model's output [1, t', 1] of a micro-batch
Pick = Callable[[MicroBatch, Tensor], Tensor]


def response_values(micro: MicroBatch, output: Tensor) -> Tensor:
    """Return the values [n] of the states before the response tokens. They are computed at the rows
    at which a policy computes these tokens' logits.
    """
    values = _chosen(output, micro.predict_rows)
    return gather_tokens(values, micro.places, micro.num_targets)


def sequence_scores(micro: MicroBatch, output: Tensor) -> Tensor:
    """Return the scores [s] at the last token of each sample.

    Context parallelism is not supported; `config.roles` rejects it for these roles.
    """
    samples = len(micro.lengths)
    ends = micro.packed.cu_seqlens_q[1 : samples + 1].long()
    return _chosen(output, ends - 1)


class ValueModel(MegatronPolicy):
    """A model with scalar outputs instead of logits. Every method is a collective."""

    family: ScalarHead

    def values(self, batch: DataProto, *, max_tokens: int) -> Jagged | None:
        """Compute the value of every response token, in batch order; None on ranks outside the last
        stage.
        """
        micro_batches = self._micro_batches(batch, max_tokens, ())
        found = self._outputs(micro_batches, response_values)
        return unpack(found, micro_batches, len(batch)) if parallel.is_last_stage() else None

    def scores(self, batch: DataProto, *, max_tokens: int) -> np.ndarray | None:
        """Compute the score [B] at the last token of each sample; None on ranks outside the last
        stage."""
        micro_batches = self._micro_batches(batch, max_tokens, (), last_token=True)
        found = self._outputs(micro_batches, sequence_scores)
        if not parallel.is_last_stage():
            return None
        scores = np.zeros(len(batch), np.float32)
        for values, micro in zip(found, micro_batches, strict=True):
            scores[micro.samples] = values
        return scores

    def train_values(
        self, batch: DataProto, loss: ScalarLoss, *, columns: Sequence[str], max_tokens: int
    ) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Run one optimizer update on the values of response tokens.

        Returns metrics as (sum, count) pairs and {grad_norm, lr, applied}.
        """
        micro_batches = self._micro_batches(batch, max_tokens, columns)
        return self._train(micro_batches, loss, response_values)

    def train_pairs(
        self, batch: DataProto, loss: ScalarLoss, *, max_tokens: int
    ) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        """Run one optimizer update on pairs of scores.

        Rows 2i and 2i + 1 form a pair and stay in one micro-batch, in order.
        """
        micro_batches = self._micro_batches(batch, max_tokens, (), together=2, last_token=True)
        return self._train(micro_batches, loss, sequence_scores)

    def _outputs(self, micro_batches: Sequence[MicroBatch], pick: Pick) -> list[np.ndarray]:
        def collect(micro: MicroBatch, output: Tensor) -> np.ndarray:
            return np.asarray(pick(micro, output).cpu().numpy())

        with self._evaluating():
            return forward_outputs(self.chunks, micro_batches, collect)

    def _train(
        self, micro_batches: Sequence[MicroBatch], loss: ScalarLoss, pick: Pick
    ) -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
        def of_output(micro: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Metrics]:
            return loss(pick(micro, output), micro)

        return self._update(
            len(micro_batches),
            lambda watch: backward_outputs(self.chunks, micro_batches, of_output, watch),
        )


def _chosen(output: Tensor, rows: Tensor) -> Tensor:
    """Select the given rows of the model's output [1, t', 1], in fp32."""
    return output[0, :, 0].float().index_select(0, rows)
