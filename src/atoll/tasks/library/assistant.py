"""An assistant that hears, sees, thinks and speaks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from atoll.core.errors import InputError
from atoll.core.request_parameters import ANSWER_FIELDS, TASK_DEFAULTS
from atoll.tasks.library.shapes import Reply, Sound, Turn
from atoll.tasks.library.transcription import hear_pieces, join_heard
from atoll.tasks.library.unit_tasks import Chat, See, Speak, Transcribe, voice_detector
from atoll.tasks.task import Task

__all__ = ["Reply", "SpeakingAssistant", "Turn"]


class SpeakingAssistant(Task[Turn, Reply]):
    """Answers turns of a conversation with text, and with speech if that is wanted.

    Every sound of the turn is heard (a long one by the piece) and every picture seen, all at once. What was
    heard stands in the message where the sound was; a message that is one sound alone is what was heard.
    Speech starts at the first sentence of the answer.

    Options: hear_encoder, hear_decoder, see, think, speak, detect: components. voice_activity: true leaves
    out sounds in which nobody speaks (they are heard as ""). sampling: defaults of how text is drawn.
    """

    obeys = frozenset({"tools", "response_format", "logprobs", "n"})

    def setup(self) -> None:
        """Name the components."""
        options = self.options
        self.hear = Transcribe(options)
        self.see = See(options.get("see", "smollm2-vision"))
        self.think = Chat(options.get("think", "smollm2"))
        self.speak = Speak(options.get("speak", "hibari"))
        self.detect = voice_detector(options)
        self.sampling = {**TASK_DEFAULTS, **options.get("sampling", {})}

    def invoke(self, request: Turn) -> Reply:
        """Answer a turn."""
        texts = self._listen(_sounds(request.messages))
        heard = iter(texts)
        messages = [
            _given(message, ("role", "tool_calls", "tool_call_id"))
            | {"content": self._content(message.get("content"), heard)}
            for message in request.messages
        ]
        text = self.think(
            messages=messages, **self._sampling(request), **_given(request.form, ANSWER_FIELDS)
        )
        audio = (
            self.speak(text=text, voice=request.voice, speed=1.0) if request.wants_audio else None
        )
        return Reply(text=text, audio=audio, heard=texts)

    def _listen(self, sounds: list[list[Sound]]) -> list[Any]:
        """Return the text of every sound, each given as its pieces."""
        pieces = [piece for sound in sounds for piece in sound]
        heard = iter(hear_pieces(self.hear, self.detect, pieces))
        return [join_heard([next(heard) for _ in sound]) for sound in sounds]

    def _content(self, content: Any, heard: Any) -> Any:
        """Return the content of a message as a language model takes it."""
        if _is_text(content):
            return content or ""
        parts: list[dict[str, Any]] = []
        for part in content:
            if part["type"] == "text":
                parts.append({"type": "text", "text": part["text"]})
            elif part["type"] == "audio":
                text = next(heard)
                if len(content) == 1:
                    return text
                parts.append({"type": "text", "text": text})
            elif part["type"] == "image":
                parts.append(self._show(part["image"]))
            elif part["type"] == "video":
                parts += [self._show(frame) for frame in part["frames"]]
            else:
                raise InputError(
                    f"unknown kind {str(part['type'])[:40]!r}",
                    field="messages.content.type",
                    hint="text, image, audio or video",
                )
        return parts

    def _show(self, image: Any) -> dict[str, Any]:
        # All that its encoder gives: some models have to know more of a picture than its vectors.
        return {"type": "embeds", "embeds": self.see(image=image)}

    def _sampling(self, request: Turn) -> dict[str, Any]:
        given = {name: request.sampling.get(name) for name in TASK_DEFAULTS}
        drawn = {
            name: self.sampling[name] if value is None else value for name, value in given.items()
        }
        # Each of several answers is drawn by itself.
        return drawn | {"seed": drawn["seed"] + request.choice} if request.choice else drawn


def _given(fields: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return those of the named fields that are given."""
    return {name: value for name in names if (value := fields.get(name)) is not None}


def _is_text(content: Any) -> bool:
    return content is None or isinstance(content, str)


def _sounds(messages: list[dict[str, Any]]) -> list[list[Sound]]:
    """Return the sounds of all messages in order, each as its pieces."""
    return [
        list(part.get("pieces", [part["audio"]]))
        for message in messages
        if not _is_text(message.get("content"))
        for part in message["content"]
        if part["type"] == "audio"
    ]
