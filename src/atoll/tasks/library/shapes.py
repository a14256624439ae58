"""Requests and answers of the library's tasks.

Answers are written as they are once everything is there; while a task runs, what says "a stream" comes in
pieces (`Run.events`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from atoll.tasks.values import Handle

Sound: TypeAlias = dict[str, Any]
"""{"samples": Handle of float32 [n], mono, in -1..1; "rate_hz": int}."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation.

    messages: as OpenAI's; content is a text or a list of {"type": "text", "text"}, {"type": "image",
    "image": Handle}, {"type": "audio", "audio": sound} and {"type": "video", "frames": [Handle]}. A sound
    longer than ears hear at once is there in "pieces", too: [sound], cut in quiet places. sampling:
    parameters that the graph server takes (`core.request_parameters`), as far as they are given. form:
    those of `core.request_parameters.ANSWER_FIELDS` that the task obeys, as OpenAI has them; where it obeys
    tools, messages tell of calls and their results. choice: which of several answers this is, from 0 on.
    """

    messages: list[dict[str, Any]]
    wants_audio: bool = False
    voice: str = "heart"
    sampling: dict[str, Any] = field(default_factory=dict)
    form: dict[str, Any] = field(default_factory=dict)
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: its text, a stream; what it sounds like, a stream of sounds; what was heard in the turn."""

    text: str
    audio: list[Sound] | None
    heard: list[str]


@dataclass(frozen=True, slots=True)
class Clip:
    """Speech to be written down; `language` is what its sender says it is.

    pieces: the same sound, cut in quiet places where it is longer than ears hear at once, else whole.
    """

    audio: Sound
    language: str | None = None
    pieces: list[Sound] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Take a sound that nobody cut for its only piece."""
        if not self.pieces:
            object.__setattr__(self, "pieces", [self.audio])


@dataclass(frozen=True, slots=True)
class Transcript:
    """Speech, written down. seconds: its length.

    segments: [start, end] in seconds of every piece in which somebody speaks, from the first word to the
    last where that is known. texts: what is said in each.
    """

    text: str
    seconds: float
    segments: list[list[float]]
    texts: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SpeechOrder:
    """A text to be spoken; speed 1 is as the voice speaks."""

    text: str
    voice: str = "heart"
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class SpokenText:
    """A text as sound: a stream, a sound for each sentence."""

    audio: list[Sound]


@dataclass(frozen=True, slots=True)
class DrawingOrder:
    """Pictures to be drawn. steps: how often each is refined."""

    prompt: str
    n: int = 1
    seed: int = 0
    steps: int = 8


@dataclass(frozen=True, slots=True)
class Drawings:
    """Pictures: uint8 [height, width, 3] each."""

    images: list[Handle]


@dataclass(frozen=True, slots=True)
class EmbeddingOrder:
    """Texts whose meaning is wanted as vectors."""

    texts: list[str]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors, float32 [dimensions] each, in the order of the texts; tokens of all texts together."""

    vectors: list[Handle]
    tokens: int
