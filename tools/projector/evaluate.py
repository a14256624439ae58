"""Marks a projector on held-out pictures, seeing and not seeing."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.components.projector import Projector
from tools.projector.model import Hide, Reader
from tools.projector.questions import is_right
from tools.projector.samples import EXAMS, Batch, PromptMaker

LONGEST = 24
"""Tokens of the longest answer that is written out."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How many questions of a kind were answered right. exact: word for word; named: in any words."""

    exam: str
    sight: str
    kind: str
    questions: int
    exact: int
    named: int | None


def _see(embeds: Tensor) -> Tensor:
    return embeds


def _blank(embeds: Tensor) -> Tensor:
    return torch.zeros_like(embeds)


def _swap(embeds: Tensor) -> Tensor:
    return embeds.roll(1, dims=0)


SIGHTS: dict[str, Hide] = {"picture": _see, "zeroed": _blank, "another picture": _swap}


@torch.no_grad()
def examine(
    reader: Reader, projector: Projector, maker: PromptMaker, *, seed: int, batches: int,
    pictures: int, blind: bool = False, longest: int = LONGEST,
) -> list[Mark]:  # fmt: skip
    """Mark every exam; the first also with the embeddings zeroed, and with those of another picture."""
    marks = []
    for exam in EXAMS:
        sights = SIGHTS if exam is EXAMS[0] else {"picture": _see}
        for sight, hide in sights.items():
            counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
            for number in range(batches):
                batch = exam.batch(maker, seed, number, pictures, projector.shape.embeds)
                features = reader.look(batch.scenes, exact=True)
                embeds = hide(projector(features * 0 if blind else features))
                _mark(reader, maker, batch, embeds, counts, longest if exam.new else 0)
            marks += [
                Mark(exam.name, sight, kind, n, exact, named if exam.new else None)
                for kind, (n, exact, named) in sorted(counts.items())
            ]
    return marks


def _mark(
    reader: Reader, maker: PromptMaker, batch: Batch, embeds: Tensor,
    counts: dict[str, list[int]], longest: int,
) -> None:  # fmt: skip
    spread = embeds.repeat_interleave(batch.per_scene, dim=0)
    said = reader.read(batch, spread).argmax(-1).cpu()
    # Given the right beginning, the likeliest next token is right at every place: then, and only then,
    # an answer written greedily is the right one, word for word.
    wrong = set(batch.rows[said != batch.targets].tolist())
    written = write(reader, maker, batch, spread, longest) if longest else None
    for number, question in enumerate(batch.questions):
        count = counts[question.kind]
        count[0] += 1
        count[1] += number not in wrong
        if written is not None:
            count[2] += is_right(question, written[number])


@torch.no_grad()
def write(
    reader: Reader, maker: PromptMaker, batch: Batch, embeds: Tensor, longest: int = LONGEST
) -> list[str]:
    """Return the answers that the model writes greedily."""
    starts = torch.full((len(batch.questions),), batch.tokens.shape[1], dtype=torch.long)
    starts = starts.scatter_reduce(0, batch.rows, batch.columns, "amin")
    room = torch.zeros(len(starts), longest, dtype=torch.long)
    tokens = torch.cat([batch.tokens, room], dim=1)
    everyone = torch.arange(len(starts))
    ends = maker.codec.eos[0]
    said = torch.zeros(len(starts), 0, dtype=torch.long)
    for step in range(longest):
        columns = starts + step
        now = Batch(
            batch.scenes, batch.questions, tokens, batch.gap, everyone, columns, batch.targets
        )
        token = reader.read(now, embeds).argmax(-1).cpu()
        said = torch.cat([said, token[:, None]], dim=1)
        if bool((said == ends).any(dim=1).all()):
            break
        tokens[everyone, columns + 1] = token
    return [
        maker.codec.decode(row[: row.index(ends)] if ends in row else row) for row in said.tolist()
    ]
