"""The inputs and targets of multi-token-prediction heads in a packed micro-batch.

At token i of a row, the head of depth k reads the state of token i and the embeddings of tokens
i + 1 to i + k, and predicts token i + k + 1. Its training targets are the tokens that an engine
would draft: the last of k + 1 consecutive response tokens that the policy sampled. No head reads or
predicts beyond the end of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridflow.data.packing import ranges
from hybridflow.mcore.parallel import ZigZag


@dataclass(frozen=True)
class Ahead:
    """One context rank's inputs and targets for the prediction head of one depth, in a micro-batch
    with t' tokens and n' targets on that rank.

    Attributes:
        tokens: [1, t'] the token `depth` positions later in the same row; 0 beyond the row's end,
            where nothing is predicted.
        rows: [n'] this rank's rows whose outputs predict the targets.
        targets: [n'] the response tokens that they predict.
    """

    tokens: Tensor
    rows: Tensor
    targets: Tensor


@dataclass(frozen=True)
class PackedRows:
    """A packed micro-batch of s rows and t tokens, before it is split across context ranks.

    Attributes:
        tokens: [t] packed tokens, with padding.
        starts, read: [s] first position and number of tokens of each row.
        predicting: [n] the position whose output predicts each response token.
        responses: [n] the response tokens.
        lengths: [s] number of response tokens of each row.
        sampled: [n] bool, False at response tokens that the policy did not sample.
    """

    tokens: np.ndarray
    starts: np.ndarray
    read: np.ndarray
    predicting: np.ndarray
    responses: np.ndarray
    lengths: np.ndarray
    sampled: np.ndarray

    def ahead(
        self,
        depth: int,
        layout: ZigZag,
        rank: int,
        upload: Callable[[Tensor], Tensor],
    ) -> Ahead:
        """Return one context rank's inputs and targets for the head of this depth."""
        kept = np.maximum(self.read - depth, 0)
        places = ranges(self.starts, kept)
        tokens = np.zeros_like(self.tokens)
        tokens[places] = self.tokens[places + depth]
        targets = self._targets(depth)
        rows = self.predicting[targets - depth]
        mine = layout.owner[rows] == rank
        arrays = (
            tokens[layout.rows_of(rank)],
            layout.local[rows[mine]],
            self.responses[targets[mine]].astype(np.int64),
        )
        there, predicting, predicted = (upload(torch.from_numpy(array)) for array in arrays)
        return Ahead(there[None], predicting, predicted)

    def _targets(self, depth: int) -> np.ndarray:
        """Return the indices of the response tokens that are targets of the head of this depth."""
        place = np.arange(len(self.responses)) - np.repeat(
            np.cumsum(self.lengths) - self.lengths, self.lengths
        )
        drafted = place >= depth
        for back in range(depth + 1):
            drafted[back:] &= self.sampled[: len(self.sampled) - back]
        return np.flatnonzero(drafted)
