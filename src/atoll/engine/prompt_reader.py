"""Readings of a prompt at the last stage: its vector, or how likely its tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.engine.engine_messages import ReadOrder

_ROWS = 64
"""Positions whose logits are computed at a time: a row has as many numbers as the vocabulary."""

Scores = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]
"""Log probabilities [tokens], and likelier tokens with theirs, both [tokens, alternatives]."""


class ModelHead(Protocol):
    """Maps hidden states to logits."""

    def logits(self, hidden: Tensor, *, normed: bool = False) -> Tensor:
        """Return logits [rows, vocabulary]."""
        ...


class PromptReader:
    """Takes in hidden states of one prompt as they come, position after position.

    `tokens` begins with the prompt, of `length` positions.
    """

    def __init__(self, order: ReadOrder, tokens: Sequence[int], length: int) -> None:
        self._order = order
        self._tokens = tokens
        self._length = length
        self._pooled: Tensor | None = None

    @property
    def pools(self) -> bool:
        """Whether a vector is wanted, and no answer."""
        return self._order.pool is not None

    def take(self, position: int, normed: Tensor, head: ModelHead) -> Scores | None:
        """Take hidden states after the last norm, [rows, width], of positions from `position` on.

        Returns the scores of the tokens after them, if those are wanted and any are of the prompt.
        """
        inside = normed[: max(0, self._length - position)]
        if self.pools and len(inside):
            self._pool(position, inside.float())
        after = self._tokens[position + 1 : min(self._length, position + 1 + len(normed))]
        if self._order.scores is None or not after:
            return None
        return _score(normed[: len(after)], after, head, self._order.scores)

    def _pool(self, position: int, rows: Tensor) -> None:
        if self._order.pool == "mean":
            new = rows.double().sum(0)
            self._pooled = new if self._pooled is None else self._pooled + new
        elif self._order.pool == "last":
            self._pooled = rows[-1]
        elif position == 0:
            self._pooled = rows[0]

    def vector(self) -> NDArray[np.float32]:
        """Return the vector of the prompt, of length 1 (unless all of it is 0)."""
        assert self._pooled is not None
        # Of a sum or of a mean: scaled to length 1 they are the same.
        vector = self._pooled.double()
        unit = vector / torch.linalg.vector_norm(vector).clamp_min(1e-12)
        found: NDArray[np.float32] = unit.float().cpu().numpy()
        return found


def _score(normed: Tensor, tokens: Sequence[int], head: ModelHead, alternatives: int) -> Scores:
    # Vectors stand where tokens are negative; nobody can say how likely those are.
    targets = torch.tensor(tokens, dtype=torch.int64, device=normed.device)
    logprobs, top_tokens, top_logprobs = [], [], []
    for start in range(0, len(tokens), _ROWS):
        logs = torch.log_softmax(
            head.logits(normed[start : start + _ROWS], normed=True).float(), -1
        )
        wanted = targets[start : start + _ROWS]
        found = logs.gather(1, wanted.clamp_min(0)[:, None])[:, 0]
        logprobs.append(found.masked_fill(wanted < 0, float("nan")))
        best = torch.topk(logs, min(alternatives, logs.shape[1]))
        top_tokens.append(best.indices)
        top_logprobs.append(best.values)
    return (
        torch.cat(logprobs).cpu().numpy(),
        torch.cat(top_tokens).cpu().numpy(),
        torch.cat(top_logprobs).cpu().numpy(),
    )
