"""Samples: pictures with questions, as token sequences with a gap where the picture's embeddings go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import torch
from torch import Tensor

from atoll.engine.text import TextCodec
from tools.projector.pictures import Scene, draw_scene
from tools.projector.questions import ASKERS, Asker, Question, ask

MARK = "<file_sep>"
"""A special token that no text holds: it stands for the picture while a prompt is put into tokens."""
_LAYOUTS = ("{mark}{text}", "{mark}\n{text}", "{text}{mark}", "{text}\n{mark}")
_LAYOUT_WEIGHTS = (55, 15, 20, 10)
_SYSTEMS = (
    None,
    "You are a helpful assistant.",
    "Answer in one short sentence.",
    "You are a voice assistant. Your answers are read aloud.",
)
_SYSTEM_WEIGHTS = (70, 15, 10, 5)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What comes before the picture, after it, and the answer with the token that ends it."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    answer: tuple[int, ...]


class PromptMaker:
    """Puts questions into tokens, exactly as a chat with a picture is served."""

    def __init__(self, codec: TextCodec) -> None:
        self.codec = codec
        self._mark = codec.encode(MARK, special=False)[0]
        self._end = codec.eos[0]
        self.split = lru_cache(maxsize=200_000)(self._split)
        self.tokens = lru_cache(maxsize=200_000)(self._tokens)

    def make(
        self, question: Question, layout: str = _LAYOUTS[0], system: str | None = None
    ) -> Prompt:
        """Return the prompt of a question."""
        before, after = self.split(question.text, layout, system)
        return Prompt(before, after, self.tokens(question.answer))

    def make_any(self, question: Question, rng: Random) -> Prompt:
        """Return the prompt of a question in a random layout under a random system message."""
        layout = rng.choices(_LAYOUTS, _LAYOUT_WEIGHTS)[0]
        return self.make(question, layout, rng.choices(_SYSTEMS, _SYSTEM_WEIGHTS)[0])

    def _tokens(self, answer: str) -> tuple[int, ...]:
        return (*self.codec.encode(answer, special=False), self._end)

    def _split(
        self, text: str, layout: str, system: str | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        messages = [{"role": "user", "content": layout.format(mark=MARK, text=text)}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        tokens = self.codec.chat(messages)
        at = tokens.index(self._mark)
        return tuple(tokens[:at]), tuple(tokens[at + 1 :])


@dataclass(frozen=True, slots=True)
class Batch:
    """Scenes, and questions about them; question i is about scene i // (questions per scene).

    tokens: [questions, length], 0 in the gap. gap: where each picture begins. rows, columns, targets: where
    the model must say what.
    """

    scenes: list[Scene]
    questions: list[Question]
    tokens: Tensor
    gap: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor

    @property
    def per_scene(self) -> int:
        """How many questions are asked about each scene."""
        return len(self.questions) // len(self.scenes)


def assemble(
    scenes: list[Scene], questions: list[Question], prompts: Sequence[Prompt], embeds: int
) -> Batch:
    """Lay prompts out for pictures of `embeds` embeddings, padded to a multiple of 16."""
    lists = [[*p.before, *[0] * embeds, *p.after, *p.answer[:-1]] for p in prompts]
    length = -(-max(map(len, lists)) // 16) * 16
    tokens = torch.tensor([row + [0] * (length - len(row)) for row in lists])
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    for number, (row, prompt) in enumerate(zip(lists, prompts, strict=True)):
        count = len(prompt.answer)
        rows += [number] * count
        columns += range(len(row) - count, len(row))
        targets += prompt.answer
    return Batch(
        scenes, questions, tokens, torch.tensor([len(p.before) for p in prompts]),
        torch.tensor(rows), torch.tensor(columns), torch.tensor(targets),
    )  # fmt: skip


def training_batch(
    maker: PromptMaker, seed: int, step: int, pictures: int, per_scene: int, embeds: int
) -> Batch:
    """Return the batch of a step of training; the same for the same arguments."""
    rng = Random(f"train/{seed}/{step}")
    scenes = [draw_scene(rng) for _ in range(pictures)]
    questions = [ask(scene, Asker(rng)) for scene in scenes for _ in range(per_scene)]
    return assemble(scenes, questions, [maker.make_any(q, rng) for q in questions], embeds)


@dataclass(frozen=True, slots=True)
class Exam:
    """A set of held-out pictures: `pairs` are the held-out ones, `new` the phrasings never trained on."""

    name: str
    pairs: bool = False
    new: bool = False
    layout: str = _LAYOUTS[0]

    def batch(
        self, maker: PromptMaker, seed: int, number: int, pictures: int, embeds: int
    ) -> Batch:
        """Return a batch of the exam with one question of every kind per scene, where one fits."""
        rng = Random(f"exam/{self.name}/{seed}/{number}")
        kinds = list(ASKERS)
        scenes = [draw_scene(rng, held_out=self.pairs) for _ in range(pictures)]
        asker = Asker(rng, new=self.new, held_out=self.pairs)
        # A kind that does not fit is replaced by a random one, so that every scene has as many.
        questions = [
            ASKERS[kind][0](scene, asker) or ask(scene, asker) for scene in scenes for kind in kinds
        ]
        prompts = [maker.make(question, self.layout) for question in questions]
        return assemble(scenes, questions, prompts, embeds)


EXAMS = (
    Exam("seen pairs"),
    Exam("held-out pairs", pairs=True),
    Exam("new phrasings", new=True),
    Exam("question first", layout=_LAYOUTS[2]),
)
