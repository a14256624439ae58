"""Text, spoken."""

from __future__ import annotations

from atoll.tasks.library.shapes import SpeechOrder, SpokenText
from atoll.tasks.library.unit_tasks import Speak
from atoll.tasks.task import Task, as_stream

__all__ = ["Speech", "SpeechOrder", "SpokenText"]


class Speech(Task[SpeechOrder, SpokenText]):
    """Speaks a text, sentence by sentence: the first is heard while later ones are made.

    Options: speak: its component.
    """

    def setup(self) -> None:
        """Name the component."""
        self.speak = Speak(self.options.get("speak", "hibari"))

    def invoke(self, request: SpeechOrder) -> SpokenText:
        """Speak a text."""
        text = as_stream(request.text)
        return SpokenText(self.speak(text=text, voice=request.voice, speed=request.speed))
