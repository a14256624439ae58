"""Speech, written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atoll.tasks.library.shapes import Clip, Sound, Transcript
from atoll.tasks.library.unit_tasks import DetectVoice, Transcribe, voice_detector
from atoll.tasks.task import Task, settled

__all__ = ["Clip", "Transcript", "Transcription"]


class Transcription(Task[Clip, Transcript]):
    """Writes down what is said in a clip.

    The pieces of a long clip are heard independently, each a segment of the transcript.

    Options: hear_encoder, hear_decoder, detect: components. voice_activity: true says where somebody speaks,
    and writes nothing where nobody does; otherwise every piece is a segment from end to end.
    """

    def setup(self) -> None:
        """Name the components."""
        self.hear = Transcribe(self.options)
        self.detect = voice_detector(self.options)

    def invoke(self, request: Clip) -> Transcript:
        """Write down a clip."""
        heard = hear_pieces(self.hear, self.detect, request.pieces)
        text = join_heard(heard)
        begin_s, segments, texts = 0.0, [], []
        for sound, piece in zip(request.pieces, heard, strict=True):
            end_s = begin_s + sound["samples"].shape[0] / sound["rate_hz"]
            if piece.segments is None:
                segments.append([begin_s, end_s])
                texts.append(piece.text)
            elif piece.segments:
                first, last = piece.segments[0], piece.segments[-1]
                segments.append([begin_s + first[0], begin_s + last[1]])
                texts.append(piece.text)
            begin_s = end_s
        return Transcript(text, begin_s, segments, texts)


@dataclass(frozen=True, slots=True)
class HeardPiece:
    """Text of a piece of sound, "" where nobody speaks.

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
