"""Speech, written down."""

from __future__ import annotations

from atoll.tasks.library.listening import hear_pieces, join_heard
from atoll.tasks.library.shapes import Clip, Transcript
from atoll.tasks.library.units import Transcribe, voice_detector
from atoll.tasks.task import Task

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
