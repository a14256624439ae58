"""Speech, written down."""

from __future__ import annotations

from atoll.tasks.library.shapes import Clip, Transcript
from atoll.tasks.library.units import Transcribe, voice_detector
from atoll.tasks.task import Task

__all__ = ["Clip", "Transcript", "Transcription"]


class Transcription(Task[Clip, Transcript]):
    """Writes down what is said in a clip.

    Options: hear_encoder, hear_decoder, detect: components. voice_activity: true says where somebody speaks,
    and writes nothing where nobody does; otherwise the whole clip is one segment.
    """

    def setup(self) -> None:
        """Name the components."""
        self.hear = Transcribe(self.options)
        self.detect = voice_detector(self.options)

    def invoke(self, request: Clip) -> Transcript:
        """Write down a clip."""
        samples, rate_hz = request.audio["samples"], request.audio["rate_hz"]
        seconds = samples.shape[0] / rate_hz
        if self.detect is None:
            return Transcript(self.hear(request.audio)["text"], seconds, [[0.0, seconds]])
        segments = self.detect(audio=request.audio)["segments"]
        if not segments:
            return Transcript("", seconds, [])
        return Transcript(self.hear(request.audio)["text"], seconds, segments)
