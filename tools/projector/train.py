"""Trains projectors and marks them: `python -m tools.projector.train --kinds mixer --minutes 8 --out DIR`."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from atoll.components.projector import Projector, ProjectorShape, load_projector, save_projector
from atoll.engine.text import TextCodec
from tools.projector.bundle import FOLDER, Bundle
from tools.projector.evaluate import (
    LONGEST,
    examine,
    mark_rows,
    now_utc,
    show,
    versions,
    write,
    write_marks,
)  # fmt: skip
from tools.projector.model import CountHead, Reader, start_projector
from tools.projector.samples import EXAMS, PromptMaker, training_batch

BLIND = "blind"
"""A mixer that is shown nothing: what can be answered by knowing the questions alone."""
_WARM_STEPS = 100
_SMOKE_LAYERS = 3


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train one projector. minutes or steps: whichever ends first; 0 is no limit."""

    kind: str
    minutes: float
    steps: int
    pictures: int
    per_scene: int
    rate: float
    seed: int
    help: float
    """The weight of counting, at first; it falls to nothing halfway."""
    first: Path | None = None
    repeats: bool = False
    """Whether every step has the first step's batch: its loss must fall."""

    def shape(self) -> ProjectorShape:
        """Return what to train."""
        if self.kind == BLIND:
            return ProjectorShape(kind="mixer")
        return ProjectorShape(kind=self.kind, hidden=512 if self.kind == "mlp" else 256)


def train(
    reader: Reader, maker: PromptMaker, plan: Plan
) -> tuple[Projector, list[dict[str, float]]]:
    """Return a trained projector and how its loss fell."""
    torch.manual_seed(plan.seed)
    if plan.first is None:
        projector = start_projector(Projector(plan.shape()), reader)
    else:
        projector = load_projector(plan.first).requires_grad_(True).train().to(reader.device)
    counter = CountHead(projector.shape.outputs).to(reader.device)
    parameters = [*projector.parameters(), *counter.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=plan.rate, betas=(0.9, 0.98), weight_decay=0.01)
    started, step, done = time.monotonic(), 0, 0.0
    log: list[dict[str, float]] = []
    every = max(plan.steps // 20, 1) if plan.steps else 100
    warm = 1 if plan.repeats else _WARM_STEPS
    while done < 1:
        rate = plan.rate * min((step + 1) / warm, 1) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = training_batch(
            maker,
            plan.seed,
            0 if plan.repeats else step,
            plan.pictures,
            plan.per_scene,
            projector.shape.embeds,
        )
        features = reader.look(batch.scenes)
        with torch.autocast("cuda", torch.bfloat16, enabled=reader.type == torch.bfloat16):
            embeds = projector(features * 0 if plan.kind == BLIND else features)
        logits = reader.read(batch, embeds.repeat_interleave(plan.per_scene, dim=0))
        targets = batch.targets.to(reader.device)
        loss = functional.cross_entropy(logits, targets)
        help_ = plan.help * max(1 - 2 * done, 0)
        counted = counter(embeds, batch.scenes) if help_ else torch.zeros_like(loss)
        optimizer.zero_grad(set_to_none=True)
        (loss + help_ * counted).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % every == 0:
            right = (logits.argmax(-1) == targets).float().mean()
            log.append(
                {
                    "step": step,
                    "seconds": round(time.monotonic() - started, 1),
                    "loss": round(loss.item(), 4),
                    "counting": round(counted.item(), 4),
                    "tokens_right": round(right.item(), 4),
                    "rate": round(rate, 6),
                }
            )
            print(plan.kind, json.dumps(log[-1]), flush=True)
        step += 1
        parts = [step / plan.steps] if plan.steps else []
        if plan.minutes:
            parts.append((time.monotonic() - started) / (60 * plan.minutes))
        done = max(parts)
    log.append({"step": step, "seconds": round(time.monotonic() - started, 1)})
    return projector, log


def round_to_half(projector: Projector) -> Projector:
    """Return the projector as it will be read back, so that what is marked is what is kept."""
    with torch.no_grad():
        for value in projector.parameters():
            value.copy_(value.half().float())
    return projector.eval().requires_grad_(False)


def show_answers(reader: Reader, projector: Projector, maker: PromptMaker, seed: int) -> list[str]:
    """Write out the answers to one question of every kind for two held-out pictures."""
    lines = []
    for exam in EXAMS[:3]:
        batch = exam.batch(maker, seed, 1_000_000, 2, projector.shape.embeds)
        with torch.no_grad():
            embeds = projector(reader.look(batch.scenes, exact=True))
        answers = write(reader, maker, batch, embeds.repeat_interleave(batch.per_scene, dim=0))
        for question, answer in zip(batch.questions, answers, strict=True):
            lines.append(f"{exam.name}: {question.text} | {question.answer} | {answer}")
    print("\n".join(lines), flush=True)
    return lines


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--kinds", default="mixer", help="of linear, mlp, mixer, blind; with commas"
    )
    parser.add_argument("--minutes", default="8", help="of training, per kind; with commas")
    parser.add_argument("--steps", type=int, default=0, help="at most; 0 is no limit")
    parser.add_argument("--pictures", type=int, default=128, help="per step")
    parser.add_argument("--questions", type=int, default=4, help="per picture")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--counting", type=float, default=0.3, help="weight of the help by counting"
    )
    parser.add_argument("--exam-batches", type=int, default=8, help="of 128 pictures")
    parser.add_argument("--first", type=Path, help="a projector to go on from")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--parts", type=Path, default=FOLDER)
    parser.add_argument("--out", type=Path, default=FOLDER / "out")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a CPU")
    return parser.parse_args()


def main() -> None:
    """Train each kind, mark it, and write the weights and the figures."""
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    exam_pictures = 128
    if options.smoke:
        torch.set_num_threads(2)
        options.minutes, options.steps, options.exam_batches = "0", options.steps or 12, 1
        options.pictures, options.questions, exam_pictures = 2, 2, 1
    began = time.monotonic()
    bundle = Bundle(options.parts)
    # The smoke test reads with the first layers alone: wrong answers, but every line of this is run.
    layers = _SMOKE_LAYERS if options.smoke else None
    reader = Reader(bundle.vision(), bundle.llm(layers), device)
    with tempfile.TemporaryDirectory() as folder:
        maker = PromptMaker(TextCodec(bundle.write_texts(Path(folder))))
    if options.compile:
        reader.compile()
    print(f"loaded on {device} in {time.monotonic() - began:.1f} s", flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    kinds = options.kinds.split(",")
    minutes = [float(value) for value in options.minutes.split(",")]
    minutes += minutes[-1:] * (len(kinds) - len(minutes))
    results: list[dict[str, Any]] = []
    rows: list[dict[str, object]] = []
    for kind, limit in zip(kinds, minutes, strict=True):
        plan = Plan(kind, limit, options.steps, options.pictures, options.questions, options.rate,
                    options.seed, options.counting, options.first, options.smoke)  # fmt: skip
        projector, log = train(reader, maker, plan)
        projector = round_to_half(projector)
        notes = {"kind": kind, "seed": str(plan.seed), "steps": str(int(log[-1]["step"]))}
        save_projector(projector, options.out / f"projector-{kind}.safetensors", notes)
        marks = examine(
            reader, projector, maker, seed=plan.seed, batches=options.exam_batches,
            pictures=exam_pictures, blind=kind == BLIND, longest=2 if options.smoke else LONGEST,
        )  # fmt: skip
        show(marks)
        date = now_utc()
        rows += mark_rows(
            marks, date=date, device=device, projector=kind, seed=plan.seed,
            pictures=options.exam_batches * exam_pictures,
        )  # fmt: skip
        answers = (
            []
            if kind == BLIND or options.smoke
            else show_answers(reader, projector, maker, plan.seed)
        )
        results.append(
            {
                "date": date,
                **versions(device),
                "plan": {**asdict(replace(plan, first=None)), "first": str(plan.first or "")},
                "parameters": sum(value.numel() for value in projector.parameters()),
                "steps": log[-1]["step"],
                "seconds": log[-1]["seconds"],
                "log": log,
                "marks": [asdict(mark) for mark in marks],
                "answers": answers,
            }
        )
        # What is known so far: a run that is cut off keeps what it has.
        (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        write_marks(options.out / "results.csv", rows)
    print(f"all done in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
