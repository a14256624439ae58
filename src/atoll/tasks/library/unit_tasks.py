"""Unit tasks for the components that come with Atoll: what goes in and comes out is said there.

Sound is {"samples": array, "rate_hz": int}, a picture an array [height, width, 3].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from atoll.tasks.cutting import sentences
from atoll.tasks.task import Task, UnitTask
from atoll.tasks.values import Value


class Transcribe(Task[Any, Any]):
    """Sound into {"text", "tokens"}: an encoder and a decoder, which may run in different places.

    Options: hear_encoder, hear_decoder: their components.
    """

    def setup(self) -> None:
        """Name the components."""
        self.encode = UnitTask(self.options.get("hear_encoder", "moonshine-encoder"))
        self.decode = UnitTask(self.options.get("hear_decoder", "moonshine-decoder"))

    def invoke(self, request: Any) -> Any:
        """Return what is said in a sound."""
        encoded = self.encode(audio=request)
        return self.decode(states=encoded["states"], samples=encoded["samples"])


class See(UnitTask):
    """image -> {"embeds"}: a picture as a language model takes it, [tokens, dimensions].

    Encoders whose language model has to know more of it give that beside, as "grid" and "deepstack".
    """

    def __init__(self, component: str = "smollm2-vision") -> None:
        super().__init__(component)


class Chat(UnitTask):
    """messages and sampling -> a stream of text."""

    def __init__(self, component: str = "smollm2") -> None:
        super().__init__(component, streams=True)

    def take(self, piece: Value) -> Value:
        """Return the text of a piece; its token ids are of use to who resumes it only."""
        return cast("dict[str, Value]", piece)["text"]

    def gather(self, pieces: list[Value]) -> Value:
        """Return the whole text, "" if nothing was said."""
        return "".join(cast("list[str]", pieces))


class Speak(UnitTask):
    """text, voice, speed -> sound; of a stream of text, a stream of sounds, one for each sentence."""

    def __init__(self, component: str = "hibari") -> None:
        super().__init__(component, cut=sentences())


class Draw(UnitTask):
    """steps, seed, difficulty -> {"image"}."""

    def __init__(self, component: str = "terrain-diffusion") -> None:
        super().__init__(component)


class Embed(UnitTask):
    """text -> {"embedding", "tokens"}."""

    def __init__(self, component: str = "minilm") -> None:
        super().__init__(component)


class ReadText(UnitTask):
    """image -> {"text", "lines"}: what is written in a picture."""

    def __init__(self, component: str = "pp-ocr") -> None:
        super().__init__(component)


class DetectVoice(UnitTask):
    """audio -> {"segments", "speech_s"}: where somebody speaks, in seconds."""

    def __init__(self, component: str = "silero-vad") -> None:
        super().__init__(component)


def voice_detector(options: Mapping[str, Any]) -> DetectVoice | None:
    """Return what says whether anybody speaks, where the option `voice_activity` asks for it."""
    if not options.get("voice_activity"):
        return None
    return DetectVoice(options.get("detect", "silero-vad"))
