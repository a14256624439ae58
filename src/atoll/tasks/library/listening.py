"""Hearing sounds that may be longer than ears hear at once: piece by piece, all pieces together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.tasks.library.shapes import Sound
from atoll.tasks.library.units import DetectVoice, Transcribe
from atoll.tasks.task import settled


@dataclass(frozen=True, slots=True)
class HeardPiece:
    """What is said in a piece of sound: its text, "" where nobody speaks.

    segments: [start, end] in seconds of the piece where somebody speaks; None where nobody listened for it.
    """

    text: Any
    segments: Any = None


def hear_pieces(
    hear: Transcribe, detect: DetectVoice | None, pieces: Sequence[Sound]
) -> list[HeardPiece]:
    """Return what is said in every piece; nobody waits for a piece before."""
    if detect is None:
        return [HeardPiece(hear(piece)["text"]) for piece in pieces]
    # All of them are listened to before the first is looked at.
    found = settled([detect(audio=piece)["segments"] for piece in pieces])
    return [
        HeardPiece(hear(piece)["text"] if segments else "", segments)
        for piece, segments in zip(pieces, found, strict=True)
    ]


def join_heard(pieces: Sequence[HeardPiece]) -> Any:
    """Return the text of pieces that follow each other."""
    if len(pieces) == 1:
        return pieces[0].text  # as it comes: nobody has to look at it
    return " ".join(text for text in settled([piece.text for piece in pieces]) if text)
