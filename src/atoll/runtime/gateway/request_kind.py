"""What a request brings and wants, told from its shape: so classes of any-to-any services are told apart."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.runtime.openai import (
    AnyRequest,
    ChatRequest,
    ImageRequest,
    SpeechRequest,
    TranscriptionRequest,
)
from atoll.workload.classes import INPUTS, Modality, write_class_name

_BROUGHT: dict[str, Modality] = {
    "image_url": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
_TEXT: tuple[Modality, ...] = ("text",)
_SPOKEN: tuple[Modality, ...] = ("text", "audio")
_KINDS: dict[type, str] = {
    SpeechRequest: write_class_name(_TEXT, _SPOKEN),
    ImageRequest: write_class_name(_TEXT, ("image",)),
    TranscriptionRequest: write_class_name(_SPOKEN, _TEXT),
}


def kind_of(parsed: AnyRequest) -> str:
    """Return what a request brings and wants as the name of a class ("text+image"), "" for text for text."""
    if not isinstance(parsed, ChatRequest):
        return _KINDS.get(type(parsed), "")
    found = set(_list_brought(parsed))
    speaks = parsed.modalities is not None and "audio" in parsed.modalities
    if not found and not speaks:
        return ""
    brings = tuple(m for m in INPUTS if m in found or m == "text")
    return write_class_name(brings, _SPOKEN if speaks else _TEXT)


def _list_brought(parsed: ChatRequest) -> Iterator[Modality]:
    for message in parsed.messages:
        # Most are plain text, which is not looked at.
        if isinstance(message.content, list):
            for part in message.content:
                if part.type in _BROUGHT:
                    yield _BROUGHT[part.type]
