"""Marks a projector on held-out pictures: `python -m tools.projector.evaluate --seed 2`."""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from atoll.components.efficientnet import load_network
from atoll.components.projector import Projector, load_projector
from atoll.components.smollm2_vision import PROJECTOR
from atoll.engine.text import TextCodec
from atoll.engine.weights.sources import DEFAULT_MODEL, resolve
from tools.projector.model import Hide, Reader
from tools.projector.questions import is_right
from tools.projector.samples import EXAMS, Batch, Exam, PromptMaker

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
    pictures: int, blind: bool = False, longest: int = LONGEST, exams: Sequence[Exam] = EXAMS,
) -> list[Mark]:  # fmt: skip
    """Mark exams of `batches` x `pictures` pictures.

    The first of EXAMS is also taken with the embeddings zeroed, and with those of another picture.
    """
    marks = []
    for exam in exams:
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
    ends = maker.codec.eos[0]
    said: list[list[int]] = [[] for _ in starts]
    rows = torch.arange(len(starts))
    for step in range(longest):
        columns = starts[rows] + step
        now = Batch(
            batch.scenes,
            batch.questions,
            tokens[rows, : int(columns.max()) + 1],
            batch.gap[rows],
            torch.arange(len(rows)),
            columns,
            batch.targets,
        )
        token = reader.read(now, embeds[rows]).argmax(-1).cpu()
        goes_on = token != ends
        rows, token, columns = rows[goes_on], token[goes_on], columns[goes_on]
        for row, number in zip(rows.tolist(), token.tolist(), strict=True):
            said[row].append(number)
        if not len(rows):
            break
        tokens[rows, columns + 1] = token
    return [maker.codec.decode(row) for row in said]


def show(marks: Iterable[Mark]) -> None:
    """Print marks as a table."""
    for mark in marks:
        named = "" if mark.named is None else f"  named {mark.named / mark.questions:.3f}"
        print(f"{mark.exam:15} {mark.sight:16} {mark.kind:9} n={mark.questions:5} "
              f"exact {mark.exact / mark.questions:.3f}{named}", flush=True)  # fmt: skip


def versions(device: str) -> dict[str, str]:
    """Return what the figures depend on."""
    import transformers

    name = torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"
    return {"torch": torch.__version__, "transformers": transformers.__version__, "device": name}


def write_marks(path: Path, rows: Iterable[dict[str, object]]) -> None:
    """Write marks as CSV; each row has the same fields: of `versions`, of the run, and of a Mark."""
    rows = list(rows)
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def mark_rows(marks: Iterable[Mark], *, date: str, device: str, projector: str, seed: int,
              pictures: int) -> list[dict[str, object]]:  # fmt: skip
    """Return marks with what they depend on; pictures: of each exam."""
    run = {"date": date, **versions(device), "projector": projector, "seed": seed}
    return [{**run, "pictures": pictures, **asdict(mark)} for mark in marks]


def now_utc() -> str:
    """Return the time, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def load_served(device: str) -> tuple[Reader, PromptMaker]:
    """Return the encoder and the language model that are served, fetched where needed."""
    from transformers import LlamaForCausalLM

    folder = resolve(DEFAULT_MODEL)
    llm = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    llm.eval().requires_grad_(False)
    return Reader(load_network(), llm, device), PromptMaker(TextCodec(folder))


def main() -> None:
    """Mark weights on pictures of a seed; on a CPU, a few pictures take minutes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", default=PROJECTOR, help="the projector")
    parser.add_argument("--seed", type=int, default=2, help="of the pictures; training used 1")
    parser.add_argument("--batches", type=int, default=5, help="per exam")
    parser.add_argument("--pictures", type=int, default=4, help="per batch; at least 2")
    parser.add_argument("--exams", nargs="*", default=[exam.name for exam in EXAMS])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    exams = [exam for exam in EXAMS if exam.name in options.exams]
    if not exams or options.batches < 1:
        parser.error(f"give at least one batch, and exams of {[exam.name for exam in EXAMS]}")
    if options.pictures < 2:
        parser.error("--pictures: at least 2, or there is no other picture to be shown")
    torch.set_num_threads(options.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reader, maker = load_served(device)
    projector = load_projector(options.file).to(reader.device)
    rows: list[dict[str, object]] = []
    for exam in exams:
        marks = examine(
            reader, projector, maker, seed=options.seed, batches=options.batches,
            pictures=options.pictures, exams=[exam],
        )  # fmt: skip
        show(marks)
        rows += mark_rows(
            marks, date=now_utc(), device=device, projector=projector.shape.kind,
            seed=options.seed, pictures=options.batches * options.pictures,
        )  # fmt: skip
        if options.csv:
            # What is known so far: the exams to come may take long.
            write_marks(options.csv, rows)


if __name__ == "__main__":
    main()
