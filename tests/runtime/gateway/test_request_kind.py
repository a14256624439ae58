"""What requests bring and want, by their shape."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from atoll.runtime.gateway.request_kind import kind_of
from atoll.runtime.openai import (
    CHAT,
    EMBEDDINGS,
    IMAGES,
    SPEECH,
    TranscriptionRequest,
    read_request,
)
from atoll.workload.classes import parse_class_name

PICTURE: dict[str, object] = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64,AAAA"},
}
SOUND: dict[str, object] = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
WORDS: dict[str, object] = {"type": "text", "text": "hello"}


def chat(*parts: Mapping[str, object], **more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": list(parts)}], **more}


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        (CHAT, {"model": "m", "messages": [{"role": "user", "content": "hello"}]}, ""),
        (CHAT, chat(WORDS), ""),
        (CHAT, chat(WORDS, PICTURE, PICTURE), "text+image"),
        (
            CHAT,
            chat(PICTURE, SOUND, modalities=["text", "audio"]),
            "text+image+audio -> text+audio",
        ),
        (CHAT, chat(WORDS, modalities=["text", "audio"]), "text -> text+audio"),
        (SPEECH, {"model": "m", "input": "hello", "voice": "alloy"}, "text -> text+audio"),
        (IMAGES, {"model": "m", "prompt": "a boat"}, "text -> image"),
        (EMBEDDINGS, {"model": "m", "input": "hello"}, ""),
    ],
)
def test_kind_is_the_name_of_a_class(endpoint: str, body: dict[str, object], kind: str) -> None:
    found = kind_of(read_request(endpoint, json.dumps(body).encode()))
    assert found == kind
    if kind:
        assert parse_class_name(found)[0][0] == "text"


def test_forms_bring_sound() -> None:
    assert kind_of(TranscriptionRequest(model="m")) == "text+audio"
