"""Vectors in place of tokens: the parts of a prompt that another model made, such as a picture's.

Among the tokens of a sequence a vector is a negative number, its mark: a hash of its values. Marks tell nodes
where vectors stand. Blocks of KV are known by their tokens, so two prompts share blocks only as far as their
vectors are the same, on every node, and only the first node of a route needs the vectors themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import UsageError

Rows = NDArray[np.float32]
PLACEHOLDER = 0
"""Token in prompts where a vector stands; any other would do."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """Vectors, and the positions of the prompt that they replace.

    positions: increasing, counted from the start of the prompt. rows: [positions, width of the model], as
    the model's own embedding layer would give them.
    """

    positions: NDArray[np.int64]
    rows: Rows

    def __post_init__(self) -> None:
        """Keep solid copies that nobody can write to; refuse what no model could read."""
        positions = np.array(self.positions, np.int64)
        rows = np.array(self.rows, np.float32)
        if rows.ndim != 2 or not rows.size or positions.shape != rows.shape[:1]:
            raise UsageError(
                f"{positions.size} positions for vectors of shape {rows.shape}",
                field="embeds",
                hint="give one vector a position, as [positions, width]",
            )
        if positions[0] < 0 or bool((np.diff(positions) <= 0).any()):
            raise UsageError("positions of vectors do not increase", field="embeds")
        if not bool(np.isfinite(rows).all()):
            raise UsageError("a vector holds a number that is not finite", field="embeds")
        for array in (positions, rows):
            array.setflags(write=False)
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "rows", rows)

    @property
    def end(self) -> int:
        """The position after the last vector."""
        return int(self.positions[-1]) + 1

    def between(self, start: int, end: int) -> tuple[NDArray[np.int64], Rows] | None:
        """Return the vectors at positions [start, end) and where they stand, counted from `start`."""
        low, high = np.searchsorted(self.positions, (start, end))
        if low == high:
            return None
        return self.positions[low:high] - start, self.rows[low:high]

    def mark(self, prompt: Sequence[int]) -> list[int]:
        """Return the prompt with marks where vectors stand."""
        if self.end > len(prompt):
            raise UsageError(
                f"a vector at position {self.end - 1} of a prompt of {len(prompt)}", field="embeds"
            )
        tokens = list(prompt)
        for position, row in zip(self.positions.tolist(), self.rows, strict=True):
            digest = hashlib.blake2b(row.astype("<f4").tobytes(), digest_size=8).digest()
            tokens[position] = -1 - (int.from_bytes(digest, "little") >> 1)
        return tokens


@dataclass(frozen=True, slots=True, eq=False)
class FramedVectors:
    """Vectors with text around them that the chat template is not to see, which might trim it."""

    rows: Rows
    before: str
    after: str

    def __len__(self) -> int:
        """How many vectors there are."""
        return len(self.rows)


def marked(tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions at which vectors stand."""
    return np.flatnonzero(tokens < 0)


def join_pieces(pieces: Sequence[Any]) -> tuple[list[int], PromptEmbeds | None]:
    """Return the prompt of pieces in order: lists of tokens, and arrays of vectors [count, width]."""
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[Rows] = []
    for piece in pieces:
        if isinstance(piece, np.ndarray):
            positions += range(len(tokens), len(tokens) + len(piece))
            rows.append(piece)
            tokens += [PLACEHOLDER] * len(piece)
        else:
            tokens += piece
    if not rows:
        return tokens, None
    return tokens, PromptEmbeds(np.array(positions, np.int64), np.concatenate(rows))
